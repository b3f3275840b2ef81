"""The backend's hooks on real ranks, against gradients worked out in one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain import defaults
from drivetrain.binding import Hooks, Origin
from drivetrain.config import RunConfig
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.plugin import Policy
from drivetrain.testing.pool import WorkerError
from drivetrain.world import Run, Topology
from drivetrain_ddp import Ddp, DdpConfig, PowerSgdConfig

FEATURES = 6


@contextlib.contextmanager
def ddp(config: DdpConfig | None = None, policy: Policy | None = None) -> Iterator[Run]:
    """A run under ddp on the environment's ranks."""
    hooks = Hooks(defaults)
    plugin = Ddp(config)
    hooks.register(plugin, Origin("backend", "ddp"))
    topology, settings = Topology.from_environment(), RunConfig(collective_timeout=10.0)
    world = hooks.init_world(config=settings, topology=topology, device=torch.device("cpu"), collectives="gloo")
    run = Run(
        config=settings,
        topology=topology,
        world=world,
        policy=policy or Policy(),
        capabilities=plugin.capabilities,
        names={"backend": "ddp", "device": "cpu", "precision": "no"},
        hooks=hooks,
    )
    try:
        yield run
    except BaseException as error:
        hooks.shutdown(run=run, error=error)
        raise
    hooks.shutdown(run=run, error=None)


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def _batch(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(number))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def _mean_gradients(numbers: list[int]) -> list[Tensor]:
    """The oracle: gradients of the mean of these batches' losses, in one process, of the model ranks start with."""
    model = _net()
    torch.stack([_loss(model, _batch(number)) for number in numbers]).mean().backward()
    return _gradients(model)


def _train(config: DdpConfig) -> None:
    with ddp(config) as run:
        model = run.hooks.wrap_model(run=run, model=_net(seed=run.world.rank))  # rank 0's values are everybody's
        _loss(model, _batch(run.world.rank)).backward()
        torch.testing.assert_close(_gradients(model), _mean_gradients(list(range(run.world.size))))


@pytest.mark.parametrize(
    "config",
    [
        DdpConfig(),
        DdpConfig(gradient_as_bucket_view=False, bucket_cap_mb=0.0001),
        DdpConfig(find_unused_parameters=True),
        DdpConfig(static_graph=True),
        DdpConfig(broadcast_buffers=False),
    ],
    ids=["defaults", "copied", "unused", "static", "no buffers"],
)
def test_gradients_are_the_mean_over_the_ranks(worker_pool: Any, config: DdpConfig) -> None:
    worker_pool(3).run(_train, config)


def _accumulate(config: DdpConfig) -> None:
    with ddp(config) as run:
        rank, size = run.world.rank, run.world.size
        model = run.hooks.wrap_model(run=run, model=_net())
        accumulate = run.hooks.bind("accumulate")
        for step in range(3):  # buckets are arranged anew after the first
            for parameter in model.parameters():
                parameter.grad = None
            with accumulate(run, [model], False):
                (_loss(model, _batch(rank)) / 2).backward()
                alone = _gradients(model)
            torch.testing.assert_close(alone, [g / 2 for g in _mean_gradients([rank])], msg=f"step {step}")
            with accumulate(run, [model], True):
                (_loss(model, _batch(rank + size)) / 2).backward()
            torch.testing.assert_close(_gradients(model), _mean_gradients(list(range(2 * size))))


@pytest.mark.parametrize(
    "config",
    [DdpConfig(), DdpConfig(gradient_as_bucket_view=False), DdpConfig(find_unused_parameters=True)],
    ids=["views", "copies", "unused"],
)
def test_ranks_add_up_alone_until_the_last_micro_batch(worker_pool: Any, config: DdpConfig) -> None:
    worker_pool(2).run(_accumulate, config)


def _fields_inside(context: contextlib.AbstractContextManager[Any], model: nn.Module) -> dict[str, Any]:
    with context:
        return dict(vars(model))


