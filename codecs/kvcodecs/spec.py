"""What a stream is, before any codec: its kind, geometry and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument
from .rope import Rope

Kind = Literal["k", "v"]
KState = Literal["pre", "post"]
F32 = npt.NDArray[np.float32]

KINDS: tuple[Kind, ...] = ("k", "v")

#: Output and input dtypes by name. float64 is accepted as input and narrowed to float32.
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

#: Bounds of what a header may claim, checked before anything is allocated.
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 16
MAX_CHANNELS = 1 << 20
# A run of equal values may code to no bytes at all: nothing but these two stops a short file from
# asking for any amount of memory.
MAX_BLOCK_TOKENS = 1 << 20
MAX_VALUES = 1 << 34


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Geometry of one stream: ``[heads][tokens][head_dim]``.

    Attributes
    ----------
    kind
        ``"k"`` or ``"v"``.
    heads, head_dim
        KV heads and channels per head; ``head_dim`` is even.
    rope
        Rotary embedding of a K stream; None for V and for models without one.

    Raises
    ------
    InvalidArgument
        Unknown kind, a size that is zero, odd or too large, or RoPE on V or wider than a head.
    """

    kind: Kind
    heads: int
    head_dim: int
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"stream kind {self.kind!r}: use 'k' or 'v'")
        for name, size in (("heads", self.heads), ("head_dim", self.head_dim)):
            if isinstance(size, bool) or not isinstance(size, int | np.integer):
                raise InvalidArgument(f"{name} {size!r}: expected an integer")
            object.__setattr__(self, name, int(size))
        if self.rope is not None and not isinstance(self.rope, Rope):
            raise InvalidArgument(f"rope {self.rope!r}: expected a Rope or None")
        if not 1 <= self.heads <= MAX_HEADS:
            raise InvalidArgument(f"heads {self.heads}: must be 1 to {MAX_HEADS}")
        if not 2 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise InvalidArgument(
                f"head_dim {self.head_dim}: must be even and 2 to {MAX_HEAD_DIM}; pad odd heads"
            )
        if self.heads * self.head_dim > MAX_CHANNELS:
            raise InvalidArgument(
                f"{self.heads} x {self.head_dim} channels: at most {MAX_CHANNELS}"
            )
        if self.rope is not None:
            if self.kind == "v":
                raise InvalidArgument("a V stream has no RoPE")
            if self.rope.rotary_dim > self.head_dim:
                raise InvalidArgument(
                    f"RoPE rotates {self.rope.rotary_dim} channels, head_dim is {self.head_dim}"
                )

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    def n_values(self, n_tokens: int) -> int:
        return self.channels * n_tokens


def float_dtype(name: str | np.dtype[Any] | type) -> np.dtype[Any]:
    """The float32, float16 or bfloat16 dtype called `name`, else `InvalidArgument`."""
    try:
        key = name if isinstance(name, str) else np.dtype(name).name
    except (TypeError, ValueError):
        key = repr(name)
    if key not in FLOAT_DTYPES:
        raise InvalidArgument(f"dtype {key!r}: use float32, float16 or bfloat16")
    return FLOAT_DTYPES[key]


def describe_value(x: F32, flat_index: int, spec: StreamSpec, first_token: int) -> str:
    """Name one value of ``[heads][n][head_dim]`` in coded order as users index it."""
    head, row, coded = (int(i) for i in np.unravel_index(flat_index, x.shape))
    channel = coded if spec.rope is None else int(spec.rope.channel_order(spec.head_dim)[coded])
    value = x[head, row, coded]
    return f"value {value} at head {head}, token {first_token + row}, channel {channel}"
