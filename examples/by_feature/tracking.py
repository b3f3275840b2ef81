"""Metrics in a tracker: one file, written by the main process, whatever the number of processes.

drivetrain launch --num_processes 2 examples/by_feature/tracking.py --project_dir runs/tracking --log_with all
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed


def main() -> None:
    """Train a line and log how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/tracking")
    parser.add_argument("--log_with", default="jsonl", help="an installed tracker, or all")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    accelerator = Accelerator(log_with=args.log_with, project_dir=args.project_dir)
    set_seed(0)
    accelerator.init_trackers("line", config=vars(args))
    x = torch.linspace(-1, 1, 32 * accelerator.num_processes).unsqueeze(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(5):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        # Every process has seen other samples: reduce first, then log what holds for all.
        mean = accelerator.reduce(total / len(loader), "mean")
        accelerator.log({"loss": mean, "lr": optimizer.param_groups[0]["lr"]}, step=epoch)
    accelerator.print(f"loss {mean.item():.4f}, logged with {', '.join(accelerator.log_with)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
