"""TKV1: what the user asks, what the stream header stores, and how one becomes the other.

FORMAT.md sections 3.1 (parameters) and 3.3 (stream header).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from .._core import read_zigzags, write_zigzags
from ..errors import Corrupt, InvalidArgument, Truncated, Unsupported
from ..frame import BytesLike, byte_view
from ..plan import CHANNEL_DTYPE, LANE_DTYPE, LaneTables
from ..spec import StreamSpec

N_CLASSES = 48
PRIOR_WORDS = 7056
#: Values are integers of the unit; float32 holds these exactly and re-encoding is idempotent.
MAX_UNITS = 1 << 23
MAX_SINK_DIV = 1 << 16
#: A session's unit keeps this many significant bits: integer times unit is then exact in float32 up
#: to 2^16 units, and the error bound holds without a rounding term. It shrinks by less than 1/128.
_UNIT_BITS = 8
EXACT_UNITS = 1 << 16
_POLICIES = ("rel_step", "step", "max_error", "rmse", "bpv")


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
class TKV1:
    """Ask for the TKV1 codec. At most one of the first five; none means ``rel_step=1/4``.

    Attributes
    ----------
    rel_step
        Quantiser step over the RMS of the prefill, per layer and kind.
    step
        Absolute step: decoded values are within ``step / 2``.
    max_error
        Largest absolute error of a value, of K as it was given: a step of ``2 max_error``, or
        ``sqrt(2) max_error / scaling`` for K given after RoPE, as a rotation mixes two channels.
    rmse
        Expected root mean square error: a step of ``sqrt(12) rmse``.
    bpv
        Bits per value of the prefill: the finest step that needs no more.
    sink, sink_div
        The first `sink` positions are coded `sink_div` times finer.
    ar
        Fit a one-token predictor per channel.
    lane_channels
        Channels of an independently decodable lane: even, a divisor of head_dim; 0 for a head.
    """

    rel_step: float | None = None
    step: float | None = None
    max_error: float | None = None
    rmse: float | None = None
    bpv: float | None = None
    sink: int = 4
    sink_div: int = 16
    ar: bool = True
    lane_channels: int = 0

    def __post_init__(self) -> None:
        given = [name for name in _POLICIES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgument(f"TKV1: give one of {', '.join(given)}, not several")
        for name in given:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise InvalidArgument(f"TKV1: {name} {value!r} is not a number")
            try:
                number = float(value)
            except OverflowError:  # an integer beyond float64
                number = math.inf
            if not (number > 0 and math.isfinite(number)):
                raise InvalidArgument(f"TKV1: {name} is not a positive, finite number")
            object.__setattr__(self, name, number)
        if not given:
            object.__setattr__(self, "rel_step", 0.25)
        for name in ("sink", "sink_div", "lane_channels"):
            if type(getattr(self, name)) is not int:
                raise InvalidArgument(f"TKV1: {name} {getattr(self, name)!r} is not an integer")
        if not isinstance(self.ar, bool):
            raise InvalidArgument(f"TKV1: ar {self.ar!r} is not True or False")
        if not 0 <= self.sink < 1 << 32:
            raise InvalidArgument(f"TKV1: sink {self.sink} is not 0 to 2^32 - 1")
        if not 1 <= self.sink_div <= MAX_SINK_DIV:
            raise InvalidArgument(f"TKV1: sink_div {self.sink_div} is not 1 to {MAX_SINK_DIV}")
        if self.lane_channels < 0 or self.lane_channels % 2:
            raise InvalidArgument(f"TKV1: lane_channels {self.lane_channels} is not even")

    @property
    def codec(self) -> str:
        return "tkv1"

    @property
    def policy(self) -> tuple[str, float]:
        """Name and value of the step policy."""
        name = next(name for name in _POLICIES if getattr(self, name) is not None)
        return name, float(getattr(self, name))

    def to_json(self) -> dict[str, object]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _POLICIES}
        policy, value = self.policy
        return {"codec": "tkv1", policy: value, **values}


def config_from_fields(values: Mapping[str, object]) -> TKV1:
    """Return the configuration with these JSON fields."""
    known = {f.name for f in fields(TKV1)}
    if set(values) - known:
        raise Unsupported(f"TKV1: configuration fields {sorted(set(values) - known)}; upgrade")
    try:
        return TKV1(**values)  # type: ignore[arg-type]
    except (TypeError, InvalidArgument) as error:
        raise Corrupt(f"TKV1: configuration {dict(values)!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class TKV1Params:
    """What a stream header stores.

    Attributes
    ----------
    spec
        The stream.
    step
        Quantiser step as float64; decoded values are within half of it.
    sink, sink_div, ar
        As in `TKV1`.
    width
        Channels of a lane.
    mean : (channels,) int32
        Channel means in units, coded channel order.
    rho : (channels,) uint8
        AR(1) coefficients in sixteenths.
    cls : (channels,) uint8
        Spread classes.
    """

    spec: StreamSpec
    step: float
    sink: int
    sink_div: int
    ar: bool
    width: int
    mean: npt.NDArray[np.int32]
    rho: npt.NDArray[np.uint8]
    cls: npt.NDArray[np.uint8]
    _lanes: list[LaneTables] = field(default_factory=list, repr=False)

    @property
    def unit(self) -> float:
        """``step / sink_div`` as float32: every decoded value is an integer times this."""
        return float(np.float32(self.step / self.sink_div))

    @property
    def n_lanes(self) -> int:
        return self.spec.channels // self.width

    def lane_tables(self) -> LaneTables:
        """Return the plan's tables of this stream; built on first use."""
        if not self._lanes:
            self._lanes.append(_lane_tables(self))
        return self._lanes[0]


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


