"""What the zarr backend asks of storage: named objects, put whole, some only where none is yet.

A directory and a bucket offer the same. Keys are relative, with slashes. FORMAT.md section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

from ...backend import Lease

#: Key, first byte, byte after the last; None for the whole object.
Request: TypeAlias = tuple[str, int | None, int | None]


class Found(NamedTuple):
    """An object as it is listed.

    Attributes
    ----------
    key
        Its key.
    n_bytes
        Its length.
    """

    key: str
    n_bytes: int


class Writer(Protocol):
    """The right to write to an archive, held for one transaction."""

    @property
    def epoch(self) -> int:
        """How often the right changed hands; 0 where the system itself sees to the lock."""
        ...

    def check(self) -> None:
        """Renew the right; raises `Locked` if another writer has taken it."""
        ...


class Objects(Protocol):
    """Objects of one archive. Safe to use from many threads.

    Every method raises `Full` (no space), `InvalidArgument` (no right) or `Locked` (storage that
    does not answer, after retries; nothing is known to have changed).
    """

    @property
    def where(self) -> str:
        """What the archive was opened as, for messages."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether each request takes a round trip, and an open object does not outlive its key."""
        ...

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Return an object or bytes ``[start, stop)`` of it; None if there is none.

        A range that ends behind the object is cut there.
        """
        ...

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Return what `get` would for each; at the same time where that helps."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Put an object where there is none; False, and nothing changed, if there is one."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Put or replace an object; readers see the old one or the new one."""
        ...

    def put_all(self, items: Iterable[tuple[str, bytes]], still_mine: Callable[[], None]) -> None:
        """Put or replace objects, as `put` does each; at the same time where that helps.

        In a bucket those that are there are replaced as by `put_frames`.
        """
        for key, data in items:
            self.put(key, data)

    def put_frames(
        self, items: Sequence[tuple[str, bytes]], still_mine: Callable[[], None]
    ) -> None:
        """Put objects where there are none; leftovers of writers that died are replaced.

        Parameters
        ----------
        items
            Keys and bytes. One that is there with the same bytes is left alone.
        still_mine
            Raises `Locked` if the caller's right to write is lost. Asked after a leftover has been
            looked at and before it is replaced, which happens only if it has not changed since.
        """
        ...

    def copy(self, pairs: Sequence[tuple[str, str]], still_mine: Callable[[], None]) -> None:
        """Give objects a second key, which need not be free: (from, to).

        A directory makes hard links. To a bucket objects are put as by `put_frames`: it would
        itself copy whatever is there by then over whatever is there.

        Raises
        ------
        NotFound
            There is no such object.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent ones are no error. Directories left empty go too."""
        ...

    def list(self, prefix: str, after: str | None = None) -> Iterator[Found]:
        """Yield the objects whose key starts with `prefix` (and comes after `after`).

        In key order where `after` is given; `prefix` ends with a slash or is empty.
        A directory also lists what a writer that died was making (`_keys.is_unfinished`), which
        is no object, and can be deleted like one by who has the right to write.
        """
        ...

    def flush(self) -> None:
        """Make what was put and copied so far durable; at once where puts are."""
        ...

    def writer(self, timeout: float) -> AbstractContextManager[Writer]:
        """Take the right to write, waiting up to `timeout` seconds; else raise `Locked`."""
        ...

    def lease(self, session: int, name: str, expires: float | None, *, in_write: bool) -> Lease:
        """Take the lease of a session, at once or not at all; see `Backend.lease`.

        Parameters
        ----------
        in_write
            Whether the caller's thread has the right to write: only then an expired lease is
            taken over; else `Locked`, with `is_expired` telling that it can be.
        """
        ...

    def is_expired(self, session: int) -> bool:
        """Whether the lease of a session may be taken over by who has the right to write."""
        ...

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...
