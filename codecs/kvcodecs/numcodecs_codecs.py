"""The numcodecs class of TKV1: an array in, a self-contained container out.

The only module that imports numcodecs. The bytes are in `container`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numcodecs.compat
import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec

from .container import (
    DTYPES,
    FILE_MAGIC,
    KINDS,
    LAYOUTS,
    MAGIC,
    Head,
    Layout,
    check_finite,
    check_overflow,
    memory_of,
    next_record,
    read_frames,
    read_head,
)
from .errors import Corrupt, InvalidArgument, Truncated
from .frame import header_tag, pack_frame, seal_record
from .plan import Plan
from .spec import F32, Kind, StreamSpec
from .tensor import as_float32, check_tensor
from .tkv1 import CODEC, TKV1, TkvFile, encode_stream, step_for_bpv
from .tkv1.tkvheader import MAX_BLOCK_TOKENS, MAX_VALUES

BARE_MAGIC: Final = b"TKV1"


class TKV1Codec(Codec):  # type: ignore[misc]
    """TKV1 for numcodecs: ``[heads][tokens][head_dim]`` floats to bytes, within a bound.

    Parameters
    ----------
    kind
        ``"k"``: channels ``(i, head_dim / 2 + i)`` are pairs and share their statistics;
        ``"v"``: they do not.
    rel_step, step, max_error, rmse, bpv
        At most one. `step`: values decode within ``step / 2``. `max_error`: that half.
        `rel_step`: the step as a fraction of the RMS of the array, 1/4 if nothing is given.
        `rmse`: the expected root mean square error. `bpv`: the finest step that needs no more
        bits per value.
    block_tokens
        Tokens per block, at most 2^20.
    sink, sink_div
        The first `sink` tokens are coded `sink_div` times finer.
    ar
        Predict each channel from its previous token.
    lane_channels
        Channels of an independently coded lane; 0 for `head_dim`.
    layout
        ``"lane"`` or ``"stream"`` (FORMAT.md sections 4 and 5).
    theta, pre_rope
        Stream layout only: RoPE base, and whether K is un-rotated with it before coding
        (default for K).

    Raises
    ------
    InvalidArgument
        A value out of range, or two policies.

    Notes
    -----
    Lossy: ``|x - y| <= step / 2``, computed in float32, plus half an ulp of the dtype for what
    is not float32; ``step / sqrt(2)`` for K that the stream layout rotates. Encoding is
    deterministic. An array whose decoded values might overflow its dtype is refused.

    Examples
    --------
    >>> import numpy as np
    >>> codec = TKV1Codec(kind="v", step=0.5)
    >>> x = np.linspace(-1, 1, 12, dtype="f2").reshape(1, 3, 4)
    >>> y = codec.decode(codec.encode(x))
    >>> y.dtype, y.shape, bool(abs(x - y).max() <= 0.25)
    (dtype('float16'), (1, 3, 4), True)
    """

    codec_id = "tkv1"

    def __init__(
        self,
        kind: Kind = "v",
        *,
        rel_step: float | None = None,
        step: float | None = None,
        max_error: float | None = None,
        rmse: float | None = None,
        bpv: float | None = None,
        block_tokens: int = 128,
        sink: int = 4,
        sink_div: int = 16,
        ar: bool = True,
        lane_channels: int = 0,
        layout: Layout = "lane",
        theta: float | None = None,
        pre_rope: bool | None = None,
    ) -> None:
        if kind not in KINDS:
            raise InvalidArgument(f"tkv1: kind {kind!r}, expected 'k' or 'v'")
        if layout not in LAYOUTS:
            raise InvalidArgument(f"tkv1: layout {layout!r}, expected 'lane' or 'stream'")
        if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidArgument(f"tkv1: block_tokens {block_tokens!r} is not 1 to 2^20")
        if layout == "lane" and not (theta is None and pre_rope is None):
            raise InvalidArgument("tkv1: theta and pre_rope belong to layout='stream'")
        self._asked = TKV1(
            rel_step=rel_step,
            step=step,
            max_error=max_error,
            rmse=rmse,
            bpv=bpv,
            sink=sink,
            sink_div=sink_div,
            ar=ar,
            lane_channels=lane_channels,
        )
        self._kind: Kind = kind
        self._block_tokens = block_tokens
        self._layout: Layout = layout
        self._theta = 1e5 if theta is None else float(theta)
        self._pre_rope = (kind == "k") if pre_rope is None else bool(pre_rope)
        if layout == "stream" and not (math.isfinite(self._theta) and self._theta > 0.0):
            raise InvalidArgument(f"tkv1: theta {theta!r} is not positive")

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        policy, value = self._asked.policy
        config: dict[str, object] = {
            "id": self.codec_id,
            "kind": self._kind,
            policy: value,
            "block_tokens": self._block_tokens,
            "sink": self._asked.sink,
            "sink_div": self._asked.sink_div,
            "ar": self._asked.ar,
            "lane_channels": self._asked.lane_channels,
            "layout": self._layout,
        }
        if self._layout == "stream":
            config |= {"theta": self._theta, "pre_rope": self._pre_rope}
        return config

    def __repr__(self) -> str:
        fields = (f"{k}={v!r}" for k, v in self.get_config().items() if k != "id")
        return f"{type(self).__name__}({', '.join(fields)})"

    def encode(self, buf: Any) -> bytes:
        """Return the container of an array.

        Parameters
        ----------
        buf : (heads, tokens, head_dim) float16, bfloat16, float32 or float64
            Any strides; read only. float64 is narrowed to float32 first.

        Raises
        ------
        InvalidArgument
            Another shape or dtype, a value that is not finite, too large for the step, or
            too large to decode into the dtype for certain.
        """
        x = np.asarray(buf)
        if x.ndim != 3:
            raise InvalidArgument(f"tkv1: shape {x.shape}, expected (heads, tokens, head_dim)")
        heads, n_tokens, head_dim = x.shape
        spec = StreamSpec(self._kind, heads, head_dim)
        check_tensor(x, spec, "tkv1")
        dtype = DTYPES.index(x.dtype.newbyteorder("=") if x.dtype.kind == "f" else x.dtype)
        head = Head(
            self._layout,
            dtype,
            self._kind,
            memory_of(x),
            heads,
            head_dim,
            self._block_tokens,
            n_tokens,
        )
        if n_tokens == 0:
            return seal_record(MAGIC, head.pack())
        if head.n_values > MAX_VALUES:
            raise InvalidArgument(f"tkv1: {head.n_values} values, at most {MAX_VALUES}; cut it up")
        y = as_float32(x)
        check_finite(y, spec)
        if self._layout == "stream":
            return self._encode_stream(head, y)
        return self._encode_lanes(head, spec, y)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the array of a container, or of bare `.tkv` bytes as float32.

        Parameters
        ----------
        buf
            What `encode` returned, or a TKV1 file; any contiguous buffer.
        out
            Array or buffer of the size of the result that receives it; returned if given. A float
            array of the result's shape gets its values, anything else its bytes.

        Returns
        -------
        x : (heads, tokens, head_dim)
            In the dtype, byte order and memory layout (C or Fortran) that was encoded.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            `buf` is not what was written. A given `out` is then undefined.
        InvalidArgument
            `out` has another size or is read-only, or `buf` is not contiguous.
        """
        try:
            data = memoryview(numcodecs.compat.ensure_contiguous_ndarray(buf).view(np.uint8))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"tkv1: buf is not a contiguous buffer: {error}") from error
        magic = bytes(data[:4])
        if len(magic) < 4:
            raise Truncated(f"container: {len(magic)} bytes")
        if magic == BARE_MAGIC:
            file = TkvFile.parse(data)
            shape = (file.params.heads, file.n_tokens, file.params.head_dim)
            target = _Target(out, Head("lane", 0, "k", 0, shape[0], shape[2], 1, shape[1]))
            file.decode(0, file.n_tokens, out=target.array)
            return target.deliver()
        head, stream_header, rest = read_head(data)
        if head.n_tokens and head.layout == "lane":
            return _decode_lanes(head, stream_header, rest, out)
        if stream_header.nbytes:
            raise Corrupt("container: bytes after its head")
        if head.n_tokens:
            return _decode_stream(head, rest, out)
        head.spec()
        if rest.nbytes:
            raise Corrupt("container: bytes after its head")
        return _Target(out, head).deliver()

    def _encode_lanes(self, head: Head, spec: StreamSpec, y: F32) -> bytes:
        params = CODEC.fit(self._asked, spec, lambda: [y])
        CODEC.check(params, y, 0)
        check_overflow(y, head.dtype, params.step / 2)
        stream_header = CODEC.pack(params)
        tag = header_tag(stream_header)
        parts = [seal_record(MAGIC, head.pack() + stream_header)]
        for block in range(head.n_blocks):
            first, n = head.span(block)
            encoder = CODEC.encoder(params, first)
            encoder.push(y[:, first : first + n])
            frame = pack_frame(
                codec=CODEC.number,
                kind=head.kind,
                owner=0,
                layer=0,
                first_token=first,
                n_tokens=n,
                header_tag=tag,
                error=encoder.error,
                payload=encoder.payload(),
            )
            parts.append(frame)
        return b"".join(parts)

    def _encode_stream(self, head: Head, y: F32) -> bytes:
        rotated = self._kind == "k" and self._pre_rope
        fields: dict[str, Any] = {
            "kind": self._kind,
            "layout": "stream",
            "theta": self._theta,
            "pre_rope": self._pre_rope,
            "sink": self._asked.sink,
            "sink_div": self._asked.sink_div,
            "block_tokens": self._block_tokens,
            "ar": self._asked.ar,
        }
        step = self._stream_step(y, rotated, fields)
        check_overflow(y, head.dtype, step / math.sqrt(2.0) if rotated else step / 2)
        file = encode_stream(y, step=step, **fields)
        return seal_record(MAGIC, head.pack()) + seal_record(FILE_MAGIC, file)

    def _stream_step(self, y: F32, rotated: bool, fields: dict[str, Any]) -> float:
        policy, value = self._asked.policy
        if policy == "rel_step":
            rms = math.sqrt(float(np.mean(np.square(y, dtype=np.float64))))
            return value * (rms or 1.0)
        if policy == "rmse":
            return value * math.sqrt(12.0)
        if policy == "max_error":
            return value * (math.sqrt(2.0) if rotated else 2.0)
        return value if policy == "step" else step_for_bpv(y, value, **fields)


