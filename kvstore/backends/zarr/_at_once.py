"""Doing the same with many things at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def at_once(
    function: Callable[[_Item], _Result], items: Sequence[_Item], most: int
) -> list[_Result]:
    """Return ``[function(item) for item in items]``, made by up to `most` threads.

    Threads live as long as the call, so that none is missing after a fork and none runs at exit.
    The first error is raised when all threads have ended; items not begun by then are left out.
    """
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    places = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                i = next(places, None)
            if i is None:
                return
            try:
                results[i] = function(items[i])
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                errors.append(error)

    threads = []
    for _ in range(min(most, len(items)) - 1):
        thread = threading.Thread(target=work, name="kvstore-objects", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system's limit, or the interpreter ends: with those there are
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(items))]
