"""Training under both versions on real ranks, against plain torch in one process on all of their data."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from backends_fsdp.tests.recipes import (
    BOTH,
    CLASSES,
    ROWS,
    UNITS,
    WIDTH,
    Block,
    Make,
    Net,
    adamw,
    batch,
    by_hand,
    close,
    full,
    joined,
    net,
    settings,
    sgd,
    train_steps,
)

# -------------------------------------------------------------------------------------------------------- equal weights


def train(steps: int, make: Make, clip: float | None) -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net(seed=accelerator.process_index)  # rank 0's values are everybody's
    model, optimizer = accelerator.prepare(model, make(model))
    seen = train_steps(accelerator, model, optimizer, steps, clip)
    return full(accelerator, model), [norm for _, norm in seen]


@pytest.mark.parametrize(
    ("backend", "ranks", "section"),
    [
        ("fsdp", 2, {}),
        ("fsdp", 4, UNITS),
        ("fsdp", 3, {"wrap_policy": "size", "min_num_params": 80}),
        ("fsdp", 2, {**UNITS, "reshard_after_forward": False}),
        ("fsdp", 4, {**UNITS, "reshard_after_forward": 2}),
        ("fsdp", 4, {**UNITS, "replicate_size": 2}),
        ("fsdp", 2, {**UNITS, "shard_size": 1}),
        ("fsdp", 2, {**UNITS, "activation_checkpointing": True}),
        ("fsdp", 2, {**UNITS, "cpu_offload": True}),
        ("fsdp", 2, {**UNITS, "forward_prefetch": 1, "backward_prefetch": 2}),
        ("fsdp", 2, {**UNITS, "ignored_modules": "head|blocks\\.0\\..*"}),
        ("fsdp1", 2, {}),
        ("fsdp1", 4, UNITS),
        ("fsdp1", 3, {"wrap_policy": "size", "min_num_params": 80}),
        ("fsdp1", 2, {**UNITS, "sharding_strategy": "shard_grad_op"}),
        ("fsdp1", 2, {**UNITS, "sharding_strategy": "no_shard"}),
        ("fsdp1", 4, {**UNITS, "shard_size": 2}),
        ("fsdp1", 4, {**UNITS, "replicate_size": 2, "sharding_strategy": "hybrid_shard_zero2"}),
        ("fsdp1", 2, {**UNITS, "activation_checkpointing": True}),
        ("fsdp1", 2, {**UNITS, "forward_prefetch": True, "backward_prefetch": None, "limit_all_gathers": False}),
        ("fsdp1", 2, {**UNITS, "ignored_modules": ["head", "blocks.0.norm"]}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else None,
)
def test_steps_equal_one_process_on_the_joined_batches(
    worker_pool: Any, backend: str, ranks: int, section: dict[str, Any]
) -> None:
    outcomes = worker_pool(ranks).run(train, 5, sgd, 0.5, config=settings(backend, **section))
    right = by_hand(5, ranks, sgd, 0.5)
    close(outcomes[0][0], right.weights)
    for _, found in outcomes:
        torch.testing.assert_close(found, right.norms, rtol=1e-5, atol=1e-6)
        assert found == outcomes[0][1]  # to the last bit, on all ranks


@BOTH
def test_adamw_steps_equal_one_process(worker_pool: Any, backend: str) -> None:
    outcomes = worker_pool(2).run(train, 5, adamw, None, config=settings(backend, **UNITS))
    close(outcomes[0][0], by_hand(5, 2, adamw).weights, 2e-5)


# ------------------------------------------------------------------------------------- optimizers, groups, frozen, ties


def groups(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [model.scale, *model.first.parameters()], "lr": 0.01},
            {"params": [*model.head.parameters(), *model.blocks[1].parameters()], "lr": 0.03, "weight_decay": 0.5},
        ],
        lr=1.0,
    )


def train_groups() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, groups(model))
    train_steps(accelerator, model, optimizer, 3)
    names = {id(p): name for name, p in accelerator.unwrap_model(model).named_parameters()}
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return full(accelerator, model), members, [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


@BOTH
def test_groups_keep_members_learning_rates_and_weight_decay(worker_pool: Any, backend: str) -> None:
    model = net()
    optimizer = groups(model)
    for step in range(3):
        x, y = joined([2 * step, 2 * step + 1])
        cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()  # of those in no group, too
    names = {id(p): name for name, p in model.named_parameters()}
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    found = worker_pool(2).run(train_groups, config=settings(backend, **UNITS))
    close(found[0][0], model.state_dict(), 1e-5)
    assert [found[0][1:], found[1][1:]] == [(members, [(0.01, 0.01), (0.03, 0.5)])] * 2


class Mixed(nn.Module):
    """Parts of two dtypes, frozen and trained, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, WIDTH).requires_grad_(False)
        self.half_frozen = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.narrow = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
        self.trained = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.half_frozen(self.frozen(x).bfloat16())
        return self.trained(self.narrow(x).float())


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def train_mixed() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = mixed()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train_steps(accelerator, model, optimizer, 3)
    return full(accelerator, model)


@BOTH
def test_frozen_and_trained_parameters_of_two_dtypes_go_together(worker_pool: Any, backend: str) -> None:
    start = mixed().state_dict()
    found = worker_pool(2).run(train_mixed, config=settings(backend))[0]
    for name, value in by_hand(3, model=mixed()).weights.items():
        assert found[name].dtype == value.dtype
        if "frozen" in name:
            assert torch.equal(found[name], start[name])
        else:
            assert not torch.equal(found[name], start[name])
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=5e-3)


