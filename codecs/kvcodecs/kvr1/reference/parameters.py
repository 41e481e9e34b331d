"""KVR1's parameters, tables and stream header. FORMAT.md sections 9.1 to 9.3."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate

import numpy as np

from ...errors import Corrupt, Unsupported
from ...spec import F32
from ...tkv1.reference import Reader, put_varint, round_away, zigzag

# --- Section 9.1: parameters and statistics -----------------------------------------------

MAX_SINK_DIV = 512
CLASS_OF_ONE = 12
FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, 2.0**128 - 2.0**104
VALUE_LIMIT = 1 << 24
N_LANES = 32


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
    if len(rows) > 2 * params.sink:
        rows = rows[params.sink :]
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
    raw = resources.files("kvcodecs.kvr1").joinpath("frequencies.u16").read_bytes()
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
