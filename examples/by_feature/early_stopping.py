"""Stop on all processes when one of them finds a reason to.

drivetrain launch --num_processes 2 examples/by_feature/early_stopping.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed


def main() -> None:
    """Train until the loss of any process is small."""
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(64 * accelerator.num_processes, 4)
    data = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    epoch, stop = 0, False
    while not stop and epoch < 100:
        epoch += 1
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if loss.item() < 1e-2:
            accelerator.set_trigger()  # on this process
        stop = accelerator.check_trigger()  # on all of them
    accelerator.print(f"stopped after {epoch} epochs")
    epochs = accelerator.gather(torch.tensor([epoch], device=accelerator.device))
    assert len(set(epochs.tolist())) == 1
    assert epoch < 100
    accelerator.end_training()


if __name__ == "__main__":
    main()
