"""The installed backend `ddp` as a user meets it: chosen by default, set by YAML or in code, visible in the state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.testing.pool import WorkerError


def _facts() -> tuple[Any, ...]:
    from drivetrain import Accelerator, PartialState

    accelerator = Accelerator(cpu=True)
    state = PartialState()
    model = accelerator.prepare(nn.Linear(2, 2))
    return accelerator.run.names["backend"], state.distributed_type, state.backend, type(model).__mro__[1].__name__


def test_several_processes_get_ddp_when_nothing_is_named(worker_pool: Any) -> None:
    assert worker_pool(2).run(_facts) == [("ddp", "MULTI_CPU", "gloo", "DistributedDataParallel")] * 2


def test_a_single_process_runs_without_it_when_the_yaml_names_it(worker_pool: Any) -> None:
    (found,) = worker_pool(1).run(_facts, config={"backend": "ddp"})
    assert found == ("single", "NO", None, "Module")


def _ask_in_code() -> None:
    from drivetrain import Accelerator

    Accelerator(cpu=True, backend="ddp")


def test_a_single_process_refuses_it_when_the_code_names_it(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match="this is a single process"):
        worker_pool(1).run(_ask_in_code)


def _settings_in_code() -> dict[str, Any]:
    from drivetrain import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, InitProcessGroupKwargs

    handlers = [
        DistributedDataParallelKwargs(
            find_unused_parameters=True,
            comm_hook=DDPCommunicationHookType.POWER_SGD,
            comm_state_option={"matrix_approximation_rank": 3},
        ),
        InitProcessGroupKwargs(backend="cpu:gloo", timeout=timedelta(seconds=9)),
    ]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    if accelerator.num_processes == 1:
        return {"library": accelerator.run.world.collectives}
    config = accelerator.run.hooks.plugin("backend").config
    return {
        "unused": config.find_unused_parameters,
        "hook": config.comm_hook,
        "rank": config.powersgd.matrix_approximation_rank,
        "cap": config.bucket_cap_mb,
        "library": accelerator.run.world.collectives,
        "timeout": accelerator.run.config.collective_timeout,
    }


def test_settings_in_code_win_over_the_yaml_which_keeps_the_rest(worker_pool: Any) -> None:
    yaml = {"ddp": {"find_unused_parameters": False, "bucket_cap_mb": 5.0, "comm_hook": "fp16"}}
    expected = {"unused": True, "hook": "powersgd", "rank": 3, "cap": 5.0, "library": "cpu:gloo", "timeout": 9.0}
    assert worker_pool(2).run(_settings_in_code, config=yaml) == [expected] * 2


def test_settings_in_code_do_nothing_in_a_single_process(worker_pool: Any) -> None:
    assert worker_pool(1).run(_settings_in_code) == [{"library": None}]


def test_a_misspelt_setting_is_refused_with_its_line_and_the_right_name(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match=r"config\.yaml:4:.*did you mean 'bucket_cap_mb'"):
        worker_pool(2).run(_facts, config={"ddp": {"bucket_cap_mbs": 5.0}})


def _own_group() -> tuple[int, bool]:
    import torch.distributed as dist

    from drivetrain import Accelerator, state

    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(1)).item()
    state.reset()
    return total, dist.is_initialized()


def test_a_process_group_of_the_program_is_used_and_left(worker_pool: Any) -> None:
    assert worker_pool(2).run(_own_group) == [(2, True)] * 2


class _ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor) -> Tensor:
        return self.w * x


def _train_by_method() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_ByMethod())
    accelerator.backward(model.loss(torch.tensor(accelerator.process_index + 1.0)))


def test_training_through_a_method_is_an_error_that_says_what_to_do(worker_pool: Any) -> None:
    worker_pool(1).run(_train_by_method)
    with pytest.raises(WorkerError, match=r"Compute it in forward \(which may call loss\)"):
        worker_pool(2).run(_train_by_method)


def _differ() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2 + accelerator.process_index))


def test_a_model_that_differs_between_ranks_fails_on_all_of_them_alike(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(_differ)
    assert {error.type for error in caught.value.errors} == {"drivetrain.errors.CollectiveMismatchError"}
    assert len({error.message for error in caught.value.errors}) == 1


def _die_in_a_barrier() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise ValueError("the first error")
    accelerator.wait_for_everyone()


def test_a_rank_that_fails_frees_those_waiting_in_a_barrier(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(_die_in_a_barrier)
    assert caught.value.errors[0].message == "the first error"
    assert "over 2 ranks failed" in caught.value.of(0).message


def _train_the_model_from_before_prepare(block: bool) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((1, 1), float(accelerator.process_index))
    if block:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
    else:
        accelerator.backward(model(x).sum())
        optimizer.step()


@pytest.mark.parametrize("block", [True, False])
def test_training_the_model_from_before_prepare_is_refused(worker_pool: Any, block: bool) -> None:
    with pytest.raises(WorkerError, match=r"accelerator\.prepare\(model, \.\.\.\)") as caught:
        worker_pool(2).run(_train_the_model_from_before_prepare, block)
    assert {error.rank for error in caught.value.errors} == {0, 1}


def _meet_in_different_places() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
    else:
        accelerator.wait_for_everyone()


def test_a_barrier_against_a_gather_is_the_same_error_on_all_ranks(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(_meet_in_different_places)
    messages = {error.message for error in caught.value.errors}
    assert len(caught.value.errors) == 2
    assert len(messages) == 1
    assert "rank 0: gather of (1,) float32" in messages.pop()
