"""The frame: one block's bytes as stored, and the envelope of every other value.

Both check themselves: a crc32c covers header and payload, so a flipped bit anywhere is
detected, and nothing is read past the end of what was handed in. What a payload means is
the codec's business (`kvcodecs.codec`). Byte layouts: FORMAT.md section 2.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import Corrupt, InvalidArgument, Truncated, Unsupported

if TYPE_CHECKING:
    from .spec import Kind

BytesLike: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]

FRAME_MAGIC: Final = b"KVF1"
FRAME_VERSION: Final = 1
HEADER_BYTES: Final = 76
RECORD_VERSION: Final = 1
RECORD_HEAD_BYTES: Final = 20

_HEADER: Final = struct.Struct("<4sBBBBQQQIIQddQ")
_HEADER_AND_CRC: Final = struct.Struct("<4sBBBBQQQIIQddQI")
_RECORD_HEAD: Final = struct.Struct("<4sB3sQ")
_CRC: Final = struct.Struct("<I")
_PAYLOAD_BYTES: Final = 7  # the index of that field
_CHECKSUM: Final = 14
_KINDS: Final[tuple[Kind, Kind]] = ("k", "v")
_UNPLACED: Final = 1  # flags
# Positions stay below this, so that first_token + n_tokens never wraps in a signed 64-bit word.
_MAX_TOKEN: Final = 2**63


def crc32c(*parts: BytesLike) -> int:
    """Return the CRC-32C (Castagnoli) of the concatenation of `parts`."""
    crc = 0
    for part in parts:
        crc = _core.crc32c(crc, part)
    return crc


def extend_crc32c(crc: int, data: BytesLike) -> int:
    """Return the CRC-32C of what `crc` is of, with `data` behind it."""
    return _core.crc32c(crc, data)


def crc32c_each(parts: Sequence[BytesLike], n_threads: int) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each part, without the GIL where there is much to do."""
    return _core.frame_checksums(parts, 0, 0, n_threads)


def header_tag(stream_header: BytesLike) -> int:
    """Return the 64-bit tag that ties a frame to its stream header; never 0.

    The first 8 bytes, little-endian, of the BLAKE2b-64 of the packed stream header. 0 is
    kept for "no stream header" and becomes 1.
    """
    return int.from_bytes(blake2b(byte_view(stream_header), digest_size=8).digest(), "little") or 1


