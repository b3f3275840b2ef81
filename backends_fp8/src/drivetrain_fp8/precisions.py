"""The two precisions, as hooks. What they do is in the modules beside this one, imported when a run needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.logging import get_logger
from drivetrain.plugin import Capabilities, Check, Policy, Precision, hookimpl
from drivetrain_fp8.config import TeConfig, TorchaoConfig

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.world import Run

__all__ = ["Fp8Te", "Fp8Torchao"]

logger = get_logger("drivetrain.fp8")


class _Fp8(Precision):
    """What both have in common: layers that are converted compute in 8 bits, all others under bfloat16 autocast."""

    family = "fp8"

    @property
    def policy(self) -> Policy:
        """Of everything that is not converted, and of what converted layers return."""
        return Policy(compute="bfloat16", converted="float8_e4m3fn")

    def _restore(self, run: Run, model: nn.Module) -> nn.Module:
        if run.capabilities.shards_params:
            logger.warning(
                "the layers of %s stay converted, since their parameters are cut over ranks; get_state_dict and "
                "save_model give the weights as any precision can load them",
                type(model).__name__,
            )
            return model
        from drivetrain_fp8 import layers

        return layers.put_back(model)


class Fp8Te(_Fp8):
    """Linear and LayerNorm in 8 bits with Transformer Engine, on NVIDIA GPUs; the rest under bfloat16 autocast."""

    api = (1, 0)
    Config = TeConfig
    requires = ("transformer-engine[pytorch]>=2.20",)
    family_rank = 0  # where it works it is the faster one

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._recipe: Any = None
        """The engine's, from the first use on; kept, since the engine tells recipes apart by their values."""

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether the engine can be imported, and which recipes the GPU can do, by the engine's own word."""
        from drivetrain_fp8 import te_availability

        return te_availability.checks()

    def refuses(self, capabilities: Capabilities, device_type: str) -> str | None:
        """Whatever the engine says against the device."""
        from drivetrain_fp8 import te_availability

        return te_availability.reason_against(device_type, self.config.recipe)

    @hookimpl
    def convert_model(self, run: Run, model: nn.Module) -> nn.Module:
        """The engine's layers in place of torch's, with the same parameters."""
        from drivetrain_fp8 import te_layers

        return te_layers.convert(model, self.config, self._made_recipe())

    @hookimpl
    def autocast(self, run: Run, model: nn.Module | None) -> contextlib.AbstractContextManager[Any]:
        """The engine's context inside of torch's. The largest values are shared over the ranks that share the data."""
        from drivetrain_fp8 import te_layers

        enabled = model is None or model.training or self.config.in_evaluation
        return te_layers.autocast(run, self._made_recipe(), enabled)

    @hookimpl
    def restore_model(self, run: Run, model: nn.Module) -> nn.Module:
        """torch's layers again."""
        return self._restore(run, model)

    @hookimpl
    def precision_state(self, run: Run, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Scales, and the largest values they come from, of the recipe that keeps any."""
        from drivetrain_fp8 import te_state

        return te_state.collect(run, models)

    @hookimpl
    def load_precision_state(self, run: Run, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Put them back; without any, the engine starts to learn them anew."""
        from drivetrain_fp8 import te_state

        te_state.put_back(run, models, state, self._made_recipe())

    def _made_recipe(self) -> Any:
        if self._recipe is None:
            from drivetrain_fp8 import te_recipes

            self._recipe = te_recipes.make(self.config.recipe, self.config.options)
        return self._recipe


class Fp8Torchao(_Fp8):
    """Linear in 8 bits with torchao, its products emulated on a CPU; the rest under bfloat16 autocast."""

    api = (1, 0)
    Config = TorchaoConfig
    requires = ("torchao>=0.18",)
    family_rank = 1

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._precomputes = False
        """Whether any weight is gathered in 8 bits, with a scale that must follow the weight."""

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether the engine can be imported, and whether the device has products in 8 bits."""
        from drivetrain_fp8 import float8_products

        return float8_products.checks()

    def refuses(self, capabilities: Capabilities, device_type: str) -> str | None:
        """A device without such products, unless they are emulated; a gather the backend can't do."""
        from drivetrain_fp8 import float8_products

        return float8_products.reason_against(self.config, capabilities, device_type)

    @hookimpl
    def convert_model(self, run: Run, model: nn.Module) -> nn.Module:
        """The engine's Linear in place of torch's, with the same parameters and names."""
        from drivetrain_fp8 import float8_layers

        made, gathers = float8_layers.convert(run, model, self.config)
        self._precomputes = self._precomputes or (gathers and self.config.precompute_scales)
        return made

    @hookimpl
    def after_step(self, run: Run, models: Sequence[nn.Module], applied: bool) -> None:
        """The scales of what is gathered in 8 bits follow the weights, all in one reduction."""
        if self._precomputes and applied:
            self._compute_scales(run, models)

    @hookimpl
    def load_precision_state(self, run: Run, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """There is no state, but the weights are others now."""
        if self._precomputes:
            self._compute_scales(run, models)

    def _compute_scales(self, run: Run, models: Sequence[nn.Module]) -> None:
        from drivetrain_fp8 import float8_layers

        float8_layers.compute_scales([run.hooks.unwrap(run=run, model=model) for model in models])

    @hookimpl
    def restore_model(self, run: Run, model: nn.Module) -> nn.Module:
        """torch's layers again."""
        return self._restore(run, model)
