"""Reading long tables piece by piece: from an open file, or from a storage far away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from kvcodecs.errors import KvError, NotFound

from ._files import ABSENT, translate
from .objects import Objects

# What is read at a time of an object far away: its neighbours are wanted next. Longer values are
# read as they are.
_WINDOW_BYTES: Final = 256 << 10
_MOST_WINDOWS: Final = 32


class OpenFile:
    """A file that can be read after its name has gone.

    Raises
    ------
    NotFound
        There is none.
    """

    def __init__(self, root: str, key: str, where: str) -> None:
        self._fd, self._where = -1, where
        try:
            self._fd = os.open(os.path.join(root, key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in ABSENT:
                raise NotFound(f"{where}: no such object") from error
            raise translate(error, where, "open") from error

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)``, or what there is of them."""
        parts = []
        try:
            while start < stop and (part := os.pread(self._fd, stop - start, start)):
                parts.append(part)
                start += len(part)
        except OSError as error:
            raise translate(error, self._where, "read") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


class Windows:
    """An object far away, read in large pieces that are kept for a while.

    Parameters
    ----------
    gone
        Returns the error that is raised when there is no such object any more.
    """

    def __init__(self, objects: Objects, key: str, gone: Callable[[str], KvError]) -> None:
        self._objects, self._key, self._gone = objects, key, gone
        self._windows: dict[int, bytes] = {}

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)``, or what there is of them."""
        first, last = start // _WINDOW_BYTES, (stop - 1) // _WINDOW_BYTES
        if last - first > 1:
            return self._get(start, stop)
        data = b"".join(self._window(number) for number in range(first, last + 1))
        begin = first * _WINDOW_BYTES
        return data[start - begin : stop - begin]

    def _window(self, number: int) -> bytes:
        data = self._windows.get(number)
        if data is None:
            data = self._get(number * _WINDOW_BYTES, (number + 1) * _WINDOW_BYTES)
            if len(self._windows) >= _MOST_WINDOWS:
                self._windows = {}
            self._windows[number] = data
        return data

    def _get(self, start: int, stop: int) -> bytes:
        data = self._objects.get(self._key, start, stop)
        if data is None:
            raise self._gone(self._key)
        return data
