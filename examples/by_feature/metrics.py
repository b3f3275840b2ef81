"""Metrics that count every sample once, also where the number of samples can't be divided by the processes.

drivetrain launch --num_processes 2 examples/by_feature/metrics.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator


def main() -> None:
    """Gather predictions in both ways and compare their number."""
    accelerator = Accelerator()
    samples = torch.arange(17.0).unsqueeze(1)
    model, loader = accelerator.prepare(nn.Identity(), DataLoader(samples, batch_size=4))
    raw, exact = [], []
    for batch in loader:
        predictions = model(batch)
        raw.append(accelerator.gather(predictions))  # with the samples that complete the last round
        exact.append(accelerator.gather_for_metrics(predictions))  # without them
    accelerator.print(f"gather: {len(torch.cat(raw))}, gather_for_metrics: {len(torch.cat(exact))}")
    assert torch.cat(exact).flatten().tolist() == samples.flatten().tolist()
    accelerator.end_training()


if __name__ == "__main__":
    main()
