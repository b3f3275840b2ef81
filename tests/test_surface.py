"""What the Accelerator offers beside the loop: who goes first, uneven data, flags, local updates, memory, trackers."""

from __future__ import annotations

import json
import random
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.testing.pool import WorkerError


class OneWeight(nn.Module):
    """The loss w * x, so that the gradient is the mean of x."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).mean()


class Values(Dataset[Tensor]):
    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.values[index]))


# ----------------------------------------------------------------------------------------------------- who goes first


def first(folder: str, local: bool) -> bool:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    done = Path(folder) / "done"
    with accelerator.local_main_process_first() if local else accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.3)
            done.touch()
        return done.exists()


@pytest.mark.parametrize("local", [False, True])
def test_the_main_process_has_finished_before_the_others_begin(worker_pool: Any, tmp_path: Path, local: bool) -> None:
    assert worker_pool(3).run(first, str(tmp_path), local) == [True] * 3


def fail_first(folder: str) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            raise ValueError("the main process failed")
        (Path(folder) / "went on").touch()


def test_an_error_of_the_main_process_frees_the_others(worker_pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(fail_first, str(tmp_path))
    assert caught.value.errors[0].rank == 0
    assert caught.value.errors[0].message == "the main process failed"
    assert (tmp_path / "went on").exists()


def decorated() -> list[Any]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    return [
        accelerator.on_main_process(lambda: "main")(),
        accelerator.on_last_process(lambda: "last")(),
        accelerator.on_process(process_index=1)(lambda: "one")(),
        accelerator.on_local_process(lambda: "local 2", local_process_index=2)(),
        accelerator.on_local_main_process(lambda x: x)(5),
    ]


def test_decorated_functions_run_on_their_process_only(worker_pool: Any) -> None:
    assert worker_pool(3).run(decorated) == [
        ["main", None, None, None, 5],
        [None, None, "one", None, None],
        [None, "last", None, "local 2", None],
    ]


def triggers() -> list[bool]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    seen = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_flag_that_one_rank_raises_is_seen_once_by_all(worker_pool: Any, ranks: int) -> None:
    assert worker_pool(ranks).run(triggers) == [[False, True, False]] * ranks


# ------------------------------------------------------------------------------------------------------------ splitting


def parts(inputs: Any, padding: bool) -> Any:
    from drivetrain import PartialState
    from drivetrain.utils import gather_object

    with PartialState(cpu=True).split_between_processes(inputs, apply_padding=padding) as part:
        return part, gather_object(list(part))


def test_inputs_are_split_without_padding_or_repeats(worker_pool: Any) -> None:
    assert worker_pool(2).run(parts, ["a"], False) == [(["a"], ["a"]), ([], ["a"])]
    nested = [["0", "1"], ["2", "3"]]
    assert worker_pool(2).run(parts, nested, True) == [([["0", "1"]], nested), ([["2", "3"]], nested)]
    longer = ["a", "b", "c", "d", "e"]
    assert worker_pool(3).run(parts, longer, True) == [
        (part, ["a", "b", "c", "d", "e", "e"]) for part in (["a", "b"], ["c", "d"], ["e", "e"])
    ]


# ---------------------------------------------------------------------------------------------------------- uneven data


def train_uneven(values: Sequence[float], override: bool | None, even: bool) -> dict[str, Any]:
    """Train in the context; the weight, and the loader's length before, in and after the context."""
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    model = OneWeight(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Values(values), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    lengths = [len(loader)]
    with accelerator.join_uneven_inputs([model], even_batches=override):
        lengths.append(len(loader))
        batches = 0
        for x in loader:
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    lengths.append(len(loader))
    return {"w": accelerator.unwrap_model(model).w.item(), "batches": batches, "lengths": lengths}


def test_ranks_with_fewer_batches_wait_and_end_with_the_same_weights(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], None, False)
    # By hand: (1 + 2) / 2, then 3 / 2, since a gradient is divided by all ranks.
    assert (one["w"], other["w"]) == (-2.0, -2.0)
    assert (one["batches"], other["batches"]) == (2, 1)


