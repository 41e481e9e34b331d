"""How the values of a tensor lie in memory: in C order, and no other way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from ..errors import InvalidArgument
from .documents import Document
from .shape import TensorShape

ORDER: Final = "batch_layer_head_token_dim"


@dataclass(frozen=True, slots=True)
class CacheLayout(Document):
    """Order of the axes and their strides, in values.

    Examples
    --------
    >>> shape = TensorShape("value", "mha", 1, 2, 3, 3, 4, 8, "f32", "not_applicable")
    >>> CacheLayout.canonical(shape).layer_stride
    96
    """

    schema: ClassVar[str] = "fib_quant_kv_cache_layout_v1"

    order: str
    batch_stride: int
    layer_stride: int
    head_stride: int
    token_stride: int
    dim_stride: int

    @classmethod
    def canonical(cls, shape: TensorShape) -> Self:
        """Return the layout that tensors of `shape` have."""
        token = shape.head_dim
        head = token * shape.tokens
        layer = head * shape.kv_heads
        return cls(ORDER, layer * shape.layers, layer, head, token, 1)

    def validate(self, shape: TensorShape) -> None:
        """Raise `InvalidArgument` unless this is the canonical layout of `shape`."""
        if self.order != ORDER:
            raise InvalidArgument(f"KV layout: order {self.order!r}, only {ORDER!r}")
        expected = CacheLayout.canonical(shape)
        for name in self._names()[1:]:
            found, canonical = getattr(self, name), getattr(expected, name)
            if type(found) is not int or found != canonical:
                raise InvalidArgument(f"KV layout: {name} {found!r}, contiguous is {canonical}")
