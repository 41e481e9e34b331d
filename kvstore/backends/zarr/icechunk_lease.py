"""Leases where only the commits of an Icechunk repository tell of other processes."""

from __future__ import annotations

import threading
import time

from kvcodecs.errors import Closed

from ...lease import locked, lost


class HeldLease:
    """A lease inside this process; see `backend.Lease`."""

    def __init__(self, leases: Leases, session: int, name: str, expires: float | None) -> None:
        self._leases, self._session, self._name = leases, session, name
        self._expires, self._renewed = expires, time.monotonic()
        self.is_lost = self._is_released = False

    @property
    def is_expired(self) -> bool:
        """Whether its holder has shown no sign of life for as long as it said."""
        return self._expires is not None and time.monotonic() - self._renewed > self._expires

    def check(self) -> None:
        """Renew it; raises `Locked` once somebody else has, or may have, taken the session."""
        if self._is_released:
            where = self._leases.where
            raise Closed(f"{where}: the lease of session {self._name!r} was given back")
        if self.is_lost:
            raise lost(self._leases.where, self._name)
        self.renew()

    def renew(self) -> None:
        """Show a sign of life."""
        self._renewed = time.monotonic()

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._is_released = True
        self._leases.drop(self._session, self)

    def __del__(self) -> None:
        self.release()


class Leases:
    """The leases of one archive in this process.

    Parameters
    ----------
    where
        The archive, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._lock = threading.RLock()
        self._held: dict[int, HeldLease] = {}

    def take(self, session: int, name: str, expires: float | None, *, in_write: bool) -> HeldLease:
        """See `Objects.lease`."""
        with self._lock:
            other = self._held.get(session)
            if other is not None:
                if not (in_write and other.is_expired):
                    raise locked(self.where, name)
                other.is_lost = True
            lease = HeldLease(self, session, name, expires)
            self._held[session] = lease
            return lease

    def is_expired(self, session: int) -> bool:
        """See `Objects.is_expired`."""
        with self._lock:
            other = self._held.get(session)
            return other is not None and other.is_expired

    def lose_all(self) -> None:
        """Take all leases away: another process may have appended to any session."""
        with self._lock:
            for lease in self._held.values():
                lease.is_lost = True
            self._held.clear()

    def drop(self, session: int, lease: HeldLease) -> None:
        """Forget a lease that was given back."""
        with self._lock:
            if self._held.get(session) is lease:
                del self._held[session]
