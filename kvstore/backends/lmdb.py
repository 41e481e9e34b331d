"""Archives in LMDB: one directory, one environment, one unnamed database.

Reads are zero-copy views of the map. A write transaction is begun and ended by a thread of its
own, since LMDB waits for its write lock without a time-out. FORMAT.md section 5.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import lmdb
from kvcodecs.errors import Closed, InvalidArgument, Locked

from ..backend import SNAPSHOT_SECONDS, BackendInfo, Mode, ReaderInfo, check_seconds
from ..forklock import keep_for_ever
from ..last_use import UseLog
from ..lease import FileLease, is_expired, take_file_lease, take_over_file_lease
from ._checks import check_limit
from ._environment import Environment, acquire, release
from ._errors import translate
from ._readers import has_reader_before, readers
from ._transactions import LmdbSnapshot, LmdbTransaction

_snapshot_numbers = count()


class _Writer(threading.Thread):
    """Owns one write transaction: begins it, waits, commits or aborts.

    LMDB wants all three from one thread; the puts may come from another while this one waits.
    If the caller's patience ends first, the thread stays in line for the lock, and either is
    taken over by the next caller or gives the lock back as soon as it has it.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(name="kvstore-writer", daemon=True)
        self._environment = environment
        self._lock = threading.Lock()
        self._begun, self._finish, self._ended = (threading.Event() for _ in range(3))
        self._wanted, self._gone, self._commit = True, False, False
        self._txn: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            txn = self._environment.env.begin(write=True, buffers=True)
            with self._lock:
                self._txn = txn if self._wanted else None
                self._gone = not self._wanted
            if self._gone:
                txn.abort()
                return
            self._begun.set()
            self._finish.wait()
            if self._commit:
                txn.commit()
            else:
                txn.abort()
        except (lmdb.Error, MemoryError) as error:
            self._error = error
        finally:
            with self._lock:
                self._txn, self._gone = None, True
                self._ended.set()
            self._begun.set()
            self._environment.leave()

    def wait(self, timeout: float) -> Any:
        """Return the transaction, None after `timeout` seconds; raises what ``begin`` did."""
        self._begun.wait(timeout)
        with self._lock:
            self._wanted = self._txn is not None
            if self._error is not None:
                raise self._error
            return self._txn

    def take_over(self) -> bool:
        """Want a transaction that another caller gave up on; False if it has gone already."""
        with self._lock:
            self._wanted = not self._gone
            return self._wanted

    def end(self, *, commit: bool) -> None:
        """Commit or abort, and raise what that raised."""
        self._commit = commit
        self._finish.set()
        self._ended.wait()
        if self._error is not None:
            raise self._error


