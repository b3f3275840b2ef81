"""Optimizers and schedules of the engine's own file, and what the file says of batches."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from backends_deepspeed.tests.recipes import by_hand, close, full, loss_of, net, settings
from drivetrain.testing.pool import WorkerError, WorkerPool

LIMIT = 60.0
OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": 1e-5, "weight_decay": "auto", "torch_adam": True},
}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def with_file(stage: int, **file: Any) -> dict[str, Any]:
    return settings(stage, config_file={**file, "zero_optimization": {"stage": "auto"}})


def stand_in(updates: int, callable_: bool = False) -> Any:
    from drivetrain import Accelerator, DummyOptim, DummyScheduler

    accelerator = Accelerator()
    model = net()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1},
        {"params": [model.tied.weight, model.scale], "lr": 0.01},
    ]
    optimizer = DummyOptim(groups, lr=0.01, weight_decay=0.01, betas=(0.8, 0.95))
    make = (lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step))) if callable_ else None
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4, lr_scheduler_callable=make)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for update in range(updates):
        accelerator.backward(loss_of(model, update * accelerator.num_processes + accelerator.process_index))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return full(accelerator, model), rates, type(model.optimizer.optimizer).__name__, optimizer.param_groups[0]["eps"]


@pytest.mark.parametrize("stage", [2, 3])
def test_stand_ins_are_filled_in_and_schedules_count_updates(ranks: WorkerPool, stage: int) -> None:
    config = with_file(stage, optimizer=OPTIMIZER, scheduler=SCHEDULER)
    _, rates, name, eps = ranks.run(stand_in, 4, size=2, config=config, timeout=LIMIT)[0]
    assert (name, eps) == ("AdamW", 1e-5)
    assert rates == pytest.approx([0.02 * step / 4 for step in (0, 1, 2, 3)])


def test_a_schedule_made_later_steps_once_for_an_update(ranks: WorkerPool) -> None:
    config = with_file(2, optimizer=OPTIMIZER)
    _, rates, _, _ = ranks.run(stand_in, 3, True, size=2, config=config, timeout=LIMIT)[0]
    assert rates == pytest.approx([0.02 / 2, 0.02 / 3, 0.02 / 4])


def plain(updates: int) -> Any:
    from drivetrain import Accelerator, DummyOptim

    accelerator = Accelerator()
    model = net()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1},
        {"params": [model.tied.weight, model.scale], "lr": 0.01},
    ]
    model, optimizer = accelerator.prepare(model, DummyOptim(groups, lr=1.0, weight_decay=0.01, betas=(0.8, 0.95)))
    for update in range(updates):
        accelerator.backward(loss_of(model, update * accelerator.num_processes + accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()
    return full(accelerator, model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_files_optimizer_trains_as_torchs(ranks: WorkerPool, stage: int) -> None:
    config = with_file(stage, optimizer=OPTIMIZER)
    close(ranks.run(plain, 3, size=2, config=config, timeout=LIMIT)[0], by_hand(3, 2)[0])


# ------------------------------------------------------------------------------------------------------------- mistakes


def mistake(how: str) -> None:
    from drivetrain import Accelerator, DummyOptim, DummyScheduler

    steps = 2 if how == "accumulation" else 1
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = net()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    if how in ("a stand-in for nothing", "a schedule for nothing"):
        optimizer = DummyOptim(model.parameters()) if how == "a stand-in for nothing" else optimizer
        accelerator.prepare(model, optimizer, *([DummyScheduler(optimizer)] if "schedule" in how else []))
    elif how == "two schedules":
        accelerator.prepare(model, optimizer, LambdaLR(optimizer, lambda _: 1.0))
    elif how == "a batch sampler":
        data = list(range(8))
        accelerator.prepare(DataLoader(data, batch_sampler=OddBatches(data)))  # type: ignore[arg-type]
    elif how == "the loader's batches":
        accelerator.prepare(model, optimizer, DataLoader(list(range(8)), batch_size=4))  # type: ignore[arg-type]
    else:
        accelerator.prepare(model, optimizer)


class OddBatches(BatchSampler):
    """Batches of a size that it does not tell."""

    def __init__(self, data: Any) -> None:
        self.sampler = SequentialSampler(data)

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3, 4, 5, 6, 7]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("how", "file", "message"),
    [
        ("two optimizers", {"optimizer": OPTIMIZER}, "has an optimizer, and the program prepares a SGD"),
        ("a stand-in for nothing", {}, "there is none"),
        ("two schedules", {"scheduler": SCHEDULER}, "has a scheduler, and the program prepares a LambdaLR"),
        ("a schedule for nothing", {}, "has no scheduler"),
        ("accumulation", {"gradient_accumulation_steps": 4}, "and gradient_accumulation_steps is 2 (Accelerator(...))"),
        ("precision", {"bf16": {"enabled": True}}, "bf16.enabled is true in config_file, and mixed_precision is no"),
        ("the loader's batches", {"train_micro_batch_size_per_gpu": 3}, "gives batches of 4 on each process"),
        ("the loader's batches", {"train_batch_size": 6}, "4 samples x 1 micro-batches x 2 processes are 8"),
        ("a batch sampler", {"train_micro_batch_size_per_gpu": "auto"}, "batches of sizes of their own"),
    ],
)
def test_a_file_that_contradicts_the_program_is_refused_on_every_rank(
    ranks: WorkerPool, how: str, file: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError) as raised:
        ranks.run(mistake, how, size=2, config=with_file(2, **file), timeout=LIMIT)
    assert len(raised.value.errors) == 2
    for error in raised.value.errors:
        assert message in error.message


def test_a_number_in_the_file_is_enough_for_batches_of_sizes_of_their_own(ranks: WorkerPool) -> None:
    config = with_file(2, train_micro_batch_size_per_gpu=3)
    assert ranks.run(mistake, "a batch sampler", size=2, config=config, timeout=LIMIT) == [None, None]


def batch_sizes() -> tuple[int, int]:
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = net()
    loaders = [DataLoader(list(range(16)), batch_size=size) for size in (4, 2)]  # type: ignore[arg-type]
    model, *_ = accelerator.prepare(model, AdamW(model.parameters()), *loaders)
    return model.train_micro_batch_size_per_gpu(), model.train_batch_size()


@pytest.mark.parametrize(("smallest", "size"), [(True, 2), (False, 4)])
def test_the_engine_is_told_the_loaders_batch_size(ranks: WorkerPool, smallest: bool, size: int) -> None:
    file = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config = settings(2, config_file=file, train_batch_min=smallest)
    assert ranks.run(batch_sizes, size=2, config=config, timeout=LIMIT)[0] == (size, size * 2)
