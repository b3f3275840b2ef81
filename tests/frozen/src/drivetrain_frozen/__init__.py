"""A backend with a runtime of its own, a device and a precision, as somebody outside wrote them for API 1.0.

Each notes which of its hooks were called, and the backend prints it at the end.
"""

import contextlib
import datetime

import attrs

from drivetrain.plugin import (
    Backend,
    Capabilities,
    Check,
    Device,
    Known,
    KwargsHandler,
    Policy,
    Precision,
    hookimpl,
)

CALLED = {"backend": set(), "device": set(), "precision": set()}


def _positive(instance, attribute, value):
    if value <= 0:
        raise ValueError(f"{attribute.name} must be above 0, got {value}")


@attrs.frozen(kw_only=True)
class FrozenConfig:
    """Section `frozen`."""

    level: int = attrs.field(default=1, validator=_positive, metadata={"help": "a number that is shown again"})


@attrs.frozen
class FrozenKwargs(KwargsHandler):
    """Section `frozen`, given in code."""

    section = "frozen"
    selects = "frozen"

    level: int | None = None


class FrozenBackend(Backend):
    """Replicate the model, with a process group of its own."""

    api = (1, 0)
    Config = FrozenConfig
    requires = ("torch>=2.9",)
    known = (Known("gradients are clipped by the global 1-norm", "only an example of how it is declared"),)

    @classmethod
    def checks(cls):
        return [Check("frozen", True, "as ever", "nothing to do")]

    @property
    def capabilities(self):
        return Capabilities(
            distributed_type="FROZEN",
            many_processes=True,
            one_process=True,
            process_group=False,
            native_dtypes=frozenset(),
            owns_scaler=False,
            moves_model=False,
            shards_params=False,
            max_models=4,
            resharding=True,
            uneven_inputs=False,
            clip_norms=frozenset({2.0}),
            clip_subsets=True,
            features=frozenset({"frozen"}),
        )

    def _note(self, hook):
        CALLED["backend"].add(hook)

    @hookimpl
    def process_count(self, plan):
        return 2

    @hookimpl
    def launch_environment(self, plan):
        return {"FROZEN_LAUNCHED": f"{plan.backend} {plan.processes}"}

    @hookimpl
    def init_world(self, config, topology, device, collectives):
        from drivetrain.world import World

        self._note("init_world")
        if topology.size > 1:
            import torch.distributed as dist

            seconds = config.collective_timeout or 60
            dist.init_process_group(collectives, timeout=datetime.timedelta(seconds=seconds))
        return World(
            rank=topology.rank,
            size=topology.size,
            device=device,
            local_rank=topology.local_rank,
            local_size=topology.local_size,
            collectives=collectives,
        )

    @hookimpl
    def shutdown(self, run, error):
        self._note("shutdown")
        if run.world.size > 1:
            import torch.distributed as dist

            if error is None:
                dist.barrier()
            dist.destroy_process_group()
        if run.world.rank == 0 and error is None:
            for role, hooks in CALLED.items():
                print(f"frozen {role}:", *sorted(hooks))

    @hookimpl
    def wrap_model(self, run, model):
        from torch.nn.parallel import DistributedDataParallel

        self._note("wrap_model")
        return DistributedDataParallel(model) if run.world.size > 1 else model

    @hookimpl
    def wrap_optimizer(self, run, optimizer, models):
        self._note("wrap_optimizer")
        assert models
        return optimizer

    @hookimpl
    def wrap_loader(self, run, loader):
        self._note("wrap_loader")
        return loader

    @hookimpl
    def after_prepare(self, run, bundle):
        self._note("after_prepare")
        assert len(bundle.names) == len(bundle.optimizers)

    @hookimpl
    def unwrap(self, run, model):
        return getattr(model, "module", model)

    @hookimpl
    def accumulate(self, run, models, last):
        self._note("accumulate")
        stack = contextlib.ExitStack()
        for model in models:
            if not last and hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        return stack

    @hookimpl
    def backward(self, run, loss, models, options):
        self._note("backward")
        loss.backward(**options)

    @hookimpl
    def clip_grad_norm(self, run, parameters, max_norm, norm_type):
        from drivetrain import defaults

        self._note("clip_grad_norm")
        return defaults.clip_grad_norm(run, parameters, max_norm, norm_type)

    @hookimpl
    def step(self, run, optimizer, closure):
        from drivetrain import defaults

        self._note("step")
        return defaults.step(run, optimizer, closure)

    @hookimpl
    def zero_grad(self, run, optimizer, set_to_none):
        from drivetrain import defaults

        self._note("zero_grad")
        defaults.zero_grad(run, optimizer, set_to_none)

    @hookimpl
    def after_step(self, run, models, applied):
        self._note("after_step")

    @hookimpl
    def all_gather(self, run, tensor, group):
        import torch
        import torch.distributed as dist

        if run.world.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(run.world.size)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @hookimpl
    def all_reduce(self, run, tensor, op, group):
        parts = self.all_gather(run, tensor, group)
        return getattr(parts, f"a{op}")(dim=0) if op in ("max", "min") else getattr(parts, op)(dim=0)

    @hookimpl
    def broadcast(self, run, tensor, source, group):
        return self.all_gather(run, tensor, group)[source]

    @hookimpl
    def all_gather_object(self, run, value, group):
        import torch.distributed as dist

        if run.world.size == 1:
            return [value]
        parts = [None] * run.world.size
        dist.all_gather_object(parts, value, group=group)
        return parts

    @hookimpl
    def broadcast_object(self, run, value, source, group):
        return self.all_gather_object(run, value, group)[source]

    @hookimpl
    def barrier(self, run, group):
        self.all_gather_object(run, None, group)

    @hookimpl
    def save_state(self, run, bundle, directory):
        from drivetrain import defaults

        self._note("save_state")
        defaults.save_state(run, bundle, directory)

    @hookimpl
    def load_state(self, run, bundle, directory, strict):
        from drivetrain import defaults

        self._note("load_state")
        defaults.load_state(run, bundle, directory, strict)


