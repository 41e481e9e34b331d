"""Random numbers of FibQuant books: ChaCha8, ziggurats, gamma variates. FORMAT.md 11.3 and 11.4.

The recipe is that of the Rust crates rand 0.8 and rand_distr 0.4, whose numbers it gives. Floats
are float64 throughout, every operation rounded by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from math import exp, log, pow, sqrt
from typing import Final

_MASK32: Final = (1 << 32) - 1
_MASK64: Final = (1 << 64) - 1
_CONSTANTS: Final = struct.unpack("<4I", b"expand 32-byte k")
_QUARTERS: Final = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)
_DOUBLE_ROUNDS: Final = 4

_NORMAL_R: Final = 3.6541528853610088
_NORMAL_V: Final = 0.00492867323399
_EXPONENTIAL_R: Final = 7.69711747013104972
_EXPONENTIAL_V: Final = 0.0039496598225815571993


def seed_key(seed: int) -> bytes:
    """Return the 32 bytes of the key: eight outputs of a PCG32 that starts at `seed`."""
    words = []
    for _ in range(8):
        seed = (seed * 6364136223846793005 + 11634580027462260723) & _MASK64
        rotated, by = ((seed >> 18) ^ seed) >> 27 & _MASK32, seed >> 59
        words.append((rotated >> by | rotated << (-by & 31)) & _MASK32)
    return struct.pack("<8I", *words)


def chacha8_words(key: bytes) -> Iterator[int]:
    """Yield the 32-bit words of the ChaCha8 key stream with nonce 0, from block 0 on."""
    block = 0
    while True:
        start = [*_CONSTANTS, *struct.unpack("<8I", key), block & _MASK32, block >> 32, 0, 0]
        x = list(start)
        for _ in range(_DOUBLE_ROUNDS):
            for a, b, c, d in _QUARTERS:
                for s, t, u, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    x[s] = (x[s] + x[t]) & _MASK32
                    x[u] ^= x[s]
                    x[u] = (x[u] << by | x[u] >> (32 - by)) & _MASK32
        yield from ((word + added) & _MASK32 for word, added in zip(x, start, strict=True))
        block += 1


class Generator:
    """A stream of random numbers that follows from a 64-bit seed."""

    def __init__(self, seed: int) -> None:
        self._words = chacha8_words(seed_key(seed))

    def bits(self) -> int:
        """Return 64 random bits: two words, the lower one first."""
        low = next(self._words)
        return low | next(self._words) << 32

    def uniform(self) -> float:
        """Return a multiple of 2^-53 in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def open_uniform(self) -> float:
        """Return a number in (0, 1)."""
        return _open(self.bits())

    def normal(self) -> float:
        """Return a standard normal number, by a ziggurat of 256 layers."""
        while True:
            bits = self.bits()
            layer = bits & 255
            u = 2.0 * _one_to_two(bits) - 3.0
            x = u * _NORMAL_X[layer]
            if abs(x) < _NORMAL_X[layer + 1]:
                return x
            if layer == 0:
                return self._normal_tail(u < 0)
            if self._below(_NORMAL_F, layer, exp(-x * x / 2.0)):
                return x

    def exponential(self) -> float:
        """Return a number of the unit exponential distribution, likewise."""
        while True:
            bits = self.bits()
            layer = bits & 255
            x = _open(bits) * _EXPONENTIAL_X[layer]
            if x < _EXPONENTIAL_X[layer + 1]:
                return x
            if layer == 0:
                return _EXPONENTIAL_R - log(self.uniform())
            if self._below(_EXPONENTIAL_F, layer, exp(-x)):
                return x

    def gamma(self, shape: float) -> float:
        """Return a gamma variate of scale 1, by Marsaglia and Tsang's method."""
        if shape == 1.0:
            return self.exponential()
        if shape < 1.0:
            u = self.open_uniform()
            return self._large_gamma(shape + 1.0) * pow(u, 1.0 / shape)
        return self._large_gamma(shape)

    def _large_gamma(self, shape: float) -> float:
        d = shape - 1.0 / 3.0
        c = 1.0 / sqrt(9.0 * d)
        while True:
            x = self.normal()
            root = 1.0 + c * x
            if root <= 0.0:
                continue
            v = root * root * root
            u = self.open_uniform()
            square = x * x
            if u < 1.0 - 0.0331 * square * square:
                return d * v
            if log(u) < 0.5 * square + d * (1.0 - v + log(v)):
                return d * v

    def _normal_tail(self, negative: bool) -> float:
        x, y = 1.0, 0.0
        while -2.0 * y < x * x:
            x = log(self.open_uniform()) / _NORMAL_R
            y = log(self.open_uniform())
        return x - _NORMAL_R if negative else _NORMAL_R - x

    def _below(self, f: list[float], layer: int, density: float) -> bool:
        return f[layer + 1] + (f[layer] - f[layer + 1]) * self.uniform() < density


def _one_to_two(bits: int) -> float:
    """Return the number in [1, 2) whose mantissa is the upper 52 bits."""
    return 1.0 + (bits >> 12) * 2.0**-52


def _open(bits: int) -> float:
    return _one_to_two(bits) - (1.0 - 2.0**-53)


def _layers(
    r: float, v: float, f: Callable[[float], float], inverse: Callable[[float], float]
) -> tuple[list[float], list[float]]:
    """Return the right edges of the layers of a ziggurat, widest first, and the density there."""
    x = [v / f(r), r]
    while len(x) < 256:
        x.append(inverse(v / x[-1] + f(x[-1])))
    x.append(0.0)
    return x, [f(edge) for edge in x]


_NORMAL_X, _NORMAL_F = _layers(
    _NORMAL_R, _NORMAL_V, lambda x: exp(-x * x / 2.0), lambda y: sqrt(-2.0 * log(y))
)
_EXPONENTIAL_X, _EXPONENTIAL_F = _layers(
    _EXPONENTIAL_R, _EXPONENTIAL_V, lambda x: exp(-x), lambda y: -log(y)
)
