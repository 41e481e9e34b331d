"""What the stream header of a FibQuant stream stores. FORMAT.md section 11.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from ..errors import Corrupt, Truncated, Unsupported
from ..frame import BytesLike, byte_view
from ..shared import SHARED_BYTES, Shared
from ..spec import F32, StreamSpec
from ..varints import read_varints, varint
from ..vectors import VectorTables
from .book import Book, book_of
from .payload import PROTECTED, REASONS, U8

_VERSION: Final = 1
_CHANNELS, _ALL_RAW, _FAIL_CLOSED = 1, 2, 4
_WHERE: Final = "FibQuant stream header"


@dataclass(frozen=True, eq=False)
class FibParams:
    """What a stream header stores, the book that it names, and the stream.

    Attributes
    ----------
    spec
        The stream.
    book
        None where everything is kept raw.
    mean, scale : (heads * head_dim,)
        Of each channel, as float16 holds them; None where values are coded as they are.
    first_tokens
        Positions below it are kept raw.
    raw_heads
        Heads that are kept raw, ascending, and why.
    all_raw
        Why everything is kept raw; 0 if it is not.
    fail_closed
        Whether vectors that cannot be coded are refused.
    """

    spec: StreamSpec
    book: Book | None = None
    mean: F32 | None = None
    scale: F32 | None = None
    first_tokens: int = 0
    raw_heads: Mapping[int, int] = field(default_factory=dict)
    all_raw: int = 0
    fail_closed: bool = False

    def keep(self, first_token: int, n_tokens: int) -> U8:
        """Return why each vector ``(heads, n_tokens)`` is kept raw in any case; 0 if it is not."""
        keep = np.full((self.spec.heads, n_tokens), self.all_raw, np.uint8)
        for head, reason in self.raw_heads.items():
            keep[head] = reason
        if not self.all_raw:
            keep[:, : max(0, self.first_tokens - first_token)] = PROTECTED
        return keep

    @property
    def index_bytes(self) -> int:
        """Of the indices of a vector."""
        return 0 if self.book is None else self.book.index_bytes

    @cached_property
    def tables(self) -> VectorTables | None:
        """The plan's tables of this stream; None where everything is raw."""
        spec, rope = self.spec, self.spec.rope
        if self.book is None:
            return None
        order = np.arange(spec.head_dim) if rope is None else rope.channel_order(spec.head_dim)
        channels = None
        if self.mean is not None and self.scale is not None:
            channels = np.concatenate([self.mean, self.scale])
        return VectorTables(
            self.book.core,
            spec.heads,
            spec.head_dim,
            channels,
            order.astype(np.uint32),
            0 if rope is None else rope.n_pairs,
        )


def pack_params(params: FibParams) -> bytes:
    """Return the stream header."""
    spec, book = params.spec, params.book
    flags = _FAIL_CLOSED if params.fail_closed else 0
    if book is None:
        flags |= _ALL_RAW
    if params.mean is not None:
        flags |= _CHANNELS
    parts = [bytes([_VERSION, flags]), varint(spec.heads), varint(spec.head_dim)]
    if book is None:
        return b"".join([*parts, bytes([params.all_raw])])
    parts += [book.digest, varint(params.first_tokens), varint(len(params.raw_heads))]
    parts += [varint(head) + bytes([reason]) for head, reason in params.raw_heads.items()]
    for channels in (params.mean, params.scale):
        if channels is not None:
            parts.append(channels.astype("<f2").tobytes())
    return b"".join(parts)


def unpack_params(spec: StreamSpec, data: BytesLike, shared: Shared) -> FibParams:
    """Read a stream header of the stream `spec`, and the book that it names.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        Header or book.
    NotFound
        The book is not there.
    """
    header = _Header.read(data, spec)
    book = None
    if header.digest is not None:
        book = book_of(header.digest, shared(header.digest))
        if book.d != spec.head_dim:
            raise Corrupt(f"{_WHERE}: its book is for heads of {book.d}, expected {spec.head_dim}")
    return FibParams(
        spec,
        book,
        header.mean,
        header.scale,
        header.first_tokens,
        header.raw_heads,
        header.all_raw,
        bool(header.flags & _FAIL_CLOSED),
    )


def book_needed(data: BytesLike) -> bytes | None:
    """Return the digest of the book that a stream header names; None if it needs none."""
    return _Header.read(data).digest


class _Header(NamedTuple):
    """The fields of `FibParams`, with the digest of the book."""

    flags: int
    all_raw: int = 0
    digest: bytes | None = None
    first_tokens: int = 0
    raw_heads: Mapping[int, int] = MappingProxyType({})
    mean: F32 | None = None
    scale: F32 | None = None

    @classmethod
    def read(cls, data: BytesLike, spec: StreamSpec | None = None) -> _Header:
        view = byte_view(data)
        if view.nbytes < 2:
            raise Truncated(f"{_WHERE}: {view.nbytes} bytes")
        version, flags = view[0], view[1]
        if version == 0:
            raise Corrupt(f"{_WHERE}: version 0 does not exist")
        if version > _VERSION:
            raise Unsupported(f"{_WHERE}: version {version}; upgrade to read it")
        if flags & ~(_CHANNELS | _ALL_RAW | _FAIL_CLOSED):
            raise Unsupported(f"{_WHERE}: flags {flags:#x}; upgrade to read it")
        (heads, head_dim), at = read_varints(view, 2, 2, _WHERE)
        if spec is not None and (heads, head_dim) != (spec.heads, spec.head_dim):
            raise Corrupt(
                f"{_WHERE}: {heads} heads of {head_dim}, expected {spec.heads} of {spec.head_dim}"
            )
        if flags & _ALL_RAW:
            if flags & _CHANNELS:
                raise Corrupt(f"{_WHERE}: statistics of channels, and nothing is coded")
            (reason,) = _bytes(view, at, 1)
            _check_end(view, at + 1)
            return cls(flags, _known(reason))
        digest = _bytes(view, at, SHARED_BYTES)
        (first_tokens, n_raw), at = read_varints(view, at + SHARED_BYTES, 2, _WHERE)
        raw_heads: dict[int, int] = {}
        last = -1
        for _ in range(n_raw):
            (head,), at = read_varints(view, at, 1, _WHERE)
            if not last < head < heads:
                raise Corrupt(f"{_WHERE}: raw head {head} of {heads}, not in order")
            (reason,) = _bytes(view, at, 1)
            raw_heads[head] = _known(reason)
            last, at = head, at + 1
        mean = scale = None
        if flags & _CHANNELS:
            n = heads * head_dim
            values = np.frombuffer(_bytes(view, at, 4 * n), "<f2").astype(np.float32)
            mean, scale = values[:n], values[n:]
            at += 4 * n
            if not (np.isfinite(values).all() and (scale > 0).all()):
                raise Corrupt(f"{_WHERE}: a mean that is not finite, or a scale that is none")
        _check_end(view, at)
        return cls(flags, 0, digest, first_tokens, raw_heads, mean, scale)


def _bytes(view: memoryview, at: int, n: int) -> bytes:
    if view.nbytes - at < n:
        raise Truncated(f"{_WHERE} ends after {view.nbytes} bytes")
    return bytes(view[at : at + n])


def _check_end(view: memoryview, at: int) -> None:
    if view.nbytes > at:
        raise Corrupt(f"{_WHERE}: {view.nbytes} bytes, expected {at}")


def _known(reason: int) -> int:
    if reason not in REASONS:
        raise Unsupported(f"{_WHERE}: reason {reason} of raw vectors; upgrade to read it")
    return reason
