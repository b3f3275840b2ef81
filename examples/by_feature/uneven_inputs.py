"""Train on every sample exactly once an epoch, though the processes do not get equally many.

drivetrain launch --num_processes 2 examples/by_feature/uneven_inputs.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration, set_seed


def main() -> None:
    """Join: a process that is out of batches answers the others' reductions until they are done too."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(0)
    inputs = torch.randn(8 * accelerator.num_processes + 4, 3)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    seen = 0
    with accelerator.join_uneven_inputs([model]):
        for x, y in loader:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            seen += len(x)
    everyone = accelerator.gather(torch.tensor([seen], device=accelerator.device)).tolist()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight)
    accelerator.print(f"samples on each process: {everyone}, in all {sum(everyone)} of {len(data)}")
    assert sum(everyone) == len(data)
    assert bool((weights == weights[0]).all()), "all processes must end with the same weights"
    accelerator.end_training()


if __name__ == "__main__":
    main()
