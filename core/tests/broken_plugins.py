"""Plugins for the tests of the conformance kit: one that is right, and many that are wrong in one way each.

Found by entry points that the test writes; the name of a class is the name of its plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Literal

import attrs

from drivetrain.plugin import Backend, Capabilities, Check, Known, Policy, Precision, hookimpl


class Right(Backend):
    """Replicates the model over processes, with nothing but torch.distributed."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, resharding=True)

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        from datetime import timedelta

        import torch.distributed as dist

        from drivetrain.world import World

        if topology.size > 1:
            dist.init_process_group(collectives, timeout=timedelta(seconds=30))
        return World(rank=topology.rank, size=topology.size, device=device, local_rank=topology.local_rank)

    @hookimpl
    def shutdown(self, run: Any, error: Any) -> None:
        import torch.distributed as dist

        if run.world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        trained = any(parameter.requires_grad for parameter in model.parameters())
        return DistributedDataParallel(model) if run.world.size > 1 and trained else model

    @hookimpl
    def unwrap(self, model: Any) -> Any:
        return getattr(model, "module", model)

    @hookimpl
    def accumulate(self, run: Any, models: Any, last: bool) -> Any:
        stack = contextlib.ExitStack()
        for model in models:
            if not last and hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        return stack

    @hookimpl
    def all_gather(self, run: Any, tensor: Any, group: Any) -> Any:
        import torch
        import torch.distributed as dist

        if run.world.size == 1:
            return torch.stack([tensor])
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(run.world.size)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Literal["sum", "mean", "max", "min"], group: Any) -> Any:
        parts = self.all_gather(run, tensor, group)
        if op in ("max", "min"):
            return getattr(parts, f"a{op}")(dim=0)
        return getattr(parts, op)(dim=0, dtype=tensor.dtype)

    @hookimpl
    def broadcast(self, run: Any, tensor: Any, source: int, group: Any) -> Any:
        return self.all_gather(run, tensor, group)[source]

    @hookimpl
    def broadcast_object(self, run: Any, value: Any, source: int, group: Any) -> Any:
        return self.all_gather_object(run, value, group)[source]

    @hookimpl
    def all_gather_object(self, run: Any, value: Any, group: Any) -> list[Any]:
        import torch.distributed as dist

        if run.world.size == 1:
            return [value]
        parts: list[Any] = [None] * run.world.size
        dist.all_gather_object(parts, value, group=group)
        return parts

    @hookimpl
    def barrier(self, run: Any, group: Any) -> None:
        self.all_gather_object(run, None, group)


# ------------------------------------------------------------------------------------------------------------- static


class ComputedApi(Backend):
    """Claims whatever version the core has."""

    api = (lambda: (1, 0))()


class InheritsApi(Right):
    """Was written for the version its base was written for."""


class Undocumented(Backend):
    api = (1, 0)


@attrs.define
class Unhashable(Backend):
    """An attrs class that compares its instances."""

    api = (1, 0)
    config: Any = None


@attrs.frozen
class Unhelpful:
    """A section of which nobody says what it is for."""

    level: int = 3


class NoHelp(Backend):
    """Has settings without help."""

    api = (1, 0)
    Config = Unhelpful


@attrs.frozen
class Demanding:
    """A section that must be given."""

    level: int = attrs.field(metadata={"help": "how much"})


class NoDefault(Backend):
    """Can't do without its section."""

    api = (1, 0)
    Config = Demanding

    def __init__(self, config: Any = None) -> None:
        self.config = config


@attrs.frozen
class OneWay:
    """A section that turns what was written into something else."""

    level: int = attrs.field(default=3, converter=lambda value: value + 1, metadata={"help": "how much"})


class NoRoundTrip(Backend):
    """Its defaults can't be written down."""

    api = (1, 0)
    Config = OneWay


class ChecksRaise(Backend):
    """Can't be examined by the doctor."""

    api = (1, 0)

    @classmethod
    def checks(cls) -> Iterable[Check]:
        raise OSError("no such library")


