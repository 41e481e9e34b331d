"""A slow and readable KVR1, section by section as FORMAT.md section 9.

The oracle of the tests: the C++ in `kvcodecs._core` must give the same bytes and the same values.
It shares no code with it, nor with the rest of this package; only the tests import it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from ..spec import F32
from ..tkv1.reference import Reader, put_varint, round_away, zigzag

# --- Section 9.1: parameters and statistics -----------------------------------------------

MAX_SINK_DIV = 512
CLASS_OF_ONE = 12
FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, 2.0**128 - 2.0**104
VALUE_LIMIT = 1 << 24


@dataclass(frozen=True)
class Params:
    """What a stream header stores; `mu`, `rho`, `classes` have one entry per component."""

    heads: int
    head_dim: int
    step: float
    sink: int = 4
    sink_div: int = 16
    ar: bool = True
    mu: tuple[int, ...] = ()
    rho: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    @property
    def unit(self) -> np.float32:
        return np.float32(self.step / self.sink_div)

    @property
    def n_components(self) -> int:
        return self.heads * self.head_dim

    @property
    def steps_per_token(self) -> int:
        return -(-self.n_components // N_LANES)

    def scale_at(self, position: int) -> int:
        """Return the step at a position, in units."""
        return 1 if position < self.sink else self.sink_div

    def classes_at(self, position: int) -> Sequence[int]:
        """Return the class of every component at a position."""
        if position >= self.sink:
            return self.classes
        wider = sink_classes(self.sink_div)
        return [min(c + wider, N_CLASSES - 1) for c in self.classes]


def fit(params: Params, x: F32) -> Params:
    """Return `params` with the statistics of the prefill `x` ``[heads][n][head_dim]``."""
    rows = components(x).astype(np.float64)
    n = len(rows)
    mean = np.zeros(params.n_components)
    for row in rows:
        mean += row
    mean /= n
    c0, c1 = np.zeros_like(mean), np.zeros_like(mean)
    before = None
    for row in rows:
        r = row - mean
        c0 += r * r
        if before is not None:
            c1 += r * before
        before = r
    rho, classes = [], []
    for zero, one in zip(c0.tolist(), c1.tolist(), strict=True):
        a = round_away(16.0 * (one / zero)) if params.ar and zero > 0.0 else 0
        rho.append(min(max(a, 0), 15))
        var = zero / n * max(1.0 - (rho[-1] / 16.0) ** 2, 0.05)
        spread = math.log2(max(math.sqrt(var) / params.step, 1e-9))
        classes.append(min(max(round_away(4.0 * spread) + CLASS_OF_ONE, 0), N_CLASSES - 1))
    mu = tuple(round_away(m / float(params.unit)) for m in mean.tolist())
    return replace(params, mu=mu, rho=tuple(rho), classes=tuple(classes))


def components(x: F32) -> F32:
    """Return ``[heads][n][head_dim]`` as ``[n][component]``."""
    heads, n, head_dim = x.shape
    return x.transpose(1, 0, 2).reshape(n, heads * head_dim)


# --- Section 9.2: classes and tables ------------------------------------------------------

N_CLASSES, N_TABLES, N_SYMBOLS = 88, 36, 64
SCALE_BITS = 11


@cache
def tables() -> tuple[tuple[int, ...], ...]:
    """Return the frozen frequencies, [table][symbol]."""
    raw = resources.files(__package__).joinpath("frequencies.u16").read_bytes()
    flat = struct.unpack(f"<{N_TABLES * N_SYMBOLS}H", raw)
    return tuple(flat[i : i + N_SYMBOLS] for i in range(0, len(flat), N_SYMBOLS))


@cache
def starts() -> tuple[tuple[int, ...], ...]:
    """Return the sum of the frequencies before each symbol, and 2048 behind the last."""
    return tuple(tuple(accumulate(row, initial=0)) for row in tables())


def shift_of(klass: int) -> int:
    """Return how many low bits of a residual are not in its symbol."""
    return 0 if klass < 24 else (klass - 20) >> 2


def table_of(klass: int) -> int:
    """Return which frequencies a class uses."""
    return klass if klass < 36 else 32 + (klass & 3)


def sink_classes(sink_div: int) -> int:
    """Return the classes that a step `sink_div` times finer adds."""
    d = 0
    while 2 ** (2 * (d + 1) - 1) <= sink_div**8:
        d += 1
    return d


# --- Section 9.3: stream header -----------------------------------------------------------


def pack_header(params: Params) -> bytes:
    """Return the stream header."""
    out = bytearray([1, params.ar])
    put_varint(out, params.heads)
    put_varint(out, params.head_dim)
    out += struct.pack("<d", params.step)
    put_varint(out, params.sink)
    put_varint(out, params.sink_div)
    for mu in params.mu:
        put_varint(out, zigzag(mu))
    out += bytes(params.classes)
    if params.ar:
        for low, high in zip(params.rho[::2], params.rho[1::2], strict=True):
            out.append(low | high << 4)
    return bytes(out)


def parse_header(data: bytes) -> Params:
    """Read a stream header."""
    r = Reader(data)
    version, flags = r.u8(), r.u8()
    if version != 1 or flags & ~1:
        raise Unsupported(f"version {version}, flags {flags:#04x}")
    ar = bool(flags & 1)
    heads, head_dim = r.varint(), r.varint()
    step, sink, sink_div = r.f64(), r.varint(), r.varint()
    if not (1 <= heads <= 1 << 16 and 2 <= head_dim <= 1 << 16 and head_dim % 2 == 0):
        raise Corrupt(f"{heads} heads of {head_dim}")
    n = heads * head_dim
    # A NaN fails the last of these as well.
    if (
        n > 1 << 20
        or not 1 <= sink_div <= MAX_SINK_DIV
        or not FLOAT32_TINY <= step / sink_div <= FLOAT32_MAX / VALUE_LIMIT
    ):
        raise Corrupt("bad size, sink_div or step")
    mu = tuple(r.svarint() for _ in range(n))
    classes = tuple(r.take(n))
    packed = r.take(n // 2) if ar else bytes(n // 2)
    rho = tuple(nibble for byte in packed for nibble in (byte & 15, byte >> 4))
    if r.at != len(data):
        raise Corrupt(f"{len(data) - r.at} bytes after the header")
    if any(abs(m) >= VALUE_LIMIT for m in mu) or any(c >= N_CLASSES for c in classes):
        raise Corrupt("mean or class out of range")
    return Params(heads, head_dim, step, sink, sink_div, ar, mu, rho, classes)


# --- Section 9.4: lanes and steps ---------------------------------------------------------

N_LANES = 32


def steps_of(params: Params, first_token: int, n_tokens: int) -> list[list[int]]:
    """Return the classes of each step's components, the first of them in lane 0."""
    steps = []
    for t in range(n_tokens):
        classes = params.classes_at(first_token + t)
        steps += [list(classes[i : i + N_LANES]) for i in range(0, len(classes), N_LANES)]
    return steps


