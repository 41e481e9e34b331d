"""Arrays of a device that values are decoded into: the caller's, and pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.targets import dtype_name, is_device_output

from .interfaces import FromDlpack, writable


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
    stream
        What the owner says that was asked of the memory was asked in this ``cudaStream_t``.
    """

    owner: Any
    address: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    head_stride: int
    row_stride: int
    pages: Pages | None = None
    first_row: int = 0
    stream: int | None = None

    def __getitem__(self, key: tuple[slice, slice]) -> View:
        """Return some of the rows: ``view[:, start:stop]``."""
        start, n_rows = _rows(key, self.shape[1])
        shape = (self.shape[0], n_rows, self.shape[2])
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


def _rows(key: Any, n_rows: int) -> tuple[int, int]:
    """Return first and number of the rows that ``[:, start:stop]`` takes."""
    if isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None):
        rows = key[1]
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(n_rows)
            return start, max(stop - start, 0)
    raise InvalidArgument(f"output[{key}]: only rows can be sliced, output[:, start:stop]")


_AXES: Final = {"HND": (1, 2), "NHD": (2, 1)}


class Paged:
    """Rows of one sequence in a paged cache, as serving engines keep it.

    Parameters
    ----------
    pool : (n_pages, ...) float32, float16 or bfloat16
        The cache of one layer and kind, on the device; last axis contiguous. Caches in FP8 are
        none.
    pages : (n,) integers, on the host
        The sequence's block table: row `i` lies in page ``pages[i // page_rows]``. It may be
        longer than the output needs, without numbers that stand for no page.
    n_rows
        Of this output; None: all that the pages hold after `first_row`.
    first_row
        Row of the sequence that the first row of the output is: to read tokens from 100 on, with
        those before already in the pages, ``first_row=100``.
    layout
        Axes of a page: ``"NHD"``, (page_rows, heads, head_dim), as vLLM mostly has them, or
        ``"HND"``, (heads, page_rows, head_dim).

    Raises
    ------
    InvalidArgument
        Not such a pool, a page that it does not have, one twice among those of the output, or too
        few of them.
    """

    __slots__ = ("_pages", "_pool", "_span", "_swapped")

    def __init__(
        self,
        pool: Any,
        pages: npt.ArrayLike,
        *,
        n_rows: int | None = None,
        first_row: int = 0,
        layout: Literal["HND", "NHD"],
    ) -> None:
        if layout not in _AXES:
            raise InvalidArgument(f"layout {layout!r}: expected 'HND' or 'NHD'")
        shape = tuple(getattr(pool, "shape", ()))
        if len(shape) != 4 or shape[_AXES[layout][1]] == 0:
            raise InvalidArgument(f"pool of shape {shape}: expected pages of heads and rows")
        if is_device_output(pages):
            raise InvalidArgument("pages: lie on the device; a copy on the host is needed")
        numbers = np.asarray(pages)
        if numbers.shape == (0,):
            numbers = numbers.astype(np.int32)  # an empty list has no dtype of its own
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise InvalidArgument(
                f"pages of dtype {numbers.dtype}, shape {numbers.shape}: expected a list of numbers"
            )
        page_rows = shape[_AXES[layout][1]]
        bad = numbers[(numbers < 0) | (numbers >= min(shape[0], 1 << 31))]
        if bad.size:
            hint = "; leave out what pads the block table" if bad[0] < 0 else ""
            raise InvalidArgument(f"page {bad[0]}: the pool has {shape[0]}{hint}")
        room = numbers.size * page_rows
        if room >= 1 << 32:
            raise InvalidArgument(f"{numbers.size} pages hold {room} rows: at most 2^32 - 1")
        first_row = _whole(first_row, "first_row")
        n_rows = room - first_row if n_rows is None else _whole(n_rows, "n_rows")
        if not (first_row >= 0 and n_rows >= 0 and first_row + n_rows <= room):
            raise InvalidArgument(
                f"rows [{first_row}, {first_row + n_rows}): {numbers.size} pages hold {room}"
            )
        used, n_times = np.unique(
            numbers[first_row // page_rows : -(-(first_row + n_rows) // page_rows)],
            return_counts=True,
        )
        if (n_times > 1).any():
            raise InvalidArgument(
                f"page {used[n_times.argmax()]}: holds rows of the output twice; "
                "leave out what pads the block table"
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

    def __repr__(self) -> str:
        heads, n_rows, head_dim = self.shape
        layout = "NHD" if self._swapped else "HND"
        return (
            f"<Paged {dtype_name(self.dtype)} ({heads}, {n_rows}, {head_dim}): rows from "
            f"{self._span[0]} of {len(self._pages)} pages, {layout}>"
        )

    def __getitem__(self, key: tuple[slice, slice]) -> Paged:
        """Return some of the rows: ``paged[:, start:stop]``."""
        start, n_rows = _rows(key, self._span[1])
        return Paged(
            self._pool, self._pages, n_rows=n_rows, first_row=self._span[0] + start,
            layout="NHD" if self._swapped else "HND",
        )  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("pages of a cache are no array")

    def view(self, from_dlpack: FromDlpack) -> View:
        """Return the output as decoders take it."""
        pool = writable(self._pool, from_dlpack)
        head, row = (2, 1) if self._swapped else (1, 2)
        page_stride, head_stride, row_stride = (pool.strides[axis] for axis in (0, head, row))
        pages = Pages(self._pages, pool.shape[row], page_stride)
        return View(
            pool.owner, pool.address, self.shape, pool.dtype, head_stride, row_stride,
            pages, self._span[0], pool.stream,
        )  # fmt: skip


def _whole(n: object, name: str) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise InvalidArgument(f"{name} {n!r}: expected a whole number")
    return int(n)


def view_of(array: Any, from_dlpack: FromDlpack) -> View:
    """Return an array of a device as decoders take it.

    Parameters
    ----------
    array : (heads, rows, head_dim) float32, float16 or bfloat16
        A CuPy array, a PyTorch tensor, anything else with ``__cuda_array_interface__`` or DLPack,
        or a `Paged`. Last axis contiguous, other strides positive.

    Raises
    ------
    InvalidArgument
        No such array, or one that lies on the host or may not be written.
    """
    if isinstance(array, View):
        return array
    if isinstance(array, Paged):
        return array.view(from_dlpack)
    memory = writable(array, from_dlpack)
    if len(memory.shape) != 3:
        raise InvalidArgument(f"output of shape {memory.shape}, expected heads, rows, head_dim")
    heads, rows, head_dim = memory.shape
    return View(
        memory.owner, memory.address, (heads, rows, head_dim), memory.dtype,
        memory.strides[0], memory.strides[1], stream=memory.stream,
    )  # fmt: skip