def _settings_of_no_sync() -> None:
    with ddp() as run:
        model = run.hooks.wrap_model(run=run, model=_net())
        before = dict(vars(model))
        ours = _fields_inside(run.hooks.accumulate(run=run, models=[model], last=False), model)
        assert ours == _fields_inside(DistributedDataParallel.no_sync(model), model) != before
        with model.no_sync():  # the user's own, around ours
            _fields_inside(run.hooks.accumulate(run=run, models=[model], last=False), model)
            assert dict(vars(model)) == ours
        assert dict(vars(model)) == before


def test_accumulating_does_to_a_replica_what_torchs_no_sync_does(worker_pool: Any) -> None:
    worker_pool(2).run(_settings_of_no_sync)


def _accumulate_two() -> list[list[float]]:
    """loss = a*x + b*x; x is rank+1, then ten times that."""
    with ddp() as run:
        models = [run.hooks.wrap_model(run=run, model=nn.Linear(1, 1, bias=False)) for _ in range(2)]
        accumulate, seen = run.hooks.bind("accumulate"), []
        for factor, last in ((1.0, False), (10.0, True)):
            x = torch.tensor([[factor * (run.world.rank + 1)]])
            with accumulate(run, models, last):
                ((models[0](x) + models[1](x)) / 2).sum().backward()
            seen.append([model.module.weight.grad.item() for model in models])
        return seen


def test_two_models_wait_for_the_same_last_micro_batch(worker_pool: Any) -> None:
    assert worker_pool(2).run(_accumulate_two) == [[[0.5, 0.5], [8.25, 8.25]], [[1.0, 1.0], [8.25, 8.25]]]


class _WithParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.config = {"depth": 3}

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.weight * x

    def describe(self) -> str:
        return "one weight"


def _use_parts() -> None:
    with ddp() as run:
        model = run.hooks.wrap_model(run=run, model=_WithParts())
        assert isinstance(model, DistributedDataParallel)
        assert model.config == {"depth": 3}
        assert model.weight is run.hooks.unwrap(run=run, model=model).weight
        assert model.describe() == "one weight"
        with torch.no_grad():
            assert model.loss(torch.tensor(2.0)).item() == 2.0
        with pytest.raises(DrivetrainError, match=r"model\.loss\(\.\.\.\) computed something .* outside"):
            model.loss(torch.tensor(2.0))
        with pytest.raises(AttributeError, match="'_WithParts' object has no attribute 'nothing'"):
            _ = model.nothing
        model(torch.tensor(run.world.rank + 1.0)).backward()
        assert model.weight.grad.item() == 1.5


def test_attributes_and_methods_are_found_but_nothing_is_trained_outside_forward(worker_pool: Any) -> None:
    worker_pool(2).run(_use_parts)


def _unwrap() -> None:
    with ddp() as run:
        mine = _net()
        wrapped = run.hooks.wrap_model(run=run, model=mine)
        assert run.hooks.unwrap(run=run, model=wrapped) is mine
        assert run.hooks.unwrap(run=run, model=mine) is mine
        assert list(run.hooks.model_state(run=run, model=wrapped)) == list(mine.state_dict())


def test_unwrap_gives_the_users_module_and_state_has_its_names(worker_pool: Any) -> None:
    worker_pool(1).run(_unwrap)


def _frozen() -> list[float]:
    with ddp() as run:
        model = nn.BatchNorm1d(1).requires_grad_(False)
        nn.init.constant_(model.weight, run.world.rank + 1.0)
        model.running_mean.fill_(run.world.rank + 3.0)
        assert run.hooks.wrap_model(run=run, model=model) is model
        with run.hooks.bind("accumulate")(run, [model], False), run.hooks.join(run=run, models=[model]):
            model(torch.ones(2, 1))
        return [model.weight.item(), model.running_mean.item() > 2.0]


def test_a_model_without_trainable_parameters_stays_unwrapped_and_is_made_equal(worker_pool: Any) -> None:
    ranks = worker_pool(2).run(_frozen)
    assert ranks[0] == ranks[1] == [1.0, True]


