"""What ``drivetrain launch -m drivetrain.testing.conformance.launched train|raise|exit|resume FOLDER`` runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["EXIT_CODE", "MESSAGE", "main"]

EXIT_CODE = 7
MESSAGE = "the last rank fails on purpose"


def main(mode: str, *arguments: str) -> None:
    """Run one rank.

    Args:
        mode: ``train``: to the end. ``raise``: on the last rank, while the others wait for it. ``exit``: with an exit
            code on the last rank. ``resume``: from a checkpoint.
        *arguments: For ``resume`` the folder of the checkpoint.
    """
    if mode == "exit":
        # No torch: what the launcher makes of exit codes does not depend on what a rank has done before.
        last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        sys.exit(EXIT_CODE if last else 0)
    if mode == "resume":
        resume(Path(*arguments))
    else:
        train(fail=mode == "raise")
    finish()


def resume(folder: Path) -> None:
    """Go on from a checkpoint, and leave beside it what came of that."""
    from drivetrain.testing.conformance.state import run_on

    run_on(str(folder), fresh=True).write(folder, int(os.environ.get("RANK", "0")))


def finish() -> None:
    """End the run as scripts do, and say so."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(f"done with {accelerator.num_processes} process(es), {accelerator.run.names}")
    accelerator.end_training()


def train(fail: bool) -> None:
    """A few updates; the last rank raises after the first, if it is to fail."""
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator
    from drivetrain.testing.conformance.recipes import WIDTH, Samples, mlp, sgd

    accelerator = Accelerator()
    model = mlp()
    loader = DataLoader(Samples(WIDTH * 3 * accelerator.run.world.data_size), batch_size=WIDTH)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for _, x, y in loader:
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if fail and accelerator.is_last_process:
            raise ValueError(MESSAGE)


if __name__ == "__main__":
    main(*sys.argv[1:])
