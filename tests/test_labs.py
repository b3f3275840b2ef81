"""Five labs a newcomer does, command by command: what they are told to observe is what they see."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.installed import backends_for_many

LIMIT = 60
"""Seconds for one command."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT)]

LOOP = """
    from drivetrain import Accelerator
    import torch

    class MyModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))

        def forward(self, x):
            return self.layers(x)

    torch.manual_seed(0)
    inputs = torch.randn(128, 8)
    train_ds = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    loss_fn = torch.nn.functional.cross_entropy
    num_epochs = 2

    accelerator = Accelerator()                      # 1. one object, reads the launch env

    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    train_dl = torch.utils.data.DataLoader(train_ds, batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

    # 2. prepare everything together, in one call, and reassign the results
    model, optimizer, train_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, scheduler
    )

    accelerator.print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}")
    for epoch in range(num_epochs):
        for batch in train_dl:                       # already sharded, already on device
            optimizer.zero_grad()
            inputs, targets = batch                  # 3. no .to(device) needed
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            accelerator.backward(loss)               # 4. not loss.backward()
            optimizer.step()
            scheduler.step()

    # right: gather across processes, then reduce, and only the main process logs
    all_losses = accelerator.gather(loss.detach())
    if accelerator.is_main_process:
        print(f"losses: {len(all_losses)}, mean {all_losses.mean().item():.6f}")
    accelerator.print(f"trained by {accelerator.run.names['backend']}")
    state = [value for entries in optimizer.state.values() for value in entries.values() if torch.is_tensor(value)]
    held = [each.to_local() if hasattr(each, "to_local") else each for each in [*model.parameters(), *state]]
    accelerator.print(f"holding {sum(each.numel() * each.element_size() for each in held)} bytes")
    accelerator.print("done")                        # prints on the main process only
"""


