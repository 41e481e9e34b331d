"""The stream header of the quantising codecs: parameters and channel statistics as bytes.

FORMAT.md sections 3.3 and 9.3. The codecs differ in what stands between `sink_div` and the means.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import numpy as np

from ._core import read_zigzags, write_zigzags
from .errors import Corrupt, Truncated, Unsupported
from .frame import BytesLike, byte_view
from .quantiser import QuantiserParams, means_fit, unit_fits
from .spec import StreamSpec
from .varints import read_varints, varint

_VERSION: Final = 1
_AR_FLAG: Final = 1


def pack_stream_header(params: QuantiserParams, *more: int) -> bytes:
    """Return the stream header, with the codec's own varints `more`."""
    spec = params.spec
    head = [
        bytes([_VERSION, _AR_FLAG if params.ar else 0]),
        varint(spec.heads),
        varint(spec.head_dim),
        struct.pack("<d", params.step),
        varint(params.sink),
        varint(params.sink_div),
        *map(varint, more),
        write_zigzags(params.mean.astype(np.int64)),
        params.cls.tobytes(),
    ]
    if params.ar:
        head.append((params.rho[0::2] | params.rho[1::2] << 4).astype(np.uint8).tobytes())
    return b"".join(head)


def unpack_stream_header(
    spec: StreamSpec,
    data: BytesLike,
    where: str,
    *,
    n_classes: int,
    max_sink_div: int,
    n_more: int = 0,
) -> tuple[QuantiserParams, list[int]]:
    """Read a stream header of the stream `spec`.

    Parameters
    ----------
    where
        Start of error messages, ``"TKV1 stream header"``.
    n_classes, max_sink_div
        Bounds of the codec.
    n_more
        How many varints of its own the codec has.

    Returns
    -------
    params
    more
        The codec's own varints, not checked.

    Raises
    ------
    Truncated
        The bytes end inside the header.
    Corrupt
        A header of another geometry, or one that no encoder writes.
    Unsupported
        A newer version.
    """
    view = byte_view(data)
    if view.nbytes < 2:
        raise Truncated(f"{where}: {view.nbytes} bytes")
    if view[0] != _VERSION or view[1] & ~_AR_FLAG:
        raise Unsupported(f"{where}: version {view[0]}, flags {view[1]:#x}; upgrade")
    ar = bool(view[1] & _AR_FLAG)
    (heads, head_dim), at = read_varints(view, 2, 2, where)
    if view.nbytes < at + 8:
        raise Truncated(f"{where}: {view.nbytes} bytes")
    (step,) = struct.unpack_from("<d", view, at)
    (sink, sink_div, *more), at = read_varints(view, at + 8, 2 + n_more, where)
    if (heads, head_dim) != (spec.heads, spec.head_dim):
        raise Corrupt(
            f"{where}: {heads} heads of {head_dim}, expected {spec.heads} of {spec.head_dim}"
        )
    check_step(step, sink_div, max_sink_div, where)
    if not unit_fits(step / sink_div):
        raise Corrupt(f"{where}: step {step!r} over sink_div {sink_div}")
    n = spec.channels
    mean, at = read_zigzags(view, at, n)
    rho_bytes = n // 2 if ar else 0
    if view.nbytes != at + n + rho_bytes:
        kind = Truncated if view.nbytes < at + n + rho_bytes else Corrupt
        raise kind(f"{where}: {view.nbytes} bytes for {n} channels")
    cls = np.frombuffer(view, np.uint8, n, at).copy()
    rho = np.zeros(n, np.uint8)
    if ar:
        packed = np.frombuffer(view, np.uint8, rho_bytes, at + n)
        rho = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    if not means_fit(mean):
        raise Corrupt(f"{where}: mean out of range")
    if (cls >= n_classes).any():
        raise Corrupt(f"{where}: class out of range")
    return QuantiserParams(spec, step, sink, sink_div, ar, mean.astype(np.int32), rho, cls), more


def check_step(step: float, sink_div: int, max_sink_div: int, where: str) -> None:
    """Raise `Corrupt` for values that no encoder writes."""
    if not (math.isfinite(step) and step > 0):
        raise Corrupt(f"{where}: step {step!r} is not a positive number")
    if not 1 <= sink_div <= max_sink_div:
        raise Corrupt(f"{where}: sink_div {sink_div}")
