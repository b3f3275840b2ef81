"""torchao's float8 on real ranks: replicated and sharded, gathered in 8 bits, saved and loaded in another world."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from backends_fp8.tests.recipes import adamw, batch, by_hand, distance, far, full, net, settings, train

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'drivetrain-fp8[torchao]'")
pytest.importorskip("drivetrain_fsdp", reason="drivetrain-fsdp is not installed")
pytest.importorskip("drivetrain_ddp", reason="drivetrain-ddp is not installed")

configure = functools.partial(settings, "fp8-torchao")
PATIENCE = 60


def float8_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if "Float8Linear" in type(module).__name__]


# ---------------------------------------------------------------------------------------------------------- training


def course(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and full weights."""
    losses, accelerator, model, _ = train(steps)
    return losses, full(accelerator, model)


@functools.cache
def right(steps: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    return by_hand(steps, ranks)


@pytest.mark.parametrize(
    ("backend", "section"),
    [
        ("ddp", {}),
        ("ddp", {"recipe": "rowwise"}),
        ("fsdp", {}),
        ("fsdp", {"float8_all_gather": False}),
        ("fsdp", {"recipe": "rowwise_with_gw_hp"}),
        ("fsdp1", {}),
    ],
)
def test_two_ranks_train_as_one_process_on_the_data_of_both(ranks: Any, backend: str, section: Any) -> None:
    config = configure(backend, fp8_torchao=section)
    found = ranks(2).run(course, 8, config=config, timeout=PATIENCE)
    losses, weights = right(8, 2)
    mean = [sum(pair) / 2 for pair in zip(found[0][0], found[1][0], strict=True)]
    assert mean == pytest.approx(losses, rel=0.1)
    assert far(found[0][1], weights) < 0.15
    if backend == "ddp":
        assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


# ------------------------------------------------------------------------------------------- gathering in eight bits


def gathered() -> tuple[list[str], list[tuple[float, float]], list[str]]:
    """Kinds of the weights a forward sees, scales beside those of the full weights, and names of the full state."""
    _, accelerator, model, optimizer = train(1)
    kinds: list[str] = []
    for layer in float8_layers(model):
        layer.register_forward_hook(lambda layer, _i, _o: kinds.append(type(layer.weight).__name__))
    train(2, first=1, accelerator=accelerator, objects=(model, optimizer))
    return kinds[: len(kinds) // 2], scales(accelerator, model), list(full(accelerator, model))


def scales(accelerator: Any, model: nn.Module) -> list[tuple[float, float]]:
    """Of what is gathered in 8 bits: the scale that was computed beforehand, and the one that is right."""
    found = []
    names = {id(module): name for name, module in model.named_modules()}
    whole = accelerator.run.hooks.all_gather_object(run=accelerator.run, value=full(accelerator, model), group=None)[0]
    for layer in float8_layers(model):
        held = getattr(getattr(layer.weight, "_local_tensor", None), "_precomputed_scale", None)
        if held is not None:
            largest = whole[f"{names[id(layer)]}.weight"].abs().max()
            found.append((float(held), float(torch.finfo(torch.float8_e4m3fn).max / largest)))
    return found


def test_sharded_weights_are_gathered_in_eight_bits_by_scales_that_follow_them(ranks: Any) -> None:
    for kinds, both, names in ranks(2).run(gathered, config=configure("fsdp"), timeout=PATIENCE):
        assert kinds == ["Float8TrainingTensor"] * 6
        assert len(both) == 6
        for held, expected in both:
            assert held == pytest.approx(expected, rel=1e-6)
        assert names in ([], list(net().state_dict()))


@pytest.mark.parametrize(
    ("size", "backend", "section"),
    [(2, "fsdp", {"float8_all_gather": False}), (3, "fsdp", {}), (2, "fsdp1", {}), (2, "ddp", {})],
)
def test_weights_are_gathered_whole_where_eight_bits_cannot_be(
    ranks: Any, size: int, backend: str, section: Any
) -> None:
    """With three ranks no number of rows can be shared evenly, which the engine needs."""
    for kinds, both, _ in ranks(size).run(gathered, config=configure(backend, fp8_torchao=section), timeout=PATIENCE):
        assert "Float8TrainingTensor" not in kinds
        assert both == []


class Language(nn.Module):
    """Its head has the weight of its embedding, which looks rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


def tied() -> tuple[list[float], bool, list[str]]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Language()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for _ in range(4):
        x = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(accelerator.process_index))
        loss = cross_entropy(model(x), x)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = full(accelerator, model)
    same = not state or torch.equal(state["head.weight"], state["embedding.weight"])
    return losses, same, [type(layer.weight._local_tensor).__name__ for layer in float8_layers(model)]


def test_a_weight_shared_with_an_embedding_is_gathered_whole(ranks: Any) -> None:
    for losses, same, kinds in ranks(2).run(tied, config=configure("fsdp"), timeout=PATIENCE):
        assert losses[-1] < 0.7 * losses[0]
        assert same
        assert kinds == ["WeightWithDynamicFloat8CastTensor", "Tensor"]


def test_scales_may_be_computed_weight_by_weight_instead(ranks: Any) -> None:
    one_by_one = configure("fsdp", fp8_torchao={"precompute_scales": False})
    found = [ranks(2).run(course, 4, config=config, timeout=PATIENCE) for config in (configure("fsdp"), one_by_one)]
    assert [losses for losses, _ in found[0]] == [losses for losses, _ in found[1]]
    for kinds, both, _ in ranks(2).run(gathered, config=one_by_one, timeout=PATIENCE):
        assert kinds == ["Float8TrainingTensor"] * 6
        assert both == []


def unbiased() -> tuple[list[float], list[str]]:
    """All that a unit gathers is in 8 bits, so there is nothing else to agree on a dtype with."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    kinds: list[str] = []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda layer, _i, _o: kinds.append(type(layer.weight).__name__))
    losses, *_ = train(6, accelerator=accelerator, objects=accelerator.prepare(model, adamw(model)))
    return losses, kinds[:2]


def test_eight_bits_alone_can_be_sent_by_every_communication_library(ranks: Any) -> None:
    for losses, kinds in ranks(2).run(unbiased, config=configure("fsdp"), timeout=PATIENCE):
        assert losses[-1] < losses[0]
        assert kinds == ["Float8TrainingTensor"] * 2


def built_on_rank_0() -> tuple[list[float], int]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    with accelerator.init_context():
        model = net()
    objects = accelerator.prepare(model, adamw(model))
    losses, *_ = train(3, accelerator=accelerator, objects=objects)
    return losses, len(scales(accelerator, objects[0]))


def test_a_model_built_on_rank_0_alone_is_gathered_in_eight_bits_too(ranks: Any) -> None:
    config = configure("fsdp", fsdp={"cpu_ram_efficient_loading": True})
    found = ranks(2).run(built_on_rank_0, config=config, timeout=PATIENCE)
    expected = ranks(2).run(course, 3, config=configure("fsdp"), timeout=PATIENCE)
    assert [rank[0] for rank in found] == [rank[0] for rank in expected]
    assert [rank[1] for rank in found] == [6, 6]


def test_the_engine_may_cast_and_recompute_as_well(ranks: Any) -> None:
    section = {
        "transformer_classes": "Block",
        "activation_checkpointing": True,
        "mixed_precision_policy": {"param_dtype": "bfloat16"},
    }
    found = ranks(2).run(course, 4, config=configure("fsdp", fsdp=section), timeout=PATIENCE)
    assert far(found[0][1], right(4, 2)[1]) < 0.15


# ------------------------------------------------------------------------------------------------- saving and loading


def save(folder: str) -> list[float]:
    _, accelerator, model, optimizer = train(3)
    accelerator.save_state(folder)
    losses, *_ = train(3, first=3, accelerator=accelerator, objects=(model, optimizer))
    return losses


def load(folder: str) -> tuple[list[float], list[tuple[float, float]], set[str]]:
    """Losses, scales as after loading, and kinds of what the optimizer keeps."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net(1)
    objects = accelerator.prepare(model, adamw(model))
    accelerator.load_state(folder)
    after = scales(accelerator, objects[0])
    losses, *_ = train(3, first=3, accelerator=accelerator, objects=objects)
    kept = [value for entries in objects[1].state.values() for value in entries.values()]
    return losses, after, {type(getattr(value, "_local_tensor", value)).__name__ for value in kept}


def test_a_checkpoint_of_gathered_weights_goes_on_as_if_nothing_had_been(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = ranks(2).run(save, folder, config=configure("fsdp"), timeout=PATIENCE)
    found = ranks(2).run(load, folder, config=configure("fsdp"), timeout=PATIENCE)
    assert [losses for losses, *_ in found] == expected
    assert found[0][2] == {"Tensor"}
    for held, is_right in found[0][1]:
        assert held == pytest.approx(is_right, rel=1e-6)  # not those of the weights before loading
    assert len(found[0][1]) == 6
    in_another = ranks(2).run(load, folder, config=configure("fsdp1"), timeout=PATIENCE)
    assert in_another[0][0] == pytest.approx(expected[0], rel=1e-3)


def evaluated() -> float:
    """A model that is not distributed computes beside those that are."""
    from drivetrain import Accelerator

    model = Accelerator().prepare_model(net(), evaluation_mode=True)
    x, _ = batch(0)
    with torch.no_grad():
        return distance(model(x), net()(x))


def test_a_model_for_evaluation_stays_whole(ranks: Any) -> None:
    for wrong in ranks(2).run(evaluated, config=configure("fsdp"), timeout=PATIENCE):
        assert 0.005 < wrong < 0.06


def unwrapped() -> tuple[int, list[str]]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(net())
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return len(float8_layers(plain)), list(full(accelerator, plain))


@pytest.mark.parametrize(("backend", "left"), [("ddp", 0), ("fsdp", 6)])
def test_unwrapping_gives_plain_layers_where_weights_are_whole(ranks: Any, backend: str, left: int) -> None:
    """Cut ones stay converted, with a warning: what gathers them holds on to the layers."""
    for count, names in ranks(2).run(unwrapped, config=configure(backend), timeout=PATIENCE):
        assert count == left
        assert names in ([], list(net().state_dict()))
