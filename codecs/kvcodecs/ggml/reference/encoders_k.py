"""Simple encoders of the K schemes: scales from the smallest and the largest value."""

from __future__ import annotations

import numpy as np

from .fields import F32, U8, f16, half, join_planes, ratio


def _codes(x: F32, low: int, high: int) -> U8:
    return (np.clip(np.rint(x), low, high) - low).astype(np.uint8)


def _signed(x: F32, low: int, ends: tuple[int, int]) -> tuple[U8, F32, U8]:
    """Return float16 `d`, whole scales, and codes counted from `low`."""
    groups = x.reshape(len(x), 16, 16)
    at = np.abs(groups).argmax(axis=2, keepdims=True)
    scale = np.take_along_axis(groups, at, axis=2)[:, :, 0] / np.float32(low)
    d = half(np.abs(scale).max(axis=1, keepdims=True) / np.float32(ends[1]))
    multiple = np.clip(np.rint(ratio(scale, f16(d))), *ends).astype(np.float32)
    step = (f16(d) * multiple)[:, :, None]
    return d, multiple, _codes(ratio(groups, step), low, -low - 1).reshape(len(x), 256)


def q3_k(x: F32) -> U8:
    d, multiple, c = _signed(x, -4, (-32, 31))
    s = (multiple + 32).astype(np.uint8)
    scales = [join_planes(s & np.uint8(15), 8, 4), join_planes(s >> np.uint8(4), 4, 2)]
    return np.concatenate(
        [join_planes(c >> np.uint8(2), 32, 1), join_planes(c & np.uint8(3), 32, 2), *scales, d],
        axis=1,
    )


def q6_k(x: F32) -> U8:
    d, multiple, c = _signed(x, -32, (-128, 127))
    low, high = join_planes(c & np.uint8(15), 64, 4), join_planes(c >> np.uint8(4), 32, 2)
    return np.concatenate([low, high, multiple.astype(np.int8).view(np.uint8), d], axis=1)


def _offset(x: F32, n: int, top: int, ends: int) -> tuple[U8, U8, U8, U8, U8]:
    """Return float16 `d` and `dmin`, whole scales and offsets, and codes."""
    groups = x.reshape(len(x), -1, n)
    least = np.minimum(groups.min(axis=2), 0)
    scale = (groups.max(axis=2) - least) / np.float32(top)
    scale = np.maximum(scale, 0)
    d = half(scale.max(axis=1, keepdims=True) / np.float32(ends))
    dmin = half((-least).max(axis=1, keepdims=True) / np.float32(ends))
    s = np.clip(np.rint(ratio(scale, f16(d))), 0, ends).astype(np.float32)
    m = np.clip(np.rint(ratio(-least, f16(dmin))), 0, ends).astype(np.float32)
    shifted = groups + (f16(dmin) * m)[:, :, None]
    c = _codes(ratio(shifted, (f16(d) * s)[:, :, None]), 0, top)
    return d, dmin, s.astype(np.uint8), m.astype(np.uint8), c.reshape(len(x), 256)


def q2_k(x: F32) -> U8:
    d, dmin, s, m, c = _offset(x, 16, 3, 15)
    return np.concatenate([s | m << np.uint8(4), join_planes(c, 32, 2), d, dmin], axis=1)


def _six_bits(s: U8, m: U8) -> U8:
    low, high = np.uint8(15), np.uint8(4)
    a = s[:, :4] | (s[:, 4:] >> high) << np.uint8(6)
    b = m[:, :4] | (m[:, 4:] >> high) << np.uint8(6)
    return np.concatenate([a, b, (s[:, 4:] & low) | (m[:, 4:] & low) << high], axis=1)


def q4_k(x: F32) -> U8:
    d, dmin, s, m, c = _offset(x, 32, 15, 63)
    return np.concatenate([d, dmin, _six_bits(s, m), join_planes(c, 32, 4)], axis=1)


def q5_k(x: F32) -> U8:
    d, dmin, s, m, c = _offset(x, 32, 31, 63)
    high, low = join_planes(c >> np.uint8(4), 32, 1), join_planes(c & np.uint8(15), 32, 4)
    return np.concatenate([d, dmin, _six_bits(s, m), high, low], axis=1)
