"""What the engine asks of the place where frames live.

A backend is a small ordered map from byte keys to byte values with snapshots and atomic write
transactions, plus one lock per session (the lease). It knows nothing of what a key or a value
means; `keys` and `records` do. FORMAT.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from kvcodecs.errors import InvalidArgument

Mode: TypeAlias = Literal["r", "a"]
Value: TypeAlias = bytes | memoryview

#: Longest key in bytes: LMDB's own limit.
MAX_KEY_BYTES: Final = 511
#: How long a snapshot may be read from: it keeps pages that were freed since from being used again.
SNAPSHOT_SECONDS: Final = 3600.0
#: How long the zarr backend keeps what was deleted, for snapshots that may still read it.
GRACE_SECONDS: Final = 3600.0
# Thirty years; much longer ones overflow the system's clock.
_LONGEST_WAIT: Final = 1e9


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Size of an archive as its backend stores it.

    Attributes
    ----------
    kind
        Name of the backend, ``"lmdb"``, ``"zarr"`` or ``"memory"``.
    file_bytes
        Length of the data file; for others than LMDB, the bytes of all keys and values.
    free_bytes
        Bytes inside the file that the next writes use again before it grows.
    used_bytes
        Bytes that are not free, LMDB's own overhead included: what the file would have without a
        hole. Exact, and the same after a restart.
    n_entries
        Number of keys.
    """

    kind: str
    file_bytes: int
    free_bytes: int
    used_bytes: int
    n_entries: int


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A snapshot that is open somewhere; pages freed since it began cannot be used again.

    Attributes
    ----------
    pid
        Its process.
    n_behind
        Transactions committed since it began.
    age_seconds
        How long it has been open; None in another process, which alone knows.
    """

    pid: int
    n_behind: int
    age_seconds: float | None


class Repository(Protocol):
    """An open Icechunk repository; stands for a path."""

    def writable_session(self, branch: str) -> Any:
        """Begin a transaction of Icechunk."""
        ...


class Lease(Protocol):
    """Exclusive right to append to one session; ends with `release` or with the process.

    One that was taken with `expires` is lost as well when it was not renewed for so long and
    another appender wants it. Its holder therefore calls `check` inside each write transaction
    on the session, before the first change, and `renew` in between while it does anything else.
    """

    def check(self) -> None:
        """Make sure that the lease is still held, and renew it.

        Raises
        ------
        Locked
            It expired, and another appender took it.
        Closed
            It was given back.
        """
        ...

    def renew(self) -> None:
        """Show a sign of life; costs next to nothing more often than once a second."""
        ...

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""
        ...


class Snapshot(Protocol):
    """The committed state at one moment, unaffected by later writes.

    Every method but `release`, and every step of a scan, raises `Closed` once the snapshot is
    older than the ``snapshot_seconds`` of its backend. Write transactions do not expire.
    """

    def get(self, key: bytes) -> memoryview | None:
        """Return a read-only view of the value, or None.

        The view is valid until the snapshot ends (inside a transaction: until the next `put`
        or `delete`) and never after it.
        """
        ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Yield keys that start with `prefix` and their values, in key order; views as in `get`."""
        ...

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield keys that start with `prefix` and lengths of their values, which are not read."""
        ...

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Say which values `get` is going to be called for, so that they come all at once.

        Absent keys do no harm. Nothing happens where a value is at hand anyway.
        """
        ...

    def at_or_after(self, key: bytes) -> bytes | None:
        """Return the first stored key that is not less than `key`, or None."""
        ...

    def before(self, key: bytes) -> bytes | None:
        """Return the last stored key that is less than `key`, or None."""
        ...

    def zarr_group(self, owner: int) -> str | None:
        """Return the path of the group where zarr finds the session of an owner; None elsewhere."""
        ...

    def release(self, view: memoryview) -> None:
        """Let go of the memory behind a view; it can be read again, at the cost of a new read."""
        ...


class Transaction(Snapshot, Protocol):
    """A snapshot that can be changed; sees its own changes, is made durable as a whole."""

    def put(self, key: bytes, value: Value) -> None:
        """Store or replace a value; `value` is copied. Raises `Full`."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove a key; an absent one is no error."""
        ...

    def shard(self, name: str, shard_bytes: int) -> bool:
        """Lay the sealed frames of a finished session together, many to an object, on commit.

        Returns
        -------
        bool
            False if they lie together already, or there are none.

        Raises
        ------
        InvalidArgument
            The backend does not keep each frame in an object of its own.
        """
        ...

    def used_bytes(self) -> int:
        """Return `BackendInfo.used_bytes` as of a commit now.

        In LMDB an upper bound, exact before the first change: the pages of the database itself
        are counted, those that the list of free pages will have are known only at the commit.
        The bound is a few pages high, and 8 bytes for each page that is freed.
        """
        ...