class LmdbBackend:
    """An archive directory with ``data.mdb``, ``lock.mdb``, ``leases/`` and ``uses``.

    Parameters
    ----------
    path
        The directory.
    mode
        ``"r"`` creates nothing but, where LMDB needs it, its lock file.
    map_size
        Upper limit of the file in bytes; None for 1 TiB or what the process can map.
    snapshot_seconds
        How long a snapshot may be read from.
    """

    def __init__(
        self,
        path: str,
        mode: Mode,
        *,
        map_size: int | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> None:
        self._path, self._directory = path, os.path.abspath(path)
        self._read_only, self._closed = mode == "r", False
        self._snapshot_seconds = check_seconds("snapshot_seconds", snapshot_seconds)
        self._environment = acquire(
            self._directory, create=mode == "a", map_size=map_size, shown=path
        )
        self._uses = UseLog(self._directory)
        # Runs once: on `close`, or when an archive that was never closed is collected.
        self._release = weakref.finalize(self, release, self._environment)

    @property
    def path(self) -> str:
        return self._path

    @contextmanager
    def read(self) -> Iterator[LmdbSnapshot]:
        environment, number = self._environment, next(_snapshot_numbers)
        txn = self._begin_read()
        environment.snapshots[number] = txn.id(), time.monotonic()
        try:
            yield LmdbSnapshot(txn, self._path, self._snapshot_seconds)
        finally:
            if environment.is_forked:
                keep_for_ever(txn)  # its end is the parent's to say
            else:
                del environment.snapshots[number]
                txn.abort()
                environment.leave()

    def _begin_read(self) -> Any:
        self._check_open()
        environment = self._environment
        while True:
            environment.enter()
            try:
                return environment.env.begin(buffers=True)
            except lmdb.MapResizedError:
                environment.leave()
                environment.adopt_size()
            except lmdb.Error as error:
                environment.leave()
                raise translate(error, self._path) from error

    @contextmanager
    def write(self, timeout: float) -> Iterator[LmdbTransaction]:
        self._check_open()
        if self._read_only:
            raise InvalidArgument(f"{self._path}: opened with mode='r'; use mode='a' to write")
        deadline = time.monotonic() + max(timeout, 0.0)
        environment = self._environment
        environment.check_process()
        lock = environment.writer_lock  # a forked child has another one
        if not lock.acquire(timeout=max(timeout, 0.0)):
            raise self._locked(timeout)
        try:
            writer, txn = self._begin_write(environment, deadline, timeout)
            transaction = LmdbTransaction(txn, self._path, environment)
            environment.writing_thread = threading.get_ident()
            try:
                yield transaction
                if transaction.failed is not None:
                    raise transaction.failed
            except BaseException:
                writer.end(commit=False)
                raise
            try:
                writer.end(commit=True)
            except lmdb.Error as error:
                raise translate(error, self._path, environment.effective_limit) from error
        finally:
            environment.writing_thread = None
            lock.release()

    def _begin_write(
        self, environment: Environment, deadline: float, timeout: float
    ) -> tuple[_Writer, Any]:
        while True:
            writer = environment.waiter
            environment.waiter = None
            if not isinstance(writer, _Writer) or not writer.take_over():
                environment.enter()  # the writer leaves
                writer = _Writer(environment)
                writer.start()
            try:
                txn = writer.wait(max(deadline - time.monotonic(), 0.0))
            except lmdb.MapResizedError:
                environment.adopt_size()
                continue
            except lmdb.Error as error:
                raise translate(error, self._path) from error
            except BaseException:
                # Interrupted (Ctrl-C): the lock must not stay with a thread nobody listens to.
                if writer.wait(0.0) is not None:
                    writer.end(commit=False)
                environment.waiter = writer
                raise
            if txn is None:
                environment.waiter = writer
                raise self._locked(timeout)
            return writer, txn

    def lease(
        self, owner: int, name: str, *, expires: float | None = None, timeout: float = 10.0
    ) -> FileLease:
        self._check_open()
        if expires is not None:
            expires = check_seconds("expires", expires)
        try:
            return take_file_lease(self._directory, owner, name, expires)
        except Locked:
            if expires is None or not is_expired(self._directory, owner):
                raise
        if self._environment.writing_thread == threading.get_ident():
            return take_over_file_lease(self._directory, owner, name, expires)
        with self.write(timeout):
            return take_over_file_lease(self._directory, owner, name, expires)

    def info(self) -> BackendInfo:
        self._check_open()
        return self._environment.info()

    @property
    def limit(self) -> int | None:
        return self._environment.limit

    def set_limit(self, n_bytes: int | None) -> None:
        self._check_open()
        self._environment.set_limit(check_limit(n_bytes))

    def readers(self) -> list[ReaderInfo]:
        self._check_open()
        return readers(self._environment)

    def reclaim(self, timeout: float) -> bool:
        environment = self._environment
        with self.write(timeout) as txn:
            # LMDB leaves out a commit that changes nothing. The first value, the archive record,
            # is small, and is written again as it is.
            last = environment.head().txn_id
            key = txn.at_or_after(b"\0")
            again = last != environment.reclaimed and key is not None
            if again and key is not None:
                txn.put(key, bytes(txn.get(key) or b""))
        environment.reclaimed = last + again
        return has_reader_before(environment, last + again)

    def back_up(self, place: str, progress: Callable[[int, int], object] | None = None) -> None:
        """Make `place` an archive that has what is committed here; whole and durable, or not there.

        Inside a write transaction, that is what was there when it began.

        Parameters
        ----------
        place
            A directory that does not exist yet.
        progress
            As for `kvstore.compact`.

        Raises
        ------
        Full
            No space.
        InvalidArgument
            Something is there, or nothing can be.
        Corrupt
            The copy does not read like the archive.
        """
        from ._backup import back_up

        self._environment.enter()
        try:
            back_up(self._environment, os.path.abspath(place), self._path, progress)
        finally:
            self._environment.leave()

    def collect(self, timeout: float) -> int:
        self._check_open()
        return 0  # there are no objects

    def note_use(self, session_id: int) -> None:
        self._uses.note(session_id)

    def last_uses(self) -> dict[int, int]:
        self._check_open()
        return self._uses.latest()

    def close(self) -> None:
        self._closed = True
        self._uses.close()
        self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path}: the archive is closed")

    def _locked(self, timeout: float) -> Locked:
        return Locked(
            f"{self._path}: another writer held the lock for {timeout:g} s; raise lock_timeout "
            "or try again"
        )
