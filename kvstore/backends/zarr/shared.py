"""What all who have one archive open in this process share: its last commit, limit, snapshots.

Opening a snapshot when nothing has been committed since asks the storage two questions and reads
nothing: the tables of the last commit stay open.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcodecs.errors import Closed, Corrupt, KvError, NotFound, Truncated

from ._table_readers import OpenFile, Windows
from .commits import FIRST_BYTES, Commit, Listed, commit_key, last_commit
from .objects import Objects
from .segment import WHOLE_BYTES, Segment, reader_of
from .snapshot import View

# As the other backends have, so that an archive beyond its limit can be emptied.
_ROOM_TO_REMOVE: Final = 1 << 16
# Commits may come and go while one is being opened; as often as this nobody is faster.
_MOST_TRIES: Final = 50
# Of a table that this process has put itself to a storage far away: no need to read it back.
_MOST_IN_MEMORY: Final = 16 << 20


@dataclass(frozen=True)
class Head:
    """A commit, with its tables open.

    Attributes
    ----------
    commit
        None before the first commit.
    listed
        How the next commit names it.
    tables
        Its own changes, and those below, the newest first.
    """

    commit: Commit | None
    listed: Listed | None
    tables: tuple[Segment, ...]

    @property
    def number(self) -> int:
        return self.commit.number if self.commit is not None else 0

    @property
    def used_bytes(self) -> int:
        return self.commit.used_bytes if self.commit is not None else 0

    @property
    def table_bytes(self) -> int:
        return self.commit.table_bytes if self.commit is not None else 0

    @property
    def n_entries(self) -> int:
        return self.commit.n_entries if self.commit is not None else 0

    @property
    def below(self) -> tuple[Listed, ...]:
        """How the next commit names the tables."""
        if self.commit is None or self.listed is None:
            return ()
        return (self.listed, *self.commit.tables)


NOTHING: Final = Head(None, None, ())


class Shared:
    """One archive, for all who have it open in this process. Safe to use from many threads.

    Parameters
    ----------
    objects
        Where it is.
    root
        The directory, if it is a local one.
    """

    def __init__(self, objects: Objects, root: str | None) -> None:
        self.objects, self.where, self.root = objects, objects.where, root
        self.refs = 1
        self.limit: int | None = None
        #: What the limit lets keys and values have: some more if they had more when it was set.
        self.cap = 0
        #: Number of the commit and start of each snapshot that is open here.
        self.snapshots: dict[int, tuple[int, float]] = {}
        #: Names of sessions whose lease was taken here, by id.
        self.names: dict[int, str] = {}
        #: Last uses that are noted nowhere else.
        self.uses: dict[int, int] = {}
        #: Who has the write transaction open.
        self.writing_thread: int | None = None
        #: The last commit whose documents for zarr's tools were seen to be written.
        self.synced = 0
        self._head = NOTHING
        self._watched: tuple[Head, str, str] | None = None
        self._is_doubtful = False
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened it."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise `Closed` in a child of the process that opened it."""
        if self.is_forked:
            raise Closed(f"{self.where}: opened before a fork; reopen it in this process")

    def doubt(self) -> None:
        """Read the last commit anew the next time: another archive may have taken the place."""
        self._is_doubtful, self.synced = True, 0

    def head(self) -> Head:
        """Return the last commit.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            Damage, or a newer release.
        NotFound
            The archive has been removed.
        """
        self.check_process()
        head, watched = self._head, self._watched
        # As `last_commit` does.
        if watched is not None and not self._is_doubtful and watched[0] is head:
            _, following, own = watched
            if not self.objects.exists(following) and self.objects.exists(own):
                return head
        number = last_commit(self.objects, 0 if self._is_doubtful else head.number)
        if number != head.number or self._is_doubtful:
            head = self._load(number)
            self._is_doubtful = False
            self.adopt(head)
        return head

    def adopt(self, head: Head) -> None:
        """Take a commit as the last one: this process has just made it, or found it."""
        self._head = head
        self._watched = None
        if head.number:
            self._watched = head, commit_key(head.number + 1), commit_key(head.number)

    def set_limit(self, limit: int | None) -> None:
        """See `Backend.set_limit`."""
        if limit is not None and limit != self.limit:
            used = self.head().used_bytes
            self.cap = limit if used <= limit else used + max(used >> 7, _ROOM_TO_REMOVE)
        self.limit = limit

    def newest(self) -> View:
        """Return what is stored now."""
        return View(self.head().tables)

    def _load(self, number: int) -> Head:
        missing = ""
        for _ in range(_MOST_TRIES):
            if not number:
                return NOTHING
            key = commit_key(number)
            data = self.objects.get(key, 0, FIRST_BYTES)
            if data is not None:
                commit, n_bytes = Commit.unpack(data, number, f"{self.where}: {key}")
                own = self._own(key, data, n_bytes)
                tables = None if own is None else self.open(commit.tables)
                if own is not None and tables is not None:
                    listed = Listed(key.partition("/")[2], n_bytes, own.crc)
                    return Head(commit, listed, (own, *tables))
            newer = last_commit(self.objects, number)
            if newer == number and missing == key:
                break
            number, missing = newer, key
        raise Corrupt(f"{self.where}: {missing}: one of its tables is missing; restore a copy")

    def _own(self, key: str, data: bytes, n_bytes: int) -> Segment | None:
        if n_bytes == len(data):
            return Segment(reader_of(data), n_bytes, f"{self.where}: {key}")
        return self._open_large(key, n_bytes, None)

    def open(self, listed: Sequence[Listed]) -> list[Segment] | None:
        """Return the tables of these names, opened; None if one has gone."""
        known = dict(zip(self._head.below, self._head.tables, strict=True))
        small = [item for item in listed if item not in known and item.n_bytes < WHOLE_BYTES]
        fetched = self.objects.get_many([(item.key, None, None) for item in small])
        for item, data in zip(small, fetched, strict=True):
            if data is None:
                return None
            where = f"{self.where}: {item.key}"
            if len(data) != item.n_bytes:
                error = Truncated if len(data) < item.n_bytes else Corrupt
                raise error(f"{where}: {len(data)} of {item.n_bytes} bytes; restore a copy")
            known[item] = Segment(reader_of(data), len(data), where, crc=item.crc)
        for item in listed:
            if item not in known:
                segment = self._open_large(item.key, item.n_bytes, item.crc)
                if segment is None:
                    return None
                known[item] = segment
        return [known[item] for item in listed]

    def open_own(self, key: str, data: bytes, crc: int) -> Segment:
        """Return the table at the end of an object that this process has just put."""
        segment = None
        if len(data) >= (_MOST_IN_MEMORY if self.root is None else WHOLE_BYTES):
            segment = self._open_large(key, len(data), crc)
        if segment is None:
            segment = Segment(reader_of(data), len(data), f"{self.where}: {key}", crc=crc)
        return segment

    def _open_large(self, key: str, n_bytes: int, crc: int | None) -> Segment | None:
        """Open a table that is read piece by piece; None if it has gone."""
        where = f"{self.where}: {key}"
        try:
            if self.root is not None:
                return Segment(OpenFile(self.root, key, where).read, n_bytes, where, crc=crc)
            read = Windows(self.objects, key, self._gone).read
            return Segment(read, n_bytes, where, key=key, crc=crc)
        except NotFound:
            return None

    def _gone(self, key: str) -> KvError:
        """Return the error of a table that is not there any more."""
        if any(listed.key == key for listed in self._head.below):
            return Corrupt(f"{self.where}: {key}: missing; restore a copy")
        return NotFound(
            f"{self.where}: this snapshot is older than the time for which what was merged is "
            "kept (grace_seconds); read again from a new one"
        )
