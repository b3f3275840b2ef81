"""Gradient accumulation: four micro-batches of 8 train exactly as one batch of 32.

drivetrain launch --num_processes 2 examples/by_feature/accumulation.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed


def train(batch_size: int, steps: int) -> Tensor:
    """Weights after one epoch of ``steps`` micro-batches to an update."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    set_seed(0)
    inputs = torch.randn(128 * accelerator.num_processes, 10)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The global batch is what counts, so it is the loader's; each process gets its part of it.
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=batch_size, shuffle=False)
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()  # a real step only at the end of a group
            optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).weight.detach().clone()
    accelerator.free_memory(model, optimizer, loader)
    return weights


def main() -> None:
    """Train both ways and compare."""
    # Batches are dealt out in turn, so a group of four small rounds and one large round hold the same samples.
    small = train(batch_size=8, steps=4)
    large = train(batch_size=32, steps=1)
    accelerator = Accelerator()
    deviation = (small - large).abs().max().item()
    accelerator.print(f"4 x 8 and 1 x 32 differ by {deviation:.1e}")
    assert deviation < 1e-5
    accelerator.end_training()


if __name__ == "__main__":
    main()
