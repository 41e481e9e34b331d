"""Arrays of a device that values are decoded into: the caller's, and pages of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import FLOAT_DTYPES
from kvcodecs.targets import dtype_name

#: Makes an array that has a ``__cuda_array_interface__`` of one that speaks DLPack alone.
FromDlpack: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Pages:
    """The block table of one sequence in a paged cache.

    Attributes
    ----------
    numbers : (n,) int32
        Page of the pool that holds the sequence's rows ``[i * rows, (i + 1) * rows)``.
    rows
        Of a page.
    stride
        From one page of the pool to the next, elements.
    """

    numbers: npt.NDArray[np.int32]
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class View:
    """Memory of a device that values are decoded into: ``[heads][rows][head_dim]``.

    Made by `view_of`; `kvcodecs.Plan.add` takes it, and slices of its rows, as an output.

    Attributes
    ----------
    owner
        What keeps the memory.
    address
        Of element 0; of a paged view, of element 0 of the pool.
    shape, dtype
        As of an array.
    head_stride, row_stride
        Elements; the last axis is contiguous.
    pages, first_row
        Of a paged view: row `i` of it is row ``first_row + i`` of the sequence.
    """

    owner: Any
    address: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    head_stride: int
    row_stride: int
    pages: Pages | None = None
    first_row: int = 0

    def __getitem__(self, key: tuple[slice, slice]) -> View:
        """Return some of the rows: ``view[:, start:stop]``."""
        heads, rows = key
        start, stop, step = rows.indices(self.shape[1])
        if heads != slice(None) or step != 1:
            raise InvalidArgument(f"view[{key}]: only rows can be sliced, view[:, start:stop]")
        shape = (self.shape[0], max(stop - start, 0), self.shape[2])
        if self.pages is not None:
            return replace(self, shape=shape, first_row=self.first_row + start)
        address = self.address + start * self.row_stride * self.dtype.itemsize
        return replace(self, shape=shape, address=address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.pages is not None:
            raise AttributeError("pages of a cache are no array")
        strides = (self.head_stride, self.row_stride, 1)
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype.kind == "V" else self.dtype.str,
            "data": (self.address, False),
            "strides": tuple(n * self.dtype.itemsize for n in strides),
            "version": 3,
        }


_AXES: Final = {"HND": (1, 2), "NHD": (2, 1)}


class Paged:
    """Rows of one sequence in a paged cache, as serving engines keep it.

    Parameters
    ----------
    pool : (n_pages, heads, page_rows, head_dim) float32, float16 or bfloat16
        The cache of one layer and kind, on the device; last axis contiguous. With
        ``layout="NHD"``: (n_pages, page_rows, heads, head_dim).
    pages : (n,) integers, on the host
        The sequence's block table: row `i` lies in page ``pages[i // page_rows]``.
    n_rows
        Of this output; None: all that the pages hold after `first_row`.
    first_row
        Row of the sequence that the first row of the output is.

    Raises
    ------
    InvalidArgument
        Not such a pool, or a page that it does not have, or too few of them.
    """

    __slots__ = ("_pages", "_pool", "_span", "_swapped")

    def __init__(
        self,
        pool: Any,
        pages: npt.ArrayLike,
        *,
        n_rows: int | None = None,
        first_row: int = 0,
        layout: Literal["HND", "NHD"] = "HND",
    ) -> None:
        if layout not in _AXES:
            raise InvalidArgument(f"layout {layout!r}: expected 'HND' or 'NHD'")
        shape = tuple(getattr(pool, "shape", ()))
        if len(shape) != 4 or shape[_AXES[layout][1]] == 0:
            raise InvalidArgument(f"pool of shape {shape}: expected pages of heads and rows")
        numbers = np.asarray(pages)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise InvalidArgument(
                f"pages of dtype {numbers.dtype}, shape {numbers.shape}: expected a list of numbers"
            )
        bad = numbers[(numbers < 0) | (numbers >= min(shape[0], 1 << 31))]
        if bad.size:
            raise InvalidArgument(f"page {bad[0]}: the pool has {shape[0]}")
        room = numbers.size * shape[_AXES[layout][1]]
        if room >= 1 << 32:
            raise InvalidArgument(f"{numbers.size} pages hold {room} rows: at most 2^32 - 1")
        if n_rows is None:
            n_rows = room - first_row
        if not (first_row >= 0 and n_rows >= 0 and first_row + n_rows <= room):
            raise InvalidArgument(
                f"rows [{first_row}, {first_row + n_rows}): {numbers.size} pages hold {room}"
            )
        self._pool, self._pages = pool, numbers.astype(np.int32)
        self._span, self._swapped = (first_row, n_rows), layout == "NHD"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows of the output, head_dim."""
        shape = self._pool.shape
        return (shape[2 if self._swapped else 1], self._span[1], shape[3])

    @property
    def dtype(self) -> Any:
        return self._pool.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("pages of a cache are no array")

    def view(self, from_dlpack: FromDlpack) -> View:
        """Return the output as decoders take it."""
        pool = _memory(self._pool, from_dlpack)
        head, row = (2, 1) if self._swapped else (1, 2)
        page_stride, head_stride, row_stride = (pool.strides[axis] for axis in (0, head, row))
        pages = Pages(self._pages, pool.shape[row], page_stride)
        return View(
            pool.owner, pool.address, self.shape, pool.dtype, head_stride, row_stride,
            pages, self._span[0],
        )  # fmt: skip