class Backend(Protocol):
    """Where the frames of one archive live. Safe to use from many threads."""

    @property
    def path(self) -> str:
        """What the archive was opened as, for messages."""
        ...

    def read(self) -> AbstractContextManager[Snapshot]:
        """Open a snapshot. Never waits for writers. Raises `Truncated`, `Closed`."""
        ...

    def write(self, timeout: float) -> AbstractContextManager[Transaction]:
        """Open the one write transaction: committed at the end, rolled back on an exception.

        Raises
        ------
        Locked
            Another writer, in this or any other process, held the lock for `timeout` seconds.
        Full
            On commit: no space; the transaction has been rolled back. Also when a `put` raised
            it and the caller went on: such a transaction is never committed.
        """
        ...

    def lease(
        self, owner: int, name: str, *, expires: float | None = None, timeout: float = 10.0
    ) -> Lease:
        """Take the lease of the streams of `owner`, at once or not at all.

        Parameters
        ----------
        name
            The session's, for the message of `Locked`.
        expires
            Seconds without `Lease.renew` or `Lease.check` after which another appender may take
            the lease. Given it, this call may also take over a lease that has expired; that
            happens inside a write transaction, the one that the caller's thread has open, or one
            of its own. What the caller knows of the session from before is out of date then:
            read its record again after this call. With None the lease never expires, and
            nothing is taken over.
        timeout
            How long to wait for that write transaction.

        Raises
        ------
        Locked
            There is an appender whose lease has not expired, or no write transaction in time.
        """
        ...

    def info(self) -> BackendInfo:
        """Return sizes."""
        ...

    @property
    def limit(self) -> int | None:
        """What `set_limit` was given last for this archive in this process."""
        ...

    def set_limit(self, n_bytes: int | None) -> None:
        """Cap the length of the data file (memory: the bytes of keys and values).

        It holds for everybody in this process who has the archive open, until all have closed
        it; None takes it away. Rounded down to whole pages. What does not fit raises `Full` with
        ``is_limit``, and nothing is lost.

        In LMDB removing needs room too, 1 % of what is removed: it writes changed pages anew,
        and what it frees is usable later (`reclaim`). So keep some below the limit. A file that
        is longer than the limit already may grow by 64 KiB, or 1/128, so that it can be emptied.

        Raises
        ------
        Locked
            LMDB: transactions of this process did not end within ten seconds. The caller has
            none open.
        """
        ...

    def readers(self) -> list[ReaderInfo]:
        """Return the snapshots that are open now, in every process; the oldest first."""
        ...

    def reclaim(self, timeout: float) -> bool:
        """Make what the last transactions freed usable by the next one.

        LMDB lets a transaction use what was freed by the last but one before it, or earlier, and
        not since the oldest snapshot that is still open. So this commits once more without
        changing anything, unless it has just done so. The caller has no snapshot open.

        Returns
        -------
        bool
            Whether an older snapshot is open, so that what was freed since it began stays
            unusable until it ends; `readers` tells whose.

        Raises
        ------
        Locked, Full
            As `write`.
        """
        ...

    def collect(self, timeout: float) -> int:
        """Delete objects that nothing refers to any more, and return their bytes.

        The zarr backend's: what was deleted longer than the grace period ago, and what writers
        left that died in the middle of a transaction. The others have no such thing.

        Raises
        ------
        Locked, Full
            As `write`.
        Corrupt
            Damage, so that it is not known what is in use.
        """
        ...

    def note_use(self, session_id: int) -> None:
        """Note that a session is used now; mode "r" may, and nothing is raised.

        LMDB: appended to the advisory file ``uses``, unless the same session was noted last, less
        than a second ago. Lost where the directory cannot be written.
        """
        ...

    def last_uses(self) -> dict[int, int]:
        """Return nanoseconds since 1970 of the last use of each session that is known."""
        ...

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...


def check_timeout(seconds: object) -> float:
    """Return a time-out that the system's clock can take; `InvalidArgument` if it is none."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidArgument(f"lock_timeout {seconds!r}: expected seconds")
    return float(min(seconds, _LONGEST_WAIT))


def check_seconds(name: str, seconds: object) -> float:
    """Return seconds above 0, thirty years at most; `InvalidArgument` if it is no such number."""
    # Written so that NaN is none either.
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0:
        return float(min(seconds, _LONGEST_WAIT))
    raise InvalidArgument(f"{name} {seconds!r}: expected seconds, more than 0")
