"""KVR1's blocks. FORMAT.md sections 9.4 to 9.7."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import Corrupt, InvalidArgument, KvError, Truncated
from ...spec import F32
from ...tkv1.reference import round_away, zigzag
from .parameters import (
    N_LANES,
    N_SYMBOLS,
    SCALE_BITS,
    VALUE_LIMIT,
    Params,
    components,
    shift_of,
    starts,
    table_of,
    tables,
)

# --- Section 9.4: lanes and steps ---------------------------------------------------------


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
