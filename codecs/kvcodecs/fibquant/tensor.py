"""K or V tensors coded page by page, with a receipt; whole or vector by vector back.

FORMAT.md section 11.9.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np

from ..digests import canonical_json, raw_digest
from ..errors import Corrupt, InvalidArgument, Truncated, Unsupported
from ..frame import RECORD_HEAD_BYTES, BytesLike, byte_view, open_record, seal_record
from ..receipts import Receipt
from ..shared import shared_digest
from ..spec import F32
from ..varints import read_varints, varint
from .book import Book, book_of
from .coded_vectors import check_finite, decode_vectors
from .kvprofile import KvProfile
from .layout import CacheLayout
from .pages import Page, check_cover
from .payload import CODED, Vectors, parse_payload
from .policies import axis_of_role
from .shape import TensorShape

MAGIC: Final = b"KVFT"
PAGE_MAGIC: Final = b"KVFP"
SCHEMA: Final = "kvstore_fibquant_tensor_v1"
_DOMAIN: Final = SCHEMA
WHERE: Final = "KV tensor"


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A coded tensor: its bytes need nothing else to be decoded.

    Attributes
    ----------
    shape, layout, profile
        What it is and how it is coded.
    book
        Rotation and codewords.
    channels : (batch, layers, 2, kv_heads, head_dim) float32, or None
        Mean and scale of each channel, as float16 holds them; None where vectors are coded as they
        are.
    pages
        In order.
    receipt
        Of the compression: a vector is a block of it.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodecs.fibquant import KvProfile, Profile, TensorShape, book_for
    >>> from kvcodecs.fibquant import decode_tensor, encode_tensor
    >>> shape = TensorShape("key", "mha", 1, 2, 1, 1, 9, 8, "f32", "pre_rope")
    >>> x = np.random.default_rng(0).standard_normal(shape.array_shape, dtype=np.float32)
    >>> book = book_for(Profile.paper_default(8, 2, 16, seed=7))
    >>> profile = KvProfile.of(shape, book, tokens_per_page=4)
    >>> encoded = EncodedTensor.unpack(encode_tensor(x, shape, profile, book).pack())
    >>> decoded = decode_tensor(encoded)
    >>> decoded.values.shape, decoded.receipt.n_pages
    ((1, 2, 1, 9, 8), 3)
    >>> bool((encoded.vector(0, 1, 0, 8) == decoded.values[0, 1, 0, 8]).all())
    True
    """

    shape: TensorShape
    layout: CacheLayout
    profile: KvProfile
    book: Book
    channels: F32 | None
    pages: tuple[Page, ...]
    receipt: Receipt

    def pack(self) -> bytes:
        """Return the bytes of the tensor."""
        documents = {
            "schema_version": SCHEMA,
            "shape": self.shape.to_json(),
            "layout": self.layout.to_json(),
            "profile": self.profile.to_json(),
            "receipt": self.receipt.to_json(),
        }
        head, book = canonical_json(documents), self.book.pack()
        parts = [varint(len(head)), varint(len(book)), head, book, self._channel_bytes]
        pages = [seal_record(PAGE_MAGIC, page.pack()) for page in self.pages]
        return b"".join([seal_record(MAGIC, b"".join(parts)), *pages])

    @classmethod
    def unpack(cls, data: BytesLike) -> Self:
        """Read a packed tensor and check all of it but the vectors; pages are views of `data`.

        Raises
        ------
        Truncated, Corrupt
            Bytes that are not those that were packed; says what is damaged, missing or too many.
        Unsupported
            Written by a newer release.
        """
        view = byte_view(data)
        head, view = _next_record(MAGIC, view, WHERE)
        (n_head, n_book), at = read_varints(head, 0, 2, WHERE)
        if head.nbytes < at + n_head + n_book:
            raise Truncated(f"{WHERE}: {head.nbytes} bytes of head")
        documents = _documents(head[at : at + n_head])
        at += n_head
        packed = bytes(head[at : at + n_book])
        book = book_of(shared_digest(packed), packed)
        shape = TensorShape.from_json(documents["shape"])
        profile = KvProfile.from_json(documents["profile"])
        channels = _read_channels(head[at + n_book :], shape, profile)
        pages: list[Page] = []
        while view.nbytes:
            where = f"{WHERE}: page {len(pages)}"
            page, view = _next_record(PAGE_MAGIC, view, where)
            pages.append(Page.unpack(page, where))
        encoded = cls(
            shape,
            CacheLayout.from_json(documents["layout"]),
            profile,
            book,
            channels,
            tuple(pages),
            Receipt.from_json(documents["receipt"]),
        )
        encoded.validate()
        return encoded

    def validate(self) -> None:
        """Check that all parts belong together: digests, and pages that have each vector once.

        Raises
        ------
        Corrupt
            They do not; says which.
        """
        try:
            self.layout.validate(self.shape)
            self.profile.validate(self.shape)
            self.profile.check_book(self.book)
        except InvalidArgument as error:
            raise Corrupt(f"{WHERE}: {error}") from error
        receipt = self.receipt
        if receipt.operation != "compress":
            raise Corrupt(f"{WHERE}: the receipt is of a {receipt.operation}")
        for name, expected in (
            ("profile_digest", self.profile.digest()),
            ("shape_digest", self.shape.digest()),
            ("codebook_digest", self.book.codebook_digest),
            ("rotation_digest", self.book.rotation_digest),
        ):
            if getattr(receipt, name) != expected:
                raise Corrupt(
                    f"{WHERE}: {name} of the receipt is {getattr(receipt, name)}, of the tensor "
                    f"{expected}"
                )
        sizes = None if self.channels is None else self.channels.shape
        if sizes != channel_sizes(self.shape, self.profile):
            raise Corrupt(
                f"{WHERE}: channel statistics {sizes}, expected "
                f"{channel_sizes(self.shape, self.profile)}"
            )
        check_cover(self.pages, self.profile.page_geometry, self.shape)
        if len(receipt.page_digests) != len(self.pages):
            raise Corrupt(
                f"{WHERE}: {len(self.pages)} pages, the receipt has {len(receipt.page_digests)}"
            )
        for page, expected in zip(self.pages, receipt.page_digests, strict=True):
            if page.digest(self.tensor_id) != expected:
                raise Corrupt(f"{WHERE}: page {page.number} is not the one of the receipt")
        least = min(2 + self.book.index_bytes, 2 * self.shape.head_dim)
        if self.nbytes < least * self.shape.n_vectors:
            raise Truncated(
                f"{WHERE}: {self.nbytes} bytes of payloads for {self.shape.n_vectors} vectors"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(byte_view(p).nbytes for page in self.pages for p in page.payloads)

    def vector(self, batch: int, layer: int, head: int, token: int) -> F32:
        """Return one vector ``(head_dim,)``; nothing else is decoded.

        Raises
        ------
        InvalidArgument
            There is no such vector.
        Truncated, Corrupt, Unsupported
            Its payload is damaged.
        """
        self.shape.check_index(batch, layer, head, token)
        page = self.pages[token // self.profile.page_geometry.tokens_per_page]
        stream = batch * self.shape.layers + layer
        vectors = self.vectors_of(page, stream)
        at = head * page.n_tokens + token - page.first_token
        is_coded = vectors.states == CODED
        before = int(is_coded[:at].sum())
        where = self.place(page, stream)
        if not is_coded[at]:
            value: F32 = vectors.raw[at - before].copy()
            check_finite(value, where)
            return value
        one = slice(before, before + 1)
        decoded: F32 = decode_vectors(
            self.book,
            vectors.norms[one],
            vectors.indices[one],
            np.array([head]),
            self.statistics(stream),
            where=where,
        )[0]
        return decoded

    def vectors_of(self, page: Page, stream: int) -> Vectors:
        """Return the vectors of one layer of a page; `stream` is ``batch * layers + layer``."""
        n_vectors = self.shape.kv_heads * page.n_tokens
        index_bytes, head_dim = self.book.index_bytes, self.shape.head_dim
        return parse_payload(page.payloads[stream], n_vectors, index_bytes, head_dim)

    def statistics(self, stream: int) -> F32 | None:
        """Return mean and scale of the channels of a layer, ``(2, kv_heads, head_dim)``."""
        if self.channels is None:
            return None
        statistics: F32 = self.channels.reshape(-1, *self.channels.shape[2:])[stream]
        return statistics

    def place(self, page: Page, stream: int) -> str:
        """Return where a payload is, for messages."""
        batch, layer = divmod(stream, self.shape.layers)
        return f"{WHERE}: page {page.number}, batch {batch}, layer {layer}"

    @cached_property
    def tensor_id(self) -> bytes:
        """32 bytes that tie pages to source, profile, shape and statistics."""
        receipt = self.receipt
        digests = (receipt.values_digest, receipt.profile_digest, receipt.shape_digest)
        return tensor_id(*digests, self._channel_bytes)

    @cached_property
    def _channel_bytes(self) -> bytes:
        return channel_bytes(self.channels)


def channel_sizes(shape: TensorShape, profile: KvProfile) -> tuple[int, ...] | None:
    """Return the shape of the channel statistics; None where vectors are coded as they are."""
    if axis_of_role(profile.axis_policy, shape.role) != "per_channel":
        return None
    return shape.batch, shape.layers, 2, shape.kv_heads, shape.head_dim


def channel_bytes(channels: F32 | None) -> bytes:
    """Return channel statistics as they are stored."""
    return b"" if channels is None else channels.astype("<f2").tobytes()


def tensor_id(source: str, profile: str, shape: str, channels: bytes) -> bytes:
    """Return what the digests of a tensor's pages hash of the tensor; see FORMAT.md 11.9."""
    return raw_digest(_DOMAIN, "".join((source, profile, shape)).encode(), channels)


def _next_record(magic: bytes, view: memoryview, where: str) -> tuple[memoryview, memoryview]:
    """Open the record at the start of `view`; return its payload and what follows."""
    size = RECORD_HEAD_BYTES + int.from_bytes(view[8:16], "little")
    return open_record(magic, view[:size], where), view[size:]


def _documents(data: memoryview) -> dict[str, Any]:
    try:
        documents = json.loads(bytes(data))
        is_canonical = canonical_json(documents) == data
    except (ValueError, RecursionError, InvalidArgument) as error:
        raise Corrupt(f"{WHERE}: head is not JSON: {error}") from error
    names = ["schema_version", "shape", "layout", "profile", "receipt"]
    version = documents.get("schema_version") if isinstance(documents, dict) else None
    if isinstance(version, str) and version != SCHEMA:
        raise Unsupported(f"{WHERE}: {version!r}, this release reads {SCHEMA!r}; upgrade")
    if not is_canonical:
        raise Corrupt(f"{WHERE}: head is not canonical JSON")
    if version is None or list(documents) != names:
        raise Corrupt(f"{WHERE}: its documents are not {', '.join(names)}")
    return dict(documents)


def _read_channels(data: memoryview, shape: TensorShape, profile: KvProfile) -> F32 | None:
    sizes = channel_sizes(shape, profile)
    n = 0 if sizes is None else math.prod(sizes)
    if data.nbytes != 2 * n:
        kind = Truncated if data.nbytes < 2 * n else Corrupt
        raise kind(f"{WHERE}: {data.nbytes} bytes of channel statistics, expected {2 * n}")
    if sizes is None:
        return None
    channels = np.frombuffer(data, "<f2").astype(np.float32).reshape(sizes)
    if not (np.isfinite(channels).all() and (channels[:, :, 1] > 0).all()):
        raise Corrupt(f"{WHERE}: a mean that is not finite, or a scale that is none")
    channels.flags.writeable = False
    return channels