class ErrorStats(NamedTuple):
    """Measured coding error of some values, in the coded domain.

    Attributes
    ----------
    max_error
        Largest ``|x - y|``; NaN when unknown.
    sum_squares
        Sum of ``(x - y)**2``; NaN when unknown.
    n_values
        Values measured; 0 when unknown.
    """

    max_error: float
    sum_squares: float
    n_values: int

    @classmethod
    def unknown(cls) -> ErrorStats:
        """Return the statistics of values whose input was never seen."""
        return cls(math.nan, math.nan, 0)

    @classmethod
    def none(cls) -> ErrorStats:
        """Return the statistics of no values at all: the neutral element of `merge`."""
        return cls(0.0, 0.0, 0)

    @property
    def is_known(self) -> bool:
        """Whether the error was measured."""
        return not math.isnan(self.max_error)

    @property
    def rms(self) -> float:
        """Root mean square error; 0.0 for no values, NaN when unknown."""
        if not self.is_known:
            return math.nan
        return math.sqrt(self.sum_squares / self.n_values) if self.n_values else 0.0

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Return the statistics of both sets of values; unknown if either is."""
        if not (self.is_known and other.is_known):
            return ErrorStats.unknown()
        return ErrorStats(
            max(self.max_error, other.max_error),
            self.sum_squares + other.sum_squares,
            self.n_values + other.n_values,
        )

    def share(self, n: int, of: int) -> ErrorStats:
        """Return the statistics of `n` of `of` tokens: an estimate where they are not all.

        The sum of squares is their share of it, the largest error a bound.
        """
        if not self.is_known or n == of or not of:
            return self
        n_values = self.n_values * n // of
        share = n_values / self.n_values if self.n_values else 0.0
        return ErrorStats(self.max_error, self.sum_squares * share, n_values)

    def is_valid(self) -> bool:
        """Whether the three numbers can belong together (FORMAT.md section 2.1)."""
        # Chained comparisons are false for NaN.
        if 0.0 <= self.max_error < math.inf and 0.0 <= self.sum_squares < math.inf:
            return True
        both = math.isnan(self.max_error) and math.isnan(self.sum_squares)
        return both and self.n_values == 0


class FrameHeader(NamedTuple):
    """Fixed-size head of a frame. FORMAT.md section 2.1.

    Attributes
    ----------
    codec
        Codec number (`kvcodecs.codec.codec_by_number`).
    kind
        ``"k"`` or ``"v"``.
    owner
        64-bit id of the stream that wrote the frame.
    layer
        Layer index.
    first_token, n_tokens
        The frame holds tokens ``[first_token, first_token + n_tokens)``, at least one.
    header_tag
        `header_tag` of the stream header the payload was coded with; 0 for none.
    error
        Measured error in the coded domain.
    payload_bytes
        Length of the payload.
    unplaced
        Whoever wrote the frame did not know its place: owner, layer and first token are 0 and say
        nothing. Such frames have no place in an archive.
    """

    codec: int
    kind: Kind
    owner: int
    layer: int
    first_token: int
    n_tokens: int
    header_tag: int
    error: ErrorStats
    payload_bytes: int
    unplaced: bool = False

    @classmethod
    def unpack(cls, data: BytesLike, where: str = "") -> FrameHeader:
        """Read and check the header at the start of `data`; the checksum is not checked.

        Parameters
        ----------
        data
            At least the first `HEADER_BYTES` of a frame; what follows is ignored.
        where
            Put in front of error messages, for example ``"layer 3 k block 7"``.

        Raises
        ------
        Truncated
            Fewer than `HEADER_BYTES`.
        Corrupt
            Wrong magic or a field out of range.
        Unsupported
            Written by a newer release.
        """
        prefix = _prefix(where)
        return _header_of(_unpack_fields(byte_view(data), prefix), prefix)

    @property
    def stop_token(self) -> int:
        """One past the last token."""
        return self.first_token + self.n_tokens


def pack_frame(
    *,
    codec: int,
    kind: Kind,
    owner: int,
    layer: int,
    first_token: int,
    n_tokens: int,
    payload: BytesLike,
    header_tag: int = 0,
    error: ErrorStats | None = None,
    unplaced: bool = False,
) -> bytes:
    """Return header, checksum and payload as one frame. FORMAT.md section 2.1.

    Parameters
    ----------
    payload
        The codec's bytes; copied.
    error
        Measured error; None means unknown.
    unplaced
        The frame does not know its place: `owner`, `layer` and `first_token` must be 0.

    Raises
    ------
    InvalidArgument
        A field does not fit.
    """
    error = ErrorStats.unknown() if error is None else error
    if kind not in _KINDS:
        raise InvalidArgument(f"frame: kind {kind!r}, expected 'k' or 'v'")
    for name, value, bits in (
        ("codec", codec, 8),
        ("owner", owner, 64),
        ("layer", layer, 32),
        ("first_token", first_token, 63),
        ("n_tokens", n_tokens, 32),
        ("header_tag", header_tag, 64),
        ("n_values", error.n_values, 64),
    ):
        if not 0 <= value < 1 << bits:
            raise InvalidArgument(f"frame: {name} {value} does not fit {bits} bits")
    if n_tokens == 0 or first_token + n_tokens > _MAX_TOKEN:
        raise InvalidArgument(f"frame: {n_tokens} tokens from token {first_token}")
    if unplaced and (owner or layer or first_token):
        raise InvalidArgument("frame: an unplaced frame has no owner, layer or first token")
    if not error.is_valid():
        raise InvalidArgument(f"frame: error statistics {error} do not belong together")
    body = byte_view(payload)
    header = _HEADER.pack(
        FRAME_MAGIC,
        FRAME_VERSION,
        codec,
        _KINDS.index(kind),
        _UNPLACED if unplaced else 0,
        owner,
        first_token,
        body.nbytes,
        layer,
        n_tokens,
        header_tag,
        error.max_error,
        error.sum_squares,
        error.n_values,
    )
    return b"".join((header, _CRC.pack(crc32c(header, body)), body))


def open_frame(data: BytesLike, where: str = "") -> tuple[FrameHeader, memoryview]:
    """Check a whole frame and return its header and a view of its payload.

    Parameters
    ----------
    data
        Exactly one frame.
    where
        Put in front of error messages.

    Returns
    -------
    header : FrameHeader
    payload : memoryview
        A view into `data`, valid as long as `data` is.

    Raises
    ------
    Truncated
        `data` ends before the frame does.
    Corrupt
        Wrong magic or checksum, bytes after the payload, or a field out of range.
    Unsupported
        Written by a newer release.
    """
    return open_frames([data], [where], 1)[0]


def open_frames(
    frames: Sequence[BytesLike], wheres: Sequence[str], n_threads: int
) -> list[tuple[FrameHeader, memoryview]]:
    """Check many frames at once; for each return what `open_frame` returns.

    Checksums are computed on up to `n_threads` threads, without the GIL where there is much to
    do. `wheres` are put in front of error messages, one for each frame.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        As `open_frame` for the first frame in order that is damaged.
    """
    views = [byte_view(frame) for frame in frames]
    checksums = _core.frame_checksums(views, _HEADER.size, HEADER_BYTES, n_threads).tolist()
    opened: list[tuple[FrameHeader, memoryview]] = []
    for view, checksum, where in zip(views, checksums, wheres, strict=True):
        prefix = _prefix(where)
        fields = _unpack_fields(view, prefix)
        _check_length("frame", view.nbytes, HEADER_BYTES + fields[_PAYLOAD_BYTES], prefix)
        # The checksum goes first: a flipped reserved flag is damage, not a newer release.
        if checksum != fields[_CHECKSUM]:
            raise _wrong_crc("frame", checksum, fields[_CHECKSUM], prefix)
        opened.append((_header_of(fields, prefix), view[HEADER_BYTES:]))
    return opened


def seal_record(magic: bytes, payload: BytesLike) -> bytes:
    """Return `payload` inside the checked envelope of non-frame values. FORMAT.md section 2.2.

    Raises
    ------
    InvalidArgument
        `magic` is not 4 bytes long.
    """
    if len(magic) != 4:
        raise InvalidArgument(f"record: magic {magic!r} is not 4 bytes long")
    body = byte_view(payload)
    head = _RECORD_HEAD.pack(magic, RECORD_VERSION, bytes(3), body.nbytes)
    return b"".join((head, _CRC.pack(crc32c(head, body)), body))


def open_record(magic: bytes, data: BytesLike, where: str = "") -> memoryview:
    """Check a record made by `seal_record` and return a view of its payload.

    Raises
    ------
    Truncated
        `data` ends before the record does.
    Corrupt
        Another magic, a wrong checksum, or bytes after the payload.
    Unsupported
        Written by a newer release.
    """
    prefix = _prefix(where)
    view = byte_view(data)
    if view.nbytes < RECORD_HEAD_BYTES:
        raise Truncated(f"{prefix}record: {view.nbytes} of {RECORD_HEAD_BYTES} head bytes")
    found, version, reserved, payload_bytes = _RECORD_HEAD.unpack_from(view)
    expected = int.from_bytes(view[_RECORD_HEAD.size : RECORD_HEAD_BYTES], "little")
    if found != magic:
        raise Corrupt(f"{prefix}record: magic {found!r}, expected {magic!r}")
    _check_version("record", version, RECORD_VERSION, prefix)
    _check_length("record", view.nbytes, RECORD_HEAD_BYTES + payload_bytes, prefix)
    payload = view[RECORD_HEAD_BYTES:]
    checksum = crc32c(view[: _RECORD_HEAD.size], payload)
    if checksum != expected:
        raise _wrong_crc("record", checksum, expected, prefix)
    if reserved != bytes(3):
        raise Unsupported(f"{prefix}record: reserved bytes {reserved!r}; upgrade to read it")
    return payload


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def byte_view(data: BytesLike) -> memoryview:
    """Return a view of the bytes of `data`, one-dimensional and of format ``B``."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    # An empty array has a zero in its shape, which memoryview refuses to cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _unpack_fields(view: memoryview, prefix: str) -> tuple[Any, ...]:
    """Return the fields of a frame header, checksum last, once magic and version are right."""
    if view.nbytes < HEADER_BYTES:
        raise Truncated(f"{prefix}frame header: {view.nbytes} of {HEADER_BYTES} bytes")
    fields = _HEADER_AND_CRC.unpack_from(view)
    if fields[0] != FRAME_MAGIC:
        raise Corrupt(f"{prefix}frame header: magic {fields[0]!r}, expected {FRAME_MAGIC!r}")
    _check_version("frame", fields[1], FRAME_VERSION, prefix)
    return fields


