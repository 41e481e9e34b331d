"""Walks over many values that do not fill the memory of the process."""

from __future__ import annotations

from typing import Final

from .backend import Snapshot


class Passing:
    """Lets go of views once they add up to some megabytes, for walks over many values.

    A mapped page counts as this process's memory from its first touch, and touching one brings
    its neighbours in: letting go of one value at a time would leave most of them behind.
    """

    LIMIT: Final = 8 << 20

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._views: list[memoryview] = []
        self._n_bytes = 0

    def add(self, view: memoryview) -> None:
        """Note a view that was read and is not needed any more."""
        self._views.append(view)
        self._n_bytes += view.nbytes
        if self._n_bytes >= self.LIMIT:
            self.release()

    def release(self) -> None:
        """Let go of all views noted."""
        for view in self._views:
            self._snapshot.release(view)
        self._views, self._n_bytes = [], 0
