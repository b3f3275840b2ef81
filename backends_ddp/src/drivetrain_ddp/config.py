"""Section ``ddp`` of the YAML."""

from __future__ import annotations

from typing import Any, Literal

import attrs

__all__ = ["DdpConfig", "PowerSgdConfig"]


@attrs.frozen(kw_only=True)
class PowerSgdConfig:
    """Section ``ddp.powersgd``: low-rank compression of gradients (Vogels et al., NeurIPS 2019). Torch's own names."""

    matrix_approximation_rank: int = attrs.field(
        default=1,
        validator=attrs.validators.ge(1),
        metadata={"help": "rank of the matrices that stand for a gradient; higher is more exact and sends more"},
    )
    start_powerSGD_iter: int = attrs.field(  # noqa: N815
        default=1000,
        validator=attrs.validators.ge(0),
        metadata={"help": "updates before compression starts; at least 2 with error feedback or warm start"},
    )
    min_compression_rate: float = attrs.field(
        default=2.0,
        validator=attrs.validators.gt(0.0),
        metadata={"help": "a gradient is compressed only if that makes it smaller by this factor"},
    )
    use_error_feedback: bool = attrs.field(
        default=True, metadata={"help": "add what compression lost to the next gradient"}
    )
    warm_start: bool = attrs.field(default=True, metadata={"help": "start each compression from the previous one"})
    orthogonalization_epsilon: float = attrs.field(
        default=0.0,
        validator=attrs.validators.ge(0.0),
        metadata={"help": "added to norms while orthogonalizing, against division by zero"},
    )
    random_seed: int = attrs.field(default=0, metadata={"help": "seed of the first approximation, equal on all ranks"})
    batch_tensors_with_same_shape: bool = attrs.field(
        default=False, metadata={"help": "compress gradients of one shape together: faster, takes more memory"}
    )

    def __attrs_post_init__(self) -> None:
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, got "
                f"{self.start_powerSGD_iter}: DDP arranges its buckets anew after the first update"
            )


def _compresses(instance: Any, attribute: attrs.Attribute, value: str) -> None:
    if value != "none" and instance.comm_hook == "none":
        raise ValueError(
            f"{attribute.name}: {value} wraps a communication hook, and comm_hook is none; for plain {value} "
            f"compression set comm_hook: {value}"
        )


@attrs.frozen(kw_only=True)
class DdpConfig:
    """Section ``ddp``. What is not said here is torch's default."""

    bucket_cap_mb: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.gt(0.0)),
        metadata={"help": "size of a bucket of gradients reduced together, in MiB; null: torch's 25"},
    )
    find_unused_parameters: bool = attrs.field(
        default=False,
        metadata={"help": "look through the graph of every forward for parameters that took no part: costs time"},
    )
    gradient_as_bucket_view: bool = attrs.field(
        default=True,
        metadata={"help": "gradients are views into the buckets: saves a copy of all gradients and its time"},
    )
    static_graph: bool = attrs.field(
        default=False, metadata={"help": "promise that every step uses the same parameters in the same order"}
    )
    broadcast_buffers: bool = attrs.field(
        default=True,
        metadata={"help": "give all ranks rank 0's buffers, such as running means, at the start and in each forward"},
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "batched_powersgd"] = attrs.field(
        default="none",
        validator=attrs.validators.in_(("none", "fp16", "bf16", "powersgd", "batched_powersgd")),
        metadata={"help": "how gradients are compressed while they are reduced"},
    )
    comm_wrapper: Literal["none", "fp16", "bf16"] = attrs.field(
        default="none",
        validator=[attrs.validators.in_(("none", "fp16", "bf16")), _compresses],
        metadata={"help": "dtype that gradients are cast to before comm_hook compresses them"},
    )
    powersgd: PowerSgdConfig = attrs.field(
        factory=PowerSgdConfig, metadata={"help": "settings of comm_hook powersgd and batched_powersgd"}
    )
