"""What a K or V tensor is: its role, attention, sizes, dtype and state of RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from ..spec import F32, MAX_VALUES
from .documents import Document, check_choice, check_u32

Role: TypeAlias = Literal["key", "value"]
AttentionKind: TypeAlias = Literal["mha", "mqa", "gqa"]
SourceDtype: TypeAlias = Literal["f16", "bf16", "f32"]
RopeState: TypeAlias = Literal["pre_rope", "post_rope", "not_applicable"]

_AXES = ("batch", "layer", "head", "token", "channel")


@dataclass(frozen=True, slots=True)
class TensorShape(Document):
    """Shape and meaning of one tensor ``[batch][layers][kv_heads][tokens][head_dim]``.

    Attributes
    ----------
    role
        ``"key"`` or ``"value"``.
    attention_kind
        ``"mha"``: as many KV heads as query heads; ``"mqa"``: one KV head; ``"gqa"``: each KV head
        serves the same number of query heads.
    batch, layers, kv_heads, query_heads, tokens, head_dim
        Sizes, all at least 1; at most 2^34 values in all.
    dtype
        What the values were before they became float32.
    rope_state
        ``"pre_rope"`` or ``"post_rope"`` of keys, ``"not_applicable"`` of values.

    Raises
    ------
    InvalidArgument
        The first rule that is broken, in the order above.

    Examples
    --------
    >>> shape = TensorShape("value", "gqa", 1, 2, 3, 9, 100, 64, "f16", "not_applicable")
    >>> shape.n_vectors, shape.array_shape
    (600, (1, 2, 3, 100, 64))
    """

    schema: ClassVar[str] = "fib_quant_kv_tensor_shape_v1"

    role: Role
    attention_kind: AttentionKind
    batch: int
    layers: int
    kv_heads: int
    query_heads: int
    tokens: int
    head_dim: int
    dtype: SourceDtype
    rope_state: RopeState

    def __post_init__(self) -> None:
        check_choice(self.role, "KV shape: role", get_args(Role))
        check_choice(self.attention_kind, "KV shape: attention_kind", get_args(AttentionKind))
        for name in ("batch", "layers", "kv_heads", "query_heads", "tokens", "head_dim"):
            check_u32(getattr(self, name), f"KV shape: {name}", 1)
        check_choice(self.dtype, "KV shape: dtype", get_args(SourceDtype))
        check_choice(self.rope_state, "KV shape: rope_state", get_args(RopeState))
        self._check_heads()
        if (self.role == "value") != (self.rope_state == "not_applicable"):
            raise InvalidArgument(
                f"KV shape: rope_state {self.rope_state!r} of a {self.role}: keys are pre_rope or "
                "post_rope, values not_applicable"
            )
        if self.n_values > MAX_VALUES:
            raise InvalidArgument(f"KV shape: {self.n_values} values, at most {MAX_VALUES}")

    @property
    def n_vectors(self) -> int:
        """Vectors of `head_dim` values."""
        return self.batch * self.layers * self.kv_heads * self.tokens

    @property
    def n_values(self) -> int:
        return self.n_vectors * self.head_dim

    @property
    def array_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the tensor as an array."""
        return self.batch, self.layers, self.kv_heads, self.tokens, self.head_dim

    def check_index(self, batch: int, layer: int, head: int, token: int) -> None:
        """Raise `InvalidArgument` unless there is such a vector."""
        sizes = zip(_AXES[:4], self.array_shape[:4], (batch, layer, head, token), strict=True)
        for axis, size, index in sizes:
            if type(index) is not int or not 0 <= index < size:
                raise InvalidArgument(f"KV index: {axis} {index!r} is not 0 to {size - 1}")

    def check_values(self, values: npt.NDArray[np.generic], where: str = "KV tensor") -> F32:
        """Return `values`, checked to be finite float32 of this shape in C order.

        Raises
        ------
        InvalidArgument
            They are not; of values that are not finite, names the first.
        """
        found = getattr(values, "dtype", type(values).__name__)
        if not isinstance(values, np.ndarray) or values.dtype != np.float32:
            raise InvalidArgument(f"{where}: {found}, expected an array of float32")
        if values.shape != self.array_shape:
            raise InvalidArgument(f"{where}: shape {values.shape}, expected {self.array_shape}")
        if not values.flags.c_contiguous or not values.dtype.isnative:
            raise InvalidArgument(f"{where}: not contiguous in C order; np.ascontiguousarray(x)")
        finite = np.isfinite(values)
        if not finite.all():
            at = np.unravel_index(int(finite.argmin()), values.shape)
            place = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES, at, strict=True))
            raise InvalidArgument(f"{where}: value {values[at]} at {place} is not finite")
        return values.view(np.float32)

    def _check_heads(self) -> None:
        kind, kv, query = self.attention_kind, self.kv_heads, self.query_heads
        if kind == "mha" and kv != query:
            raise InvalidArgument(f"KV shape: mha with {kv} KV heads and {query} query heads")
        if kind == "mqa" and kv != 1:
            raise InvalidArgument(f"KV shape: mqa with {kv} KV heads, it has 1")
        if query % kv:
            raise InvalidArgument(
                f"KV shape: {query} query heads are not a multiple of {kv} KV heads"
            )
