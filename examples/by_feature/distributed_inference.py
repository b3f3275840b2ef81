"""Share prompts out over the processes, and collect the answers in order. No model needs to be prepared for this.

drivetrain launch --num_processes 2 examples/by_feature/distributed_inference.py
"""

import torch
from torch import nn

from drivetrain import PartialState
from drivetrain.utils import gather_object


@torch.no_grad()
def answer(model: nn.Module, prompts: list[str], device: torch.device) -> list[str]:
    """The model's answer to each prompt."""
    lengths = torch.tensor([[float(len(prompt))] for prompt in prompts], device=device).reshape(-1, 1)
    found = model(lengths).flatten().tolist()
    return [f"{prompt} has {round(n)} letters" for prompt, n in zip(prompts, found, strict=True)]


def main() -> None:
    """Five prompts over any number of processes."""
    state = PartialState()
    model = nn.Linear(1, 1).to(state.device)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    prompts = ["one", "three", "eleven", "fifteen", "a"]
    with state.split_between_processes(prompts) as mine:  # a part may be empty: nothing is repeated
        answers = gather_object(answer(model, mine, state.device))
    state.print("\n".join(answers))
    assert answers == [f"{prompt} has {len(prompt)} letters" for prompt in prompts]
    state.destroy_process_group()


if __name__ == "__main__":
    main()
