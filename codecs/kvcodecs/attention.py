"""Attention over rows of K and V as they are stored, in one pass and constant memory.

The rows come piece by piece, as floats or as blocks of a `ggml` scheme, and each piece is forgotten
once it is seen: tiles of 64 rows at most are decoded at a time, and every query row keeps the
running maximum of its scores, the sum of its weights and the weighted sum of V (online softmax).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core
from .blocks import SIMD_LEVELS
from .errors import InvalidArgument
from .frame import BytesLike, byte_view
from .ggml.schemes import Scheme
from .plan import available_cpus, check_threads
from .rope import Rope
from .spec import F32
from .tensor import as_array

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
        Wrong shapes or types, or a scale or query that is not finite.

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
        q = as_array(q, "q")
        if q.ndim != 3 or q.dtype != np.float32:
            raise InvalidArgument(
                f"q is {q.dtype} {q.shape}, expected float32 (kv_heads, n_rows, head_dim)"
            )
        q = np.ascontiguousarray(q, np.float32)
        scale = check_scale(scale, "attention")
        if not np.isfinite(q).all():
            raise InvalidArgument("q: a value is not finite")
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.float32(scale * 1.5) * np.abs(q).max(initial=0.0))
        if not fits:
            raise InvalidArgument(f"scale {scale}: times q it is beyond float32")
        self._core = _core.attention(
            q,
            _integer(head_dim_v, "head_dim_v"),
            scale,
            _integers(first, "first"),
            _integers(last, "last"),
            None if order is None else _integers(order, "order").astype(np.int32),
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
        if not (rope is None or isinstance(rope, Rope)):
            raise InvalidArgument(f"attention: rope {rope!r}: expected a Rope or None")
        if rope is not None and not isinstance(k, Rows):
            raise InvalidArgument("attention: K as floats is not rotated; rotate it before")
        (k_data, k_scheme), (v_data, v_scheme) = _operand(k), _operand(v)
        self._core.add(
            k_data,
            k_scheme,
            v_data,
            v_scheme,
            _integer(first_position, "first_position"),
            None if rope is None else np.ascontiguousarray(rope.inv_freq, np.float32),
            1.0 if rope is None else rope.scaling,
            check_threads(n_threads) or available_cpus(),
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


def check_scale(scale: object, where: str) -> float:
    """Return a scale of scores; `InvalidArgument` unless it is a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating):
        raise InvalidArgument(f"{where}: scale {scale!r}: expected a number")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidArgument(f"{where}: scale: not finite")
    return number


def _integer(value: object, name: str) -> int:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < 1 << 63:  # type: ignore[operator]
        raise InvalidArgument(f"attention: {name} {value!r}: expected an integer, 0 or more")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _integers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    given = as_array(values, f"attention: {name}")
    if given.ndim != 1 or (given.size and not np.can_cast(given.dtype, np.int64)):
        raise InvalidArgument(
            f"attention: {name} is {given.dtype} {given.shape}, expected integers in one dimension"
        )
    return np.ascontiguousarray(given, np.int64)


def _operand(x: Operand) -> tuple[BytesLike | F32, int]:
    if isinstance(x, Rows):
        if not isinstance(x.scheme, Scheme):
            raise InvalidArgument(f"attention: scheme {x.scheme!r}: expected a Scheme")
        try:
            return byte_view(x.data), x.scheme.number
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidArgument(f"attention: rows are no contiguous bytes: {error}") from error
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        found = getattr(x, "dtype", type(x).__name__)
        raise InvalidArgument(f"attention: values of {found}, expected an array of float32")
    return x, 0
