"""What a fork copies and should not: locks of threads that are not there, objects of LMDB's."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """A reentrant lock; in a forked child it is free unless the forking thread holds it.

    A fork copies locks as they are and only the thread that forks: what another thread held
    would never be released.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._process == os.getpid():
            self._lock.acquire()
            return
        if not self._lock.acquire(blocking=False):
            self._lock = threading.RLock()
            self._lock.acquire()
        self._process = os.getpid()

    def __exit__(self, *args: object) -> None:
        self._lock.release()


def keep_for_ever(thing: object) -> None:
    """Never free an object of LMDB's that a forked child shares with its parent."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
