"""How the tokens of a tensor are cut into pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from ..errors import InvalidArgument
from .documents import Document, check_u32
from .shape import TensorShape


@dataclass(frozen=True, slots=True)
class PageGeometry(Document):
    """Pages of the same number of tokens of all batches, layers and heads; the last may be shorter.

    Attributes
    ----------
    tokens_per_page
        1 to the tokens of the tensor.
    vectors_per_block
        1: every vector is coded by itself.
    head_dim
        Values of a vector.
    encoded_block_bytes, raw_vector_bytes
        Bytes of a vector: coded, and as float32.

    Examples
    --------
    >>> shape = TensorShape("value", "mha", 1, 1, 1, 1, 100, 64, "f16", "not_applicable")
    >>> geometry = PageGeometry.of(shape, 32, block_dim=4, codebook_size=256)
    >>> geometry.encoded_block_bytes, geometry.page_count(shape), geometry.span(shape, 3)
    (18, 4, (96, 4))
    """

    schema: ClassVar[str] = "fib_quant_kv_page_geometry_v1"

    tokens_per_page: int
    vectors_per_block: int
    head_dim: int
    encoded_block_bytes: int
    raw_vector_bytes: int

    @classmethod
    def of(
        cls, shape: TensorShape, tokens_per_page: int, *, block_dim: int, codebook_size: int
    ) -> Self:
        """Return pages of `tokens_per_page` tokens; of all tokens where there are fewer."""
        check_u32(tokens_per_page, "page geometry: tokens_per_page", 1)
        tokens = min(tokens_per_page, shape.tokens)
        n_bytes = coded_bytes(shape.head_dim, block_dim, codebook_size)
        return cls(tokens, 1, shape.head_dim, n_bytes, 4 * shape.head_dim)

    def validate(self, shape: TensorShape) -> None:
        """Raise `InvalidArgument` unless tensors of `shape` can have these pages."""
        check_u32(self.tokens_per_page, "page geometry: tokens_per_page", 1)
        if self.tokens_per_page > shape.tokens:
            raise InvalidArgument(
                f"page geometry: tokens_per_page {self.tokens_per_page}, there are {shape.tokens}"
            )
        if self.vectors_per_block != 1:
            raise InvalidArgument(
                f"page geometry: vectors_per_block {self.vectors_per_block!r}: only 1"
            )
        if self.head_dim != shape.head_dim:
            raise InvalidArgument(
                f"page geometry: head_dim {self.head_dim!r}, of the tensor {shape.head_dim}"
            )
        check_u32(self.encoded_block_bytes, "page geometry: encoded_block_bytes", 1)
        if self.raw_vector_bytes != 4 * shape.head_dim:
            raise InvalidArgument(
                f"page geometry: raw_vector_bytes {self.raw_vector_bytes!r}, expected "
                f"{4 * shape.head_dim}"
            )

    def page_count(self, shape: TensorShape) -> int:
        """Return how many pages a tensor has."""
        return -(-shape.tokens // self.tokens_per_page)

    def span(self, shape: TensorShape, page: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a page."""
        first = page * self.tokens_per_page
        return first, min(self.tokens_per_page, shape.tokens - first)


def coded_bytes(head_dim: int, block_dim: int, codebook_size: int) -> int:
    """Return the bytes of a coded vector: a float16 norm, then indices."""
    index_bits = (codebook_size - 1).bit_length()
    return 2 + -(-(head_dim // block_dim * index_bits) // 8)
