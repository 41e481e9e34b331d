"""Room in an archive: every write passes through here, and what was not used for longest goes.

With a quota the length of the data file is limited for good; what is stored stays a little below
it, since a write needs pages before it frees others. A write that finds no room is rolled back,
sessions are evicted, and it runs again. FORMAT.md section 5.6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeVar

from kvcodecs.errors import Full, InvalidArgument, KvError, Locked, NotFound

from . import keys
from .backend import Backend, Snapshot, Transaction
from .catalog import Catalog
from .records import check_archive, pack_archive
from .session_record import SessionRecord
from .survey import last_use, session_names

T = TypeVar("T")

#: Least quota: LMDB's own first pages and room to change a few.
MIN_QUOTA: Final = 1 << 18
# Of the quota, kept free: changed pages are written anew, and removing needs room too.
_RESERVE: Final = 1 / 32
_MIN_RESERVE: Final = 1 << 16
_POLL_SECONDS: Final = 0.05


class _Overdraft(Exception):
    """A transaction would use `n_bytes` too many, `n_new` of them its own; it is rolled back."""

    def __init__(self, n_bytes: int, n_new: int) -> None:
        self.n_bytes, self.n_new = n_bytes, n_new


class Room:
    """Runs the write transactions of one archive, and evicts where its quota asks for it.

    Parameters
    ----------
    timeout
        Seconds that a write waits for other writers, or for readers that keep pages.
    """

    def __init__(self, backend: Backend, catalog: Catalog, timeout: float) -> None:
        self._backend, self._catalog, self._timeout = backend, catalog, timeout
        self._about: tuple[bytes, int | None] = (b"", None)

    def write(
        self, work: Callable[[Transaction], T], keep: Collection[int] = (), *, frees: bool = False
    ) -> T:
        """Run `work` in a transaction and commit it; `work` may run more than once.

        Parameters
        ----------
        keep
            Ids of sessions that are not evicted for it.
        frees
            Whether the work is there to make room: it is never refused for the quota.

        Raises
        ------
        Full
            No room, and nothing that may be evicted. Nothing of this write is stored.
        Locked
            See `Session.commit`.
        """
        waited = False
        while True:
            quota = self._follow_quota()
            try:
                with self._backend.write(self._timeout) as transaction:
                    before = transaction.used_bytes() if quota is not None else 0
                    result = work(transaction)
                    if quota is not None and not frees:
                        self._check(transaction.used_bytes(), before, quota)
                return result
            except _Overdraft as over:
                if quota is None or over.n_new > _soft(quota):
                    raise self._full(quota, "one write needs more than that") from None
                self._evict(over.n_bytes, keep, quota)
            except Full as error:
                if quota is None or not error.is_limit:
                    raise
                # Everything fits, but pages that were freed cannot be used yet, or lie apart.
                if not waited:
                    waited = True
                    self._reclaim(quota)
                else:
                    self._evict(1, keep, quota)

    def note_use(self, session: int) -> None:
        """Note that a session was used: advisory, never fails."""
        self._backend.note_use(session)

    def quota(self) -> int | None:
        """Return the quota as of now in bytes, or None."""
        with self._backend.read() as snapshot:
            return self._stored_quota(snapshot)

    def _follow_quota(self) -> int | None:
        """Return the quota, once the backend's limit is what it says."""
        quota = self.quota()
        if quota != self._backend.limit:
            self._backend.set_limit(quota)
        return quota

    def set_quota(self, quota: int | None) -> None:
        """Store a quota, for all who write to the archive, and evict down to it.

        Raises
        ------
        InvalidArgument
            Not bytes, or too few.
        Full
            What may not be evicted needs more. The quota holds nevertheless.
        """
        if quota is not None and not (type(quota) is int and MIN_QUOTA <= quota < 1 << 62):
            raise InvalidArgument(f"quota_bytes {quota!r}: at least {MIN_QUOTA} bytes, or None")

        def work(transaction: Transaction) -> None:
            value = transaction.get(keys.ARCHIVE)
            about = {} if value is None else check_archive(value, self._backend.path)
            about.pop("quota", None)
            if quota is not None:
                about["quota"] = quota
            transaction.put(keys.ARCHIVE, pack_archive(about))

        self.write(work, frees=True)
        if self._follow_quota() is not None and quota is not None:
            over = self._backend.info().used_bytes - _soft(quota)
            if over > 0:
                self._evict(over, (), quota)

    def _stored_quota(self, snapshot: Snapshot) -> int | None:
        value = snapshot.get(keys.ARCHIVE)
        data = b"" if value is None else bytes(value)
        if data != self._about[0]:
            quota = check_archive(data, self._backend.path).get("quota")
            self._about = data, quota or None
        return self._about[1]

    def _check(self, after: int, before: int, quota: int) -> None:
        if after > before and after > _soft(quota):
            raise _Overdraft(after - _soft(quota), after - before)

    def _evict(self, n_bytes: int, keep: Collection[int], quota: int) -> None:
        """Delete sessions until so many bytes are free, those not used for longest first.

        Raises
        ------
        Full
            There are not enough that may go.
        """
        wanted = self._backend.info().used_bytes - n_bytes
        for name, record in self._by_last_use(keep):
            if self._backend.info().used_bytes <= wanted:
                break
            self._delete(name, record)
        if self._backend.info().used_bytes > wanted:
            raise self._full(quota, "what is left is pinned, or being appended to")
        self._backend.reclaim(self._timeout)

    def _delete(self, name: str, record: SessionRecord) -> None:
        """Delete one session unless it is in use, pinned by now, or gone."""
        try:
            lease = self._backend.lease(record.id, name)
        except Locked:
            return
        try:
            with self._backend.write(self._timeout) as transaction:
                stored = self._catalog.record(transaction, name, record.id)
                if not stored.pinned:
                    self._catalog.delete(transaction, name, record.id)
        except NotFound:
            pass
        finally:
            lease.release()

    def _by_last_use(self, keep: Collection[int]) -> Iterator[tuple[str, SessionRecord]]:
        uses = self._backend.last_uses()
        found = []
        with self._backend.read() as snapshot:
            for name in session_names(snapshot):
                try:
                    record = self._catalog.record(snapshot, name)
                except KvError:
                    continue  # a damaged session is for its user to judge
                if not record.pinned and record.id not in keep:
                    found.append((last_use(record, uses), name, record))
        for _, name, record in sorted(found, key=lambda item: item[:2]):
            yield name, record

    def _reclaim(self, quota: int) -> None:
        """Make freed pages usable; waits for the readers that keep them.

        Raises
        ------
        Full
            They do not end.
        """
        deadline = time.monotonic() + self._timeout
        while self._backend.reclaim(self._timeout):
            if time.monotonic() >= deadline:
                oldest = self._backend.readers()[:1]
                who = f"process {oldest[0].pid}" if oldest else "a process"
                raise self._full(quota, f"{who} reads an old snapshot and keeps what was freed")
            time.sleep(_POLL_SECONDS)

    def _full(self, quota: int | None, why: str) -> Full:
        return Full(
            f"{self._backend.path}: the quota of {quota} bytes is used up: {why}; unpin or delete "
            "sessions, or raise the quota",
            is_limit=True,
        )


def _soft(quota: int) -> int:
    return quota - max(_MIN_RESERVE, int(quota * _RESERVE))