class _Target:
    """The array that is decoded into: the caller's if it fits, else one to copy from."""

    def __init__(self, out: Any, head: Head) -> None:
        self._out = out
        self._head = head
        shape, dtype = (head.heads, head.n_tokens, head.head_dim), DTYPES[head.dtype]
        size = math.prod(shape) * dtype.itemsize
        if out is not None:
            try:
                given = numcodecs.compat.ensure_ndarray_like(out)
            except (TypeError, ValueError) as error:
                raise InvalidArgument(f"tkv1: out is not a buffer: {error}") from error
            if not given.flags.writeable:
                raise InvalidArgument("tkv1: out is read-only")
            if given.nbytes != size:
                raise InvalidArgument(f"tkv1: out has {given.nbytes} bytes, expected {size}")
        # float64 output holds float32 values, and only these are decoded.
        narrow = DTYPES[0] if dtype == np.float64 else dtype
        direct = (
            isinstance(out, np.ndarray)
            and (out.shape, out.dtype) == (shape, narrow)
            and out.flags.c_contiguous
            and out.flags.writeable
        )
        self.array: npt.NDArray[Any] = out if direct else np.empty(shape, narrow)

    def deliver(self) -> Any:
        """Return the result, in the caller's memory if he gave some."""
        if self.array is self._out:
            return self._out
        result = self.array.astype(DTYPES[self._head.dtype], copy=False)
        out = self._out
        if isinstance(out, np.ndarray) and out.shape == result.shape and _is_float(out.dtype):
            out[...] = result  # any strides and byte order
            return out
        result = self._head.restore(result)
        return result if out is None else numcodecs.compat.ndarray_copy(result, out)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.newbyteorder("=") in DTYPES if dtype.kind == "f" else dtype in DTYPES