def view_of(array: Any, from_dlpack: FromDlpack) -> View:
    """Return an array of a device as decoders take it.

    Parameters
    ----------
    array : (heads, rows, head_dim) float32, float16 or bfloat16
        A CuPy array, a PyTorch tensor, anything else with ``__cuda_array_interface__`` or DLPack,
        or a `Paged`. Last axis contiguous, other strides not negative.

    Raises
    ------
    InvalidArgument
        No such array, or one that lies on the host or may not be written.
    """
    if isinstance(array, View):
        return array
    if isinstance(array, Paged):
        return array.view(from_dlpack)
    memory = _memory(array, from_dlpack)
    if len(memory.shape) != 3:
        raise InvalidArgument(f"output of shape {memory.shape}, expected heads, rows, head_dim")
    heads, rows, head_dim = memory.shape
    return View(
        memory.owner, memory.address, (heads, rows, head_dim), memory.dtype,
        memory.strides[0], memory.strides[1],
    )  # fmt: skip


def bytes_of(array: Any) -> tuple[int, int]:
    """Return address and size of a payload that lies on the device.

    Raises
    ------
    InvalidArgument
        It has gaps.
    """
    if hasattr(type(array), "data_ptr"):
        is_whole, address = array.is_contiguous() and array.is_cuda, array.data_ptr()
        n_bytes = array.numel() * array.element_size()
    else:
        described = array.__cuda_array_interface__
        address, n_bytes = described["data"][0], np.dtype(described["typestr"]).itemsize
        shape, strides = described["shape"], described.get("strides")
        is_whole = strides is None or tuple(strides) == _contiguous(shape, n_bytes)
        n_bytes *= math.prod(shape)
    if not is_whole:
        raise InvalidArgument("payload: expected bytes of the device without gaps")
    return address or 0, n_bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """What an array's own library says of it; strides in elements."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]


def _memory(array: Any, from_dlpack: FromDlpack) -> _Memory:
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
        memory = _Memory(array, array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype)
    else:
        if not hasattr(array, "__cuda_array_interface__"):
            array = from_dlpack(array)
        memory = _interface(array, dtype)
    if 0 in memory.shape:
        return memory
    if memory.address % dtype.itemsize:
        raise InvalidArgument(f"output at {memory.address:#x}: not where {name} may lie")
    if (memory.strides[-1] != 1 and memory.shape[-1] > 1) or min(memory.strides) < 0:
        raise InvalidArgument(
            f"output with strides of {memory.strides} elements: the last axis must be contiguous, "
            "no stride negative"
        )
    return memory


def _interface(array: Any, dtype: np.dtype[Any]) -> _Memory:
    described = array.__cuda_array_interface__
    address, read_only = described["data"]
    if read_only:
        raise InvalidArgument("output is read-only")
    shape = tuple(described["shape"])
    strides = described.get("strides") or _contiguous(shape, dtype.itemsize)
    if any(stride % dtype.itemsize for stride in strides):
        raise InvalidArgument(f"output with strides of {strides} bytes: no whole elements")
    return _Memory(
        array, address or 0, shape, tuple(stride // dtype.itemsize for stride in strides), dtype
    )


def _contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))
