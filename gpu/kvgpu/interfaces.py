"""What libraries say of their arrays of a device: ``__cuda_array_interface__``, DLPack, PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import FLOAT_DTYPES
from kvcodecs.targets import are_apart, dtype_name

#: Makes an array that has a ``__cuda_array_interface__`` of one that speaks DLPack alone.
FromDlpack: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Resident:
    """A payload that lies on the device; `stream` as in `View`."""

    owner: Any
    address: int
    n_bytes: int
    stream: int | None


def bytes_of(array: Any, from_dlpack: FromDlpack) -> Resident:
    """Return where a payload of the device lies.

    Raises
    ------
    InvalidArgument
        It has gaps, or lies on the host.
    """
    stream = None
    if hasattr(type(array), "data_ptr"):
        is_whole, address = array.is_contiguous() and array.is_cuda, array.data_ptr()
        n_bytes = array.numel() * array.element_size()
    else:
        if not hasattr(array, "__cuda_array_interface__"):
            array = from_dlpack(array)
        described = array.__cuda_array_interface__
        stream = described.get("stream")
        address, n_bytes = described["data"][0], np.dtype(described["typestr"]).itemsize
        shape, strides = described["shape"], described.get("strides")
        is_whole = strides is None or tuple(strides) == _contiguous(shape, n_bytes)
        n_bytes *= math.prod(shape)
    if not is_whole:
        raise InvalidArgument("payload: expected bytes of the device without gaps")
    return Resident(array, address or 0, n_bytes, stream)


@dataclass(frozen=True, slots=True)
class Array:
    """What an array's own library says of it; strides in elements."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: int | None = None


def writable(array: Any, from_dlpack: FromDlpack) -> Array:
    """Return what an array is that values are to be written to.

    Raises
    ------
    InvalidArgument
        It is of another dtype, on the host, read-only, or has strides that no output may have.
    """
    name = dtype_name(getattr(array, "dtype", None))
    if isinstance(array, np.ndarray) or name not in FLOAT_DTYPES:
        raise InvalidArgument(
            f"output {type(array).__name__} of {name}: expected float32, float16 or bfloat16 on "
            "the device"
        )
    dtype = FLOAT_DTYPES[name]
    if hasattr(type(array), "data_ptr"):  # PyTorch says more of bfloat16 than the protocols can
        if not array.is_cuda:
            raise InvalidArgument("output tensor: lies on the host, expected it on the device")
        memory = Array(array, array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype)
    else:
        if not hasattr(array, "__cuda_array_interface__"):
            array = from_dlpack(array)
        memory = _interface(array, dtype)
    if 0 in memory.shape:
        return memory
    if memory.address % dtype.itemsize:
        raise InvalidArgument(f"output at {memory.address:#x}: not where {name} may lie")
    is_contiguous = memory.strides[-1] == 1 or memory.shape[-1] == 1
    if not (is_contiguous and are_apart(memory.shape, memory.strides)):
        raise InvalidArgument(
            f"output with strides of {memory.strides} elements: the last axis must be contiguous, "
            "strides positive"
        )
    return memory


def _interface(array: Any, dtype: np.dtype[Any]) -> Array:
    described = array.__cuda_array_interface__
    address, read_only = described["data"]
    if read_only:
        raise InvalidArgument("output is read-only")
    shape = tuple(described["shape"])
    strides = described.get("strides") or _contiguous(shape, dtype.itemsize)
    if any(stride % dtype.itemsize for stride in strides):
        raise InvalidArgument(f"output with strides of {strides} bytes: no whole elements")
    return Array(
        array, address or 0, shape, tuple(stride // dtype.itemsize for stride in strides), dtype,
        described.get("stream"),
    )  # fmt: skip


def _contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))
