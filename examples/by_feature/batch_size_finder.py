"""Find a batch size that fits into memory: halve it until training no longer runs out.

drivetrain launch --num_processes 2 examples/by_feature/batch_size_finder.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed
from drivetrain.utils import find_executable_batch_size

FITS = 16
"""What this example pretends to have memory for."""


def main() -> None:
    """Build everything inside the function that is tried, so that it is freed between tries."""
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        accelerator.free_memory()
        set_seed(0)
        inputs = torch.randn(128 * accelerator.num_processes, 4)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))
        for x, y in loader:
            if len(x) > FITS:
                raise torch.OutOfMemoryError(f"{len(x)} rows don't fit")
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    train()
    accelerator.print(f"tried {tried}")
    assert tried == [128, 64, 32, 16]
    accelerator.end_training()


if __name__ == "__main__":
    main()
