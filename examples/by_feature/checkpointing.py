"""Stop in the middle of an epoch, and go on as if nothing had happened.

drivetrain launch --num_processes 2 examples/by_feature/checkpointing.py --project_dir runs/checkpointing
drivetrain launch --num_processes 2 examples/by_feature/checkpointing.py --project_dir runs/checkpointing --resume
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ProjectConfiguration, set_seed


def main() -> None:
    """Train 2 epochs of 8 batches; stop after ``--stop_after`` batches in all, saving everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/checkpointing")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--stop_after", type=int, default=None, help="batches")
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    inputs = torch.randn(64 * accelerator.num_processes, 4)
    data = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    if args.resume:
        accelerator.load_state()  # weights, optimizer, scheduler, random numbers, and the position in the epoch
        accelerator.print(f"going on in epoch {loader.epoch} after {accelerator.step} batches")
    for epoch in range(loader.epoch, 2):
        for x, y in loader:  # begins where the checkpoint was made
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.step == args.stop_after:
                accelerator.print(f"stopped in epoch {epoch}: {accelerator.save_state().name}")
                accelerator.end_training()
                return
    accelerator.print(f"loss of the last batch: {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
