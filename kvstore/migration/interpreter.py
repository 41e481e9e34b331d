"""Keeps a fault of CPython 3.11.0 to 3.11.8 from freezing the workers of a Dask cluster.

Dask's profiler calls `sys._current_frames` every few milliseconds. There the call holds a lock of
the interpreter, and may collect garbage: what that runs lets another thread have the GIL. If that
one starts a thread, or ends, as at every flush of files (`at_once`), it waits for the lock and
keeps the GIL: no thread of the process runs ever again, and what it had locked stays locked.
Newer interpreters collect nothing there (python/cpython#106883).
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Final

from ..forklock import ForkLock

_MENDED: Final = (3, 11, 9)
_lock = ForkLock()


def keep_from_freezing() -> None:
    """Let `sys._current_frames` collect no garbage in this process; a second call does nothing."""
    before = sys._current_frames
    if tuple(sys.version_info) >= _MENDED or getattr(before, "collects_nothing", False):
        return

    def current_frames() -> dict[int, FrameType]:
        with _lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                return before()
            finally:
                if collects:
                    gc.enable()

    current_frames.collects_nothing = True  # type: ignore[attr-defined]
    setattr(sys, "_current_frames", current_frames)  # noqa: B010  its type is that of a function
