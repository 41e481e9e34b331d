"""Arrays of floats to rows of blocks and back, along the last axis."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import InvalidArgument
from ..plan import available_cpus, check_threads
from ..spec import FLOAT_DTYPES, float_dtype
from ..tensor import as_array
from .config import GGML
from .schemes import Scheme, scheme_by_name

# csrc/rows.hpp OutputType.
_TYPES: Final = {FLOAT_DTYPES[name]: i for i, name in enumerate(("float32", "float16", "bfloat16"))}
# Fewer values are not worth a second thread.
_MANY_VALUES: Final = 1 << 18


def quantise(
    x: npt.NDArray[Any], scheme: str | GGML | Scheme, n_threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Return rows of blocks for an array of floats.

    Parameters
    ----------
    x : (..., n_values) float32, float16 or bfloat16
        `n_values` is a multiple of the scheme's block size.
    scheme
        Its name, in any case, ``GGML("q8_0")`` or one of `SCHEMES`.
    n_threads
        None: one per CPU that this process may use. The bytes do not depend on it.

    Returns
    -------
    (..., row_bytes) uint8
        ``row_bytes = n_values / block_values * block_bytes``.

    Raises
    ------
    InvalidArgument
        Another dtype, rows that are not whole blocks, a value that is not finite, or one so large
        that the scale of its block leaves float16; names its index.
    """
    scheme = _scheme(scheme)
    x = as_array(x, f"ggml.{scheme.name}")
    if x.ndim == 0 or x.dtype.newbyteorder("=") not in _TYPES:
        raise InvalidArgument(
            f"ggml.{scheme.name}: {x.ndim}-dimensional array of {x.dtype}, expected rows of "
            "float32, float16 or bfloat16"
        )
    row_bytes = scheme.row_bytes(x.shape[-1])
    x = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    rows, value, block = _core.ggml_encode_values(
        scheme.number, _bits(x).reshape(-1), _TYPES[x.dtype], _threads(n_threads, x.size)
    )
    if value >= 0:
        at = tuple(int(i) for i in np.unravel_index(value, x.shape))
        raise InvalidArgument(f"ggml.{scheme.name}: value {x[at]} at index {at} is not finite")
    if block >= 0:
        at = tuple(int(i) for i in np.unravel_index(block * scheme.block_values, x.shape))
        raise InvalidArgument(
            f"ggml.{scheme.name}: the values of the block from index {at} are too large: its scale "
            "leaves float16"
        )
    return rows.reshape(*x.shape[:-1], row_bytes)


def dequantise(
    rows: npt.NDArray[np.uint8],
    scheme: str | GGML | Scheme,
    dtype: str | npt.DTypeLike = "float32",
    out: npt.NDArray[Any] | None = None,
    n_threads: int | None = None,
) -> npt.NDArray[Any]:
    """Return the values of rows of blocks.

    Parameters
    ----------
    rows : (..., row_bytes) uint8
        What `quantise` returns; `row_bytes` is a multiple of the scheme's block bytes.
    scheme
        As in `quantise`.
    dtype
        ``"float32"``, ``"float16"`` or ``"bfloat16"``; that of `out`, where it is given.
    out : (..., n_values)
        C-contiguous array for the values.
    n_threads
        As in `quantise`.

    Raises
    ------
    InvalidArgument
        Another dtype or shape, or a value that overflows `dtype`.

    Notes
    -----
    No encoder writes a scale that is infinite or NaN. Of blocks that have one, ``"float32"`` gives
    the values that are not finite; the narrower types refuse them as an overflow.
    """
    scheme = _scheme(scheme)
    rows = as_array(rows, f"ggml.{scheme.name}")
    if rows.ndim == 0 or rows.dtype != np.uint8 or rows.shape[-1] % scheme.block_bytes:
        raise InvalidArgument(
            f"ggml.{scheme.name}: rows {rows.dtype} of shape {rows.shape}, expected uint8 and a "
            f"multiple of {scheme.block_bytes} bytes a row"
        )
    n_values = rows.shape[-1] // scheme.block_bytes * scheme.block_values
    shape = (*rows.shape[:-1], n_values)
    if out is None:
        out = np.empty(shape, float_dtype(dtype))  # type: ignore[arg-type]
    elif (
        not isinstance(out, np.ndarray)
        or out.shape != shape
        or out.dtype not in _TYPES
        or not (out.flags.c_contiguous and out.flags.writeable)
    ):
        raise InvalidArgument(
            f"ggml.{scheme.name}: out: expected a writeable, C-contiguous float32, float16 or "
            f"bfloat16 array of shape {shape}"
        )
    overflow = _core.ggml_decode_values(
        scheme.number,
        np.ascontiguousarray(rows).reshape(-1),
        _bits(out).reshape(-1),
        _TYPES[out.dtype],
        _threads(n_threads, out.size),
    )
    if overflow:
        raise InvalidArgument(
            f"ggml.{scheme.name}: a value overflows {out.dtype.name}; ask for float32"
        )
    return out


def _scheme(scheme: str | GGML | Scheme) -> Scheme:
    if isinstance(scheme, Scheme):
        return scheme_by_name(scheme.name)
    return scheme_by_name(scheme.scheme if isinstance(scheme, GGML) else scheme)


def _bits(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as the core takes it."""
    return x if x.dtype == np.float32 else x.view(np.uint16)


def _threads(n_threads: int | None, n_values: int) -> int:
    n_threads = check_threads(n_threads) or available_cpus()
    return n_threads if n_values >= _MANY_VALUES else 1
