"""Mean and scale of the channels of a prefill. FORMAT.md section 11.8.

A vector's error is spread evenly over its scaled channels. With scales ``s`` and variances ``v``,
channel `c` has the error ``s_c^2 sum(v / s^2)`` times a constant, and the sum over channels is
least where ``s^2`` is as the standard deviation is: so a scale is the root of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ..codec import Chunks
from ..spec import F32

F64 = npt.NDArray[np.float64]

_AT_ONCE: Final = 256
_LARGEST: Final = 65504.0
_LEAST: Final = 2.0**-14
#: No channel counts with a deviation that is less than this share of the RMS of its head's.
_LEAST_SHARE: Final = 2.0**-10


def channel_statistics(heads: int, head_dim: int, chunks: Chunks, left_out: int) -> tuple[F32, F32]:
    """Return mean and scale of each channel, as float16 holds them.

    Parameters
    ----------
    chunks
        The prefill, in two passes.
    left_out
        So many of the first tokens do not count, if there are more than twice as many.
    """
    n = sum(chunk.shape[1] for chunk in chunks())
    left_out = left_out if n > 2 * left_out else 0
    count = max(n - left_out, 1)
    total = np.zeros(heads * head_dim)
    for rows in _rows(chunks, left_out):
        total = _add(total, rows)
    mean = total / count
    total = np.zeros(heads * head_dim)
    for rows in _rows(chunks, left_out):
        rows -= mean
        rows *= rows
        total = _add(total, rows)
    squares = (total / count).reshape(heads, head_dim)
    typical = np.sqrt(np.add.accumulate(squares, axis=1)[:, -1:] / head_dim)
    scale = np.sqrt(np.maximum(np.sqrt(squares), _LEAST_SHARE * typical))
    scale = np.where(typical == 0, 1.0, np.clip(scale, _LEAST, _LARGEST))
    return _as_float16(np.clip(mean, -_LARGEST, _LARGEST)), _as_float16(scale.reshape(-1))


def _rows(chunks: Chunks, left_out: int) -> Iterator[F64]:
    """Return tokens ``(n, channels)``, some at a time, without the first `left_out`."""
    for chunk in chunks():
        skip = min(left_out, chunk.shape[1])
        left_out -= skip
        for at in range(skip, chunk.shape[1], _AT_ONCE):
            part = chunk[:, at : at + _AT_ONCE].transpose(1, 0, 2)
            yield part.astype(np.float64, order="C").reshape(part.shape[0], -1)


def _add(total: F64, rows: F64) -> F64:
    """Add token after token, so that it does not matter how they are cut into chunks."""
    rows[0] += total
    # In order, as there are two channels at least; `accumulate` promises it, 200 times slower.
    return np.asarray(np.add.reduce(rows, axis=0))


def _as_float16(values: F64) -> F32:
    return values.astype(np.float32).astype(np.float16).astype(np.float32)
