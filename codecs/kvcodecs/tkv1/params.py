"""TKV1: what the user asks, what the stream header stores, and how one becomes the other.

FORMAT.md sections 3.1 (parameters) and 3.3 (stream header).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt, InvalidArgument
from ..frame import BytesLike
from ..lanes import CHANNEL_DTYPE, LANE_DTYPE, LaneTables
from ..quantiser import QuantiserConfig, QuantiserParams, check_integer
from ..spec import StreamSpec
from ..stream_header import pack_stream_header, unpack_stream_header

CLASS_OF_ONE: Final = 8
N_CLASSES: Final = 48
PRIOR_WORDS: Final = 7056
#: Bound of headers; configurations stay below `TKV1.max_sink_div`.
MAX_SINK_DIV: Final = (1 << 24) - 1


@cache
def prior_table() -> npt.NDArray[np.uint32]:
    """Return the frozen initial models, 48 classes x 3 contexts x 49 models; read-only."""
    data = files(__package__).joinpath("prior_table.u32").read_bytes()
    table = np.frombuffer(data, dtype="<u4").astype(np.uint32)
    if table.size != PRIOR_WORDS:
        raise Corrupt(f"installed prior table has {table.size} words, expected {PRIOR_WORDS}")
    table.flags.writeable = False
    return table


@dataclass(frozen=True, slots=True)
class TKV1(QuantiserConfig):
    """Ask for the TKV1 codec: quantised residuals in adaptive binary range coding.

    Steps and bounds are those of `KVR1`. It adapts to each block, which is smaller where the spread
    of a channel changes from token to token, or where a few values are far beyond all others.

    Attributes
    ----------
    rel_step
        Quantiser step over the RMS of the prefill, per layer and kind; 1/4 if nothing is asked.
    step
        Absolute step: values decode within ``step / 2``, those of sinks within that over
        `sink_div`.
    max_error
        Largest absolute error, of K as it was given: a step of ``2 max_error``, or
        ``sqrt(2) max_error / scaling`` for K given after RoPE, as a rotation mixes two channels.
    rmse
        Expected root mean square error: a step of ``sqrt(12) rmse``.
    bpv
        Bits per value of the prefill's payload, of 1024 tokens at most: the finest step that needs
        no more. Headers and records come on top.
    sink, sink_div
        The first `sink` tokens are coded `sink_div` (1 to 2^16) times finer.
    ar
        Predict each channel from its previous token.
    lane_channels
        Channels of an independently decodable lane: even, a divisor of head_dim; 0 for a head.

    Notes
    -----
    At most one of the first five. Bounds hold for what is read as float32: reading as float16 or
    bfloat16 adds half a unit in the last place of that type.
    """

    codec: ClassVar[str] = "tkv1"
    max_sink_div: ClassVar[int] = 1 << 16

    lane_channels: int = 0

    def __post_init__(self) -> None:
        QuantiserConfig.__post_init__(self)
        check_integer(self.lane_channels, "TKV1: lane_channels")
        if self.lane_channels < 0 or self.lane_channels % 2:
            raise InvalidArgument(f"TKV1: lane_channels {self.lane_channels} is not even")


def config_from_fields(values: Mapping[str, Any]) -> TKV1:
    """Return the configuration with these JSON fields."""
    return TKV1.from_fields(values)


@dataclass(frozen=True, eq=False)
class TKV1Params(QuantiserParams):
    """What a stream header stores: `QuantiserParams`, and `width`, the channels of a lane."""

    width: int

    @property
    def n_lanes(self) -> int:
        return self.spec.channels // self.width

    @cached_property
    def lane_tables(self) -> LaneTables:
        """The plan's tables of this stream."""
        return _lane_tables(self)


def lane_channel(head_dim: int, width: int, group: int, i: int) -> int:
    """Return the channel of lane-local index `i` in channel group `group`.

    A lane holds whole RoPE pairs: channels ``c`` and ``c + head_dim / 2`` together.
    """
    base = group * width // 2
    return base + i if i < width // 2 else head_dim // 2 + base + i - width // 2


def lane_width(head_dim: int, lane_channels: int) -> int:
    """Return the channels of a lane, `head_dim` for 0; `InvalidArgument` if they do not fit."""
    width = lane_channels or head_dim
    if width % 2 or head_dim % width:
        raise InvalidArgument(
            f"TKV1: lane_channels {lane_channels} is not an even divisor of head_dim {head_dim}"
        )
    return width


def _lane_tables(params: TKV1Params) -> LaneTables:
    spec, width = params.spec, params.width
    hd, half, groups = spec.head_dim, spec.head_dim // 2, spec.head_dim // width
    order = np.arange(hd) if spec.rope is None else spec.rope.channel_order(hd)
    n_pairs = 0 if spec.rope is None else spec.rope.n_pairs
    in_head = np.array(
        [[lane_channel(hd, width, g, i) for i in range(width)] for g in range(groups)]
    )
    lanes = np.zeros(params.n_lanes, LANE_DTYPE)
    channels = np.zeros((params.n_lanes, width), CHANNEL_DTYPE)
    classes: list[npt.NDArray[np.uint8]] = []
    n_classes = 0
    for lane in range(params.n_lanes):
        head, group = divmod(lane, groups)
        of_lane = head * hd + in_head[group]
        present, dense = np.unique(params.cls[of_lane], return_inverse=True)
        channels[lane]["mean"], channels[lane]["rho"] = params.mean[of_lane], params.rho[of_lane]
        channels[lane]["models"], channels[lane]["output"] = dense, order[in_head[group]]
        first_pair = group * width // 2
        lanes[lane]["head"], lanes[lane]["first_pair"] = head, min(first_pair, n_pairs)
        lanes[lane]["n_pairs"] = min(max(n_pairs - first_pair, 0), min(width // 2, half))
        lanes[lane]["channels"], lanes[lane]["classes"] = lane * width, n_classes
        lanes[lane]["n_classes"] = len(present)
        classes.append(present)
        n_classes += len(present)
    lanes["width"], lanes["unit"] = width, params.unit
    lanes["sink"], lanes["sink_div"] = params.sink, params.sink_div
    return LaneTables(lanes, channels.ravel(), np.concatenate(classes), prior_table())


def pack_params(params: TKV1Params) -> bytes:
    """Return the stream header. FORMAT.md section 3.3."""
    return pack_stream_header(params, 0 if params.width == params.spec.head_dim else params.width)


def unpack_params(spec: StreamSpec, data: BytesLike) -> TKV1Params:
    """Read a stream header of the stream `spec`."""
    quantiser, (lane_channels,) = unpack_stream_header(
        spec,
        data,
        "TKV1 stream header",
        n_classes=N_CLASSES,
        max_sink_div=MAX_SINK_DIV,
        n_more=1,
    )
    check_lane_width(lane_channels, spec.head_dim, "TKV1 stream header")
    return TKV1Params.extend(quantiser, width=lane_channels or spec.head_dim)


def check_lane_width(lane_channels: int, head_dim: int, where: str) -> None:
    """Raise `Corrupt` for a lane width that no encoder writes."""
    if lane_channels % 2 or (lane_channels and head_dim % lane_channels):
        raise Corrupt(f"{where}: bad lane width {lane_channels} for head_dim {head_dim}")
