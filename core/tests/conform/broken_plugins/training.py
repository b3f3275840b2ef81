"""Wrong in what they train."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, hookimpl


@fails("losses and weights are those of one process on the whole batch", "losses of rank 0 should be")
class NeverSteps(Right):
    """Says that it updated."""

    api = (1, 0)

    @hookimpl
    def step(self) -> bool:
        return True


@fails("losses and weights are those of one process on the whole batch", "losses of rank 0 should be")
class StepsTwice(Right):
    """Updates twice."""

    api = (1, 0)

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        optimizer.step()
        optimizer.step()
        return True


@fails("losses and weights are those of one process on the whole batch", "losses of rank 0 should be", size=2)
class SumsGradients(Right):
    """Adds gradients of all ranks up, where their mean is wanted."""

    api = (1, 0)

    @hookimpl
    def backward(self, run: Any, loss: Any) -> None:
        (loss * run.world.size).backward()


@fails("losses and weights are those of one process on the whole batch", size=2)
@fails("an overflow on one rank skips", size=2, precision="fp16")
class StepsAlone(Right):
    """Leaves gradients as each rank has them."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, model: Any) -> Any:
        return model


@fails("accumulated micro-batches give the gradient", "losses of rank 0 should be")
@fails("accumulate() may name no model", "losses of rank 0 should be")
@fails("every spelling of the accumulation loop", "w after two groups of two")
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


@fails("zero_grad clears a bad batch", "w after x=1")
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


@fails("tied weights stay tied")
class Unties(Right):
    """Gives each name a weight of its own."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        import torch

        if hasattr(model, "last"):
            model.last.weight = torch.nn.Parameter(model.last.weight.detach().clone())
        return super().wrap_model(run, model)


@fails("parameter groups keep their members", "losses of rank 0 should be")
class OneGroup(Right):
    """Makes one group of all."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any) -> Any:
        import torch

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


@fails(
    "models compute in the dtype",
    "claims to compute natively in bfloat16: expected 'torch.bfloat16', got 'torch.float32'",
    precision="bf16",
)
class ClaimsNative(Right):
    """Claims to compute in bfloat16, and leaves it to somebody else."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, native_dtypes=frozenset({"bfloat16"}))


@fails("an update whose gradients overflow", precision="fp16")
class ClaimsScaler(Right):
    """Claims to scale losses, and does not."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, owns_scaler=True)


@fails("a short last group is a mean over its own micro-batches", "weights deviate")
@fails("every spelling of the loop divides a short last group", "w after groups of 2, 2 and 1")
class FixedGroups(Right):
    """Takes every group for as long as the first one was."""

    api = (1, 0)
    begun = longest = 0

    @hookimpl
    def backward(self, loss: Any) -> None:
        self.begun += 1
        loss.backward()

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        self.longest = max(self.longest, self.begun)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.begun / self.longest)
        self.begun = 0
        optimizer.step()
        return True


@fails("frozen parameters stay as they are", "losses of rank 0 should be")
class Thaws(Right):
    """Trains what is frozen."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any, models: Any) -> Any:
        frozen = [parameter for model in models for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": frozen, "lr": 0.1})
        return optimizer


@fails("a learning rate set on the prepared optimizer counts", "losses of rank 0 should be")
class KeepsRate(Right):
    """Steps with the learning rates that it found at first."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any) -> Any:
        self.rates = [group["lr"] for group in optimizer.param_groups]
        return optimizer

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        optimizer.step()
        return True


@fails("one loss trains two models", size=2)
class AveragesOne(Right):
    """Takes the first model for the only one."""

    api = (1, 0)
    seen = False

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        if self.seen:
            return model
        self.seen = True
        return super().wrap_model(run, model)


@fails("no more models than claimed are accepted", "room for one")
class ClaimsTwoModels(Right):
    """Claims two models, and has room for one."""

    api = (1, 0)
    model: Any = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, max_models=2)

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        if self.model is not None:
            raise ValueError("room for one")
        self.model = super().wrap_model(run, model)
        return self.model


@fails("a scheduler moves with every update", "steps of the scheduler")
class SaysSkipped(Right):
    """Updates, and says that it did not."""

    api = (1, 0)

    @hookimpl
    def step(self, optimizer: Any) -> bool:
        optimizer.step()
        return False


@fails("of two optimizers only the one that overflows", precision="fp16")
class ClearsEverything(Right):
    """Clears the gradients of all models with those of one optimizer."""

    api = (1, 0)

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.models: list[Any] = []

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        self.models.append(super().wrap_model(run, model))
        return self.models[-1]

    @hookimpl
    def zero_grad(self) -> None:
        for model in self.models:
            model.zero_grad()


@fails("gradients are reduced in the dtype", "after a gradient of 1.00195", size=2, precision="Coarse")
class ReducesInFull(Right):
    """Does not ask in which dtype gradients are to be reduced."""

    api = (1, 0)
