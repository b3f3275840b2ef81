"""What the tests of this member share: a small model, its data, a loop in plain torch, and the same by the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH = 16, 2
"""Features, and samples of one device."""
SAMPLES = 40


class Net(nn.Module):
    """Sizes that four devices divide and others that they don't, a weight under two names, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.odd = nn.Linear(32, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.odd(self.first(x).tanh())
        return self.frozen(self.again(self.tied(hidden).relu())) * self.scale + self.shift


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, 4, generator=generator))


def parts(model: nn.Module) -> tuple[AdamW, LambdaLR]:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias") and p.requires_grad]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias") and p.requires_grad]
    optimizer = AdamW([{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}], lr=0.01, eps=1e-5)
    return optimizer, LambdaLR(optimizer, lambda step: 0.9**step)


def by_hand(
    shards: int = 1, epochs: int = 1, steps: int = 1, clip: float = 0.5, dtype: torch.dtype | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain torch on the CPU, on batches of all devices together: losses, norms and weights."""
    model = net()
    optimizer, schedule = parts(model)
    loader = DataLoader(data(), batch_size=BATCH * shards)
    losses, norms = [], []
    for _ in range(epochs):
        batches = list(loader)
        for number, (x, y) in enumerate(batches):
            group = number // steps * steps
            size = min(steps, len(batches) - group)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                output = model(x)
            loss = mse_loss(output.float(), y)
            losses.append(loss.item())
            (loss / size).backward()
            if number + 1 == group + size:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(shards):
                    schedule.step()
    return losses, norms, dict(model.state_dict())


def train(
    epochs: int = 1, steps: int = 1, clip: float = 0.5, folder: str | None = None, load: str | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same through the library. With folders: writes its state at the end, or begins with one."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = net()
    optimizer, schedule = parts(model)
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if load is not None:
        accelerator.load_state(load)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.save_model(model, str(Path(folder).parent / "model"))
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return [loss.item() for loss in losses], [norm.item() for norm in norms], weights


def settings(precision: str = "no", **section: Any) -> dict[str, Any]:
    return {"backend": "xla", "mixed_precision": precision, "xla": section}


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 2e-6) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
