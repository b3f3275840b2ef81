"""A moving average of the weights, kept beside the model and saved with it.

drivetrain launch --num_processes 2 examples/by_feature/ema.py --project_dir runs/ema
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the average a little towards the model."""
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


def main() -> None:
    """Train with a noisy learning rate; the average is calmer than the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/ema")
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(128 * accelerator.num_processes, 4)
    targets = inputs.sum(dim=1, keepdim=True) + 0.5 * torch.randn(len(inputs), 1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    bare = accelerator.unwrap_model(model)
    average = copy.deepcopy(bare)
    accelerator.register_for_checkpointing(average)
    for x, y in loader:
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            follow(average, bare, decay=0.9)
    error = [(module.weight - 1).norm().item() for module in (bare, average)]
    accelerator.print(f"distance from the truth: model {error[0]:.3f}, average {error[1]:.3f}")
    assert error[1] < error[0]

    saved = average.weight.detach().clone()
    accelerator.save_state(f"{args.project_dir}/state")
    nn.init.zeros_(average.weight)
    accelerator.load_state(f"{args.project_dir}/state")
    assert torch.equal(average.weight, saved)
    accelerator.end_training()


if __name__ == "__main__":
    main()
