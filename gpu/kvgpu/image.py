"""What goes up to the device in one piece: tables and payloads, each at an offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs import _core
from kvcodecs.frame import BytesLike

#: Where parts begin: what the widest load of a kernel asks for.
ALIGNMENT: Final = 16
#: Which rows of a table hold an offset in a field, and not 0 or an address.
Rows: TypeAlias = slice | npt.NDArray[np.bool_]

ALL: Final = slice(None)


def aligned(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to whole `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Image:
    """Bytes of device memory, made of buffers of the host that are copied only once.

    Parameters
    ----------
    first
        Offset in the device memory where the image begins: what lies before it is not uploaded.

    Attributes
    ----------
    first, stop
        The image's range. Bytes between its parts are undefined.
    """

    def __init__(self, first: int) -> None:
        self.first = self.stop = aligned(first)
        self._parts: list[BytesLike] = []
        self._offsets: list[npt.NDArray[np.uint64]] = []
        self._pointers: list[tuple[npt.NDArray[np.uint64], Rows]] = []
        self._base = 0

    def add(self, array: npt.NDArray[Any], **pointers: Rows) -> int:
        """Add a contiguous array, referred to until the image was written; return its offset.

        Parameters
        ----------
        pointers
            Fields of the array that hold offsets in these rows: `place` makes them addresses.
        """
        self._pointers += [(array[name], rows) for name, rows in pointers.items()]
        part = array.reshape(-1).view(np.uint8)  # not every dtype has a buffer of its own
        return int(self.add_all([part], np.array([part.nbytes], np.uint64))[0])

    def add_struct(
        self, dtype: np.dtype[Any], pointers: dict[str, int], numbers: dict[str, int]
    ) -> int:
        """Add one struct of offsets and numbers; what it has else is 0. Return its offset."""
        struct = np.zeros(1, dtype)
        for name, value in (pointers | numbers).items():
            struct[name] = value
        return self.add(struct, **dict.fromkeys(pointers, ALL))

    def add_all(
        self, parts: Sequence[BytesLike], n_bytes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Add buffers of these sizes; return their offsets."""
        unit = np.uint64(ALIGNMENT)
        room = (n_bytes + unit - np.uint64(1)) // unit * unit
        ends = np.cumsum(room, dtype=np.uint64) + np.uint64(self.stop)
        offsets: npt.NDArray[np.uint64] = ends - room
        self._parts += parts
        self._offsets.append(offsets)
        if ends.size:
            self.stop = int(ends[-1])
        return offsets

    def place(self, base: int) -> None:
        """Make offsets addresses: the device memory begins at `base`."""
        for field, rows in self._pointers:
            # Unsigned numbers go round: a base may also be lower than the one before.
            field[rows] += np.uint64((base - self._base) % (1 << 64))
        self._base = base

    def write(self, start: int, out: npt.NDArray[np.uint8], n_threads: int) -> None:
        """Write bytes ``[start, start + out.size)`` of the device memory into `out`."""
        if len(self._offsets) > 1:
            self._offsets = [np.concatenate(self._offsets)]
        offsets = self._offsets[0]
        first = max(int(np.searchsorted(offsets, start, "right")) - 1, 0)
        stop = int(np.searchsorted(offsets, start + out.size, "left"))
        _core.gather(self._parts[first:stop], offsets[first:stop], start, out, n_threads)
