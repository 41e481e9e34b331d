"""The header of a `.tkv` file: parameters and channel statistics. FORMAT.md section 6."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import Corrupt, InvalidArgument, Truncated, Unsupported
from ..quantiser import means_fit, unit_fits
from ..spec import MAX_BLOCK_TOKENS, MAX_VALUES, Kind, StreamSpec
from ..stream_header import check_step
from ..varints import read_varints, varint
from .params import MAX_SINK_DIV, N_CLASSES, TKV1Params, check_lane_width, lane_width

MAGIC = b"TKV1"
Layout = Literal["lane", "stream"]
_V, _PRE_ROPE, _AR, _LANE, _LANE_WIDTH, _RESERVED = 1, 2, 4, 8, 16, 0xE0


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
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"TKV1: block_tokens {self.block_tokens} is not 1 to {MAX_BLOCK_TOKENS}"
            )
        if not 0 <= self.sink < 1 << 63 or not 1 <= self.sink_div <= MAX_SINK_DIV:
            raise InvalidArgument(f"TKV1: sink {self.sink}, sink_div {self.sink_div} out of range")
        if self.layout == "lane":
            if self.kind == "k" and self.pre_rope:
                raise InvalidArgument("TKV1: the lane layout codes K as given; set pre_rope=False")
            if not unit_fits(self.step / self.sink_div):
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


class ChannelStatistics(NamedTuple):
    """Channel mean (lane: in units, stream: in steps), AR coefficient, class."""

    mean: npt.NDArray[np.int64]
    rho: npt.NDArray[np.uint8]
    cls: npt.NDArray[np.uint8]


def pack_header(p: TkvParams, n_tokens: int, statistics: ChannelStatistics) -> bytes:
    """Return everything of a `.tkv` file that stands before the blocks."""
    narrow = p.layout == "lane" and lane_width(p.head_dim, p.lane_channels) < p.head_dim
    flags = (
        (_V if p.kind == "v" else 0)
        | (_PRE_ROPE if p.pre_rope else 0)
        | (_AR if p.ar else 0)
        | (_LANE if p.layout == "lane" else 0)
        | (_LANE_WIDTH if narrow else 0)
    )
    head = [MAGIC, bytes([flags]), varint(p.heads), varint(p.head_dim)]
    head.append(struct.pack("<dd", p.theta, p.step))
    head += map(varint, (p.sink, p.sink_div, p.block_tokens, n_tokens))
    if narrow:
        head.append(varint(p.lane_channels))
    mean, rho, cls = statistics
    for j in range(p.channels):
        head.append(_core.write_zigzags(mean[j : j + 1]))
        head.append(bytes([cls[j], rho[j]]) if p.ar else bytes([cls[j] | 0x80]))
    return b"".join(head)


def unpack_header(view: memoryview) -> tuple[TkvParams, int, ChannelStatistics, int]:
    """Read a header: the parameters, the token count, the statistics, and the offset behind it.

    Raises
    ------
    Truncated
        The bytes end inside the header.
    Corrupt
        Not TKV1, or a header that no encoder writes.
    Unsupported
        Reserved flags.
    """
    if view[:4] != MAGIC[: view.nbytes]:
        raise Corrupt(f"not a TKV1 stream: magic {bytes(view[:4])!r}")
    if view.nbytes < 5:
        raise Truncated(f"TKV1 header ends after {view.nbytes} bytes")
    flags = view[4]
    if flags & _RESERVED or (flags & _LANE_WIDTH and not flags & _LANE):
        raise Unsupported(f"TKV1 header: flags {flags:#04x}; upgrade to read it")
    (heads, head_dim), at = read_varints(view, 5, 2, "TKV1 header")
    if view.nbytes < at + 16:
        raise Truncated(f"TKV1 header ends after {view.nbytes} bytes")
    theta, step = struct.unpack_from("<dd", view, at)
    (sink, sink_div, block, n_tokens), at = read_varints(view, at + 16, 4, "TKV1 header")
    lane_channels = 0
    if flags & _LANE_WIDTH:
        (lane_channels,), at = read_varints(view, at, 1, "TKV1 header")
    if block == 0 or heads == 0 or head_dim % 2 or head_dim == 0:
        raise Corrupt(f"TKV1 header: {heads} heads of {head_dim}, {block} tokens a block")
    check_step(step, sink_div, MAX_SINK_DIV, "TKV1 header")
    check_lane_width(lane_channels, head_dim, "TKV1 header")
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
    mean, cls, rho, at = _core.read_tkv_channels(view, at, params.channels, params.ar)
    if (cls >= N_CLASSES).any():
        raise Corrupt("TKV1 header: class out of range")
    if not means_fit(mean):
        raise Corrupt("TKV1 header: mean out of range")
    if n_tokens * params.channels > MAX_VALUES:
        raise Corrupt(f"TKV1 header: {n_tokens} tokens of {params.channels} channels")
    return params, n_tokens, ChannelStatistics(mean, rho, cls), at


def lane_params(p: TkvParams, statistics: ChannelStatistics) -> TKV1Params:
    """Return the parameters of a lane-layout stream as frames use them."""
    mean, rho, cls = statistics
    return TKV1Params(
        StreamSpec(p.kind, p.heads, p.head_dim),
        p.step,
        p.sink,
        p.sink_div,
        p.ar,
        mean.astype(np.int32),
        rho,
        cls,
        lane_width(p.head_dim, p.lane_channels),
    )
