"""Pages: successive tokens of all batches and layers of a tensor, as they are stored.

FORMAT.md section 11.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from ..digests import bytes_digest
from ..errors import Corrupt, Truncated
from ..frame import BytesLike, byte_view
from ..varints import read_varints, varint
from .geometry import PageGeometry
from .shape import TensorShape

_DOMAIN: Final = "kvstore_fibquant_page_v1"


@dataclass(frozen=True, eq=False, slots=True)
class Page:
    """Some tokens of a tensor.

    Attributes
    ----------
    number
        From 0, in the order of tokens.
    first_token, n_tokens
        What it covers.
    payloads
        One block payload for each layer of each batch.
    """

    number: int
    first_token: int
    n_tokens: int
    payloads: tuple[BytesLike, ...]

    def pack(self) -> bytes:
        """Return the bytes of the page."""
        head = (self.number, self.first_token, self.n_tokens, len(self.payloads))
        sizes = (byte_view(payload).nbytes for payload in self.payloads)
        return b"".join([*map(varint, head), *map(varint, sizes), *self.payloads])

    @classmethod
    def unpack(cls, data: BytesLike, where: str = "page") -> Self:
        """Read a page; payloads are views of `data`, not looked at.

        Raises
        ------
        Truncated, Corrupt
            Sizes that do not fit the bytes.
        """
        view = byte_view(data)
        (number, first_token, n_tokens, n_payloads), at = read_varints(view, 0, 4, where)
        if n_payloads > view.nbytes:  # each has a byte at least
            raise Truncated(f"{where}: {view.nbytes} bytes with {n_payloads} payloads")
        sizes, at = read_varints(view, at, n_payloads, where)
        if view.nbytes != at + sum(sizes):
            kind = Truncated if view.nbytes < at + sum(sizes) else Corrupt
            raise kind(f"{where}: {view.nbytes} bytes, expected {at + sum(sizes)}")
        payloads = []
        for size in sizes:
            payloads.append(view[at : at + size])
            at += size
        return cls(number, first_token, n_tokens, tuple(payloads))

    def digest(self, tensor: bytes) -> str:
        """Return the digest of the page as one of the tensor that `tensor` names."""
        return bytes_digest(_DOMAIN, tensor, self.pack())


def check_cover(pages: Sequence[Page], geometry: PageGeometry, shape: TensorShape) -> None:
    """Check that pages are those of a tensor: each vector is in exactly one.

    Raises
    ------
    Corrupt
        A page that is missing, there twice, not in order, or of another geometry.
    """
    seen: set[int] = set()
    for page in pages:
        if page.number in seen:
            raise Corrupt(f"KV tensor: page {page.number} is there twice")
        seen.add(page.number)
    n_pages = geometry.page_count(shape)
    missing = next((number for number in range(n_pages) if number not in seen), None)
    if missing is not None:
        raise Corrupt(f"KV tensor: page {missing} of {n_pages} is missing")
    if len(pages) > n_pages:
        raise Corrupt(f"KV tensor: {len(pages)} pages, expected {n_pages}")
    for number, page in enumerate(pages):
        if page.number != number:
            raise Corrupt(f"KV tensor: page {page.number} of {n_pages} where {number} should be")
        span = geometry.span(shape, number)
        if (page.first_token, page.n_tokens) != span:
            raise Corrupt(
                f"KV tensor: page {number} has {page.n_tokens} tokens from {page.first_token}, "
                f"expected {span[1]} from {span[0]}"
            )
        if len(page.payloads) != shape.batch * shape.layers:
            raise Corrupt(
                f"KV tensor: page {number} has {len(page.payloads)} payloads for {shape.batch} x "
                f"{shape.layers} layers"
            )