def _wrap_wrapped() -> None:
    with ddp() as run:
        wrapped = DistributedDataParallel(_net())
        with pytest.raises(DrivetrainError, match="is a DistributedDataParallel already"):
            run.hooks.wrap_model(run=run, model=wrapped)


def test_a_model_the_user_wrapped_is_refused(worker_pool: Any) -> None:
    worker_pool(1).run(_wrap_wrapped)


def _order_of_freeing() -> list[str]:
    with ddp() as run:
        attributes = list(vars(run.hooks.wrap_model(run=run, model=_net())))
        return sorted(("logger", "reducer", "process_group"), key=attributes.index)


def test_the_process_group_is_freed_after_all_that_holds_on_to_it(worker_pool: Any) -> None:
    # The other way round, freeing a model after the end of its run deadlocks now and then (gloo, torch 2.13).
    assert worker_pool(1).run(_order_of_freeing)[0][-1] == "process_group"


def _different() -> None:
    with ddp() as run:
        run.hooks.wrap_model(run=run, model=nn.Linear(2, 2 + int(os.environ["RANK"])))


def test_different_models_are_the_same_error_on_all_ranks_and_name_the_hook(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(_different)
    assert len({error.message for error in caught.value.errors}) == 1
    assert "CollectiveMismatchError" in str(caught.value)
    assert "backend 'ddp'" in str(caught.value)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _leave_out_a_branch(config: DdpConfig) -> None:
    with ddp(config) as run:
        model = run.hooks.wrap_model(run=run, model=_Branches())
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()


def test_unused_parameters_are_an_error_that_names_the_setting(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match=r"ddp\.find_unused_parameters=true"):
        worker_pool(2).run(_leave_out_a_branch, DdpConfig())
    worker_pool(2).run(_leave_out_a_branch, DdpConfig(find_unused_parameters=True))


def _buffers(broadcast: bool) -> list[float]:
    with ddp(DdpConfig(broadcast_buffers=broadcast)) as run:
        model = nn.BatchNorm1d(1)
        model.running_mean.fill_(run.world.rank + 1.0)
        wrapped = run.hooks.wrap_model(run=run, model=model)
        start = model.running_mean.item()
        for _ in range(2):
            wrapped(torch.full((2, 1), 10.0 * run.world.rank)).sum().backward()
        return [start, round(model.running_mean.item(), 4)]


def test_buffers_follow_rank_0_unless_told_otherwise(worker_pool: Any) -> None:
    # Momentum 0.1. Together: rank 1 moves from rank 0's mean of 0.9 once more, towards its own 10.
    assert worker_pool(2).run(_buffers, True) == [[1.0, 0.81], [1.0, 1.81]]
    assert worker_pool(2).run(_buffers, False) == [[1.0, 0.81], [2.0, 3.52]]


def _compressed(config: DdpConfig, tolerance: float) -> None:
    with ddp(config) as run:
        model = run.hooks.wrap_model(run=run, model=_net())
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = None
            _loss(model, _batch(run.world.rank)).backward()
        expected = _mean_gradients(list(range(run.world.size)))
        torch.testing.assert_close(_gradients(model), expected, rtol=tolerance, atol=tolerance)
        mine = torch.cat([gradient.flatten() for gradient in _gradients(model)])
        everyone = run.hooks.all_gather(run=run, tensor=mine, group=None)
        assert torch.equal(everyone[0], everyone[1])


# A rank of 8 stands for these matrices exactly, which have no more.
_EXACT = PowerSgdConfig(start_powerSGD_iter=2, matrix_approximation_rank=8, min_compression_rate=0.01)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (DdpConfig(comm_hook="fp16"), 2e-3),
        (DdpConfig(comm_hook="bf16"), 2e-2),
        (DdpConfig(comm_hook="powersgd", powersgd=_EXACT), 1e-4),
        (DdpConfig(comm_hook="powersgd", powersgd=_EXACT, gradient_as_bucket_view=False), 1e-4),
        (DdpConfig(comm_hook="powersgd", powersgd=_EXACT, comm_wrapper="fp16"), 5e-3),
        (DdpConfig(comm_hook="powersgd", powersgd=_EXACT, comm_wrapper="bf16"), 0.2),
    ],
    ids=["fp16", "bf16", "powersgd", "powersgd-copied", "powersgd-fp16", "powersgd-bf16"],
)
def test_compressed_gradients_are_near_the_mean_and_equal_on_all_ranks(
    worker_pool: Any, config: DdpConfig, tolerance: float
) -> None:
    worker_pool(2).run(_compressed, config, tolerance)