class Tied(nn.Module):
    """A language model whose head is its embedding, and two blocks that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].inner.weight = self.blocks[0].inner.weight
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ids(number: int) -> Tensor:
    return torch.randint(7, (ROWS, 5), generator=torch.Generator().manual_seed(number))


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train_tied() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    with accelerator.init_context():
        model = Tied()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(next_token(model, ids(2 * step + accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    bare = accelerator.unwrap_model(model)
    ties = bare.head.weight is bare.tokens.weight, bare.blocks[0].inner.weight is bare.blocks[1].inner.weight
    return full(accelerator, model), ties, len(list(model.parameters()))


@BOTH
@pytest.mark.parametrize(
    "section",
    [UNITS, {"transformer_classes": "Block,Embedding,Linear"}, {**UNITS, "cpu_ram_efficient_loading": True}],
    ids=["blocks", "everything", "from rank 0"],
)
def test_tied_weights_stay_one(worker_pool: Any, backend: str, section: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        next_token(model, torch.cat([ids(2 * step), ids(2 * step + 1)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = worker_pool(2).run(train_tied, config=settings(backend, **section))
    close(found[0][0], model.state_dict())
    assert [rank[1:] for rank in found] == [((True, True), len(list(model.parameters())))] * 2


def train_several() -> Any:
    """A trained pair with an optimizer each, a model that only teaches, and an optimizer over parts of both."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    student, critic, teacher = net(0), net(1), net(2).requires_grad_(False)
    optimizers = [
        sgd(student),
        torch.optim.SGD(critic.blocks.parameters(), lr=0.1),
        torch.optim.SGD([*critic.head.parameters(), critic.scale], lr=0.2),
    ]
    student, critic, teacher, *optimizers = accelerator.prepare(student, critic, teacher, *optimizers)
    for step in range(4):
        x, _ = batch(2 * step + accelerator.process_index)
        with torch.no_grad():
            wanted = teacher(x)
        loss = mse_loss(student(x), wanted)
        if step % 2:
            loss = loss + mse_loss(critic(x), wanted) * 0.5
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [full(accelerator, model) for model in (student, critic, teacher)]


@BOTH
def test_several_models_and_optimizers_equal_one_process(worker_pool: Any, backend: str) -> None:
    student, critic, teacher = net(0), net(1), net(2)
    optimizers = [
        sgd(student),
        torch.optim.SGD(critic.blocks.parameters(), lr=0.1),
        torch.optim.SGD([*critic.head.parameters(), critic.scale], lr=0.2),
    ]
    for step in range(4):
        x, _ = joined([2 * step, 2 * step + 1])
        wanted = teacher(x).detach()
        loss = mse_loss(student(x), wanted)
        if step % 2:
            loss = loss + mse_loss(critic(x), wanted) * 0.5
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = worker_pool(2).run(train_several, config=settings(backend, **UNITS))[0]
    for weights, model in zip(found, (student, critic, teacher), strict=True):
        close(weights, model.state_dict(), 2e-6)


class WithEmpty(Net):
    """With a parameter of no elements, as a model has whose last table of extra tokens was left out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra.sum()


def with_empty() -> WithEmpty:
    torch.manual_seed(0)
    return WithEmpty()


def train_with_empty() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = with_empty()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train_steps(accelerator, model, optimizer, 2)
    return full(accelerator, model)


@BOTH
def test_a_parameter_without_elements_does_no_harm(worker_pool: Any, backend: str) -> None:
    close(worker_pool(2).run(train_with_empty, config=settings(backend))[0], by_hand(2, model=with_empty()).weights)


def train_with_average() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    average = deepcopy(model).requires_grad_(False)
    model, average, optimizer = accelerator.prepare(model, average, sgd(model))
    for step in range(3):
        train_steps(accelerator, model, optimizer, 1, start=step)
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value.detach(), 0.1)
    try:
        deepcopy(model)
    except Exception as error:
        return full(accelerator, average), str(error)
    raise AssertionError("a prepared model was copied")


@BOTH
def test_a_moving_average_is_a_copy_that_was_prepared_too(worker_pool: Any, backend: str) -> None:
    model = net()
    average, optimizer = deepcopy(model).requires_grad_(False), sgd(model)
    for step in range(3):
        x, y = joined([2 * step, 2 * step + 1])
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value.detach(), 0.1)
    weights, refused = worker_pool(2).run(train_with_average, config=settings(backend, **UNITS))[0]
    close(weights, average.state_dict())
    assert "deepcopy" in refused


def own_values() -> list[float]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, accelerator.process_index)
    model = accelerator.prepare(model)
    return full(accelerator, model).get("weight", torch.zeros(0)).flatten().tolist()


@pytest.mark.parametrize(("backend", "first"), [("fsdp", 4), ("fsdp1", 5)])
def test_without_synchronisation_each_rank_cuts_its_own_values(worker_pool: Any, backend: str, first: int) -> None:
    found = worker_pool(2).run(own_values, config=settings(backend, sync_module_states=False))[0]
    assert found == [0.0] * first + [1.0] * (8 - first)