class ChecksAreTexts(Backend):
    """Gives the doctor something else than rows."""

    api = (1, 0)

    @classmethod
    def checks(cls) -> Iterable[Any]:
        return ["fine"]


# -------------------------------------------------------------------------------------------------------------- world


class NoWorld(Right):
    """Can't communicate."""

    api = (1, 0)

    @hookimpl
    def init_world(self, topology: Any) -> Any:
        raise OSError("no cable")


class Nameless(Right):
    """Distributes, and says that it does not."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="NO", many_processes=True)


# ----------------------------------------------------------------------------------------------------------- numerics


class NeverSteps(Right):
    """Says that it updated."""

    api = (1, 0)

    @hookimpl
    def step(self) -> bool:
        return True


class StepsTwice(Right):
    """Updates twice."""

    api = (1, 0)

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        optimizer.step()
        optimizer.step()
        return True


class SumsGradients(Right):
    """Adds gradients of all ranks up, where their mean is wanted."""

    api = (1, 0)

    @hookimpl
    def backward(self, run: Any, loss: Any) -> None:
        (loss * run.world.size).backward()


class StepsAlone(Right):
    """Leaves gradients as each rank has them."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, model: Any) -> Any:
        return model


class DividesAgain(Right):
    """Takes the gradient of a group for a sum that is still to be divided."""

    api = (1, 0)

    @hookimpl
    def accumulate(self, run: Any, models: Any, last: bool) -> Any:
        self.groups = True
        return super().accumulate(run, models, last)

    @hookimpl
    def backward(self, loss: Any) -> None:
        (loss / 2 if hasattr(self, "groups") else loss).backward()


class KeepsGradients(Right):
    """Clears nothing, if it did not step before."""

    api = (1, 0)

    @hookimpl
    def zero_grad(self) -> None:
        pass

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        optimizer.step()
        optimizer.zero_grad()
        return True


class Unties(Right):
    """Gives each name a weight of its own."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        import torch

        if hasattr(model, "last"):
            model.last.weight = torch.nn.Parameter(model.last.weight.detach().clone())
        return super().wrap_model(run, model)


class OneGroup(Right):
    """Makes one group of all."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any) -> Any:
        import torch

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


class ClipIgnored(Right):
    """Measures the norm, and clips nothing."""

    api = (1, 0)

    @hookimpl
    def clip_grad_norm(self, parameters: Any, norm_type: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, float("inf"), norm_type)


class ClipRemembered(Right):
    """Clips by the first bound it was ever given."""

    api = (1, 0)
    bound: float | None = None

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Any:
        import torch

        self.bound = max_norm if self.bound is None else self.bound
        return torch.nn.utils.clip_grad_norm_(parameters, self.bound, norm_type)


class ClipAlwaysTwo(Right):
    """Takes every norm for the 2-norm."""

    api = (1, 0)

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class ClipValueIgnored(Right):
    """Clamps nothing."""

    api = (1, 0)

    @hookimpl
    def clip_grad_value(self) -> None:
        pass


