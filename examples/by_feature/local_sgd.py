"""Local SGD: processes train by themselves and average their weights every eight steps; less is sent.

drivetrain launch --num_processes 2 examples/by_feature/local_sgd.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, LocalSGD, set_seed


def main() -> None:
    """Train a linear model until it is right."""
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(256 * accelerator.num_processes, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
        for x, y in loader:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    accelerator.print(f"weights of all processes: {weights.tolist()}")
    assert bool((weights == weights[0]).all())
    assert bool(((weights - 1).abs() < 0.05).all())
    accelerator.end_training()


if __name__ == "__main__":
    main()