# --- Section 9.5: residuals ---------------------------------------------------------------

ESCAPE = 0
RESIDUAL_LIMIT = 1 << 30
MORE = 1 << 15


@dataclass(frozen=True)
class Residual:
    """A residual as it is coded: a symbol of a table, raw low bits, words of an escape."""

    symbol: int
    low: int
    escape: tuple[int, ...]


def split(q: int, klass: int) -> Residual:
    """Return how the residual `q` is coded."""
    shift = shift_of(klass)
    u, low = q >> shift, q & (1 << shift) - 1
    if -31 <= u <= 31 and tables()[table_of(klass)][u + 32] > 0:
        return Residual(u + 32, low, ())
    z = zigzag(u)
    if z < MORE:
        return Residual(ESCAPE, low, (z,))
    if z >= 1 << 31:
        raise InvalidArgument(f"residual {q} of class {klass} does not fit an escape")
    return Residual(ESCAPE, low, (z & MORE - 1 | MORE, z >> 15))


# --- Section 9.6: payload, decoding -------------------------------------------------------

STATE_BITS = 16
STATE_LOW = 1 << STATE_BITS
HEAD = struct.Struct(f"<B{N_LANES}I")


class Decoder:
    """The 32 states of a block and its words."""

    def __init__(self, payload: bytes, n_steps: int) -> None:
        if len(payload) < HEAD.size:
            raise Truncated(f"payload of {len(payload)} bytes, at least {HEAD.size}")
        bare, *self.states = HEAD.unpack_from(payload)
        n_words, odd = divmod(len(payload) - HEAD.size, 2)
        if odd:
            raise Corrupt("half a word at the end of the payload")
        self.words = struct.unpack_from(f"<{n_words}H", payload, HEAD.size)
        self.at = 0
        if bare > n_steps:
            raise Corrupt(f"{bare} bare steps of {n_steps}")
        if min(self.states) < STATE_LOW:
            raise Corrupt(f"a state of {min(self.states)}")
        self.normalised_steps = n_steps - bare
        self.bare = False

    def word(self) -> int:
        if self.at == len(self.words):
            raise Truncated(f"more than {self.at} words are needed")
        word: int = self.words[self.at]
        self.at += 1
        return word

    def renormalise(self, lanes: Sequence[int]) -> None:
        for i in lanes:
            if not self.bare and self.states[i] < STATE_LOW:
                self.states[i] = self.states[i] << STATE_BITS | self.word()

    def next_step(self) -> None:
        """Leave the range of normalised states when only the bare steps are left."""
        if self.normalised_steps == 0:
            self.states = [x - STATE_LOW for x in self.states]
            self.bare = True
        self.normalised_steps -= 1

    def step(self, classes: Sequence[int]) -> list[int]:
        """Decode the residuals of one step."""
        self.next_step()
        symbols, lows, residuals = [], [0] * len(classes), []
        for i, klass in enumerate(classes):
            freqs, start = tables()[table_of(klass)], starts()[table_of(klass)]
            x = self.states[i]
            slot = x & (1 << SCALE_BITS) - 1
            symbol = next(s for s in range(N_SYMBOLS) if start[s] <= slot < start[s + 1])
            symbols.append(symbol)
            self.states[i] = freqs[symbol] * (x >> SCALE_BITS) + slot - start[symbol]
        self.renormalise(range(len(classes)))
        shifted = [i for i, klass in enumerate(classes) if shift_of(klass) > 0]
        for i in shifted:
            shift = shift_of(classes[i])
            lows[i] = self.states[i] & (1 << shift) - 1
            self.states[i] >>= shift
        self.renormalise(shifted)
        for i, klass in enumerate(classes):
            u = symbols[i] - 32
            if symbols[i] == ESCAPE:
                z = self.word()
                if z & MORE:
                    z = z & MORE - 1 | self.word() << 15
                u = -(z >> 1) - 1 if z & 1 else z >> 1
            residuals.append((u << shift_of(klass)) + lows[i])
        return residuals

    def finish(self) -> None:
        """Check what must hold behind the last step."""
        self.next_step()
        if any(self.states):
            raise Corrupt("a state is not 0 in the end")
        if self.at != len(self.words):
            raise Corrupt(f"{len(self.words) - self.at} words are left")


