"""Room in an archive: every write passes through here, and what was not used for longest goes.

With a quota the length of the data file is limited for good; what is stored stays a little below
it, since a write needs pages before it frees others. A write that finds no room is rolled back,
sessions are evicted, and it runs again. FORMAT.md section 5.6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Final, TypeVar

from kvcodecs.errors import Full, InvalidArgument, KvError, Locked

from . import keys
from .backend import Backend, Snapshot, Transaction
from .catalog import Catalog
from .records import check_archive, pack_archive
from .session_record import SessionRecord
from .survey import last_use, session_names

T = TypeVar("T")

#: Least quota: LMDB's own first pages and room to change a few.
MIN_QUOTA: Final = 1 << 20
_POLL_SECONDS: Final = 0.05
# A snapshot that is more transactions behind than this keeps pages that matter.
_FEW: Final = 3


class _Overdraft(Exception):
    """A transaction would use `n_bytes` too many, `n_new` of them its own; it is rolled back."""

    def __init__(self, n_bytes: int, n_new: int, quota: int) -> None:
        self.n_bytes, self.n_new, self.quota = n_bytes, n_new, quota


class _NotEnough(Exception):
    """There are no more sessions to evict."""


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
        self,
        work: Callable[[Transaction], T],
        keep: Collection[int] = (),
        *,
        n_bytes: int = 0,
        frees: bool = False,
    ) -> T:
        """Run `work` in a transaction and commit it; `work` may run more than once.

        Parameters
        ----------
        keep
            Ids of sessions that are not evicted for it.
        n_bytes
            What the work stores, about: more than could ever fit evicts nobody in vain.
        frees
            Whether the work is there to make room: it is never refused for the quota.

        Raises
        ------
        Full
            No room, and nothing that may be evicted. Nothing of this write is stored.
        Locked
            See `Session.commit`.
        """
        deadline = time.monotonic() + self._timeout
        reclaimed = False
        while True:
            quota = self._follow_quota()
            if quota is not None and n_bytes > _soft(quota):
                raise self._full(quota, f"one write of {n_bytes} bytes needs more than that")
            try:
                with self._backend.write(self._timeout) as transaction:
                    before = transaction.used_bytes() if quota is not None else 0
                    result = work(transaction)
                    if quota is not None and not frees:
                        _check(transaction.used_bytes(), before, quota)
                return result
            except _Overdraft as over:
                grows = self._backend.info().file_bytes + over.n_new <= over.quota
                if not grows and self._is_held_up(deadline, over.quota):
                    continue
                self._evict(over.n_bytes, keep, over.quota)
            except Full as error:
                if quota is None or not error.is_limit:
                    raise
                # It fits, but pages that were freed cannot be used yet, or lie apart.
                self._reclaim()
                if self._is_held_up(deadline, quota):
                    continue
                if reclaimed:
                    over_bytes = self._backend.info().used_bytes + n_bytes - _soft(quota)
                    self._evict(max(over_bytes, 1), keep, quota)
                reclaimed = not reclaimed

    def _reclaim(self) -> None:
        """Make what was freed usable, as far as old snapshots let it be."""
        try:
            self._backend.reclaim(self._timeout)
        except Full as error:
            if not error.is_limit:
                raise
            # Not even a page: whatever is tried next says what it is for.

    def _is_held_up(self, deadline: float, quota: int) -> bool:
        """Whether an old snapshot keeps what was freed; waits a little for it to end.

        Evicting would not help then: what that frees is kept as well.

        Raises
        ------
        Full
            It did not end before the deadline.
        """
        oldest = self._backend.readers()[:1]
        # Of short reads, however many, none is far behind.
        if not oldest or oldest[0].n_behind <= _FEW:
            return False
        if time.monotonic() >= deadline:
            who = f"process {oldest[0].pid}"
            raise self._full(quota, f"{who} reads an old snapshot, which keeps what was freed")
        time.sleep(_POLL_SECONDS)
        return True

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
        check_quota(quota)

        def work(transaction: Transaction) -> None:
            value = transaction.get(keys.ARCHIVE)
            about = {} if value is None else check_archive(value, self._backend.path)
            about.pop("quota", None)
            if quota is not None:
                about["quota"] = quota
            transaction.put(keys.ARCHIVE, pack_archive(about))

        failure = None
        if quota is not None:
            # Before the limit holds: there is room to remove sessions then.
            over = self._backend.info().used_bytes - _soft(quota)
            try:
                if over > 0:
                    self._evict(over, (), quota)
            except Full as error:
                failure = error
        self.write(work, frees=True)
        self._follow_quota()
        if failure is not None:
            raise failure

    def _stored_quota(self, snapshot: Snapshot) -> int | None:
        value = snapshot.get(keys.ARCHIVE)
        data = b"" if value is None else bytes(value)
        if data != self._about[0]:
            quota = check_archive(data, self._backend.path).get("quota")
            self._about = data, quota or None
        return self._about[1]

    def _evict(self, n_bytes: int, keep: Collection[int], quota: int) -> None:
        """Delete sessions until so many bytes are free, those not used for longest first.

        Raises
        ------
        Full
            There are not enough that may go; then none goes.
        """
        wanted = self._backend.info().used_bytes - n_bytes
        try:
            try:
                self._evict_until(wanted, keep)
            except Full:
                # Removing takes room as well; for all at once there is too little.
                while self._backend.info().used_bytes > wanted:
                    self._reclaim()
                    self._evict_until(wanted, keep, most=1)
        except _NotEnough:
            why = "what may be evicted does not make enough room"
            raise self._full(quota, why) from None
        self._reclaim()

    def _evict_until(self, wanted: int, keep: Collection[int], most: int = 1 << 62) -> None:
        """Delete up to `most` sessions in one transaction; `_NotEnough` if there are too few."""
        with ExitStack() as leases, self._backend.write(self._timeout) as transaction:
            for name, record in self._by_last_use(transaction, keep):
                try:
                    lease = self._backend.lease(record.id, name)
                except Locked:
                    continue  # being appended to
                leases.callback(lease.release)
                self._catalog.delete(transaction, name, record.id)
                most -= 1
                if not most or transaction.used_bytes() <= wanted:
                    return
            raise _NotEnough

    def _by_last_use(
        self, snapshot: Snapshot, keep: Collection[int]
    ) -> list[tuple[str, SessionRecord]]:
        """Return the sessions that may go, those not used for longest first."""
        uses = self._backend.last_uses()
        found = []
        for name in session_names(snapshot):
            try:
                record = self._catalog.record(snapshot, name)
            except KvError:
                continue  # a damaged session is for its user to judge
            if not record.pinned and record.id not in keep:
                found.append((last_use(record, uses), name, record))
        return [(name, record) for _, name, record in sorted(found, key=lambda item: item[:2])]

    def _full(self, quota: int | None, why: str) -> Full:
        return Full(
            f"{self._backend.path}: the quota of {quota} bytes is used up: {why}; unpin or delete "
            "sessions, close appenders, or raise the quota",
            is_limit=True,
        )


def check_quota(quota: object) -> None:
    """Raise `InvalidArgument` unless it is a number of bytes that a quota can be, or None."""
    if quota is not None and not (type(quota) is int and MIN_QUOTA <= quota < 1 << 62):
        raise InvalidArgument(
            f"quota_bytes {quota!r}: expected an integer, at least {MIN_QUOTA}, or None"
        )


def _check(after: int, before: int, quota: int) -> None:
    if after > before and after > _soft(quota):
        raise _Overdraft(after - _soft(quota), after - before, quota)


def _soft(quota: int) -> int:
    """Return how much may be used: changed pages are written anew, removing needs room too."""
    return quota - max(quota // 32, min(quota // 8, 1 << 18))
