"""The `.tkv` file: one stream with its header, in the lane or the stream layout.

FORMAT.md section 6. It has no checksum: truncations and malformed headers are errors, flipped
payload bits can only be promised not to crash or read out of bounds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import Corrupt, InvalidArgument, Truncated
from ..frame import BytesLike
from ..plan import Plan
from ..spec import F32, Kind, StreamSpec
from .codec import CODEC
from .params import (
    MAX_UNITS,
    N_CLASSES,
    TKV1Params,
    check_header,
    lane_width,
    prior_table,
    read_varints,
    varint,
)

MAGIC = b"TKV1"
Layout = Literal["lane", "stream"]
_V, _PRE_ROPE, _AR, _LANE, _LANE_WIDTH = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class TkvParams:
    """Header fields of a `.tkv` file, without the channel statistics.

    Attributes
    ----------
    kind, heads, head_dim
        The stream.
    step
        Quantiser step, float64.
    layout
        ``"lane"``: integers, one substream per head or channel group; codes the values given.
        ``"stream"``: float64, one substream per block; K is un-rotated with `theta` first if
        `pre_rope`.
    theta, pre_rope
        RoPE of the stream layout, half-split pairs.
    sink, sink_div, ar, lane_channels
        As in `TKV1`.
    block_tokens
        Tokens per block.
    """

    kind: Kind
    heads: int
    head_dim: int
    step: float
    layout: Layout = "lane"
    theta: float = 1e5
    pre_rope: bool = False
    sink: int = 4
    sink_div: int = 16
    block_tokens: int = 128
    ar: bool = True
    lane_channels: int = 0

    def __post_init__(self) -> None:
        StreamSpec(self.kind, self.heads, self.head_dim)
        lane_width(self.head_dim, self.lane_channels)
        if not (math.isfinite(self.step) and self.step > 0):
            raise InvalidArgument(f"TKV1: step {self.step!r} is not a positive number")
        if self.layout not in ("lane", "stream"):
            raise InvalidArgument(f"TKV1: layout {self.layout!r}, expected 'lane' or 'stream'")
        if not 1 <= self.block_tokens < 1 << 32:
            raise InvalidArgument(f"TKV1: block_tokens {self.block_tokens} is not 1 to 2^32 - 1")
        if not 0 <= self.sink < 1 << 63 or not 1 <= self.sink_div < 1 << 24:
            raise InvalidArgument(f"TKV1: sink {self.sink}, sink_div {self.sink_div} out of range")
        if self.layout == "lane":
            if self.kind == "k" and self.pre_rope:
                raise InvalidArgument("TKV1: the lane layout codes K as given; set pre_rope=False")
            unit = self.step / self.sink_div
            tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
            if not float(tiny) <= unit <= float(largest) / (2 * MAX_UNITS):
                raise InvalidArgument(f"TKV1: step {self.step!r} over sink_div is outside float32")
        elif self.rotated and not (math.isfinite(self.theta) and self.theta > 0):
            raise InvalidArgument(f"TKV1: theta {self.theta!r} is not a positive number")

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def rotated(self) -> bool:
        """Whether K is un-rotated before coding."""
        return self.layout == "stream" and self.kind == "k" and self.pre_rope

    @property
    def entries_per_block(self) -> int:
        if self.layout == "stream":
            return 1
        return self.channels // lane_width(self.head_dim, self.lane_channels)


class _Statistics(NamedTuple):
    """Channel mean (lane: in units, stream: in steps), AR coefficient, class."""

    mean: npt.NDArray[np.int64]
    rho: npt.NDArray[np.uint8]
    cls: npt.NDArray[np.uint8]


class GpuTables(NamedTuple):
    """Tables of the lane layout for a GPU decoder.

    Attributes
    ----------
    mean : (channels,) int32
    rho, cls : (channels,) uint32
    lanes : (n_lanes, 6) uint64
        Byte offset, byte length, first token, tokens, head, channel group of each lane.
    """

    mean: npt.NDArray[np.int32]
    rho: npt.NDArray[np.uint32]
    cls: npt.NDArray[np.uint32]
    lanes: npt.NDArray[np.uint64]


class StreamEncoder:
    """Append-friendly encoder of one `.tkv` stream.

    Parameters
    ----------
    params
        The header.
    prefill : (heads, n, head_dim), n >= 1
        The first tokens; their statistics fix the stream.

    Raises
    ------
    InvalidArgument
        Wrong shape, non-finite values, or values beyond 2^24 units.
    """

    def __init__(self, params: TkvParams, prefill: npt.NDArray[Any]) -> None:
        self.params = params
        self._blocks: list[bytes] = []
        self._n_tokens = 0
        first = self._coded(prefill)
        if first.shape[1] == 0:
            raise InvalidArgument("TKV1: the prefill needs at least one token")
        statistics = _core.Statistics(params.heads, params.head_dim)
        statistics.add_mean(first)
        statistics.finish_mean()
        statistics.add_moments(first)
        lane = params.layout == "lane"
        unit = float(np.float32(params.step / params.sink_div)) if lane else params.step
        self._statistics = _Statistics(
            *statistics.finish(params.channels, params.step, unit, params.ar, params.kind == "k")
        )
        if lane and (np.abs(self._statistics.mean) >= 2 * MAX_UNITS).any():
            raise InvalidArgument(
                "TKV1: a channel mean is beyond 2^24 units: the step is too small"
            )
        self._tail = first[:, :0]
        self._push(first)

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return self._n_tokens

    @property
    def n_sealed_blocks(self) -> int:
        """Full blocks; they never change again."""
        return len(self._blocks)

    def append(self, x: npt.NDArray[Any]) -> None:
        """Append tokens ``(heads, n, head_dim)``."""
        self._push(self._coded(x))

    def to_bytes(self) -> bytes:
        """Return the `.tkv` bytes; the tail is coded as a short block."""
        p = self.params
        flags = (
            (_V if p.kind == "v" else 0)
            | (_PRE_ROPE if p.pre_rope else 0)
            | (_AR if p.ar else 0)
            | (_LANE if p.layout == "lane" else 0)
            | (_LANE_WIDTH if p.layout == "lane" and self._narrow else 0)
        )
        head = [MAGIC, bytes([flags]), varint(p.heads), varint(p.head_dim)]
        head.append(struct.pack("<dd", p.theta, p.step))
        head += map(varint, (p.sink, p.sink_div, p.block_tokens, self._n_tokens))
        if flags & _LANE_WIDTH:
            head.append(varint(p.lane_channels))
        mean, rho, cls = self._statistics
        for j in range(p.channels):
            head.append(_core.write_zigzags(mean[j : j + 1]))
            head.append(bytes([cls[j], rho[j]]) if p.ar else bytes([cls[j] | 0x80]))
        tail = [self._encode(self._tail)] if self._tail.shape[1] else []
        return b"".join(head + self._blocks + tail)

    @property
    def _narrow(self) -> bool:
        return lane_width(self.params.head_dim, self.params.lane_channels) < self.params.head_dim

    def _coded(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        p = self.params
        if x.ndim != 3 or x.shape[0] != p.heads or x.shape[2] != p.head_dim:
            raise InvalidArgument(
                f"TKV1: shape {x.shape}, expected (heads={p.heads}, n_tokens, head_dim={p.head_dim})"
            )
        narrow = np.ascontiguousarray(x, np.float32)
        at = _core.find_beyond(narrow, np.inf)
        if at >= 0:
            head, token, channel = (int(i) for i in np.unravel_index(at, narrow.shape))
            raise InvalidArgument(
                f"TKV1: value {narrow[head, token, channel]} at head {head}, token "
                f"{self._n_tokens + token}, channel {channel} is not finite"
            )
        if p.layout == "lane":
            return narrow
        coded = narrow.astype(np.float64)
        if p.rotated:
            _core.rotate(coded, p.theta, self._n_tokens, -1.0)
        return coded

    def _push(self, y: npt.NDArray[Any]) -> None:
        block = self.params.block_tokens
        pending = np.concatenate([self._tail, y], axis=1) if self._tail.shape[1] else y
        blocks = []
        at = 0
        while pending.shape[1] - at >= block:
            first = (len(self._blocks) + len(blocks)) * block
            blocks.append(self._encode(pending[:, at : at + block], first))
            at += block
        tail = pending[:, at:].copy()
        if tail.shape[1]:  # refuse what cannot be coded before anything changes
            self._encode(tail, (len(self._blocks) + len(blocks)) * block)
        self._blocks += blocks
        self._tail = tail
        self._n_tokens += y.shape[1]

    def _encode(self, y: npt.NDArray[Any], first_token: int | None = None) -> bytes:
        p, (mean, rho, cls) = self.params, self._statistics
        first = len(self._blocks) * p.block_tokens if first_token is None else first_token
        y = np.ascontiguousarray(y)
        if p.layout == "stream":
            data = _core.stream_encode(
                prior_table(), p.step, p.sink, p.sink_div, mean, rho, cls, first, y
            )
            return varint(len(data)) + data
        params = _lane_params(p, self._statistics)
        encoder = CODEC.encoder(params, first)
        encoder.push(y)
        return encoder.payload()


@dataclass(frozen=True, slots=True)
class TkvFile:
    """A parsed `.tkv` stream.

    Attributes
    ----------
    params
        The header.
    n_tokens
        Tokens of the stream.
    """

    params: TkvParams
    n_tokens: int
    _data: memoryview
    _statistics: _Statistics
    _entries: npt.NDArray[np.uint64]

    @classmethod
    def parse(cls, data: BytesLike) -> TkvFile:
        """Parse `.tkv` bytes; `data` is referred to, not copied.

        Raises
        ------
        Truncated
            The bytes end before the last block does.
        Corrupt
            Not TKV1, or a header that no encoder writes.
        """
        view = memoryview(data).cast("B")
        if view[:4] != MAGIC[: view.nbytes]:
            raise Corrupt(f"not a TKV1 stream: magic {bytes(view[:4])!r}")
        if view.nbytes < 5:
            raise Truncated(f"TKV1 header ends after {view.nbytes} bytes")
        flags = view[4]
        (heads, head_dim), at = read_varints(view, 5, 2)
        if view.nbytes < at + 16:
            raise Truncated(f"TKV1 header ends after {view.nbytes} bytes")
        theta, step = struct.unpack_from("<dd", view, at)
        (sink, sink_div, block, n_tokens), at = read_varints(view, at + 16, 4)
        lane_channels = 0
        if flags & _LANE_WIDTH:
            (lane_channels,), at = read_varints(view, at, 1)
        if block == 0 or heads == 0 or head_dim % 2 or head_dim == 0:
            raise Corrupt(f"TKV1 header: {heads} heads of {head_dim}, {block} tokens a block")
        check_header(step, sink_div, head_dim, lane_channels)
        try:
            params = TkvParams(
                kind="v" if flags & _V else "k",
                heads=heads,
                head_dim=head_dim,
                step=step,
                layout="lane" if flags & _LANE else "stream",
                theta=theta,
                pre_rope=bool(flags & _PRE_ROPE),
                sink=sink,
                sink_div=sink_div,
                block_tokens=block,
                ar=bool(flags & _AR),
                lane_channels=lane_channels,
            )
        except InvalidArgument as error:
            raise Corrupt(f"TKV1 header: {error}") from error
        mean, cls_, rho, at = _core.read_tkv_channels(view, at, params.channels, params.ar)
        if (cls_ >= N_CLASSES).any():
            raise Corrupt("TKV1 header: class out of range")
        if params.layout == "lane" and (np.abs(mean) >= 2 * MAX_UNITS).any():
            raise Corrupt("TKV1 header: mean out of range")
        # Every entry is at least its length byte: no count beyond the bytes left is believed.
        n_entries = -(-n_tokens // block) * params.entries_per_block
        if n_entries > view.nbytes - at:
            raise Truncated(
                f"TKV1: {n_tokens} tokens need more than the {view.nbytes - at} bytes left"
            )
        entries, _ = _core.scan_entries(view, at, n_entries)
        return cls(params, n_tokens, view, _Statistics(mean, rho, cls_), entries)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_tokens // self.params.block_tokens)

    def block_entries(self, block: int) -> memoryview:
        """Return the entries of one block as stored, lengths included: a frame's payload."""
        n = self.params.entries_per_block
        if not 0 <= block < self.n_blocks:
            raise InvalidArgument(f"TKV1: block {block} of {self.n_blocks}")
        first, last = self._entries[block * n], self._entries[(block + 1) * n - 1]
        start = int(first[0]) - len(varint(int(first[1])))
        return self._data[start : int(last[0] + last[1])]

    def lane_params(self) -> TKV1Params:
        """Return the parameters of the lane layout as frames use them."""
        if self.params.layout != "lane":
            raise InvalidArgument("TKV1: the stream layout has no lanes")
        return _lane_params(self.params, self._statistics)

    def decode(
        self,
        start: int = 0,
        stop: int | None = None,
        out: npt.NDArray[Any] | None = None,
        n_threads: int | None = None,
    ) -> npt.NDArray[Any]:
        """Decode tokens ``[start, stop)``, only the blocks that cover them.

        Returns
        -------
        out : (heads, stop - start, head_dim) float32
            `out` if it was given.

        Raises
        ------
        InvalidArgument
            A range outside the stream, or an `out` of the wrong shape or dtype.
        Corrupt
            A block that does not decode.
        """
        p = self.params
        stop = self.n_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.n_tokens:
            raise InvalidArgument(f"TKV1: tokens [{start}, {stop}) of {self.n_tokens}")
        shape = (p.heads, stop - start, p.head_dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32:
            raise InvalidArgument(f"TKV1: out is {out.dtype} {out.shape}, expected float32 {shape}")
        if p.layout == "lane":
            self._decode_lanes(start, stop, out, n_threads)
        else:
            self._decode_stream(start, stop, out)
        return out

    def gpu_tables(self) -> GpuTables:
        """Return the tables of the lane layout; `InvalidArgument` for the stream layout."""
        p = self.params
        if p.layout != "lane":
            raise InvalidArgument("TKV1: the stream layout has no lanes")
        groups = p.head_dim // lane_width(p.head_dim, p.lane_channels)
        index = np.arange(len(self._entries), dtype=np.uint64)
        per_block = np.uint64(p.entries_per_block)
        first = index // per_block * np.uint64(p.block_tokens)
        lanes = np.empty((len(index), 6), np.uint64)
        lanes[:, 0:2] = self._entries
        lanes[:, 2] = first
        lanes[:, 3] = np.minimum(np.uint64(p.block_tokens), np.uint64(self.n_tokens) - first)
        lanes[:, 4] = index % per_block // np.uint64(groups)
        lanes[:, 5] = index % np.uint64(groups)
        mean, rho, cls = self._statistics
        return GpuTables(mean.astype(np.int32), rho.astype(np.uint32), cls.astype(np.uint32), lanes)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Block, first token and token count of the blocks that cover ``[start, stop)``."""
        block = self.params.block_tokens
        blocks = range(start // block, -(-stop // block)) if stop > start else range(0)
        return [(b, b * block, min(block, self.n_tokens - b * block)) for b in blocks]

    def _decode_lanes(
        self, start: int, stop: int, out: npt.NDArray[Any], n_threads: int | None
    ) -> None:
        params, plan = self.lane_params(), Plan()
        for block, first, n in self._ranges(start, stop):
            lo, hi = max(start, first), min(stop, first + n)
            plan.add(
                CODEC,
                params,
                self.block_entries(block),
                first_token=first,
                n_tokens=n,
                start=lo,
                stop=hi,
                out=out[:, lo - start : hi - start],
                where=f"block {block}",
            )
        plan.run(n_threads)

    def _decode_stream(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        p, (mean, rho, cls) = self.params, self._statistics
        for block, first, n in self._ranges(start, stop):
            at, n_bytes = (int(i) for i in self._entries[block])
            lo, hi = max(start, first), min(stop, first + n)
            y = _core.stream_decode(
                prior_table(),
                p.heads,
                p.head_dim,
                p.step,
                p.sink,
                p.sink_div,
                mean,
                rho,
                cls,
                first,
                hi - first,
                self._data[at : at + n_bytes],
            )
            wanted = np.ascontiguousarray(y[:, lo - first :])
            if p.rotated:
                _core.rotate(wanted, p.theta, lo, 1.0)
            with np.errstate(over="ignore"):
                out[:, lo - start : hi - start] = wanted


def _lane_params(p: TkvParams, statistics: _Statistics) -> TKV1Params:
    mean, rho, cls = statistics
    return TKV1Params(
        StreamSpec(p.kind, p.heads, p.head_dim),
        p.step,
        p.sink,
        p.sink_div,
        p.ar,
        lane_width(p.head_dim, p.lane_channels),
        mean.astype(np.int32),
        rho,
        cls,
    )


def encode_stream(
    x: npt.NDArray[Any],
    *,
    kind: Kind,
    step: float,
    layout: Layout = "lane",
    pre_rope: bool | None = None,
    prefill: int | None = None,
    chunk: int | None = None,
    **fields: Any,
) -> bytes:
    """Return the `.tkv` bytes of ``x`` (heads, n, head_dim).

    Parameters
    ----------
    pre_rope
        Default: True for K in the stream layout.
    prefill
        Fix the statistics from the first `prefill` tokens, then append the rest; default all.
    chunk
        Tokens per append after the prefill; default all at once.
    fields
        Further fields of `TkvParams`.
    """
    x = np.asarray(x)
    if x.ndim != 3:
        raise InvalidArgument(f"TKV1: shape {x.shape}, expected (heads, n_tokens, head_dim)")
    if pre_rope is None:
        pre_rope = kind == "k" and layout == "stream"
    params = TkvParams(
        kind, x.shape[0], x.shape[2], step, layout=layout, pre_rope=pre_rope, **fields
    )
    n = x.shape[1]
    first = n if prefill is None else min(prefill, n)
    encoder = StreamEncoder(params, x[:, :first])
    for at in range(first, n, chunk or max(n - first, 1)):
        encoder.append(x[:, at : at + (chunk or n)])
    return encoder.to_bytes()


def step_for_bpv(
    x: npt.NDArray[Any], bpv: float, *, params: TkvParams | None = None, **fields: Any
) -> float:
    """Return the step whose one-shot stream is closest to, and not above, `bpv` bits per value.

    30 bisections of ``ln(step)`` between 1e-5 and 10 times the RMS of `x`. `fields` are those of
    `encode_stream` but ``step``.
    """
    x = np.asarray(x, np.float32)
    if not (math.isfinite(bpv) and bpv > 0):
        raise InvalidArgument(f"TKV1: bpv {bpv!r} is not a positive number")
    rms = max(math.sqrt(float(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0, 1e-30)
    low, high = math.log(rms * 1e-5), math.log(rms * 10.0)
    for _ in range(30):
        middle = 0.5 * (low + high)
        try:
            if params is not None:
                encoded = StreamEncoder(replace(params, step=math.exp(middle)), x).to_bytes()
            else:
                encoded = encode_stream(x, step=math.exp(middle), **fields)
            rate = 8.0 * len(encoded) / x.size
        except InvalidArgument:  # too fine for these values
            rate = math.inf
        if rate > bpv:
            low = middle
        else:
            high = middle
    return math.exp(high)