# --- Section 9.7: encoding ----------------------------------------------------------------

MAX_BARE = 255


def encode_steps(steps: list[list[int]], residuals: list[int]) -> bytes:
    """Return the payload of a block whose residuals stand in the order of decoding."""
    states = [0] * N_LANES
    words: list[int] = []
    bare, normalise = 0, False
    coded = iter(reversed(residuals))
    for classes in reversed(steps):
        lanes = list(reversed(range(len(classes))))
        parts = {i: split(next(coded), classes[i]) for i in lanes}
        if not normalise:
            trial = states.copy()
            for i in lanes:
                trial[i] = put_symbol(put_low(trial[i], parts[i], classes[i]), parts[i], classes[i])
            if bare < MAX_BARE and max(trial) < (1 << 32) - STATE_LOW:
                bare, states = bare + 1, trial
            else:
                normalise = True
                states = [x + STATE_LOW for x in states]
        for i in lanes:
            words += reversed(parts[i].escape)
        if not normalise:
            continue
        for i in lanes:
            if states[i] >> (32 - shift_of(classes[i])):
                words.append(states[i] & STATE_LOW - 1)
                states[i] >>= STATE_BITS
            states[i] = put_low(states[i], parts[i], classes[i])
        for i in lanes:
            if states[i] >= tables()[table_of(classes[i])][parts[i].symbol] << 21:
                words.append(states[i] & STATE_LOW - 1)
                states[i] >>= STATE_BITS
            states[i] = put_symbol(states[i], parts[i], classes[i])
    if not normalise:
        states = [x + STATE_LOW for x in states]
    return HEAD.pack(bare, *states) + struct.pack(f"<{len(words)}H", *reversed(words))