# ---------------------------------------------------------------- step and unit


def session_step(step: float, sink_div: int, where: str) -> float:
    """Return the step that a session uses for `step`: at most it, with a short unit.

    Raises
    ------
    InvalidArgument
        The unit leaves the normal float32 numbers.
    """
    unit = step / sink_div
    # A little above the least normal number, since the unit is rounded down below.
    if not (unit_fits(unit) and unit_fits(unit * (1 - 2.0**-7))):
        raise InvalidArgument(f"{where}: step {step!r} over sink_div {sink_div} is outside float32")
    mantissa, exponent = math.frexp(unit)
    return (
        math.ldexp(math.floor(math.ldexp(mantissa, _UNIT_BITS)), exponent - _UNIT_BITS) * sink_div
    )


# ---------------------------------------------------------------- stream header

_HEADER_VERSION = 1
_AR_FLAG = 1


def pack_params(params: TKV1Params) -> bytes:
    """Return the stream header. FORMAT.md section 3.3."""
    spec = params.spec
    head = [
        bytes([_HEADER_VERSION, _AR_FLAG if params.ar else 0]),
        varint(spec.heads),
        varint(spec.head_dim),
        struct.pack("<d", params.step),
        varint(params.sink),
        varint(params.sink_div),
        varint(0 if params.width == spec.head_dim else params.width),
        write_zigzags(params.mean.astype(np.int64)),
        params.cls.tobytes(),
    ]
    if params.ar:
        rho = np.append(params.rho, np.zeros(params.rho.size % 2, np.uint8))
        head.append((rho[0::2] | rho[1::2] << 4).astype(np.uint8).tobytes())
    return b"".join(head)


