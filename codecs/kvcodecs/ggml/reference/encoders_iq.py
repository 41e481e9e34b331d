"""Simple encoders of the IQ schemes.

The largest magnitude of a sub-block goes to the largest of the table; the scale of the block is
that of its largest sub-block. Then every group gets the row of the grid nearest to it under the
stored scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tables import IQ4_VALUES, grids
from .fields import F32, U8, f16, half, join_planes, ratio

I64 = npt.NDArray[np.int64]


def _scales(sub_blocks: F32, largest_level: float, tops: tuple[float, float], step: float) -> F32:
    """Return the float16 bytes of `d` for the largest magnitudes of sub-blocks, and `k` of each.

    A sub-block's scale is `d * (first + step * k)`, `k` from 0; `tops` are first and last of them.
    """
    first, last = tops
    scale = np.abs(sub_blocks).max(axis=2) / np.float32(largest_level)
    d = half(scale.max(axis=1, keepdims=True) / np.float32(last))
    whole = np.rint((ratio(scale, f16(d)) - np.float32(first)) / np.float32(step))
    k = np.clip(whole, 0, (last - first) / step).astype(np.float32)
    return np.concatenate([f16(d), k], axis=1)


def _nearest(x: F32, rows: F32) -> I64:
    """Return the row of `rows` nearest to each of `x`, in pieces that fit in memory."""
    norms = (rows * rows).sum(axis=1)
    flat = x.reshape(-1, rows.shape[1])
    found = [
        (norms - 2 * part @ rows.T).argmin(axis=1)
        for part in np.array_split(flat, max(1, len(flat) // 4096))
    ]
    return np.concatenate(found).reshape(x.shape[:-1])


def _parity(x: F32) -> tuple[F32, U8]:
    """Return magnitudes of groups of eight and seven bits of signs.

    Where the negatives are odd in number the smallest value counts with the other sign.
    """
    negative = x < 0
    odd = negative.sum(axis=-1) % 2 == 1
    at = np.abs(x).argmin(axis=-1)
    flip = odd[..., None] & (np.arange(8) == at[..., None])
    magnitudes = np.where(flip, -np.abs(x), np.abs(x))
    bits = np.packbits(negative ^ flip, axis=-1, bitorder="little")[..., 0]
    return magnitudes, bits & np.uint8(127)


def _iq4(groups: F32, step: F32) -> U8:
    levels = np.array(IQ4_VALUES, np.float32)
    edges = (levels[1:] + levels[:-1]) / 2
    return np.searchsorted(edges, ratio(groups, step), side="right").astype(np.uint8)


def _largest(x: F32) -> F32:
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def iq4_nl(x: F32) -> U8:
    d = half(_largest(x) / np.float32(IQ4_VALUES[0]))
    return np.concatenate([d, join_planes(_iq4(x, f16(d)), 16, 4)], axis=1)


def iq4_xs(x: F32) -> U8:
    groups = x.reshape(len(x), 8, 32)
    scale = _largest(groups)[:, :, 0] / np.float32(IQ4_VALUES[0])
    d = half(np.abs(scale).max(axis=1, keepdims=True) / np.float32(31))
    multiple = np.clip(np.rint(ratio(scale, f16(d))), -32, 31).astype(np.float32)
    c = _iq4(groups, (f16(d) * multiple)[:, :, None]).reshape(len(x), 256)
    s = (multiple + 32).astype(np.uint8)
    low, high = join_planes(s & np.uint8(15), 1, 4), join_planes(s >> np.uint8(4), 1, 2)
    return np.concatenate([d, high, low, join_planes(c, 16, 4)], axis=1)


def _iq2(
    x: F32, name: str, n: int, width: int, level: float, unit: float
) -> tuple[U8, U8, I64, U8]:
    """Return `d`, `k`, rows of the grid and seven signs of each eight values."""
    found = _scales(x.reshape(len(x), -1, n), level, (0.5 * unit, 15.5 * unit), unit)
    d, k = found[:, :1], found[:, 1:]
    magnitudes, signs = _parity(x.reshape(len(x), 32, 8))
    step = np.repeat(
        d * (np.float32(0.5) + k) * np.float32(unit), 256 // width // k.shape[1], axis=1
    )
    values = magnitudes.reshape(len(x), -1, width)
    rows = _nearest(ratio(values, step[:, :, None]), grids()[name].astype(np.float32))
    return half(d), k.astype(np.uint8), rows, signs


def _words(signs: U8, k: U8) -> U8:
    """Return four times seven signs and the scale of each u32."""
    four = signs.reshape(len(signs), 8, 4).astype(np.uint32)
    words = (four << np.array([0, 7, 14, 21], np.uint32)).sum(axis=2, dtype=np.uint32)
    words |= k.astype(np.uint32) << np.uint32(28)
    found: U8 = words.astype("<u4").view(np.uint8)
    return found.reshape(len(signs), 32)


def iq2_xxs(x: F32) -> U8:
    d, k, rows, signs = _iq2(x, "iq2_xxs", 32, 8, 43, 0.25)
    q = rows.astype(np.uint8).reshape(len(x), 8, 4)
    words = _words(signs, k).reshape(len(x), 8, 4)
    return np.concatenate([d, np.concatenate([q, words], axis=2).reshape(len(x), 64)], axis=1)


def iq2_xs(x: F32) -> U8:
    d, k, rows, signs = _iq2(x, "iq2_xs", 16, 8, 43, 0.25)
    q = (rows.astype(np.uint16) | signs.astype(np.uint16) << np.uint16(9)).astype("<u2")
    return np.concatenate([d, q.view(np.uint8), join_planes(k, 1, 4)], axis=1)


def iq3_xxs(x: F32) -> U8:
    d, k, rows, signs = _iq2(x, "iq3_xxs", 32, 4, 62, 0.5)
    return np.concatenate([d, rows.astype(np.uint8), _words(signs, k)], axis=1)


def iq2_s(x: F32) -> U8:
    found = _scales(x.reshape(len(x), 16, 16), 43, (0.125, 3.875), 0.25)
    d, k = found[:, :1], found[:, 1:]
    step = np.repeat(d * (np.float32(0.5) + k) * np.float32(0.25), 2, axis=1)[:, :, None]
    rows = _nearest(
        ratio(np.abs(x).reshape(len(x), 32, 8), step), grids()["iq2_s"].astype(np.float32)
    )
    signs = join_planes((x < 0).astype(np.uint8), 1, 1)
    high = join_planes((rows >> 8).astype(np.uint8), 1, 2)
    scales = join_planes(k.astype(np.uint8), 1, 4)
    return np.concatenate([half(d), (rows & 255).astype(np.uint8), signs, high, scales], axis=1)


def iq3_s(x: F32) -> U8:
    found = _scales(x.reshape(len(x), 8, 32), 15, (1, 31), 2)
    d, k = found[:, :1], found[:, 1:]
    step = np.repeat(d * (1 + 2 * k), 8, axis=1)[:, :, None]
    rows = _nearest(
        ratio(np.abs(x).reshape(len(x), 64, 4), step), grids()["iq3_s"].astype(np.float32)
    )
    signs = join_planes((x < 0).astype(np.uint8), 1, 1)
    high = join_planes((rows >> 8).astype(np.uint8), 1, 1)
    scales = join_planes(k.astype(np.uint8), 1, 4)
    return np.concatenate([half(d), (rows & 255).astype(np.uint8), high, signs, scales], axis=1)


def _iq1(x: F32, n: int) -> tuple[F32, npt.NDArray[np.int64], I64]:
    """Return `d`, `k` and rows of the grid; what is added to its levels is 0.125."""
    found = _scales(x.reshape(len(x), -1, n), 1.125, (1, 15), 2)
    d, k = found[:, :1], found[:, 1:]
    step = np.repeat(d * (1 + 2 * k), n // 8, axis=1)[:, :, None]
    levels = grids()["iq1"].astype(np.float32) + np.float32(0.125)
    return d, k.astype(np.int64), _nearest(ratio(x.reshape(len(x), 32, 8), step), levels)


def iq1_s(x: F32) -> U8:
    d, k, rows = _iq1(x, 32)
    high = (rows.reshape(len(x), 8, 4) >> 8 << np.array([0, 3, 6, 9])).sum(axis=2)
    words = (high | k << 12).astype("<u2").view(np.uint8)
    return np.concatenate([half(d), (rows & 255).astype(np.uint8), words], axis=1)


def iq1_m(x: F32) -> U8:
    d, k, rows = _iq1(x, 16)
    words = (k.reshape(len(x), 4, 4) << np.array([0, 3, 6, 9])).sum(axis=2)
    bits = half(d).view("<u2").astype(np.int64)
    words |= (bits >> np.array([0, 4, 8, 12]) & 15) << 12
    high = join_planes((rows >> 8).astype(np.uint8), 1, 4)
    scales = words.astype("<u2").view(np.uint8)
    return np.concatenate([(rows & 255).astype(np.uint8), high, scales], axis=1)
