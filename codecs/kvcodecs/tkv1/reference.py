"""A slow and readable TKV1 lane layout, section by section as FORMAT.md sections 1.1 and 4.

The oracle of the tests: the C++ in `kvcodecs._core` must give the same bytes and the same
values. It shares no code with it, nor with `params.py`. Only `reference_file.py`, which adds
sections 3.2 and 6, and the tests import it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from ..errors import Corrupt, InvalidArgument, KvError, Truncated
from ..spec import F32, Kind

# --- Section 1.1: integers ----------------------------------------------------------------


def put_varint(out: bytearray, value: int) -> None:
    """Append an unsigned LEB128."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def zigzag(value: int) -> int:
    """Map 0, -1, 1, -2, 2 ... to 0, 1, 2, 3, 4 ..."""
    return 2 * value if value >= 0 else -2 * value - 1


class Reader:
    """Reads fields from bytes, front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise Truncated(f"{n} bytes wanted at {self.at} of {len(self.data)}")
        self.at += n
        return self.data[self.at - n : self.at]

    def u8(self) -> int:
        return self.take(1)[0]

    def f64(self) -> float:
        value: float = struct.unpack("<d", self.take(8))[0]
        return value

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise Corrupt("varint of more than 10 bytes")
        if value >= 1 << 64:
            raise Corrupt("varint of more than 64 bits")
        return value

    def svarint(self) -> int:
        value = self.varint()
        return -(value >> 1) - 1 if value & 1 else value >> 1


def round_away(x: float) -> int:
    """Round to the nearest integer, halves away from zero."""
    whole = math.trunc(x)
    return whole + int(math.copysign(1, x)) if abs(x - whole) >= 0.5 else whole


# --- Section 4.1: bit models --------------------------------------------------------------

FAST_SHIFT, SLOW_SHIFT = 4, 7
ONE = 1 << 16
P_MIN = 32
HALF = ONE // 2


class Models:
    """The adaptive bit models of one lane, each a fast and a slow estimate of P(1)."""

    def __init__(self) -> None:
        self.fast = [word & 0xFFFF for word in prior_table()]
        self.slow = [word >> 16 for word in prior_table()]

    def p(self, i: int) -> int:
        return min(max((self.fast[i] + self.slow[i]) >> 1, P_MIN), ONE - P_MIN)

    def update(self, i: int, bit: int) -> None:
        for estimate, shift in ((self.fast, FAST_SHIFT), (self.slow, SLOW_SHIFT)):
            if bit:
                estimate[i] += (ONE - estimate[i]) >> shift
            else:
                estimate[i] -= estimate[i] >> shift


# --- Section 4.2: range coder -------------------------------------------------------------

TOP = 1 << 24
WORD = 0xFFFFFFFF


class RangeEncoder:
    """Carry-propagating range encoder; `low` holds its carry in bit 32."""

    def __init__(self) -> None:
        self.low, self.range = 0, WORD
        self.cache, self.pending = 0, 1
        self.out = bytearray()

    def encode(self, bit: int, p: int) -> None:
        bound = (self.range >> 16) * p
        if bit:
            self.range = bound
        else:
            self.low += bound
            self.range -= bound
        while self.range < TOP:
            self.range <<= 8
            self._shift_low()

    def _shift_low(self) -> None:
        if self.low < 0xFF000000 or self.low > WORD:
            carry = self.low >> 32
            self.out.append(self.cache + carry & 0xFF)
            self.out += bytes([0xFF + carry & 0xFF]) * (self.pending - 1)
            self.cache, self.pending = self.low >> 24 & 0xFF, 0
        self.pending += 1
        self.low = (self.low & 0x00FFFFFF) << 8

    def finish(self) -> bytes:
        for _ in range(5):
            self._shift_low()
        return bytes(self.out[1:]).rstrip(b"\0")


class RangeDecoder:
    """The counterpart; past the end of its bytes it reads zeros."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4
        self.range = WORD
        self.code = int.from_bytes(data[:4].ljust(4, b"\0"), "big")

    def decode(self, p: int) -> int:
        bound = (self.range >> 16) * p
        bit = int(self.code < bound)
        if bit:
            self.range = bound
        else:
            self.code -= bound
            self.range -= bound
        while self.range < TOP:
            self.range <<= 8
            byte = self.data[self.at] if self.at < len(self.data) else 0
            self.code = (self.code << 8 | byte) & WORD
            self.at += 1
        return bit


# --- Section 4.3: contexts and their prior ------------------------------------------------

N_CLASSES, N_ACTIVITIES = 48, 3
N_UNARY = N_MANTISSA = 24
ZERO, UNARY, MANTISSA = 0, 1, 1 + N_UNARY
CONTEXT_MODELS = 1 + N_UNARY + N_MANTISSA


@cache
def prior_table() -> tuple[int, ...]:
    """Return the frozen words ``fast | slow << 16`` of every model of every context."""
    raw = resources.files(__package__).joinpath("prior_table.u32").read_bytes()
    return struct.unpack(f"<{N_CLASSES * N_ACTIVITIES * CONTEXT_MODELS}I", raw)


def first_model(klass: int, activity: int) -> int:
    """Return the index of a context's first model."""
    return (klass * N_ACTIVITIES + activity) * CONTEXT_MODELS


# --- Section 4.4: residuals ---------------------------------------------------------------

MAX_BITS = 24


