"""Decoders of the IQ schemes. FORMAT.md section 10.4."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tables import IQ4_VALUES, grids, sign_masks
from .fields import F32, U8, U16, U32, f16, numbers, planes, split, spread, u16, u32

Integers = npt.NDArray[np.integer]


def iq4_nl(blocks: U8) -> F32:
    d, q = split(blocks, 2, 16)
    return f16(d) * _iq4_values(planes(q, 16, 4))


def iq4_xs(blocks: U8) -> F32:
    d, high_scales, low_scales, q = split(blocks, 2, 2, 4, 128)
    six = planes(low_scales, 1, 4) | planes(high_scales, 1, 2) << np.uint8(4)
    scale = f16(d) * numbers(six, zero=32)
    return spread(scale, 32) * _iq4_values(planes(q, 16, 4))


def _iq4_values(codes: U8) -> F32:
    return np.array(IQ4_VALUES, np.float32)[codes]


def _rows(name: str, index: Integers) -> F32:
    """Put rows of a grid one after the other."""
    rows: F32 = grids()[name][index].astype(np.float32)
    return rows.reshape(len(index), -1)


def _signs(masks: U8) -> F32:
    """Return the signs of eight values for each mask: a set bit is a minus."""
    return 1 - 2 * numbers(planes(masks, 1, 1))


def _packed_signs(words: U32) -> F32:
    """Return the signs of 32 values for each word: four indices of seven bits."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return _signs(sign_masks()[indices].reshape(len(words), -1))


def _half_steps(d: U8, scales: Integers, factor: float) -> F32:
    return f16(d) * (np.float32(0.5) + numbers(scales)) * np.float32(factor)


def iq2_xxs(blocks: U8) -> F32:
    d, rest = split(blocks, 2, 64)
    groups = rest.reshape(len(blocks), 8, 8)
    index = groups[:, :, :4].reshape(len(blocks), 32)
    words = u32(np.ascontiguousarray(groups[:, :, 4:]).reshape(len(blocks), 32))
    scale = spread(_half_steps(d, words >> 28, 0.25), 32)
    return scale * _rows("iq2_xxs", index) * _packed_signs(words)


def iq2_xs(blocks: U8) -> F32:
    d, q, scales = split(blocks, 2, 64, 8)
    scale = spread(_half_steps(d, planes(scales, 1, 4), 0.25), 16)
    signs = _signs(sign_masks()[u16(q) >> 9])
    return scale * _rows("iq2_xs", u16(q) & 511) * signs


def iq2_s(blocks: U8) -> F32:
    d, q, signs, high, scales = split(blocks, 2, 32, 32, 8, 8)
    scale = spread(_half_steps(d, planes(scales, 1, 4), 0.25), 16)
    return scale * _rows("iq2_s", _index(q, planes(high, 1, 2))) * _signs(signs)


def _index(low: U8, high: Integers) -> U16:
    return low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)


def iq3_xxs(blocks: U8) -> F32:
    d, q, rest = split(blocks, 2, 64, 32)
    words = u32(rest)
    scale = spread(_half_steps(d, words >> 28, 0.5), 32)
    return scale * _rows("iq3_xxs", q) * _packed_signs(words)


def iq3_s(blocks: U8) -> F32:
    d, q, high, signs, scales = split(blocks, 2, 64, 8, 32, 4)
    scale = spread(f16(d) * (2 * numbers(planes(scales, 1, 4)) + 1), 32)
    return scale * _rows("iq3_s", _index(q, planes(high, 1, 1))) * _signs(signs)


def iq1_s(blocks: U8) -> F32:
    d, q, rest = split(blocks, 2, 32, 16)
    words = u16(rest)
    scale = spread(f16(d) * (2 * numbers(words >> 12 & 7) + 1), 32)
    shift = spread(np.where(words >> 15, np.float32(-0.125), np.float32(0.125)), 32)
    high = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    return scale * (_rows("iq1", _index(q, high.reshape(len(words), 32))) + shift)


def iq1_m(blocks: U8) -> F32:
    q, rest, scales = split(blocks, 32, 16, 8)
    words = u16(scales)
    top = words >> 12 << np.array([0, 4, 8, 12], np.uint16)  # a nibble of d each
    d = np.bitwise_or.reduce(top, axis=1, keepdims=True).astype("<u2").view("<f2")
    three = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    scale = spread(d.astype(np.float32) * (2 * numbers(three.reshape(len(words), 16)) + 1), 16)
    nibbles = planes(rest, 1, 4)
    shift = spread(np.where(nibbles & 8, np.float32(-0.125), np.float32(0.125)), 8)
    return scale * (_rows("iq1", _index(q, nibbles & 7)) + shift)
