"""What the Accelerator offers beside the loop: who goes first, flags, splitting, memory, random numbers, logging."""

from __future__ import annotations

import json
import random
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.errors import DrivetrainError
from drivetrain.testing.pool import WorkerError
from tests.one_weight import OneWeight, Values

# ------------------------------------------------------------------------------------------------------- who goes first


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


# ----------------------------------------------------------------------------------------------- states that come first


def train_after_a_state(settings: dict[str, Any]) -> Any:
    import torch.distributed as dist

    from drivetrain import Accelerator, PartialState
    from drivetrain.utils import gather_object

    early = PartialState(cpu=True)
    with early.main_process_first():
        pass
    ranks = gather_object([early.process_index])
    accelerator = Accelerator(**settings)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Values([1.0, 2.0, 3.0, 4.0]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x.unsqueeze(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    early.wait_for_everyone()
    weights = accelerator.get_state_dict(model)  # whole on rank 0 at least
    weight = weights["weight"].item() if accelerator.is_main_process else None
    accelerator.end_training()
    names = accelerator.run.names
    left = dist.is_initialized()
    return ranks, weight, names["precision"], names["backend"], early.process_index, left


@pytest.mark.parametrize(
    "settings", [{}, {"mixed_precision": "bf16"}, {"backend": "fsdp"}, {"backend": "fsdp", "mixed_precision": "bf16"}]
)
def test_the_first_accelerator_says_how_to_compute_in_the_world_of_a_state(
    worker_pool: Any, settings: dict[str, Any]
) -> None:
    expected = settings.get("mixed_precision", "no"), settings.get("backend", "ddp")
    for rank, found in enumerate(worker_pool(2).run(train_after_a_state, settings)):
        # w * x, and w is 0 at first: two updates, by the means of 1, 2 and of 3, 4
        assert found == ([0, 1], None if rank else -5.0, *expected, rank, False)


def handler_after_a_state() -> Any:
    from drivetrain import Accelerator, DistributedDataParallelKwargs, PartialState

    PartialState(cpu=True)
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    prepared = accelerator.prepare(model)
    for _ in range(2):  # a second forward fails where unused parameters were not looked for
        accelerator.backward(prepared(torch.ones(1, 1)).sum())
    return True


def test_handlers_given_after_a_state_count(worker_pool: Any) -> None:
    assert worker_pool(2).run(handler_after_a_state) == [True, True]


def all_to_the_last(data: Any, part: slice, process_index: int, num_processes: int) -> Any:
    return data[part.start :] if process_index == num_processes - 1 else data[:0]


def slice_for_one_loader() -> list[Any]:
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    cut = accelerator.prepare_data_loader(DataLoader(Values([1, 2, 3, 4])), slice_fn_for_dispatch=all_to_the_last)
    other = accelerator.prepare_data_loader(DataLoader(Values([1, 2, 3, 4])))
    return [[batch.tolist() for batch in loader] for loader in (cut, other)]


def test_a_slice_function_may_be_given_for_one_loader(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(slice_for_one_loader)
    assert one == [[[], []], [[1.0], [3.0]]]
    assert other == [[[2.0], [4.0]], [[2.0], [4.0]]]


# ---------------------------------------------------------------------------------------------- one world after another

SEVERAL_WORLDS = """
    from drivetrain import Accelerator
    from drivetrain.utils import gather_object
    for number in range(3):
        accelerator = Accelerator(cpu=True)
        ranks = gather_object([accelerator.process_index])
        if accelerator.is_main_process:
            print(number, ranks)
        accelerator.end_training()
"""


def several_worlds() -> list[list[int]]:
    from drivetrain import Accelerator
    from drivetrain.utils import gather_object

    found = []
    for _ in range(3):
        accelerator = Accelerator(cpu=True)
        found.append(gather_object([accelerator.process_index]))
        accelerator.end_training()
    return found


def test_a_world_may_follow_one_that_ended(worker_pool: Any) -> None:
    assert worker_pool(2).run(several_worlds) == [[[0, 1]] * 3] * 2


@pytest.mark.slow
def test_a_world_may_follow_one_that_ended_though_the_launchers_store_remembers_it(launcher: Any) -> None:
    done = launcher.run("--num_processes", "2", launcher.script(SEVERAL_WORLDS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 [0, 1]", "1 [0, 1]", "2 [0, 1]"]


def weight_losses_by_samples(even: bool) -> int:
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare(DataLoader(Values(range(15)), batch_size=4))  # the last batch of rank 1 has 3
    return len(torch.cat([accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]))


@pytest.mark.parametrize("even", [True, False])
def test_a_loss_repeated_for_a_full_batch_counts_once_a_sample_on_every_rank(worker_pool: Any, even: bool) -> None:
    assert worker_pool(2).run(weight_losses_by_samples, even) == [15, 15]


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


@pytest.mark.parametrize(
    "kind", [list, tuple, torch.tensor, np.array, range, lambda rows: {"rows": rows, "same": rows}]
)
def test_every_kind_of_inputs_is_padded_with_its_last_row(worker_pool: Any, kind: Any) -> None:
    inputs = range(5) if kind is range else kind([0, 1, 2, 3, 4])
    for rank, expected in enumerate([[0, 1, 2], [3, 4, 4]]):
        part = worker_pool(2).run(padded, inputs)[rank]
        assert part == ({"rows": expected, "same": expected} if isinstance(part, dict) else expected)


def padded(inputs: Any) -> Any:
    from drivetrain import PartialState

    with PartialState(cpu=True).split_between_processes(inputs, apply_padding=True) as part:
        if isinstance(part, dict):
            return {key: [int(row) for row in rows] for key, rows in part.items()}
        return [int(row) for row in part]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (5, "TypeError", "got an object of type int"),
        ({1, 2}, "TypeError", "got an object of type set"),
        (torch.tensor(1.0), "TypeError", "got a 0-d tensor"),
        ({"a": [1, 2], "b": None}, "TypeError", "got an object of type NoneType"),
        ({"a": [1, 2], "b": [1]}, "ValueError", "must have one length"),
    ],
)
def test_what_can_not_be_split_is_refused_in_any_world(
    worker_pool: Any, ranks: int, inputs: Any, error: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=f"{error}: .*{message}"):
        worker_pool(ranks).run(padded, inputs)


def save_in_files_of(size: str, folder: Any) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(OneWeight()), folder, max_shard_size=size)


def test_a_size_of_files_that_is_none_is_refused_on_every_rank(worker_pool: Any, tmp_path: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(save_in_files_of, "ten", tmp_path)
    for rank in range(2):
        assert "ValueError: 'ten' is no size" in str(caught.value.of(rank))


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


def clip_a_part() -> str:
    """The error of clipping a part where the backend clips whole models only."""
    import attrs

    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    whole = attrs.evolve(accelerator.run.capabilities, clip_subsets=False)
    accelerator.gradients.run = attrs.evolve(accelerator.run, capabilities=whole)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    try:
        accelerator.clip_grad_norm_(accelerator.unwrap_model(model)[0].parameters(), 1.0)
    except DrivetrainError as error:
        return str(error)
    return "went through"


def test_a_part_that_the_backend_cannot_clip_is_the_same_error_on_all_ranks(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(clip_a_part)
    assert one == other
    assert "clips the gradients of whole models only, but clip_grad_norm_ was given 2 of the 4" in one


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


# ----------------------------------------------------------------------------------------------- without an Accelerator


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
