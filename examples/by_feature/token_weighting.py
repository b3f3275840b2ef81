"""A loss that is a mean over tokens, though micro-batches and processes have different numbers of them.

    drivetrain launch --num_processes 2 examples/by_feature/token_weighting.py

The gradient of a group is the mean over its micro-batches and processes. So if the loss of each micro-batch is the sum
over its tokens, times micro-batches and processes, divided by all tokens of the group, the gradient is the mean over
tokens.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, GradientAccumulationPlugin, set_seed

STEPS = 2


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one tensor, and which of its elements are tokens."""
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return padded, torch.arange(padded.shape[1]) < lengths.unsqueeze(1)


def main() -> None:
    """Compare the gradient of each group with that of all its tokens at once, in one process."""
    # Groups are read ahead, to count their tokens, so it is not the loader that says where the last one ends.
    plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    set_seed(0)
    rows = [torch.randn(int(length)) for length in torch.randint(1, 9, (5 * accelerator.num_processes,))]
    model = nn.Linear(1, 1)
    loader = DataLoader(rows, batch_size=1, collate_fn=pad)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches, done = iter(loader), 0
    while done < len(loader):
        # Count the tokens of the whole group first: on all processes, in all of its micro-batches.
        size = accelerator.gradient_accumulation_steps = min(STEPS, len(loader) - done)
        group = [next(batches) for _ in range(size)]
        tokens = accelerator.reduce(sum(mask.sum() for _, mask in group), "sum")
        for x, mask in group:
            with accelerator.accumulate(model):
                losses = model(x.unsqueeze(-1)).squeeze(-1) ** 2
                loss = (losses * mask).sum() * size * accelerator.num_processes / tokens
                accelerator.backward(loss)
                optimizer.step()
        found = accelerator.unwrap_model(model).weight.grad.item()
        optimizer.zero_grad()

        first = done * accelerator.num_processes
        done += size
        everything = torch.cat(rows[first : done * accelerator.num_processes]).unsqueeze(1)
        alone = nn.Linear(1, 1).to(accelerator.device)
        alone.load_state_dict(accelerator.unwrap_model(model).state_dict())
        alone(everything.to(accelerator.device)).square().mean().backward()
        accelerator.print(f"gradient {found:.6f}, over {len(everything)} tokens at once {alone.weight.grad.item():.6f}")
        assert abs(found - alone.weight.grad.item()) < 1e-5
    accelerator.end_training()


if __name__ == "__main__":
    main()
