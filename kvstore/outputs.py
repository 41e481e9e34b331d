"""Arrays of the caller's that values are read into: are they what the values need."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import FLOAT_DTYPES, KINDS, float_dtype
from kvcodecs.targets import dtype_name

DType = str | np.dtype[Any] | type | None


def check_out(out: Any, shape: tuple[int, ...], dtype: DType, where: str) -> np.dtype[Any]:
    """Return the dtype of an array of any library that tokens of one stream can go to.

    Raises
    ------
    InvalidArgument
        Another shape, not a float type, or not `dtype` where one is asked for.
    """
    name = dtype_name(getattr(out, "dtype", None))
    if name not in FLOAT_DTYPES:
        raise InvalidArgument(f"{where}: out of {name}: expected float32, float16 or bfloat16")
    found = FLOAT_DTYPES[name]
    if tuple(out.shape) != shape or (dtype is not None and found != float_dtype(dtype)):
        hint = ""
        if len(out.shape) == 3 and out.shape[1] != shape[1]:
            hint = "; start and stop choose the tokens, n_rows those that a kvgpu.Paged takes"
        raise InvalidArgument(
            f"{where}: out is {out.dtype} {tuple(out.shape)}, "
            f"expected {dtype or 'a float type'} {shape}{hint}"
        )
    return found


def outs_of_layers(out: Any, n_layers: int) -> list[list[Any]]:
    """Return an array for each layer, of K and of V; None where there is none.

    Raises
    ------
    InvalidArgument
        Not such arrays for K and V, or not as many as there are layers.
    """
    if not isinstance(out, list | tuple) or len(out) != len(KINDS):
        raise InvalidArgument(f"out {type(out).__name__}: expected two, the arrays of K and of V")
    return [
        _of_kind(part, n_layers, f"out of {kind}") for kind, part in zip(KINDS, out, strict=True)
    ]


def _of_kind(part: Any, n_layers: int, what: str) -> list[Any]:
    if part is None:
        return [None] * n_layers
    if isinstance(part, list | tuple):
        n_found = len(part)
    elif len(shape := tuple(getattr(part, "shape", ()))) == 4:
        n_found = shape[0]
    else:
        raise InvalidArgument(
            f"{what}, {type(part).__name__} of shape {shape}: expected a list of arrays, or one "
            "array of layers, heads, tokens, head_dim"
        )
    if n_found != n_layers:
        raise InvalidArgument(f"{what}: arrays of {n_found} layers, expected {n_layers}")
    try:
        return [part[i] for i in range(n_layers)]
    except TypeError as error:
        raise InvalidArgument(f"{what}: {error}; give a list of arrays") from error
