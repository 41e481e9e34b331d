"""Chunks of zarr arrays: from their bytes to values and back.

There are two kinds of arrays with our codec. The chunks of an archive's array are its frames, and
the stream header is in the configuration; only the archive writes them. A chunk of an array that
somebody created by himself stands alone: a container (FORMAT.md section 8) with one frame that is
flagged as unplaced, since a codec never learns which chunk of the array it is given.

Nothing here imports zarr: `zarr_codec` is the class that zarr meets.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .codec import BlockCodec, codec_by_name, codec_for
from .container import (
    BLOCK_CODECS,
    DTYPES,
    Head,
    Layout,
    check_finite,
    encode_fitted,
    read_blocks,
    read_head,
)
from .errors import Corrupt, InvalidArgument
from .fibquant.codec import CODEC as FIBQUANT
from .fibquant.config import FibQuant
from .frame import BytesLike, byte_view, open_frame
from .plan import Plan
from .shared import short
from .spec import MAX_BLOCK_TOKENS, StreamSpec
from .tensor import as_float32
from .zarr_configuration import NAME, ArchiveArray
from .zarr_own import OwnArray

Shape = tuple[int, int, int]
Objects = tuple[tuple[bytes, bytes], ...]

_LAYOUTS: Final[dict[str, Layout]] = {codec: layout for layout, codec in BLOCK_CODECS.items()}


def decode_archived(
    array: ArchiveArray,
    header: bytes,
    objects: Objects,
    data: BytesLike,
    shape: Shape,
    rows: slice,
    dtype: np.dtype[Any],
) -> npt.NDArray[Any]:
    """Return tokens of a chunk of an archive's array, ``[heads][tokens][head_dim]``.

    Parameters
    ----------
    array
        What every frame of the array must be.
    header
        The stream header.
    objects
        The packed objects that the headers need, by digest.
    data
        A frame.
    shape
        Of the chunk.
    rows
        Successive tokens, counted from the first of the chunk.
    dtype
        float32 or float16.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        The frame is damaged, or not of this array.
    InvalidArgument
        A value overflows float16.
    """
    where = f"zarr chunk of layer {array.layer} {array.kind}"
    frame, payload = open_frame(data, where)
    name, tag = array.codec, array.header_tag
    for more in array.more_headers:
        if frame.header_tag == more.header_tag:
            name, tag, header = more
    codec = codec_by_name(name)
    n_tokens = shape[1]
    if array.tail and array.tail <= frame.n_tokens < n_tokens:
        n_tokens = frame.n_tokens
    for what, found, expected in (
        ("unplaced", frame.unplaced, False),
        ("layer", frame.layer, array.layer),
        ("kind", frame.kind, array.kind),
        ("codec", frame.codec, codec.number),
        ("stream header tag", frame.header_tag, tag),
        ("number of tokens", frame.n_tokens, n_tokens),
    ):
        if found != expected:
            raise Corrupt(
                f"{where}: another frame is stored here: {what} {found}, expected {expected}"
            )
    spec = array.spec(shape[0], shape[2])
    params = _params(name, spec, header, objects)
    where = f"{where}, tokens from {frame.first_token}"
    inside = slice(min(rows.start, n_tokens), min(rows.stop, n_tokens))
    x = _decode(codec, params, payload, frame.first_token, n_tokens, inside, dtype, where)
    if inside == rows:
        return x
    # Behind the end of the array: zarr cuts it off.
    padded = np.full((shape[0], rows.stop - rows.start, shape[2]), np.nan, dtype)
    padded[:, : x.shape[1]] = x
    return padded


def encode_own(array: OwnArray, x: npt.NDArray[Any]) -> bytes:
    """Return a chunk, ``[heads][tokens][head_dim]`` float16 or float32, as bytes.

    Raises
    ------
    InvalidArgument
        A value that is not finite, too large for the step, or too large to decode into the
        dtype for certain.
    """
    heads, n_tokens, head_dim = x.shape
    spec = StreamSpec(array.kind, heads, head_dim)
    if not 1 <= n_tokens <= MAX_BLOCK_TOKENS:
        raise InvalidArgument(f"{NAME}: chunks of {n_tokens} tokens, expected 1 to 2^20")
    y, dtype = as_float32(x), x.dtype.newbyteorder("=")
    sizes = heads, head_dim, n_tokens, n_tokens
    head = Head(_LAYOUTS[array.family], DTYPES.index(dtype), array.kind, 0, *sizes)
    try:
        check_finite(y, spec)
        asked, chunks = array.asked(dtype.name), [y]
        if isinstance(asked, FibQuant):
            params = FIBQUANT.fit(asked, spec, lambda: chunks, book=array.stored_book())
            return encode_fitted(head, FIBQUANT, params, y, unplaced=True, bare=True)
        codec = codec_for(asked)
        params = codec.fit(asked, spec, lambda: chunks)
        return encode_fitted(head, codec, params, y, unplaced=True)
    except InvalidArgument as error:
        raise InvalidArgument(f"zarr chunk: {error} (tokens count from its first)") from error


def decode_own(
    array: OwnArray, data: BytesLike, shape: Shape, rows: slice, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return tokens `rows` of a chunk; see `decode_archived`."""
    head, stream_header, rest = read_head(byte_view(data))
    found = (BLOCK_CODECS.get(head.layout), head.kind, head.heads, head.n_tokens, head.head_dim)
    expected = (array.family, array.kind, *shape)
    if found != expected or head.n_blocks != 1:
        raise Corrupt(f"zarr chunk: {head.n_blocks} blocks of {found}, expected one of {expected}")
    shared = None if array.fibquant is None else array.shared
    params, (payload,) = read_blocks(head, stream_header, rest, shared)
    codec, name = codec_by_name(array.codec), array.scheme
    if codec.name_of(params) != name:
        raise Corrupt(f"zarr chunk: {codec.name_of(params)}, expected {name}")
    return _decode(codec, params, payload, 0, head.n_tokens, rows, dtype, "zarr chunk")


@lru_cache(maxsize=256)
def _params(codec: str, spec: StreamSpec, header: bytes, objects: Objects) -> Any:
    found = dict(objects)

    def shared(digest: bytes) -> bytes:
        if digest not in found:
            raise Corrupt(f"{NAME}: shared object {short(digest)} is not in the configuration")
        return found[digest]

    return codec_by_name(codec).unpack(spec, header, shared)


def _decode(
    codec: BlockCodec,
    params: Any,
    payload: memoryview,
    first_token: int,
    n_tokens: int,
    rows: slice,
    dtype: np.dtype[Any],
    where: str,
) -> npt.NDArray[Any]:
    spec: StreamSpec = params.spec
    out = np.empty((spec.heads, rows.stop - rows.start, spec.head_dim), dtype)
    plan = Plan()
    plan.add(
        codec,
        params,
        payload,
        first_token=first_token,
        n_tokens=n_tokens,
        start=first_token + rows.start,
        stop=first_token + rows.stop,
        out=out,
        where=where,
    )
    plan.run(1)  # zarr decodes many chunks at a time
    return out