def test_even_batches_is_overridden_in_the_context_only(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], False, True)
    assert (one["w"], other["w"]) == (-2.0, -2.0)
    assert (one["lengths"], other["lengths"]) == ([2, 2, 2], [2, 1, 2])
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], True, False)
    assert (one["w"], other["w"]) == (-2.5, -2.5)  # the second gradient is (3 + 1) / 2
    assert (one["lengths"], other["lengths"]) == ([2, 2, 2], [1, 2, 1])


def test_a_single_process_joins_nobody(worker_pool: Any) -> None:
    (found,) = worker_pool(1).run(train_uneven, [1.0, 2.0, 3.0], False, True)
    assert (found["w"], found["batches"]) == (-5.0, 3)


class Numbers(IterableDataset[Tensor]):
    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter([torch.tensor(value) for value in self.values])


def train_uneven_with_momentum(stream: bool) -> list[Any]:
    """An uneven epoch under Adam and a schedule, then an even one: whatever a rank missed would show in the weights."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = OneWeight(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    loader = DataLoader(Numbers(values) if stream else Values(values), batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for even in (False, True):
        with accelerator.join_uneven_inputs([model], even_batches=even):
            for x in loader:
                accelerator.backward(model(x))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen += [accelerator.unwrap_model(model).w.item(), optimizer.param_groups[0]["lr"]]
    return [*seen, {key: float(value) for key, value in next(iter(optimizer.state.values())).items()}]


@pytest.mark.parametrize("stream", [False, True])
def test_optimizers_and_schedulers_are_equal_after_uneven_data(worker_pool: Any, stream: bool) -> None:
    one, other = worker_pool(2).run(train_uneven_with_momentum, stream)
    assert one == other
    assert one[-1]["step"] == 6.0


def join_and_accumulate() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(OneWeight())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


def test_uneven_data_and_accumulation_are_refused_together(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match="gradient_accumulation_steps=2 can't be combined with uneven"):
        worker_pool(2).run(join_and_accumulate)


def switch_even_batches() -> list[int]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(DataLoader(Values(range(3))))
    accelerator.even_batches = False
    second = accelerator.prepare(DataLoader(Values(range(3))))
    return [len(first), len(second)]


def test_even_batches_can_be_switched_for_loaders_to_come(worker_pool: Any) -> None:
    assert worker_pool(2).run(switch_even_batches) == [[2, 2], [2, 1]]


# ------------------------------------------------------------------------------------------ when gradients are reduced


def reduce_late() -> list[float]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OneWeight(1.0))
    x = torch.tensor(accelerator.process_index + 1.0)
    with accelerator.no_sync(model):
        losses = [model(x), model(10 * x)]
        accelerator.backward(losses[0])
        apart = accelerator.unwrap_model(model).w.grad.item()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    return [apart, accelerator.unwrap_model(model).w.grad.item()]


def test_gradients_of_forwards_kept_apart_are_reduced_by_a_triggered_backward(worker_pool: Any) -> None:
    assert worker_pool(1).run(reduce_late) == [[1.0, 11.0]]
    assert worker_pool(2).run(reduce_late) == [[1.0, 16.5], [2.0, 16.5]]


def train_locally(steps: int, enabled: bool) -> list[float]:
    from drivetrain import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True)
    model = OneWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=steps, enabled=enabled) as local:
        for _ in range(3):
            accelerator.backward(model(torch.tensor(accelerator.process_index + 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(accelerator.unwrap_model(model).w.item())
    return [*seen, accelerator.unwrap_model(model).w.item()]


def test_local_updates_are_averaged_every_few_steps_and_at_the_end(worker_pool: Any) -> None:
    assert worker_pool(2).run(train_locally, 2, True) == [[-1.0, -3.0, -4.0, -4.5], [-2.0, -3.0, -5.0, -4.5]]
    assert worker_pool(2).run(train_locally, 2, False) == [[-1.5, -3.0, -4.5, -4.5]] * 2
    assert worker_pool(1).run(train_locally, 2, True) == [[-1.0, -2.0, -3.0, -3.0]]


# --------------------------------------------------------------------------------------------------------------- memory


def let_go() -> list[Any]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = OneWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Values([1.0]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor(1.0)))
    alive = weakref.ref(accelerator.unwrap_model(model)), weakref.ref(optimizer.optimizer)
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.clear()  # collects what the variables still held
    left = [ref() is None for ref in alive]
    model = accelerator.prepare(OneWeight())
    with accelerator.accumulate(model):  # the group that was begun is forgotten
        synced = accelerator.sync_gradients
    return [model is not None, optimizer, loader, *left, synced]


@pytest.mark.parametrize("ranks", [1, 2])
def test_freed_objects_are_gone_and_groups_start_anew(worker_pool: Any, ranks: int) -> None:
    assert worker_pool(ranks).run(let_go) == [[True, None, None, True, True, False]] * ranks


# ------------------------------------------------------------------------------------------------------- random numbers


def draw(device_specific: bool) -> list[float]:
    from drivetrain import Accelerator, set_seed

    set_seed(5, device_specific=device_specific)  # before there is a run
    early = torch.rand(()).item()
    Accelerator(cpu=True)
    set_seed(5, device_specific=device_specific)
    return [early, torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_seeds_are_equal_or_one_apart_also_before_there_is_an_accelerator(worker_pool: Any) -> None:
    same = worker_pool(2).run(draw, False)
    assert same[0] == same[1]
    for rank, drawn in enumerate(worker_pool(2).run(draw, True)):
        expected = torch.rand((), generator=torch.Generator().manual_seed(5 + rank)).item()
        assert drawn[:2] == [expected, expected]


def synchronize() -> list[float]:
    from drivetrain import Accelerator
    from drivetrain.utils import set_seed, synchronize_rng_states

    accelerator = Accelerator(cpu=True)
    set_seed(1, device_specific=True)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    before = [torch.rand(()).item(), torch.rand((), generator=generator).item()]
    synchronize_rng_states(["torch", "generator", "cpu"], generator)
    with pytest.raises(ValueError, match="'banana' is no generator of this run"):
        synchronize_rng_states(["banana"])
    return [*before, torch.rand(()).item(), torch.rand((), generator=generator).item()]


def test_generators_of_all_ranks_take_the_main_processs_state(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(synchronize)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one[2:] == other[2:]


# --------------------------------------------------------------------------------------------- without an Accelerator


def without_accelerator() -> dict[str, Any]:
    from drivetrain import PartialState
    from drivetrain.utils import (
        DistributedType,
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        is_bf16_available,
        pad_across_processes,
        reduce,
        tqdm,
        wait_for_everyone,
    )

    state = PartialState(cpu=True)
    rank = state.process_index
    wait_for_everyone()
    return {
        "gather": gather({"x": torch.tensor([rank])})["x"].tolist(),
        "objects": gather_object([f"rank {rank}"]),
        "mean": reduce(torch.tensor([rank + 1.0])).tolist(),
        "sum": reduce(torch.tensor([rank + 1.0]), "sum", 2.0).tolist(),
        "broadcast": broadcast(torch.tensor(rank), 1).item(),
        "list": broadcast_object_list([rank, "x"], 1),
        "padded": pad_across_processes(torch.ones(rank + 1), pad_index=7).tolist(),
        "bf16": is_bf16_available(),
        "bar": [tqdm([], leave=False).disable, tqdm([], main_process_only=False, leave=False).disable],
        "type": [state.distributed_type == DistributedType.MULTI_CPU, state.distributed_type == DistributedType.NO],
    }


def test_collectives_without_an_accelerator(worker_pool: Any) -> None:
    expected = {
        "gather": [0, 1],
        "objects": ["rank 0", "rank 1"],
        "mean": [1.5],
        "sum": [6.0],
        "broadcast": 1,
        "list": [1, "x"],
        "bf16": True,
        "type": [True, False],
    }
    own = [{"padded": [1.0, 7.0], "bar": [False, False]}, {"padded": [1.0, 1.0], "bar": [True, False]}]
    assert worker_pool(2).run(without_accelerator) == [{**expected, **mine} for mine in own]


def extract() -> list[str]:
    from drivetrain import Accelerator
    from drivetrain.utils import extract_model_from_parallel

    before = type(extract_model_from_parallel(nn.Linear(1, 1))).__name__  # no run yet: nothing to take off
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(1, 1))
    bare = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    return [before, type(model).__name__, type(bare).__name__, str("forward" in vars(bare))]


def test_a_model_is_extracted_from_whatever_wraps_it(worker_pool: Any) -> None:
    assert worker_pool(1).run(extract) == [["Linear", "Linear", "Linear", "False"]]
    assert worker_pool(2).run(extract) == [["Linear", "Replica", "Linear", "False"]] * 2


def record(folder: str) -> bool:
    from drivetrain import Accelerator, ProfileKwargs

    handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=folder)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(nn.Linear(4, 4))
    with accelerator.profile() as profiler:
        model(torch.ones(2, 4))
    return any("addmm" in event.key for event in profiler.key_averages())


def test_every_rank_writes_a_trace(worker_pool: Any, tmp_path: Path) -> None:
    assert worker_pool(2).run(record, str(tmp_path / "traces")) == [True, True]
    for rank in (0, 1):
        assert json.loads((tmp_path / "traces" / f"profile_{rank}.json").read_text())["traceEvents"]


# -------------------------------------------------------------------------------------------------------------- logging


def log_in_order(folder: str) -> None:
    import logging

    from drivetrain import Accelerator, get_logger

    Accelerator(cpu=True)
    handler = logging.FileHandler(Path(folder) / "log", mode="a")
    logging.getLogger("ordered").addHandler(handler)
    logger = get_logger("ordered", log_level="info")
    logger.info("main only")
    logger.info("in order", in_order=True, main_process_only=False)
    logging.getLogger("ordered").removeHandler(handler)
    handler.close()


def test_ranks_log_one_after_the_other_when_asked_to(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(3).run(log_in_order, str(tmp_path))
    lines = ["main only", "[RANK 0] in order", "[RANK 1] in order", "[RANK 2] in order"]
    assert (tmp_path / "log").read_text().splitlines() == lines


# ------------------------------------------------------------------------------------------------------------- trackers


def fake_tracker(everywhere: bool) -> Any:
    from drivetrain.tracking import GeneralTracker

    class Fake(GeneralTracker):
        name = "fake"
        main_process_only = not everywhere

        def __init__(self) -> None:
            super().__init__("none")
            self.calls: list[Any] = []

        def start(self) -> None:
            self.calls.append("start")

        @property
        def tracker(self) -> Any:
            return self.calls

        def store_init_configuration(self, values: Mapping[str, Any]) -> None:
            self.calls.append(dict(values))

        def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.calls.append((dict(values), step, kwargs))

        def finish(self) -> None:
            self.calls.append("finish")

    return Fake()


def track(everywhere: bool) -> Any:
    from drivetrain import Accelerator

    tracker = fake_tracker(everywhere)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"fake": {"commit": True}})
    accelerator.get_tracker("fake").log({"extra": 2.0})
    unwrapped = accelerator.get_tracker("fake", unwrap=True)
    unwrapped.append("by hand")
    accelerator.end_training()
    return tracker.calls


def test_trackers_live_on_the_main_process_and_are_harmless_on_the_others(worker_pool: Any) -> None:
    expected = [
        "start",
        {"lr": 0.1},
        ({"loss": 1.0}, 3, {"commit": True}),
        ({"extra": 2.0}, None, {}),
        "by hand",
        "finish",
    ]
    assert worker_pool(2).run(track, False) == [expected, []]
    assert worker_pool(2).run(track, True) == [expected, expected]


def track_in_a_file(folder: str) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.1})
    for step in range(2):
        loss = accelerator.reduce(torch.tensor(accelerator.process_index + step), "mean")
        accelerator.log({"loss": loss}, step=step)
    accelerator.end_training()


def test_the_file_has_one_line_a_step_whatever_the_number_of_ranks(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(2).run(track_in_a_file, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 0.5), (1, 1.5)]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}
