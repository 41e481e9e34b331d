"""Decoders of the plain, K and ternary schemes, and the table of all. FORMAT.md section 10.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..schemes import Scheme
from . import iq
from .fields import F32, U8, f16, numbers, planes, split, spread


def _f16(blocks: U8) -> F32:
    return f16(blocks)


def _q8_0(blocks: U8) -> F32:
    d, q = split(blocks, 2, 32)
    return f16(d) * numbers(q.view(np.int8))


def _q4_0(blocks: U8) -> F32:
    d, q = split(blocks, 2, 16)
    return f16(d) * numbers(planes(q, 16, 4), zero=8)


def _q4_1(blocks: U8) -> F32:
    d, m, q = split(blocks, 2, 2, 16)
    return f16(d) * numbers(planes(q, 16, 4)) + f16(m)


def _q5_0(blocks: U8) -> F32:
    d, high, q = split(blocks, 2, 4, 16)
    return f16(d) * numbers(planes(q, 16, 4) | planes(high, 1, 1) << np.uint8(4), zero=16)


def _q5_1(blocks: U8) -> F32:
    d, m, high, q = split(blocks, 2, 2, 4, 16)
    return f16(d) * numbers(planes(q, 16, 4) | planes(high, 1, 1) << np.uint8(4)) + f16(m)


def _q1_0(blocks: U8) -> F32:
    d, q = split(blocks, 2, 16)
    return f16(d) * (2 * numbers(planes(q, 1, 1)) - 1)


def _q2_0(blocks: U8) -> F32:
    d, q = split(blocks, 2, blocks.shape[1] - 2)
    return f16(d) * numbers(planes(q, 1, 2), zero=1)


def _q2_k(blocks: U8) -> F32:
    scales, q, d, dmin = split(blocks, 16, 64, 2, 2)
    scale = spread(f16(d) * numbers(scales & 15), 16)
    offset = spread(f16(dmin) * numbers(scales >> 4), 16)
    return scale * numbers(planes(q, 32, 2)) - offset


def _q3_k(blocks: U8) -> F32:
    high, q, low_scales, high_scales, d = split(blocks, 32, 64, 8, 4, 2)
    six = planes(low_scales, 8, 4) | planes(high_scales, 4, 2) << np.uint8(4)
    codes = planes(q, 32, 2) | planes(high, 32, 1) << np.uint8(2)
    return spread(f16(d) * numbers(six, zero=32), 16) * numbers(codes, zero=4)


def _scales_and_offsets(d: U8, dmin: U8, a: U8, b: U8, c: U8) -> tuple[F32, F32]:
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=1)
    offsets = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=1)
    return spread(f16(d) * numbers(scales), 32), spread(f16(dmin) * numbers(offsets), 32)


def _q4_k(blocks: U8) -> F32:
    d, dmin, a, b, c, q = split(blocks, 2, 2, 4, 4, 4, 128)
    scale, offset = _scales_and_offsets(d, dmin, a, b, c)
    return scale * numbers(planes(q, 32, 4)) - offset


def _q5_k(blocks: U8) -> F32:
    d, dmin, a, b, c, high, q = split(blocks, 2, 2, 4, 4, 4, 32, 128)
    scale, offset = _scales_and_offsets(d, dmin, a, b, c)
    return scale * numbers(planes(q, 32, 4) | planes(high, 32, 1) << np.uint8(4)) - offset


def _q6_k(blocks: U8) -> F32:
    q, high, scales, d = split(blocks, 128, 64, 16, 2)
    codes = planes(q, 64, 4) | planes(high, 32, 2) << np.uint8(4)
    return spread(f16(d) * numbers(scales.view(np.int8)), 16) * numbers(codes, zero=32)


def _q8_k(blocks: U8) -> F32:
    d, q, _sums = split(blocks, 4, 256, 32)
    return d.view("<f4").astype(np.float32) * numbers(q.view(np.int8))


def _trits(field: U8, run: int, n: int) -> U8:
    """Read `n` trits a byte, `run` bytes at a time, the first trit of every byte first."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:n].reshape(-1, 1)
    rest: U8 = field.reshape(len(field), -1, 1, run) * powers  # modulo 256
    return (3 * rest.astype(np.uint16) >> 8).astype(np.uint8).reshape(len(field), -1)


def _tq1_0(blocks: U8) -> F32:
    a, b, c, d = split(blocks, 32, 16, 4, 2)
    trits = np.concatenate([_trits(a, 32, 5), _trits(b, 16, 5), _trits(c, 4, 4)], axis=1)
    return f16(d) * numbers(trits, zero=1)


def _tq2_0(blocks: U8) -> F32:
    q, d = split(blocks, 64, 2)
    return f16(d) * numbers(planes(q, 32, 2), zero=1)


_DECODERS: Final[dict[str, Callable[[U8], F32]]] = {
    "f16": _f16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q4_1": _q4_1,
    "q5_1": _q5_1,
    "q1_0": _q1_0,
    "q2_0": _q2_0,
    "q2_0_128": _q2_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
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


def decode(blocks: U8, scheme: Scheme) -> F32:
    """Decode blocks `[n][block_bytes]` to values `[n][block_values]`."""
    if blocks.ndim != 2 or blocks.shape[1] != scheme.block_bytes:
        raise ValueError(f"{scheme.name}: blocks of {scheme.block_bytes} bytes expected")
    if len(blocks) == 0:
        return np.zeros((0, scheme.block_values), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return _DECODERS[scheme.name](blocks)
