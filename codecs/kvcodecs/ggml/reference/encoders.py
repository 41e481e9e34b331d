"""Encoders once more: those of the plain and ternary schemes exactly, the others as simple ones.

What FORMAT.md section 10.6 fixes is here line by line. Schemes whose scales the core searches for
have the encoder one writes first: scales from the smallest and the largest value, codes from the
stored scales. The search is held against their error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..schemes import Scheme
from . import encoders_iq as iq
from . import encoders_k as k
from .fields import F32, U8, Floats, half, join_planes


def _largest(x: F32) -> F32:
    """Return the value of largest magnitude, the first of equals, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)


def _inverse(d: Floats) -> F32:
    return np.where(d == 0, np.float32(0), 1 / d)


def _away(x: F32) -> F32:
    """Round halves away from zero."""
    whole = np.floor(np.abs(x))
    whole += np.abs(x) - whole >= np.float32(0.5)
    return np.where(np.isfinite(whole), np.copysign(whole, x), np.float32(0))


def _cut(x: F32, top: int) -> U8:
    """Drop the fraction; what is not a number in the range counts as gguf has it."""
    return np.where(np.isfinite(x), np.clip(np.trunc(x), 0, top), 0).astype(np.uint8)


def _f16(x: F32) -> U8:
    return half(x)


def _q8_0(x: F32) -> U8:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.concatenate([half(d), _away(x * _inverse(d)).astype(np.int8).view(np.uint8)], axis=1)


def _fifth_bits(c: U8) -> U8:
    return join_planes(c >> np.uint8(4), 1, 1)


def _q4_0(x: F32) -> U8:
    d = _largest(x) / np.float32(-8)
    c = _cut(x * _inverse(d) + np.float32(8.5), 15)
    return np.concatenate([half(d), join_planes(c, 16, 4)], axis=1)


def _q5_0(x: F32) -> U8:
    d = _largest(x) / np.float32(-16)
    c = _cut(x * _inverse(d) + np.float32(16.5), 31)
    return np.concatenate([half(d), _fifth_bits(c), join_planes(c & np.uint8(15), 16, 4)], axis=1)


def _between(x: F32, top: int) -> tuple[U8, U8]:
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / np.float32(top)
    c = _cut((x - least) * _inverse(d) + np.float32(0.5), top)
    return np.concatenate([half(d), half(least)], axis=1), c


def _q4_1(x: F32) -> U8:
    scales, c = _between(x, 15)
    return np.concatenate([scales, join_planes(c, 16, 4)], axis=1)


def _q5_1(x: F32) -> U8:
    scales, c = _between(x, 31)
    return np.concatenate([scales, _fifth_bits(c), join_planes(c & np.uint8(15), 16, 4)], axis=1)


def _q1_0(x: F32) -> U8:
    total = np.cumsum(np.abs(x), axis=1, dtype=np.float32)[:, -1:]  # one after the other
    bits = join_planes((x >= 0).astype(np.uint8), 1, 1)
    return np.concatenate([half(total / np.float32(128)), bits], axis=1)


def _ternary(x: F32) -> tuple[F32, U8]:
    d = np.abs(x).max(axis=1, keepdims=True)
    return d, (_away(x * _inverse(d)).astype(np.int8) + 1).astype(np.uint8)


def _q2_0(x: F32) -> U8:
    d, c = _ternary(x)
    return np.concatenate([half(d), join_planes(c, 1, 2)], axis=1)


def _q8_k(x: F32) -> U8:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    q = np.clip(_away(np.where(d > 0, x / d, np.float32(0))), -127, 127).astype(np.int8)
    sums = q.reshape(len(q), 16, 16).sum(axis=2, dtype=np.int16)
    return np.concatenate([d.view(np.uint8), q.view(np.uint8), sums.view(np.uint8)], axis=1)


def _bytes_of_trits(c: U8, run: int, n: int) -> U8:
    powers = np.array([81, 27, 9, 3, 1])[:n].reshape(-1, 1)
    numbers = (c.reshape(len(c), -1, n, run) * powers).sum(axis=2)
    found: U8 = ((numbers * 256 + 242) // 243).astype(np.uint8)
    return found.reshape(len(c), -1)


def _tq1_0(x: F32) -> U8:
    d, c = _ternary(x)
    parts = [_bytes_of_trits(c[:, :160], 32, 5), _bytes_of_trits(c[:, 160:240], 16, 5)]
    return np.concatenate([*parts, _bytes_of_trits(c[:, 240:], 4, 4), half(d)], axis=1)


def _tq2_0(x: F32) -> U8:
    d, c = _ternary(x)
    return np.concatenate([join_planes(c, 32, 2), half(d)], axis=1)


_ENCODERS: Final[dict[str, Callable[[F32], U8]]] = {
    "f16": _f16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q4_1": _q4_1,
    "q5_1": _q5_1,
    "q1_0": _q1_0,
    "q2_0": _q2_0,
    "q2_0_128": _q2_0,
    "q2_k": k.q2_k,
    "q3_k": k.q3_k,
    "q4_k": k.q4_k,
    "q5_k": k.q5_k,
    "q6_k": k.q6_k,
    "q8_k": _q8_k,
    "iq4_nl": iq.iq4_nl,
    "iq4_xs": iq.iq4_xs,
    "iq2_xxs": iq.iq2_xxs,
    "iq2_xs": iq.iq2_xs,
    "iq2_s": iq.iq2_s,
    "iq3_xxs": iq.iq3_xxs,
    "iq3_s": iq.iq3_s,
    "iq1_s": iq.iq1_s,
    "iq1_m": iq.iq1_m,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
}

#: Schemes whose bytes are fixed; of the others only the error is compared.
EXACT: Final = frozenset(_ENCODERS) - frozenset(
    name
    for name in _ENCODERS
    if name.startswith("iq") or name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
)


def encode(values: F32, scheme: Scheme) -> U8:
    """Encode values `[n][block_values]` to blocks `[n][block_bytes]`.

    Scales that leave float16 are stored as infinite.
    """
    if values.ndim != 2 or values.shape[1] != scheme.block_values:
        raise ValueError(f"{scheme.name}: blocks of {scheme.block_values} values expected")
    if len(values) == 0:
        return np.zeros((0, scheme.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        return _ENCODERS[scheme.name](np.ascontiguousarray(values, np.float32))