def unpack_params(spec: StreamSpec, data: BytesLike) -> TKV1Params:
    """Read a stream header of the stream `spec`."""
    view = byte_view(data)
    if view.nbytes < 2:
        raise Truncated(f"TKV1 stream header: {view.nbytes} bytes")
    if view[0] != _HEADER_VERSION or view[1] & ~_AR_FLAG:
        raise Unsupported(f"TKV1 stream header: version {view[0]}, flags {view[1]:#x}; upgrade")
    ar = bool(view[1] & _AR_FLAG)
    (heads, head_dim), at = read_varints(view, 2, 2)
    if view.nbytes < at + 8:
        raise Truncated(f"TKV1 stream header: {view.nbytes} bytes")
    (step,) = struct.unpack_from("<d", view, at)
    (sink, sink_div, lane_channels), at = read_varints(view, at + 8, 3)
    if (heads, head_dim) != (spec.heads, spec.head_dim):
        raise Corrupt(
            f"TKV1 stream header: {heads} heads of {head_dim}, "
            f"expected {spec.heads} of {spec.head_dim}"
        )
    check_header(step, sink_div, head_dim, lane_channels)
    if not unit_fits(step / sink_div):
        raise Corrupt(f"TKV1 stream header: step {step!r} over sink_div {sink_div}")
    mean, at = read_zigzags(view, at, spec.channels)
    rho_bytes = (spec.channels + 1) // 2 if ar else 0
    if view.nbytes != at + spec.channels + rho_bytes:
        kind = Truncated if view.nbytes < at + spec.channels + rho_bytes else Corrupt
        raise kind(f"TKV1 stream header: {view.nbytes} bytes for {spec.channels} channels")
    cls = np.frombuffer(view, np.uint8, spec.channels, at).copy()
    rho = np.zeros(spec.channels, np.uint8)
    if ar:
        packed = np.frombuffer(view, np.uint8, rho_bytes, at + spec.channels)
        both = np.stack([packed & 15, packed >> 4], axis=1).ravel()
        if both[spec.channels :].any():
            raise Corrupt("TKV1 stream header: padding is not zero")
        rho = both[: spec.channels].copy()
    if not means_fit(mean):
        raise Corrupt("TKV1 stream header: mean out of range")
    if (cls >= N_CLASSES).any():
        raise Corrupt("TKV1 stream header: class out of range")
    width = lane_channels or head_dim
    return TKV1Params(spec, step, sink, sink_div, ar, width, mean.astype(np.int32), rho, cls)


def unit_fits(unit: float) -> bool:
    """Whether `unit` and every value below 2^24 units are normal float32 numbers."""
    tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return tiny <= unit <= largest / (2 * MAX_UNITS)


def means_fit(mean: npt.NDArray[np.int64]) -> bool:
    """Whether channel means are below 2^24 units; abs() would wrap for the least integer."""
    return bool(((mean < 2 * MAX_UNITS) & (mean > -2 * MAX_UNITS)).all())


def check_header(step: float, sink_div: int, head_dim: int, lane_channels: int) -> None:
    """Raise `Corrupt` for values that no encoder writes."""
    if not (math.isfinite(step) and step > 0):
        raise Corrupt(f"TKV1 header: step {step!r} is not a positive number")
    if not 1 <= sink_div < 1 << 24:
        raise Corrupt(f"TKV1 header: sink_div {sink_div}")
    if lane_channels % 2 or (lane_channels and head_dim % lane_channels):
        raise Corrupt(f"TKV1 header: bad lane width {lane_channels} for head_dim {head_dim}")


def varint(value: int) -> bytes:
    """Return `value` as unsigned LEB128."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varints(view: memoryview, offset: int, count: int) -> tuple[list[int], int]:
    """Read `count` unsigned LEB128 numbers of at most 64 bits, and the offset behind them."""
    values = []
    for _ in range(count):
        value = shift = 0
        while True:
            if offset >= view.nbytes:
                raise Truncated(f"TKV1 header ends after {view.nbytes} bytes")
            byte = view[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 70:
                raise Corrupt(f"TKV1 header: a varint before byte {offset} does not fit 64 bits")
        if value >= 1 << 64:
            raise Corrupt(f"TKV1 header: a varint before byte {offset} does not fit 64 bits")
        values.append(value)
    return values, offset