def put_low(x: int, part: Residual, klass: int) -> int:
    return x << shift_of(klass) | part.low


def put_symbol(x: int, part: Residual, klass: int) -> int:
    freq = tables()[table_of(klass)][part.symbol]
    start = starts()[table_of(klass)][part.symbol]
    return (x // freq << SCALE_BITS) + start + x % freq


# --- Section 4.5: prediction and reconstruction, blocks -----------------------------------


def reconstruct(
    params: Params,
    first_token: int,
    n_tokens: int,
    residuals: Callable[[int, list[int], int], list[int]],
    refuse: type[KvError],
) -> npt.NDArray[np.int32]:
    """Run the closed loop that encoder and decoder share.

    `residuals` gets (token, predictions, step in units) and gives the residuals of a token.
    Returns the values ``[n_tokens][component]`` in units; one out of range raises `refuse`.
    """
    rows = np.empty((n_tokens, params.n_components), np.int32)
    previous = list(params.mu)
    for t in range(n_tokens):
        scale = params.scale_at(first_token + t)
        preds = [
            mu + (rho * (before - mu) >> 4)
            for mu, rho, before in zip(params.mu, params.rho, previous, strict=True)
        ]
        qs = residuals(t, preds, scale)
        previous = [pred + q * scale for pred, q in zip(preds, qs, strict=True)]
        for q, value in zip(qs, previous, strict=True):
            if abs(q * scale) >= RESIDUAL_LIMIT or abs(value) >= VALUE_LIMIT:
                raise refuse(f"residual {q}, value {value} at token {first_token + t}")
        rows[t] = previous
    return rows


def encode_block(params: Params, x: F32, first_token: int) -> tuple[bytes, npt.NDArray[np.int32]]:
    """Encode a block `x` ``[heads][n][head_dim]``; return its payload and what it decodes to."""
    unit = float(params.unit)
    rows = [[float(value) for value in row] for row in components(x)]
    coded: list[int] = []

    def quantise(t: int, preds: list[int], scale: int) -> list[int]:
        qs = [
            round_away((value / unit - pred) / scale)
            for value, pred in zip(rows[t], preds, strict=True)
        ]
        coded.extend(qs)
        return qs

    values = reconstruct(params, first_token, len(rows), quantise, InvalidArgument)
    return encode_steps(steps_of(params, first_token, len(rows)), coded), values


def decode_block(
    params: Params,
    payload: bytes,
    first_token: int,
    block_tokens: int,
    n_tokens: int | None = None,
) -> npt.NDArray[np.int32]:
    """Decode a block of `block_tokens` tokens, or only its first `n_tokens`.

    Returns the values ``[n_tokens][component]`` in units. That nothing is left in the end is
    checked when the whole block is decoded.
    """
    n_tokens = block_tokens if n_tokens is None else n_tokens
    decoder = Decoder(payload, block_tokens * params.steps_per_token)
    steps = iter(steps_of(params, first_token, n_tokens))

    def decode(_t: int, _preds: list[int], _scale: int) -> list[int]:
        return [q for _ in range(params.steps_per_token) for q in decoder.step(next(steps))]

    values = reconstruct(params, first_token, n_tokens, decode, Corrupt)
    if n_tokens == block_tokens:
        decoder.finish()
    return values


def floats(params: Params, values: npt.NDArray[np.int32]) -> F32:
    """Return values ``[n][component]`` in units as float32 ``[heads][n][head_dim]``."""
    y = values.astype(np.float32) * params.unit
    return np.ascontiguousarray(
        y.reshape(len(values), params.heads, params.head_dim).transpose(1, 0, 2)
    )
