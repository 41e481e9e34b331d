"""The container of the numcodecs classes: a head, then frames or a TKV1 file.

FORMAT.md section 8. What is inside the frames is the codec's business, as is the file.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ._core import find_beyond
from .codec import (
    BlockCodec,
    BlockEncoder,
    CodecConfig,
    KeepingEncoder,
    codec_by_name,
    codec_for,
    last_tokens,
)
from .errors import Corrupt, InvalidArgument, Truncated, Unsupported
from .frame import (
    HEADER_BYTES,
    RECORD_HEAD_BYTES,
    FrameHeader,
    header_tag,
    open_frame,
    open_record,
    pack_frame,
    seal_record,
)
from .plan import Plan, check_payload
from .shared import SHARED_MAGIC, Shared, pack_shared
from .spec import F32, MAX_BLOCK_TOKENS, MAX_VALUES, Kind, StreamSpec, describe_value

Layout: TypeAlias = Literal["lane", "stream", "kvr1", "raw", "ggml", "fibquant"]

MAGIC: Final = b"KVC1"
FILE_MAGIC: Final = b"KVCT"

LAYOUTS: Final[tuple[Layout, ...]] = ("lane", "stream", "kvr1", "raw", "ggml", "fibquant")
#: Codecs of the layouts that are made of frames.
BLOCK_CODECS: Final[dict[Layout, str]] = {
    "lane": "tkv1",
    "kvr1": "kvr1",
    "raw": "raw",
    "ggml": "ggml",
    "fibquant": "fibquant",
}
KINDS: Final[tuple[Kind, ...]] = ("k", "v")
DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float64),
)
# From here on a value rounds to infinity; float64 output holds float32 values.
_OVERFLOW: Final = (2.0**128, 65520.0, 2.0**128 - 2.0**119, 2.0**128)
_HEAD: Final = struct.Struct("<BBBBIIIQ")
_BIG_ENDIAN, _FORTRAN = 1, 2


class Head(NamedTuple):
    """The fixed part of a container.

    `memory` says how the array lay in memory. A caller such as zarr's format 2 hands over an array
    and takes the decoded one for the same bytes, so it gets the same byte order and layout back.
    """

    layout: Layout
    dtype: int
    kind: Kind
    memory: int
    heads: int
    head_dim: int
    block_tokens: int
    n_tokens: int

    @property
    def n_values(self) -> int:
        return self.heads * self.n_tokens * self.head_dim

    @property
    def n_blocks(self) -> int:
        return -(-self.n_tokens // self.block_tokens)

    def span(self, block: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a block."""
        first = block * self.block_tokens
        return first, min(self.block_tokens, self.n_tokens - first)

    def pack(self) -> bytes:
        layout, kind = LAYOUTS.index(self.layout), KINDS.index(self.kind)
        return _HEAD.pack(layout, self.dtype, kind, *self[3:])

    @classmethod
    def unpack(cls, data: memoryview) -> Head:
        if data.nbytes < _HEAD.size:
            raise Truncated(f"container: {data.nbytes} of {_HEAD.size} head bytes")
        layout, dtype, kind, memory, *sizes = _HEAD.unpack_from(data)
        known = layout < len(LAYOUTS) and dtype < len(DTYPES) and kind < len(KINDS)
        if not known or memory & ~(_BIG_ENDIAN | _FORTRAN):
            raise Unsupported(
                f"container: layout {layout}, dtype {dtype}, kind {kind}, memory {memory}; "
                "upgrade to read it"
            )
        head = cls(LAYOUTS[layout], dtype, KINDS[kind], memory, *sizes)
        if not 1 <= head.block_tokens <= MAX_BLOCK_TOKENS:
            raise Corrupt(f"container: {head.block_tokens} tokens a block")
        if head.n_values > MAX_VALUES:
            raise Corrupt(f"container: {head.n_values} values, at most {MAX_VALUES}")
        return head

    def restore(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `x` in the byte order and memory layout that was encoded."""
        if self.memory & _BIG_ENDIAN:
            x = x.astype(x.dtype.newbyteorder(">"))
        return np.asfortranarray(x) if self.memory & _FORTRAN else x

    def spec(self) -> StreamSpec:
        try:
            return StreamSpec(self.kind, self.heads, self.head_dim)
        except InvalidArgument as error:
            raise Corrupt(f"container: {error}") from error


def memory_of(x: npt.NDArray[Any]) -> int:
    """Return how an array lies in memory, for `Head.memory`."""
    big_endian = x.dtype.newbyteorder("<") != x.dtype if x.dtype.kind == "f" else False
    fortran = x.flags.f_contiguous and not x.flags.c_contiguous
    return _BIG_ENDIAN * big_endian | _FORTRAN * fortran


def read_head(data: memoryview) -> tuple[Head, memoryview, memoryview]:
    """Return the head of a container, the stream header, and what follows the first record."""
    payload, rest = next_record(MAGIC, data)
    return Head.unpack(payload), payload[_HEAD.size :], rest


def next_record(magic: bytes, data: memoryview) -> tuple[memoryview, memoryview]:
    """Open the record at the start of `data`; return its payload and what follows."""
    if data.nbytes < RECORD_HEAD_BYTES:
        raise Truncated(f"container: {data.nbytes} bytes where a record starts")
    size = RECORD_HEAD_BYTES + int.from_bytes(data[8:16], "little")
    return open_record(magic, data[:size], "container"), data[size:]


def encode_blocks(head: Head, config: CodecConfig, y: F32) -> bytes:
    """Return the container of `y`, ``(heads, n_tokens, head_dim)``, in a layout of frames.

    Raises
    ------
    InvalidArgument
        Values that the step cannot code, or that may leave the range of their dtype.
    """
    codec = codec_for(config)
    params = codec.fit(config, head.spec(), lambda: [y])
    return encode_fitted(head, codec, params, y, n_kept=last_tokens(config))


def encode_fitted(
    head: Head,
    codec: BlockCodec,
    params: Any,
    y: F32,
    *,
    n_kept: int = 0,
    unplaced: bool = False,
    bare: bool = False,
) -> bytes:
    """Return the container of `y`, coded with `params`; see `encode_blocks`.

    Parameters
    ----------
    n_kept
        So many of the last tokens are kept as they are, by a codec that can.
    unplaced
        Flag the frames as such; only for a container of one block.
    bare
        Leave out the objects that the stream header needs; whoever reads has them.
    """
    coded = np.ascontiguousarray(y[:, : max(head.n_tokens - n_kept, 0)])
    codec.check(params, coded, 0)
    step = codec.step(params)
    if step is not None:
        check_overflow(y, head.dtype, step / 2)
    stream_header = codec.pack(params)
    tag = header_tag(stream_header)
    largest = 0.0
    parts = [seal_record(MAGIC, head.pack() + stream_header)]
    if not bare:
        shared = codec.shared(params)
        parts += [pack_shared(shared[digest]) for digest in codec.needs(stream_header)]
    for block in range(head.n_blocks):
        first, n = head.span(block)
        encoder = codec.encoder(params, first)
        _push_block(encoder, y[:, first : first + n], head.n_tokens - first - n_kept)
        largest = max(largest, encoder.error.max_error)
        frame = pack_frame(
            codec=codec.number,
            kind=head.kind,
            owner=0,
            layer=0,
            first_token=first,
            n_tokens=n,
            header_tag=tag,
            error=encoder.error,
            payload=encoder.payload(),
            unplaced=unplaced,
        )
        parts.append(frame)
    if step is None and not codec.lossless:
        check_overflow(y, head.dtype, largest)
    return b"".join(parts)


def _push_block(encoder: BlockEncoder, y: F32, n_coded: int) -> None:
    """Append the tokens of a block, the first `n_coded` of them coded and the others kept."""
    n_coded = min(max(n_coded, 0), y.shape[1])
    encoder.push(np.ascontiguousarray(y[:, :n_coded]))
    if n_coded < y.shape[1]:
        cast(KeepingEncoder, encoder).keep(np.ascontiguousarray(y[:, n_coded:]))


def read_blocks(
    head: Head, stream_header: memoryview, data: memoryview, shared: Shared | None = None
) -> tuple[Any, list[memoryview]]:
    """Check what follows the head: that it can be the tokens that the head claims.

    Parameters
    ----------
    shared
        Of a bare container: where the objects are that the stream header needs.

    Returns
    -------
    params
        Of the codec, from the stream header.
    payloads
        Of the frames, views of `data`.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        A frame is damaged, missing, too many, of another stream, or has another size than its
        tokens; or the stream header, or an object that it needs, is not what was written.
    """
    codec = codec_by_name(BLOCK_CODECS[head.layout])
    spec = head.spec()
    if shared is None:
        objects: dict[bytes, memoryview] = {}
        for digest in codec.needs(stream_header):
            objects[digest], data = next_record(SHARED_MAGIC, data)
        shared = objects.__getitem__
    params = codec.unpack(spec, stream_header, shared)
    tag = header_tag(stream_header)
    payloads = []
    # Frames are opened one by one, so the bytes at hand bound what the head may claim.
    for block in range(head.n_blocks):
        where = f"block {block}"
        size = HEADER_BYTES + FrameHeader.unpack(data, where).payload_bytes
        frame, payload = open_frame(data[:size], where)
        data = data[size:]
        found = (frame.codec, frame.kind, frame.owner, frame.layer, frame.header_tag)
        if found != (codec.number, head.kind, 0, 0, tag):
            raise Corrupt(f"{where}: a frame of another stream")
        if (frame.first_token, frame.n_tokens) != head.span(block):
            raise Corrupt(
                f"{where}: {frame.n_tokens} tokens from {frame.first_token}, expected "
                f"{head.span(block)[1]} from {head.span(block)[0]}"
            )
        check_payload(codec, params, payload, frame.first_token, frame.n_tokens, where)
        payloads.append(payload)
    if data.nbytes:
        raise Corrupt(f"container: {data.nbytes} bytes after the last block")
    return params, payloads


def decode_blocks(
    head: Head, params: Any, payloads: list[memoryview], out: npt.NDArray[Any]
) -> None:
    """Decode blocks into `out`, ``(heads, n_tokens, head_dim)``.

    Raises
    ------
    Truncated, Corrupt
        They are not what was written; `out` is then undefined.
    InvalidArgument
        A value overflows the dtype of `out`.
    """
    codec = codec_by_name(BLOCK_CODECS[head.layout])
    plan = Plan()
    for block, payload in enumerate(payloads):
        first, n = head.span(block)
        plan.add(
            codec,
            params,
            payload,
            first_token=first,
            n_tokens=n,
            start=first,
            stop=first + n,
            out=out[:, first : first + n],
            where=f"block {block}",
        )
    plan.run()


def check_finite(y: F32, spec: StreamSpec) -> None:
    """Raise `InvalidArgument` naming the first value that is not finite."""
    at = find_beyond(y, np.inf)
    if at >= 0:
        raise InvalidArgument(f"{describe_value(y, at, spec, 0)} is not finite")


def check_overflow(y: F32, dtype: int, error: float) -> None:
    """Refuse values that may leave the range of their dtype when `error` is added."""
    largest = max(float(y.max()), -float(y.min()))
    if largest + error >= _OVERFLOW[dtype]:
        raise InvalidArgument(
            f"a value of magnitude {largest:g} may decode beyond {DTYPES[dtype].name}; "
            "use a wider dtype, or more bits"
        )