class FrozenDevice(Device):
    """The CPU under a name of its own."""

    api = (1, 0)
    label = "frozen CPU"
    engine_requires = {}

    @classmethod
    def present(cls):
        return False

    @hookimpl
    def device(self, topology):
        import torch

        CALLED["device"].add("device")
        return torch.device("cpu")

    @hookimpl
    def collectives(self, device_type):
        CALLED["device"].add("collectives")
        return "gloo"

    @hookimpl
    def move_model(self, run, model):
        CALLED["device"].add("move_model")
        return model.to(run.world.device)

    @hookimpl
    def place(self, run, batch, non_blocking):
        from drivetrain import defaults

        CALLED["device"].add("place")
        return defaults.place(run, batch, non_blocking)

    @hookimpl
    def rng_state(self, run):
        CALLED["device"].add("rng_state")
        return {"drawn": 3}

    @hookimpl
    def set_rng_state(self, run, state):
        assert state["drawn"] == 3
        CALLED["device"].add("set_rng_state")


class FrozenPrecision(Precision):
    """The dtype of the model, in layers that say so."""

    api = (1, 0)
    family = "frozen"
    family_rank = 7
    needs = frozenset({"frozen"})

    @property
    def policy(self):
        return Policy(compute=None, reduce=None, output=None, loss_scale=None, scaler_options={})

    def refuses(self, capabilities, device_type):
        return None if "frozen" in capabilities.features else "it wants a frozen backend"

    @hookimpl
    def convert_model(self, run, model):
        CALLED["precision"].add("convert_model")
        model.converted_in = run.policy.compute
        return model

    @hookimpl
    def after_step(self, run, models, applied):
        CALLED["precision"].add("after_step")