def _decode_lanes(head: Head, stream_header: memoryview, rest: memoryview, out: Any) -> Any:
    params = CODEC.unpack(head.spec(), stream_header)
    payloads = read_frames(head, CODEC.number, stream_header, rest)
    target = _Target(out, head)
    plan = Plan()
    for block, payload in enumerate(payloads):
        first, n = head.span(block)
        plan.add(
            CODEC,
            params,
            payload,
            first_token=first,
            n_tokens=n,
            start=first,
            stop=first + n,
            out=target.array[:, first : first + n],
            where=f"block {block}",
        )
    plan.run()
    return target.deliver()


def _decode_stream(head: Head, rest: memoryview, out: Any) -> Any:
    data, after = next_record(FILE_MAGIC, rest)
    if after.nbytes:
        raise Corrupt("container: bytes after its end")
    file = TkvFile.parse(data)
    p = file.params
    found = (p.layout, p.kind, p.heads, p.head_dim, p.block_tokens, file.n_tokens)
    if found != (head.layout, head.kind, *head[4:]):
        raise Corrupt(f"container: its head says {head}, its file {found}")
    dtype = DTYPES[head.dtype]
    target = _Target(out, head)
    if target.array.dtype == np.float32:
        file.decode(0, file.n_tokens, out=target.array)
        return target.deliver()
    with np.errstate(over="ignore"):
        target.array[...] = file.decode(0, file.n_tokens).astype(dtype)
    if not np.isfinite(target.array.astype(np.float32)).all():
        raise InvalidArgument(f"container: a value overflows {dtype.name}")
    return target.deliver()