def _check_version(what: str, found: int, known: int, prefix: str) -> None:
    if found > known:
        raise Unsupported(
            f"{prefix}{what} version {found}, this release reads up to {known}; upgrade to read it"
        )
    if found == 0:
        raise Corrupt(f"{prefix}{what} version 0 does not exist")


def _check_length(what: str, found: int, expected: int, prefix: str) -> None:
    if found < expected:
        raise Truncated(f"{prefix}{what}: {found} of {expected} bytes")
    if found > expected:
        raise Corrupt(f"{prefix}{what}: {found} bytes where its header says {expected}")


def _wrong_crc(what: str, computed: int, expected: int, prefix: str) -> Corrupt:
    return Corrupt(f"{prefix}{what}: crc32c {computed:#010x}, header says {expected:#010x}")


def _header_of(fields: tuple[Any, ...], prefix: str) -> FrameHeader:
    codec, kind, flags, owner, first_token, payload_bytes = fields[2:8]
    layer, n_tokens, tag, max_error, sum_squares, n_values = fields[8:_CHECKSUM]
    if kind >= len(_KINDS):
        raise Corrupt(f"{prefix}frame header: kind {kind}, expected 0 (k) or 1 (v)")
    if flags & ~_UNPLACED:
        raise Unsupported(f"{prefix}frame header: flags {flags:#04x}; upgrade to read it")
    if n_tokens == 0 or first_token + n_tokens > _MAX_TOKEN:
        raise Corrupt(f"{prefix}frame header: {n_tokens} tokens from token {first_token}")
    unplaced = bool(flags & _UNPLACED)
    if unplaced and (owner or layer or first_token):
        raise Corrupt(f"{prefix}frame header: unplaced, and yet with a place")
    error = ErrorStats(max_error, sum_squares, n_values)
    if not error.is_valid():
        raise Corrupt(f"{prefix}frame header: impossible error statistics {error}")
    place = _KINDS[kind], owner, layer, first_token, n_tokens
    return FrameHeader(codec, *place, tag, error, payload_bytes, unplaced)
