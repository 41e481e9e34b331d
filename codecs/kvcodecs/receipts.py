"""Receipts: what one compression or decompression of a tensor or stream had and made, by digest.

A receipt is a document like those of `digests`: its JSON is canonical, and its digest says all of
it. FORMAT.md section 2.4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from .digests import bytes_digest, canonical_json, document_digest, is_digest
from .errors import Corrupt, InvalidArgument, Unsupported
from .frame import BytesLike, ErrorStats

if TYPE_CHECKING:
    from .codec import BlockCodec

SCHEMA: Final = "kvstore_receipt_v1"
_FAMILY: Final = "kvstore_receipt_v"
_FRAME_DOMAIN: Final = "kvstore_frame_v1"
_STREAM_DOMAIN: Final = "kvstore_stream_profile_v1"

Operation: TypeAlias = Literal["compress", "decode"]

#: Of each operation: the field of its values' digest, and that of its count of pages.
_FIELDS: Final[dict[str, tuple[str, str]]] = {
    "compress": ("source_digest", "encoded_pages"),
    "decode": ("decoded_digest", "decoded_pages"),
}
MAX_COUNT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt for one tensor or stream. All digests are ``"blake3:"`` and 64 hexadecimal digits.

    Attributes
    ----------
    operation
        ``"compress"`` or ``"decode"``.
    values_digest
        Of the values that went in or came out: `source_digest` or `decoded_digest` in JSON.
    profile_digest
        Of the codec and its parameters.
    shape_digest
        Of the geometry.
    page_digests
        Of the pages as they are stored, in their order.
    codec
        The codec's configuration, as its `to_json` gives it.
    compressed_blocks, raw_fallback_blocks
        Blocks with values that the codec coded, and blocks with values kept raw; some are both.
    codebook_digest, rotation_digest
        None where the codec has none.
    fallback_reasons
        Why blocks are raw, each once, in the order in which they first occurred.
    max_error, rms
        Measured error of the values in the coded domain; None where nobody knows.
    recorded_unix_seconds
        When.

    Raises
    ------
    InvalidArgument
        A field that is no such thing, or fields that cannot belong together.
    """

    operation: Operation
    values_digest: str
    profile_digest: str
    shape_digest: str
    page_digests: tuple[str, ...]
    codec: Mapping[str, object]
    compressed_blocks: int
    raw_fallback_blocks: int = 0
    codebook_digest: str | None = None
    rotation_digest: str | None = None
    fallback_reasons: tuple[str, ...] = ()
    max_error: float | None = None
    rms: float | None = None
    recorded_unix_seconds: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def source_digest(self) -> str | None:
        """Digest of the values that were compressed; None for a decode receipt."""
        return self.values_digest if self.operation == "compress" else None

    @property
    def decoded_digest(self) -> str | None:
        """Digest of the values that were decoded; None for a compression receipt."""
        return self.values_digest if self.operation == "decode" else None

    @property
    def n_pages(self) -> int:
        """Pages that were encoded or decoded."""
        return len(self.page_digests)

    def digest(self) -> str:
        """Return the digest of the receipt, of every field of it."""
        return document_digest(SCHEMA, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return the receipt as a JSON object, fields in their order."""
        values, pages = _FIELDS[self.operation]
        return {
            "schema_version": SCHEMA,
            "operation_kind": self.operation,
            values: self.values_digest,
            "profile_digest": self.profile_digest,
            "shape_digest": self.shape_digest,
            "page_digests": list(self.page_digests),
            "codebook_digest": self.codebook_digest,
            "rotation_digest": self.rotation_digest,
            pages: self.n_pages,
            "compressed_blocks": self.compressed_blocks,
            "raw_fallback_blocks": self.raw_fallback_blocks,
            "fallback_reasons": list(self.fallback_reasons),
            "max_error": self.max_error,
            "rms": self.rms,
            "codec": dict(self.codec),
            "recorded_unix_seconds": self.recorded_unix_seconds,
        }

    def dumps(self) -> bytes:
        """Return the canonical JSON of the receipt."""
        return canonical_json(self.to_json())

    @classmethod
    def from_json(cls, data: object) -> Receipt:
        """Return the receipt that `to_json` described.

        Raises
        ------
        Corrupt
            A field is missing, too many, or not what it should be.
        Unsupported
            A newer version.
        """
        fields = _object(data)
        version = fields.pop("schema_version", None)
        if version != SCHEMA:
            newer = isinstance(version, str) and version.startswith(_FAMILY)
            kind = Unsupported if newer else Corrupt
            raise kind(f"receipt: schema_version {version!r}, this release reads {SCHEMA!r}")
        operation = fields.pop("operation_kind", None)
        if not isinstance(operation, str) or operation not in _FIELDS:
            raise Corrupt(f"receipt: operation_kind {operation!r}")
        values, pages = _FIELDS[operation]
        try:
            n_pages = fields.pop(pages)
            receipt = cls(
                operation=cast(Operation, operation),
                values_digest=fields.pop(values),
                **{name: fields.pop(name) for name in _COPIED},
                page_digests=_tuple(fields.pop("page_digests")),
                fallback_reasons=_tuple(fields.pop("fallback_reasons")),
                max_error=_float(fields.pop("max_error")),
                rms=_float(fields.pop("rms")),
            )
        except KeyError as error:
            raise Corrupt(f"receipt: field {error} is missing") from error
        except InvalidArgument as error:
            raise Corrupt(str(error)) from error
        if not _is_count(n_pages) or n_pages != receipt.n_pages:
            raise Corrupt(f"receipt: {pages} {n_pages!r}, {receipt.n_pages} page digests")
        if fields:
            raise Corrupt(f"receipt: unknown fields {sorted(fields)}")
        return receipt

    @classmethod
    def loads(cls, data: bytes | str) -> Receipt:
        """Return the receipt whose JSON this is; raises as `from_json` does."""
        try:
            return cls.from_json(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"receipt: not JSON: {error}") from error


_COPIED: Final = (
    "profile_digest",
    "shape_digest",
    "codebook_digest",
    "rotation_digest",
    "compressed_blocks",
    "raw_fallback_blocks",
    "codec",
    "recorded_unix_seconds",
)


def frame_digest(frame: BytesLike, *more: BytesLike) -> str:
    """Return the digest of a frame's bytes as they are stored, whole or in parts."""
    return bytes_digest(_FRAME_DOMAIN, frame, *more)


def stream_profile_digest(codec_number: int, stream_header: BytesLike) -> str:
    """Return the digest of a stream's codec and its packed stream header."""
    return bytes_digest(_STREAM_DOMAIN, bytes([codec_number]), stream_header)


def raw_parts(
    codec: BlockCodec, params: Any, payload: BytesLike, n_tokens: int
) -> tuple[bool, tuple[str, ...]]:
    """Return whether a block has coded values, and why it has raw ones, each reason once.

    A codec that keeps some values raw has a method of this name; what others store is coded.
    """
    of_codec = getattr(codec, "raw_parts", None)
    if of_codec is None:
        return True, ()
    found: tuple[bool, tuple[str, ...]] = of_codec(params, payload, n_tokens)
    return found


def known_error(error: ErrorStats) -> tuple[float | None, float | None]:
    """Return `max_error` and `rms` of a receipt."""
    return (error.max_error, error.rms) if error.is_known else (None, None)


def _check(receipt: Receipt) -> None:
    """Raise `InvalidArgument` unless every field is what it should be."""
    if receipt.operation not in _FIELDS:
        raise InvalidArgument(f"receipt: operation {receipt.operation!r}: compress or decode")
    for name in ("values_digest", "profile_digest", "shape_digest"):
        if not is_digest(getattr(receipt, name)):
            raise InvalidArgument(f"receipt: {name} {getattr(receipt, name)!r} is no digest")
    for name in ("codebook_digest", "rotation_digest"):
        value = getattr(receipt, name)
        if value is not None and not is_digest(value):
            raise InvalidArgument(f"receipt: {name} {value!r} is no digest")
    for page, digest in enumerate(receipt.page_digests):
        if not is_digest(digest):
            raise InvalidArgument(f"receipt: page {page}: {digest!r} is no digest")
    for name in ("compressed_blocks", "raw_fallback_blocks", "recorded_unix_seconds"):
        if not _is_count(getattr(receipt, name)):
            raise InvalidArgument(f"receipt: {name} {getattr(receipt, name)!r} is not a count")
    reasons = receipt.fallback_reasons
    texts = all(isinstance(reason, str) and reason for reason in reasons)
    if not texts or len(set(reasons)) != len(reasons):
        raise InvalidArgument(f"receipt: fallback_reasons {reasons!r}: different texts expected")
    if bool(reasons) != bool(receipt.raw_fallback_blocks):
        raise InvalidArgument(
            f"receipt: {receipt.raw_fallback_blocks} raw blocks for the reasons {list(reasons)}"
        )
    errors = receipt.max_error, receipt.rms
    if errors != (None, None) and not all(_is_error(value) for value in errors):
        raise InvalidArgument(f"receipt: max_error {errors[0]!r}, rms {errors[1]!r}")
    codec = receipt.codec
    if not isinstance(codec, Mapping) or not isinstance(codec.get("codec"), str):
        raise InvalidArgument(f"receipt: codec {codec!r} is no configuration of a codec")
    try:
        canonical_json([codec, list(reasons)])
    except InvalidArgument as error:
        raise InvalidArgument(f"receipt: {error}") from error


def _object(data: object) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise Corrupt(f"receipt: {type(data).__name__} instead of a JSON object")
    return dict(data)


def _tuple(value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Corrupt(f"receipt: {value!r} is no list")
    return tuple(value)


def _float(value: Any) -> Any:
    # Other writers of JSON may spell 1.0 as 1.
    return float(value) if _is_count(value) else value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_error(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0
