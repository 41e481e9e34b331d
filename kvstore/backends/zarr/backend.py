"""Archives in a directory or a bucket that zarr's tools open as well. FORMAT.md section 9."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Final

from kvcodecs.errors import Closed, InvalidArgument, Locked, NotFound

from ...backend import (
    GRACE_SECONDS,
    SNAPSHOT_SECONDS,
    BackendInfo,
    Lease,
    Mode,
    ReaderInfo,
    check_seconds,
)
from ...last_use import UseLog
from .._checks import check_limit
from . import view
from .collect import collect
from .documents import FILE_NAME
from .objects import Objects, Writer
from .opening import acquire, release
from .places import ROOT
from .shared import Shared
from .snapshot import ZarrSnapshot
from .transaction import ZarrTransaction

# Names of sessions that are kept for what is stored before a record names it.
_MOST_NAMES: Final = 1 << 16
_snapshot_numbers = count()


class ZarrBackend:
    """An archive of objects.

    Parameters
    ----------
    path
        A directory, or the URL of a bucket.
    mode
        ``"r"`` creates nothing.
    map_size
        Upper limit of keys and values in bytes, for writes through this object.
    snapshot_seconds
        How long a snapshot may be read from.
    grace_seconds
        How long deleted objects are kept for snapshots that were opened before.
    storage_options
        Of a bucket.
    objects
        Where the archive is, instead of `path`; shared with nobody. For tests.
    """

    def __init__(
        self,
        path: str,
        mode: Mode,
        *,
        map_size: int | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        storage_options: Mapping[str, str] | None = None,
        objects: Objects | None = None,
    ) -> None:
        self._map_size, self._closed, self._read_only = map_size, False, mode == "r"
        self._snapshot_seconds = check_seconds("snapshot_seconds", snapshot_seconds)
        self._grace_seconds = check_grace(grace_seconds)
        self._path = path
        shared = acquire(path, mode, storage_options) if objects is None else Shared(objects, None)
        try:
            _begin(shared.objects, path, mode)
        except BaseException:
            release(shared)
            raise
        self._shared = shared
        self._uses = None if shared.root is None else UseLog(os.path.join(shared.root, ROOT))
        # Runs once: on `close`, or when an archive that was never closed is collected.
        self._release = weakref.finalize(self, release, shared)

    @property
    def path(self) -> str:
        return self._path

    @contextmanager
    def read(self) -> Iterator[ZarrSnapshot]:
        self._check_open()
        shared, number = self._shared, next(_snapshot_numbers)
        head = shared.head()
        shared.snapshots[number] = head.number, time.monotonic()
        try:
            yield ZarrSnapshot(
                head.tables,
                shared.objects,
                self._snapshot_seconds,
                shared.newest,
                self._grace_seconds,
            )
        finally:
            shared.snapshots.pop(number, None)

    @contextmanager
    def write(self, timeout: float) -> Iterator[ZarrTransaction]:
        with self._writer(timeout) as writer:
            shared = self._shared
            limit, what = self._cap()
            transaction = ZarrTransaction(
                shared, shared.head(), writer, limit, what, self._grace_seconds
            )
            shared.writing_thread = threading.get_ident()
            try:
                yield transaction
                if transaction.failed is not None:
                    raise transaction.failed
                transaction.commit()
            finally:
                shared.writing_thread = None

    @contextmanager
    def _writer(self, timeout: float) -> Iterator[Writer]:
        self._check_open()
        if self._read_only:
            raise InvalidArgument(f"{self._path}: opened with mode='r'; use mode='a' to write")
        self._shared.check_process()
        try:
            with self._shared.objects.writer(max(timeout, 0.0)) as writer:
                yield writer
        except BaseException:
            # What was taken for committed may not be.
            self._shared.doubt()
            self._shared.synced = 0
            raise

    def lease(
        self, owner: int, name: str, *, expires: float | None = None, timeout: float = 10.0
    ) -> Lease:
        self._check_open()
        shared = self._shared
        shared.check_process()
        if expires is not None:
            expires = check_seconds("expires", expires)
        lease = self._take_lease(owner, name, expires, timeout)
        if len(shared.names) >= _MOST_NAMES:
            shared.names.pop(next(iter(shared.names)), None)
        shared.names[owner] = name
        return lease

    def _take_lease(self, owner: int, name: str, expires: float | None, timeout: float) -> Lease:
        objects = self._shared.objects
        is_writing = self._shared.writing_thread == threading.get_ident()
        try:
            return objects.lease(owner, name, expires, in_write=is_writing)
        except Locked:
            # In a bucket every lease expires: nobody notices that its process has died.
            may_expire = expires is not None or objects.is_remote
            if is_writing or not may_expire or not objects.is_expired(owner):
                raise
        with self.write(timeout):
            return objects.lease(owner, name, expires, in_write=True)

    def info(self) -> BackendInfo:
        self._check_open()
        head = self._shared.head()
        return BackendInfo("zarr", head.used_bytes, 0, head.used_bytes, head.n_entries)

    @property
    def limit(self) -> int | None:
        return self._shared.limit

    def set_limit(self, n_bytes: int | None) -> None:
        self._check_open()
        self._shared.set_limit(check_limit(n_bytes))

    def _cap(self) -> tuple[int | None, str]:
        limit = self._shared.limit
        if limit is None or (self._map_size is not None and self._map_size < limit):
            return self._map_size, "map_size"
        return self._shared.cap, "the limit"

    def readers(self) -> list[ReaderInfo]:
        """Return the snapshots of this process; nobody sees those of others."""
        self._check_open()
        last, now = self._shared.head().number, time.monotonic()
        found = [
            ReaderInfo(os.getpid(), last - number, now - began)
            for number, began in self._shared.snapshots.copy().values()
        ]
        return sorted(found, key=lambda reader: (-reader.n_behind, -(reader.age_seconds or 0.0)))

    def reclaim(self, timeout: float) -> bool:
        with self.write(timeout):
            pass  # what is deleted is not counted any more; the same errors as elsewhere
        return any(reader.n_behind for reader in self.readers())

    def collect(self, timeout: float) -> int:
        with self._writer(timeout) as writer:
            return collect(self._shared, self._shared.head(), writer, self._grace_seconds)

    def note_use(self, session_id: int) -> None:
        if self._uses is not None:
            self._uses.note(session_id)
        elif not self._closed:
            self._shared.uses[session_id] = time.time_ns()

    def last_uses(self) -> dict[int, int]:
        self._check_open()
        return self._shared.uses.copy() if self._uses is None else self._uses.latest()

    def close(self) -> None:
        self._closed = True
        if self._uses is not None:
            self._uses.close()
        self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path}: the archive is closed")


def check_grace(seconds: object) -> float:
    """Return a grace period; `InvalidArgument` if it is none."""
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds == 0:
        return 0.0
    return check_seconds("grace_seconds", seconds)


def _begin(objects: Objects, path: str, mode: Mode) -> None:
    """Make sure that there is an archive, and with mode "a" begin one where nothing is."""
    if objects.exists(ROOT + FILE_NAME):
        return
    if mode == "r":
        raise NotFound(f"{path}: no such archive; open it with mode='a' to begin one")
    for found in objects.list(""):
        # All that a writer leaves that dies while it begins an archive.
        if found.key != FILE_NAME and not found.key.startswith(ROOT):
            raise InvalidArgument(
                f"{path}: neither an archive nor empty: it has {found.key!r}; choose another"
            )
    own = objects.get(FILE_NAME)
    if own is not None and b'"kvstore"' not in own:
        raise InvalidArgument(f"{path}: there is another {FILE_NAME}; choose another place")
    view.begin(objects)
