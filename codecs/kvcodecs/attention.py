"""Attention over rows of K and V as they are stored, in one pass and constant memory.

The rows come piece by piece, as floats or as blocks of a `ggml` scheme, and each piece is forgotten
once it is seen: tiles of 64 rows at most are decoded at a time, and every query row keeps the
running maximum of its scores, the sum of its weights and the weighted sum of V (online softmax).
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core
from .blocks import SIMD_LEVELS
from .errors import InvalidArgument
from .frame import BytesLike
from .ggml.schemes import Scheme
from .plan import available_cpus
from .rope import Rope
from .spec import F32

#: csrc/simd.hpp Level.
_LEVELS: Final = {"portable": 0, "avx2": 1, "avx512": 2}


class Rows(NamedTuple):
    """Successive rows of all heads, coded channel order: whole blocks of one scheme."""

    data: BytesLike
    scheme: Scheme


Operand: TypeAlias = Rows | F32


class Attention:
    """Attention of fixed query rows over rows of K and V that are added piece by piece.

    Parameters
    ----------
    q : (kv_heads, n_rows, head_dim) float32
        The query rows of each KV head, in tensor channel order; finite. Copied.
    head_dim_v
        Channels of a V head.
    scale
        Of the scores; finite.
    first, last : (n_rows,) integers
        The positions that each query row sees, both included; the same for all heads. A row whose
        `last` is before its `first` sees nothing.
    order : (head_dim,) int32, optional
        The tensor channel that each coded channel of `Rows` of K holds, see `Rope.channel_order`.
        None: the same. K as floats is in tensor channel order.
    simd
        Instruction set, one of `SIMD_LEVELS`; None: the fastest.

    Raises
    ------
    InvalidArgument
        Wrong shapes, or a scale or query that is not finite.

    Notes
    -----
    Weights are within some 1e-6 of exact ones: scores that may lose that much in float32 are taken
    in float64. The result depends on the instruction set and the number of threads by rounding
    alone. Safe to use from many threads.
    """

    def __init__(
        self,
        q: F32,
        head_dim_v: int,
        *,
        scale: float,
        first: npt.ArrayLike,
        last: npt.ArrayLike,
        order: npt.NDArray[np.int32] | None = None,
        simd: str | None = None,
    ) -> None:
        if simd is not None and simd not in SIMD_LEVELS:
            raise InvalidArgument(f"simd {simd!r}: None, or one of {', '.join(SIMD_LEVELS)}")
        q = np.ascontiguousarray(q, np.float32)
        if q.ndim != 3:
            raise InvalidArgument(f"q of shape {q.shape}, expected (kv_heads, n_rows, head_dim)")
        if not np.isfinite(q).all():
            raise InvalidArgument("q: a value is not finite")
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.float32(scale * 1.5) * np.abs(q).max(initial=0.0))
        if not fits:
            raise InvalidArgument(f"scale {scale}: times q it is beyond float32")
        self._core = _core.attention(
            q,
            head_dim_v,
            scale,
            np.ascontiguousarray(first, np.int64),
            np.ascontiguousarray(last, np.int64),
            None if order is None else np.ascontiguousarray(order, np.int32),
            -1 if simd is None else _LEVELS[simd],
        )

    def add(
        self,
        k: Operand,
        v: Operand,
        first_position: int,
        *,
        rope: Rope | None = None,
        n_threads: int | None = None,
    ) -> None:
        """Go on with successive rows.

        Parameters
        ----------
        k, v
            `Rows`, or floats ``(kv_heads, n, head_dim)`` with the last axis contiguous.
        first_position
            Of the first row. Pieces may come in any order, and positions may be left out.
        rope
            Rotate `Rows` of K on the way. None: K is as the queries need it.
        n_threads
            None: one per CPU this process may use.

        Raises
        ------
        InvalidArgument
            K and V of different numbers of rows, wrong shapes, bytes that are not whole rows, or
            positions that the rotation cannot take.
        """
        if rope is not None and not isinstance(k, Rows):
            raise InvalidArgument("attention: K as floats is not rotated; rotate it before")
        (k_data, k_scheme), (v_data, v_scheme) = _operand(k), _operand(v)
        self._core.add(
            k_data,
            k_scheme,
            v_data,
            v_scheme,
            first_position,
            None if rope is None else np.ascontiguousarray(rope.inv_freq, np.float32),
            1.0 if rope is None else rope.scaling,
            n_threads or available_cpus(),
        )

    def result(self) -> F32:
        """Return the attention so far, ``(kv_heads, n_rows, head_dim_v)``: a new array.

        Zeros where a query row saw nothing.

        Raises
        ------
        InvalidArgument
            Scores, or sums of V, that leave float32.
        """
        out = self._core.result()
        if not np.isfinite(out).all():
            raise InvalidArgument("attention: scores or sums of V are beyond float32")
        return out


def _operand(x: Operand) -> tuple[BytesLike | F32, int]:
    if isinstance(x, Rows):
        return x.data, x.scheme.number
    if x.dtype != np.float32:
        raise InvalidArgument(f"attention: values of dtype {x.dtype}, expected float32")
    return x, 0