def _sixteen_bits_on_the_way(hook: str) -> float:
    """1 + 2^-12 is no half-precision number: what comes back tells in which dtype it travelled."""
    with ddp(DdpConfig(comm_hook=hook)) as run:
        model = run.hooks.wrap_model(run=run, model=nn.Linear(1, 1, bias=False))
        (model(torch.ones(1, 1)) * (1 + 2**-12)).sum().backward()
        return model.module.weight.grad.item()


def test_communication_hooks_really_send_sixteen_bits(worker_pool: Any) -> None:
    ranks = worker_pool(2)
    assert ranks.run(_sixteen_bits_on_the_way, "none") == [1 + 2**-12] * 2
    assert ranks.run(_sixteen_bits_on_the_way, "fp16") == [1.0] * 2
    assert ranks.run(_sixteen_bits_on_the_way, "bf16") == [1.0] * 2


def _refused(config: DdpConfig, policy: Policy, message: str) -> None:
    with ddp(config, policy) as run, pytest.raises(ConfigError, match=message):
        run.hooks.wrap_model(run=run, model=_net())


def test_powersgd_with_loss_scaling_is_refused(worker_pool: Any) -> None:
    policy = Policy(compute="float16", loss_scale="dynamic")
    worker_pool(1).run(_refused, DdpConfig(comm_hook="powersgd"), policy, "one overflow would stay in it for ever")


def test_batched_powersgd_works_or_is_refused_at_prepare(worker_pool: Any) -> None:
    from drivetrain_ddp.comm_hooks import _orthogonalizes_matrices

    config = DdpConfig(comm_hook="batched_powersgd", powersgd=_EXACT)
    if _orthogonalizes_matrices():
        worker_pool(2).run(_compressed, config, 10.0)
    else:
        worker_pool(1).run(_refused, config, Policy(), "batched_powersgd fails in torch")


def _join() -> tuple[float, list[float]]:
    """Rank 0 has 3 batches, rank 1 has 1."""
    with ddp() as run:
        model = run.hooks.wrap_model(run=run, model=nn.Linear(1, 1, bias=False))
        nn.init.zeros_(model.module.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        gradients = []
        with run.hooks.join(run=run, models=[model]):
            for value in [1.0, 2.0, 3.0] if run.world.rank == 0 else [5.0]:
                optimizer.zero_grad()
                model(torch.tensor([[value]])).sum().backward()
                gradients.append(model.module.weight.grad.item())
                optimizer.step()
        return model.module.weight.item(), gradients


def test_ranks_with_different_numbers_of_batches_end_with_equal_weights(worker_pool: Any) -> None:
    ranks = worker_pool(2).run(_join)
    # Divided by both ranks always: (1+5)/2, then 2/2, then 3/2.
    assert ranks == [(-5.5, [3.0, 1.0, 1.5]), (-5.5, [3.0])]


def _type() -> tuple[str, bool, bool]:
    with ddp() as run:
        return run.capabilities.distributed_type, run.capabilities.uneven_inputs, run.capabilities.resharding


def test_capabilities_say_what_scripts_ask_for(worker_pool: Any) -> None:
    assert worker_pool(2).run(_type) == [("MULTI_CPU", True, True)] * 2


def _hot() -> None:
    with ddp() as run:
        assert run.hooks.bind("accumulate").__func__ is Ddp.accumulate
        for name in ("backward", "step", "zero_grad", "clip_grad_norm", "place", "autocast"):
            assert run.hooks.bind(name) is getattr(defaults, name)


def test_the_hot_path_is_cores_own_but_for_accumulation(worker_pool: Any) -> None:
    worker_pool(1).run(_hot)