class ClaimsNoSubsets(Right):
    """Says that it can't clip a part, and does."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, clip_subsets=False)


class ClipsWhole(Right):
    """Clips the whole model, whatever part was meant."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        self.model = model
        return super().wrap_model(run, model)

    @hookimpl
    def clip_grad_norm(self, max_norm: float, norm_type: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


class ClaimsInfNorm(Right):
    """Claims a norm it can't measure."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, clip_norms=frozenset({2.0, float("inf")}))

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Any:
        import torch

        if norm_type != 2.0:
            raise ValueError("only the 2-norm")
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class ClaimsNative(Right):
    """Claims to compute in bfloat16, and leaves it to somebody else."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, native_dtypes=frozenset({"bfloat16"}))


class ClaimsScaler(Right):
    """Claims to scale losses, and does not."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, owns_scaler=True)


# ------------------------------------------------------------------------------------------------- wiring, data, state


class LeavesOptimizer(Right):
    """Gives the optimizer copies of the parameters."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any) -> Any:
        import torch

        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        return optimizer


class Prefixes(Right):
    """Calls parameters by the names of its wrapper."""

    api = (1, 0)

    @hookimpl
    def unwrap(self, model: Any) -> Any:
        return model

    @hookimpl
    def model_state(self, model: Any) -> Any:
        return {f"module.{name.removeprefix('module.')}": value for name, value in model.state_dict().items()}


class ClaimsShards(Right):
    """Claims to shard, and holds everything everywhere."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, shards_params=True)


class HalfState(Right):
    """Forgets the last weights of a model."""

    api = (1, 0)

    @hookimpl
    def model_state(self, model: Any) -> Any:
        state = self.unwrap(model).state_dict()
        return {name: value * 0 if name == list(state)[-1] else value for name, value in state.items()}


class SameShard(Right):
    """Every process takes the first shard of the data."""

    api = (1, 0)

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        return attrs.evolve(super().init_world(topology, device, collectives), data_rank=0)


class DropsLast(Right):
    """Its loader leaves out the last batch."""

    api = (1, 0)

    @hookimpl
    def wrap_loader(self, loader: Any) -> Any:
        read = loader._feed.read
        loader._feed.read = lambda *args: iter(list(read(*args))[:-1])
        return loader


class ClaimsUneven(Right):
    """Claims that ranks may run out of batches, and has no way of joining them."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, uneven_inputs=True)


class ClaimsResharding(Right):
    """Claims that checkpoints can be loaded by any number of processes."""

    api = (1, 0)

    @hookimpl
    def load_state(self, run: Any, bundle: Any, directory: Any, strict: bool) -> None:
        from drivetrain import defaults

        if run.world.size != len(list(directory.parent.glob("**/rng-*.json"))) and run.world.size == 2:
            raise OSError("saved by another number of processes")
        defaults.load_state(run, bundle, directory, strict)


# --------------------------------------------------------------------------------------------------------- collectives


class GathersReversed(Right):
    """Gathers in another order."""

    api = (1, 0)

    @hookimpl
    def all_gather(self, run: Any, tensor: Any, group: Any) -> Any:
        return super().all_gather(run, tensor, group).flip(0)


class MeanIsSum(Right):
    """Forgets to divide."""

    api = (1, 0)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Any, group: Any) -> Any:
        return super().all_reduce(run, tensor, "sum" if op == "mean" else op, group)


class ReducesInPlace(Right):
    """Changes its argument."""

    api = (1, 0)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Any, group: Any) -> Any:
        return tensor.copy_(super().all_reduce(run, tensor, op, group))


class BroadcastsFromZero(Right):
    """Takes rank 0 for the source."""

    api = (1, 0)

    @hookimpl
    def broadcast(self, run: Any, tensor: Any, group: Any) -> Any:
        return super().broadcast(run, tensor, 0, group)


# ---------------------------------------------------------------------------------------------------- precision, launch


class Picky(Precision):
    """Works nowhere, and says why."""

    api = (1, 0)

    def refuses(self, capabilities: Capabilities, device_type: str) -> str | None:
        return "it wants a device from the future"


class Freezing(Precision):
    """Trains nothing."""

    api = (1, 0)

    @property
    def policy(self) -> Policy:
        return Policy(output=None)

    @hookimpl
    def convert_model(self, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0)
        return model


class AlwaysFine(Backend):
    """Its launcher takes every end for a good one."""

    api = (1, 0)

    @hookimpl
    def launch(self, plan: Any) -> int:
        from drivetrain.launch.elastic import start

        start(plan)
        return 0


# --------------------------------------------------------------------------------------------------------------- known


class KnowsItsDefect(NeverSteps):
    """Is wrong, and says so."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "the engine is on holiday"),)


class KnowsTooMuch(Right):
    """Was wrong once."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "the engine was on holiday"),)


class KnowsWithBf16(Right):
    """Says that it is wrong with another precision."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "coarse", precision="bf16"),)


class KnowsNoCheck(Right):
    """Declares a defect that no check of the kit looks for."""

    api = (1, 0)
    known = (Known("it brews coffee", "no water"),)
