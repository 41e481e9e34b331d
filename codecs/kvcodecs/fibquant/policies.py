"""What is compressed along which axis, and what is kept raw: of a tensor, or vector by vector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from .config import Axis, OnFailure
from .documents import Document, check_choice, check_u32
from .shape import Role, TensorShape

Strategy: TypeAlias = Literal[
    "raw",
    "fib_quant_per_token",
    "fib_quant_per_channel",
    "role_aware_kivi_style_baseline",
    "experimental_fib_quant_role_aware",
]
Action: TypeAlias = Literal["keep_raw", "compress", "need_calibration", "quarantine"]

_AXES: Final[dict[Strategy, Axis]] = {
    "raw": "raw",
    "fib_quant_per_token": "per_token",
    "fib_quant_per_channel": "per_channel",
    "role_aware_kivi_style_baseline": "role_aware",
    "experimental_fib_quant_role_aware": "role_aware",
}


def axis_of_role(axis: Axis, role: Role) -> Axis:
    """Return what `axis` is for keys or values: role-aware is K per channel, V per token."""
    if axis != "role_aware":
        return axis
    return "per_channel" if role == "key" else "per_token"


@dataclass(frozen=True, slots=True)
class ProtectedPolicy(Document):
    """Regions that are kept raw: a vector is if any of them has it.

    Attributes
    ----------
    first_tokens_raw, last_tokens_raw
        So many tokens at the start and at the end; at most all.
    raw_layers, raw_heads
        Indices of layers and KV heads.

    Raises
    ------
    InvalidArgument
        A count or index that is no unsigned 32-bit integer.
    """

    first_tokens_raw: int = 0
    last_tokens_raw: int = 0
    raw_layers: tuple[int, ...] = ()
    raw_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("first_tokens_raw", "last_tokens_raw"):
            check_u32(getattr(self, name), f"protected: {name}")
        for name in ("raw_layers", "raw_heads"):
            indices = getattr(self, name)
            if not isinstance(indices, tuple):
                raise InvalidArgument(f"protected: {name} {indices!r}: give a tuple of indices")
            for index in indices:
                check_u32(index, f"protected: {name}")

    def validate(self, shape: TensorShape) -> None:
        """Raise `InvalidArgument` unless all of it is inside `shape`."""
        for name in ("first_tokens_raw", "last_tokens_raw"):
            if getattr(self, name) > shape.tokens:
                raise InvalidArgument(
                    f"protected: {name} {getattr(self, name)}, there are {shape.tokens} tokens"
                )
        for name, size in (("raw_layers", shape.layers), ("raw_heads", shape.kv_heads)):
            for index in getattr(self, name):
                if index >= size:
                    raise InvalidArgument(f"protected: {name} {index}, there are {size}")

    def is_protected(self, shape: TensorShape, layer: int, head: int, token: int) -> bool:
        """Whether one vector is kept raw."""
        return (
            token < self.first_tokens_raw
            or token + self.last_tokens_raw >= shape.tokens
            or layer in self.raw_layers
            or head in self.raw_heads
        )

    def mask(self, shape: TensorShape, layer: int) -> npt.NDArray[np.bool_]:
        """Return which vectors of a layer are kept raw, ``(kv_heads, tokens)``."""
        mask = np.zeros((shape.kv_heads, shape.tokens), bool)
        mask[:, : self.first_tokens_raw] = True
        mask[:, max(shape.tokens - self.last_tokens_raw, 0) :] = True
        mask[list(self.raw_heads)] = True
        if layer in self.raw_layers:
            mask[:] = True
        return mask


@dataclass(frozen=True, slots=True)
class FallbackPolicy(Document):
    """What becomes of vectors that cannot be coded.

    Attributes
    ----------
    mode
        ``"keep_raw"``, or ``"fail_closed"``: coding the tensor fails.
    raw_fallback_available
        Whether readers of the tensor take raw vectors at all; `mode` keeps none where they do not.

    Raises
    ------
    InvalidArgument
        Unknown, or raw vectors that are kept but not taken.
    """

    mode: OnFailure = "keep_raw"
    raw_fallback_available: bool = True

    def __post_init__(self) -> None:
        check_choice(self.mode, "fallback: mode", get_args(OnFailure))
        if not isinstance(self.raw_fallback_available, bool):
            raise InvalidArgument(
                f"fallback: raw_fallback_available {self.raw_fallback_available!r}: True or False"
            )
        if self.mode == "keep_raw" and not self.raw_fallback_available:
            raise InvalidArgument("fallback: keep_raw needs raw_fallback_available")


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done with one vector, and why.

    Attributes
    ----------
    action
        ``"need_calibration"``: nothing yet. ``"quarantine"`` is for whoever finds an artefact that
        does not match; `CompressionPolicy.decide` never says it.
    axis
        ``"per_token"`` or ``"per_channel"`` of what is compressed, else ``"raw"``.
    reason
        ``"protected_region"``, ``"calibration_missing"``, ``"raw_strategy"``,
        ``"experimental_role_aware"``, ``"key_role_axis"`` or ``"value_role_axis"``.
    """

    action: Action
    axis: Axis
    reason: str


@dataclass(frozen=True, slots=True)
class CompressionPolicy(Document):
    """Decides vector by vector.

    Examples
    --------
    >>> shape = TensorShape("key", "mha", 1, 1, 1, 1, 9, 8, "f32", "pre_rope")
    >>> policy = CompressionPolicy.role_aware_baseline()
    >>> policy.decide(shape, layer=0, head=0, token=3)
    Decision(action='compress', axis='per_channel', reason='key_role_axis')
    >>> policy.decide(shape, layer=0, head=0, token=8).reason
    'protected_region'
    """

    strategy: Strategy
    protected: ProtectedPolicy = field(default_factory=ProtectedPolicy)
    require_calibration: bool = False
    allow_raw_fallback: bool = True

    def __post_init__(self) -> None:
        check_choice(self.strategy, "compression policy: strategy", get_args(Strategy))

    @classmethod
    def _read(cls, name: str, value: object) -> object:
        return ProtectedPolicy.from_json(value) if name == "protected" else value

    @classmethod
    def role_aware_baseline(cls) -> CompressionPolicy:
        """Return K per channel, V per token, the last token raw."""
        return cls("role_aware_kivi_style_baseline", ProtectedPolicy(last_tokens_raw=1))

    def decide(
        self,
        shape: TensorShape,
        layer: int,
        head: int,
        token: int,
        *,
        has_calibration: bool = False,
    ) -> Decision:
        """Decide on one vector: protected regions first, then calibration, then the strategy.

        Raises
        ------
        InvalidArgument
            Protected regions outside `shape`, or an index outside of it.
        """
        self.protected.validate(shape)
        shape.check_index(0, layer, head, token)
        if self.protected.is_protected(shape, layer, head, token):
            return Decision("keep_raw", "raw", "protected_region")
        if self.require_calibration and not has_calibration:
            action: Action = "keep_raw" if self.allow_raw_fallback else "need_calibration"
            return Decision(action, "raw", "calibration_missing")
        axis = axis_of_role(_AXES[self.strategy], shape.role)
        if axis == "raw":
            return Decision("keep_raw", "raw", "raw_strategy")
        reason = f"{shape.role}_role_axis"
        if self.strategy == "experimental_fib_quant_role_aware":
            reason = "experimental_role_aware"
        return Decision("compress", axis, reason)
