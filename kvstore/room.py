"""Room in an archive: every transaction that stores something goes through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .backend import Backend, Transaction

T = TypeVar("T")


class Room:
    """Runs write transactions of one archive.

    Parameters
    ----------
    timeout
        Seconds that a write waits for other writers.
    """

    def __init__(self, backend: Backend, timeout: float) -> None:
        self._backend, self._timeout = backend, timeout

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction and commit it; `work` may run more than once.

        Raises
        ------
        Locked, Full
            See `Session.commit`; nothing has changed then.
        """
        with self._backend.write(self._timeout) as transaction:
            return work(transaction)