class Shell:
    """Types the labs' commands in a folder of the test's own, on the CPU."""

    def __init__(self, launcher: Any) -> None:
        self.folder = launcher.folder
        self.home = launcher.folder / "home"
        self._launcher = launcher
        self._environment = {**launcher.environment, "DRIVETRAIN_COLLECTIVE_TIMEOUT": "20"}

    def write(self, text: str) -> None:
        self._launcher.script(text, "train.py")

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = {"drivetrain": ["-m", "drivetrain"], "python": []}[words[0]]
        done = subprocess.run(
            [sys.executable, *command, *words[1:]],
            cwd=self.folder,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def shell(launcher: Any) -> Shell:
    return Shell(launcher)


def test_lab_1_the_same_script_three_ways(shell: Shell) -> None:
    shell.write(LOOP)
    before = (shell.folder / "train.py").read_bytes()
    runs = {
        "rank 0 of 1 on cpu": shell.run("python", "train.py", DRIVETRAIN_DEVICE="cpu"),
        "rank 0 of 1 on cpu ": shell.run("drivetrain", "launch", "--cpu", "--num_processes", "1", "train.py"),
        "rank 0 of 2 on cpu": shell.run("drivetrain", "launch", "--cpu", "--num_processes", "2", "train.py"),
    }
    for line, done in runs.items():
        assert line.strip() in done.stdout
        assert done.stdout.count("done") == 1
        processes = int(line.split()[3])
        assert f"losses: {processes}," in done.stdout
    one, other, _ = (re.search(r"mean (\S+)", done.stdout) for done in runs.values())
    assert one is not None
    assert other is not None
    assert one.group(1) == other.group(1)
    assert (shell.folder / "train.py").read_bytes() == before


def test_lab_2_a_config_is_written_shown_tested_and_overridden(shell: Shell) -> None:
    shell.run("drivetrain", "config")  # asks nothing: writes the defaults
    file = shell.home / "default_config.yaml"
    assert "# num_processes:" in file.read_text()
    answers = ["--num_processes", "2", "--mixed_precision", "no", "--device", "cpu"]
    shell.run("drivetrain", "config", "default", "--overwrite", *answers)
    text = file.read_text()
    assert re.search(r"^num_processes: 2$", text, re.MULTILINE)
    assert re.search(r"^mixed_precision: ['\"]?no['\"]?$", text, re.MULTILINE)

    shown = shell.run("drivetrain", "env").stdout
    assert str(file) in shown
    assert re.search(r"num_processes\s+2 \(.*default_config\.yaml:\d+", shown)

    tested = shell.run("drivetrain", "test").stdout
    assert "This world works: 2 process(es)" in tested

    shell.write(LOOP)
    done = shell.run("drivetrain", "launch", "--mixed_precision", "bf16", "train.py")
    assert re.search(r"mixed_precision=bf16 \(command line; .*default_config\.yaml:\d+ said no\)", done.stderr)
    assert "rank 0 of 2 on cpu" in done.stdout


METRICS = """
    from drivetrain import Accelerator
    import torch

    accelerator = Accelerator()
    model = torch.nn.Linear(2, 3)
    data = torch.randn(13, 2)
    model, dl = accelerator.prepare(model, torch.utils.data.DataLoader(data, batch_size=2))
    raw, exact = 0, 0
    for batch in dl:
        preds = model(batch).argmax(dim=-1)
        # wrong for a final metric, includes padding duplicates:
        all_preds_raw = accelerator.gather(preds)
        # right, drops the padding the dataloader added:
        all_preds = accelerator.gather_for_metrics(preds)
        raw, exact = raw + len(all_preds_raw), exact + len(all_preds)
    if accelerator.is_main_process:
        accelerator.print(raw, exact)   # raw is larger
"""


def test_lab_3_gather_counts_the_padding_and_gather_for_metrics_does_not(shell: Shell) -> None:
    shell.write(METRICS)
    done = shell.run("drivetrain", "launch", "--cpu", "--num_processes", "2", "train.py")
    # 13 samples on 2 processes in batches of 2: four rounds of 4.
    assert done.stdout.split() == ["16", "13"]


ACCUMULATION = """
    from drivetrain import Accelerator, set_seed
    import torch

    def train(batch_size, steps):
        acc = Accelerator(gradient_accumulation_steps=steps)
        set_seed(0)
        inputs = torch.randn(256 * acc.num_processes, 4)
        data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.99)
        dl = torch.utils.data.DataLoader(data, batch_size=batch_size)
        model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
        synced, curve, group = [], [], []
        for x, y in dl:
            with acc.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                acc.backward(loss)
                opt.step(); sched.step(); opt.zero_grad()
                synced.append(acc.sync_gradients)
            group.append(acc.reduce(loss.detach(), "mean").item())
            if len(group) == steps:
                curve.append(sum(group) / steps)
                group = []
        lr = opt.param_groups[0]["lr"]
        model, opt, dl, sched = acc.free_memory(model, opt, dl, sched)
        return acc, synced, curve, lr

    acc, synced, small, small_lr = train(8, 4)
    acc, _, large, large_lr = train(32, 1)
    acc.print("synced", *[int(flag) for flag in synced])
    acc.print("updates", len(small), len(large))
    acc.print("deviation", max(abs(a - b) / b for a, b in zip(small, large)))
    acc.print("rates", small_lr == large_lr)
"""


def test_lab_4_four_micro_batches_are_one_big_batch(shell: Shell) -> None:
    shell.write(ACCUMULATION)
    done = shell.run("drivetrain", "launch", "--cpu", "--num_processes", "2", "train.py")
    found = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}
    assert found["synced"] == ["0", "0", "0", "1"] * 8
    assert found["updates"] == ["8", "8"]
    assert float(found["deviation"][0]) < 1e-5
    assert found["rates"] == ["True"]


WHOLE = 3 * 4 * (8 * 32 + 32 + 32 * 3 + 3)
"""Bytes of the loop's model, and of the two numbers that AdamW keeps for each of its parameters."""


def holding(done: subprocess.CompletedProcess[str]) -> int:
    """Bytes of model and optimizer state on rank 0."""
    found = re.search(r"holding (\d+) bytes", done.stdout)
    assert found is not None
    return int(found.group(1))


def test_lab_5_every_process_holds_the_model_where_none_is_named(shell: Shell) -> None:
    shell.write(LOOP)
    done = shell.run("drivetrain", "launch", "--cpu", "--multi_gpu", "--num_processes", "2", "train.py")
    assert "rank 0 of 2 on cpu" in done.stdout
    assert "losses: 2," in done.stdout
    assert holding(done) >= WHOLE


@pytest.mark.parametrize(("backend", "shards"), backends_for_many().items())
def test_lab_5_another_backend_the_same_script(shell: Shell, backend: str, shards: bool) -> None:
    shell.write(LOOP)
    done = shell.run("drivetrain", "launch", "--cpu", f"--use_{backend}", "--num_processes", "2", "train.py")
    assert "rank 0 of 2 on cpu" in done.stdout
    assert "losses: 2," in done.stdout
    assert f"trained by {backend}" in done.stdout
    if shards:
        assert holding(done) < 0.6 * WHOLE  # a half, but for rows that can't be divided