def put_symbol(coder: RangeEncoder, models: Models, context: int, q: int) -> None:
    """Encode the residual `q`."""

    def modelled(bit: int, i: int) -> None:
        coder.encode(bit, models.p(i))
        models.update(i, bit)

    modelled(int(q == 0), context + ZERO)
    if q == 0:
        return
    coder.encode(int(q < 0), HALF)
    k = abs(q).bit_length() - 1
    if k >= MAX_BITS:
        raise InvalidArgument(f"residual {q} has more than {MAX_BITS} bits")
    for i in range(k):
        modelled(1, context + UNARY + i)
    modelled(0, context + UNARY + k)
    for i in reversed(range(k)):
        bit = abs(q) >> i & 1
        if i == k - 1:
            modelled(bit, context + MANTISSA + k)
        else:
            coder.encode(bit, HALF)


def get_symbol(coder: RangeDecoder, models: Models, context: int) -> int:
    """Decode one residual."""

    def modelled(i: int) -> int:
        bit = coder.decode(models.p(i))
        models.update(i, bit)
        return bit

    if modelled(context + ZERO):
        return 0
    negative = coder.decode(HALF)
    k = 0
    while modelled(context + UNARY + k):
        k += 1
        if k == MAX_BITS:
            raise Corrupt(f"a residual of more than {MAX_BITS} bits")
    w = 1
    for i in reversed(range(k)):
        w = w << 1 | (modelled(context + MANTISSA + k) if i == k - 1 else coder.decode(HALF))
    return -w if negative else w


# --- Section 4.5: prediction and reconstruction -------------------------------------------

VALUE_LIMIT = 1 << 24


@dataclass(frozen=True)
class Params:
    """What a lane decoder must know; `mu`, `rho`, `classes` have one entry per channel."""

    kind: Kind
    heads: int
    head_dim: int
    step: float
    sink: int = 4
    sink_div: int = 16
    ar: bool = True
    lane_channels: int = 0
    mu: tuple[int, ...] = ()
    rho: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    @property
    def unit(self) -> np.float32:
        return np.float32(self.step / self.sink_div)

    @property
    def lane_width(self) -> int:
        return self.lane_channels or self.head_dim

    @property
    def n_groups(self) -> int:
        return self.head_dim // self.lane_width

    def lane_channel(self, group: int, i: int) -> int:
        """Return the channel of its head that lane-local channel `i` of `group` is."""
        pairs = self.lane_width // 2
        if i < pairs:
            return group * pairs + i
        return self.head_dim // 2 + group * pairs + i - pairs


def code_lane(
    params: Params,
    head: int,
    group: int,
    first_token: int,
    n_tokens: int,
    symbol: Callable[[int, int, int, int, int], int],
    refuse: type[KvError],
) -> list[list[int]]:
    """Run the closed loop that encoder and decoder share.

    `symbol` gets (token, channel, context, prediction, token step) and gives the residual.
    Returns the reconstructed values, [token][lane-local channel], in units; a value of 2^24
    units or more raises `refuse`.
    """
    width = params.lane_width
    channels = [params.lane_channel(group, i) for i in range(width)]
    prev, activity = [0] * width, [0] * width
    rows: list[list[int]] = []
    for t in range(n_tokens):
        token_step = 1 if first_token + t < params.sink else params.sink_div
        for i, channel in enumerate(channels):
            j = head * params.head_dim + channel
            pred = params.mu[j]
            if t > 0:
                pred += params.rho[j] * (prev[i] - params.mu[j]) >> 4
            context = first_model(params.classes[j], activity[i])
            q = symbol(t, channel, context, pred, token_step)
            value = pred + q * token_step
            if abs(value) >= VALUE_LIMIT:
                raise refuse(f"value {value} at token {first_token + t}, channel {channel}")
            prev[i], activity[i] = value, min(abs(q), 2)
        rows.append(prev.copy())
    return rows


def encode_lane(params: Params, head: int, group: int, y: F32, first_token: int) -> bytes:
    """Encode one lane of a block `y` ``[heads][n][head_dim]``."""
    coder, models, unit = RangeEncoder(), Models(), float(params.unit)

    def symbol(t: int, channel: int, context: int, pred: int, token_step: int) -> int:
        q = round_away((float(y[head, t, channel]) / unit - pred) / token_step)
        put_symbol(coder, models, context, q)
        return q

    code_lane(params, head, group, first_token, y.shape[1], symbol, InvalidArgument)
    return coder.finish()


def decode_lane(
    params: Params, head: int, group: int, data: bytes, first_token: int, n_tokens: int
) -> list[list[int]]:
    """Decode one lane to [token][lane-local channel], in units."""
    coder, models = RangeDecoder(data), Models()

    def symbol(_t: int, _channel: int, context: int, _pred: int, _token_step: int) -> int:
        return get_symbol(coder, models, context)

    return code_lane(params, head, group, first_token, n_tokens, symbol, Corrupt)


# --- Sections 4.6, 4.7: lanes, payload ----------------------------------------------------


def encode_block(params: Params, y: F32, first_token: int) -> bytes:
    """Return a block's payload: every lane behind its length, (head, group) order."""
    out = bytearray()
    for head in range(params.heads):
        for group in range(params.n_groups):
            lane = encode_lane(params, head, group, y, first_token)
            put_varint(out, len(lane))
            out += lane
    return bytes(out)


def decode_block(params: Params, payload: bytes, first_token: int, n_tokens: int) -> F32:
    """Return the float32 values ``[heads][n_tokens][head_dim]`` of a payload."""
    out = np.empty((params.heads, n_tokens, params.head_dim), np.float32)
    reader = Reader(payload)
    for head in range(params.heads):
        for group in range(params.n_groups):
            lane = reader.take(reader.varint())
            rows = decode_lane(params, head, group, lane, first_token, n_tokens)
            columns = [params.lane_channel(group, i) for i in range(params.lane_width)]
            out[head][:, columns] = np.array(rows, np.float32) * params.unit
    if reader.at != len(payload):
        raise Corrupt(f"{len(payload) - reader.at} bytes after the last lane")
    return out
