"""Objects inside an Icechunk repository: each transaction of the archive is one commit of a branch.

So a snapshot of the repository, a tag or another branch is a whole archive as of then, for
zarr's tools and for us. What is not committed is nowhere: there are no leftovers.

Two writers that commit to a branch at the same time are told apart by Icechunk: the second one
gets `Locked`. Of a repository in a local directory they also wait for each other, as everywhere:
``_kvstore/writer`` and ``_kvstore/leases`` beside Icechunk's own files. Elsewhere a lease holds
against this process, and against others by what they commit: once somebody else has committed to
the branch, the leases taken before are lost. FORMAT.md section 9.7.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import icechunk
from kvcodecs.errors import Closed, InvalidArgument, KvError, Locked, NotFound

from ...backend import Lease
from ...forklock import ForkLock
from ...lease import is_expired, take_file_lease, take_over_file_lease
from ._keys import check_prefix
from ._writer_lock import file_writer
from .icechunk_changes import Changes, get
from .icechunk_lease import Leases
from .icechunk_nodes import place_of
from .icechunk_store import Store, translate
from .objects import Found, Objects, Request
from .places import ROOT

# So many groups are named in the message of a commit.
_MOST_NAMES: Final = 5
# How long a single change waits for another writer.
_PATIENCE: Final = 10.0


class Right:
    """The right to write; see `objects.Writer`. Icechunk tells at the commit if it was lost."""

    @property
    def epoch(self) -> int:
        return 0

    def check(self) -> None:
        """Do nothing."""


class IcechunkObjects(Objects):
    """Objects at the tip of a branch, or as of a snapshot or a tag.

    Parameters
    ----------
    repository
        Where they are.
    where
        What messages call it.
    branch
        Whose tip is read and written.
    tag, snapshot_id
        Read as of then instead; nothing can be written.
    directory
        Of the repository, if it is a local one: for locks that other processes see.

    Raises
    ------
    NotFound
        No such branch, tag or snapshot.
    """

    def __init__(
        self,
        repository: icechunk.Repository,
        *,
        where: str,
        branch: str = "main",
        tag: str | None = None,
        snapshot_id: str | None = None,
        directory: str | None = None,
    ) -> None:
        self._repository, self._where, self._branch = repository, where, branch
        self._directory = None if directory is None else os.path.join(directory, ROOT.rstrip("/"))
        self._pid, self._closed = os.getpid(), False
        self._writing, self._lock = threading.Lock(), ForkLock()
        self._writer_thread: int | None = None
        self._changes: Changes | None = None
        self._leases = Leases(where)
        fixed = {"tag": tag} if tag is not None else {"snapshot_id": snapshot_id}
        self._is_fixed = tag is not None or snapshot_id is not None
        try:
            if self._is_fixed:
                session = repository.readonly_session(**fixed)
            else:
                session = repository.readonly_session(branch)
        except (icechunk.IcechunkError, ValueError) as error:
            what = f"tag {tag!r}" if tag else f"snapshot {snapshot_id!r}"
            what = what if self._is_fixed else f"branch {branch!r}"
            raise NotFound(f"{where}: no {what} in the repository") from error
        self._reading = Store(session, where)
        #: Snapshot that is read, and the one after which all commits were this process's.
        self._read_id = self._own_id = str(session.snapshot_id)

    @property
    def where(self) -> str:
        return self._where

    @property
    def is_remote(self) -> bool:
        return True

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        changes = self._own_changes()
        if changes is not None:
            return changes.get(key, start, stop)
        return get(self._reading, place_of(key, self._where), start, stop)

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        changes = self._own_changes()
        if changes is not None:
            return changes.get_many(requests)
        store = self._reading
        places = [(place_of(key, self._where), start, stop) for key, start, stop in requests]
        found = store.get_many([(place.key, start, stop) for place, start, stop in places])
        return [
            get(store, *request) if data is None else data
            for request, data in zip(places, found, strict=True)
        ]

    def exists(self, key: str) -> bool:
        changes = self._own_changes()
        if changes is not None:
            return changes.exists(key)
        return Changes(self._newest(), self._where).exists(key)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._changing() as changes:
            if changes.exists(key):
                return False
            changes.put(key, data)
            return True

    def put(self, key: str, data: bytes) -> None:
        with self._changing() as changes:
            changes.put(key, data)

    def put_all(self, items: Iterable[tuple[str, bytes]], still_mine: Callable[[], None]) -> None:
        with self._changing() as changes:
            changes.put_all(items)

    def put_frames(
        self, items: Sequence[tuple[str, bytes]], still_mine: Callable[[], None]
    ) -> None:
        with self._changing() as changes:
            changes.put_all(items)

    def copy(self, pairs: Sequence[tuple[str, str]], still_mine: Callable[[], None]) -> None:
        with self._changing() as changes:
            for source, target in pairs:
                data = changes.get(source)
                if data is None:
                    raise NotFound(f"{self._where}: no object {source!r} to copy")
                changes.put(target, data)

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            with self._changing() as changes:
                changes.delete(keys)

    def list(self, prefix: str, after: str | None = None) -> Iterator[Found]:
        check_prefix(self._where, prefix)
        changes = self._own_changes()
        if changes is None:
            changes = Changes(self._newest(), self._where)
        for found in changes.listed(prefix):
            if after is None or found.key > after:
                yield found

    def flush(self) -> None:
        """Do nothing: all of a transaction becomes durable with its commit."""

    @contextlib.contextmanager
    def writer(self, timeout: float) -> Iterator[Right]:
        self._check()
        if self._is_fixed:
            raise InvalidArgument(
                f"{self._where}: opened as of a tag or a snapshot; open a branch to write"
            )
        if not self._writing.acquire(timeout=max(timeout, 0.0)):
            raise Locked(
                f"{self._where}: another writer held the lock for {timeout:g} s; raise "
                "lock_timeout or try again"
            )
        try:
            with contextlib.ExitStack() as stack:
                if self._directory is not None:
                    os.makedirs(self._directory, exist_ok=True)
                    lock = os.path.join(self._directory, "writer")
                    stack.enter_context(file_writer(lock, self._where, timeout))
                with self._asked():
                    session = self._repository.writable_session(self._branch)
                self._notice(str(session.snapshot_id))
                changes = Changes(Store(session, self._where), self._where)
                self._changes, self._writer_thread = changes, threading.get_ident()
                try:
                    yield Right()
                    changes.finish()
                finally:
                    self._changes = self._writer_thread = None
                self._commit(session, changes)
        finally:
            self._writing.release()

    def lease(self, session: int, name: str, expires: float | None, *, in_write: bool) -> Lease:
        self._check()
        if self._directory is None:
            if not in_write:
                with self._lock, self._asked():
                    self._notice(self._repository.lookup_branch(self._branch))
            return self._leases.take(session, name, expires, in_write=in_write)
        try:
            os.makedirs(self._directory, exist_ok=True)
            return take_file_lease(self._directory, session, name, expires, shown=self._where)
        except Locked:
            if expires is None or not in_write or not self.is_expired(session):
                raise
        return take_over_file_lease(self._directory, session, name, expires, shown=self._where)

    def is_expired(self, session: int) -> bool:
        if self._directory is None:
            return self._leases.is_expired(session)
        return is_expired(self._directory, session)

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"{self._where}: the archive is closed")
        if self._pid != os.getpid():
            raise Closed(f"{self._where}: opened before a fork; reopen it in this process")

    def _own_changes(self) -> Changes | None:
        """Return the transaction that this thread has open."""
        self._check()
        return self._changes if self._writer_thread == threading.get_ident() else None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Changes]:
        """Yield the transaction that this thread has open, or one for this call alone."""
        changes = self._own_changes()
        if changes is not None:
            yield changes
            return
        with self.writer(_PATIENCE):
            changes = self._changes
            if changes is None:
                raise Closed(f"{self._where}: the archive is closed")
            yield changes

    def _newest(self) -> Store:
        """Return the store of what is committed now."""
        if self._is_fixed:
            return self._reading
        with self._asked():
            tip = self._repository.lookup_branch(self._branch)
            if tip != self._read_id:
                reading = Store(self._repository.readonly_session(snapshot_id=tip), self._where)
                self._reading, self._read_id = reading, tip
        return self._reading

    def _notice(self, tip: str) -> None:
        """Give up the leases that were taken before somebody else committed."""
        with self._lock:
            if tip != self._own_id:
                self._leases.lose_all()
            self._own_id = tip

    def _commit(self, session: icechunk.Session, changes: Changes) -> None:
        if not session.has_uncommitted_changes:
            return
        names = ", ".join(list(changes.groups)[:_MOST_NAMES])
        more = " ..." if len(changes.groups) > _MOST_NAMES else ""
        number = "" if changes.number is None else f" commit {changes.number}"
        about: dict[str, Any] = {} if changes.number is None else {"kvstore": changes.number}
        with self._lock, self._asked():
            self._own_id = session.commit(f"kvstore{number}: {names or 'no view'}{more}", about)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except KvError:
            raise
        except (icechunk.IcechunkError, icechunk.ConflictError, ValueError, OSError) as error:
            raise translate(error, self._where) from error
