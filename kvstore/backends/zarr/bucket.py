"""Objects in a bucket: S3, what speaks like it, and other clouds that obstore knows.

Every put is durable when it returns. Where two may want the same key, the storage decides: an
object is created where there is none, or replaced if its tag is still the one that was read.
Storage without such conditional puts is refused. Listings are in key order, as S3 has them; its
directory buckets (Express) have no order and are not supported.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvcodecs.errors import Closed, InvalidArgument, Locked, NotFound

from ...backend import Lease
from ...lease import locked, lost
from ._at_once import at_once
from ._keys import LEASE_PREFIX, WRITER_KEY, check_key, check_prefix
from ._requests import MAX_RETRIES, RETRY_SECONDS, Requests
from .bucket_lease import LEASE_SECONDS, BucketLease, State, parse, take
from .objects import Found, Objects, Request

#: Requests at the same time.
_AT_ONCE: Final = 24
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
# What the library also takes, but cannot replace under a condition, or keep.
_LOCAL: Final = ("file:", "memory:")


class Bucket(Objects):
    """Objects below a prefix of a bucket.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, or another URL that ``obstore.store.from_url`` takes.
    storage_options
        What it takes as configuration: ``endpoint``, ``region``, ``access_key_id``,
        ``secret_access_key`` and others, also those of its HTTP client (``timeout``). The
        environment (``AWS_...``) says what is missing here.
    lease_seconds
        After how long the leases of a process that died, or stands still, are free.
    max_retries, retry_seconds
        How often a failed request is repeated, and for how long.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        lease_seconds: float = LEASE_SECONDS,
        max_retries: int = MAX_RETRIES,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        if url.startswith(_LOCAL):
            raise InvalidArgument(f"{url}: not a bucket; open a directory by its path")
        self._where, self._lease_seconds = url, lease_seconds
        self._requests = Requests(
            url, storage_options, max_retries=max_retries, retry_seconds=retry_seconds
        )
        self._writing = threading.Lock()
        self._is_closed = False

    @property
    def where(self) -> str:
        return self._where

    @property
    def is_remote(self) -> bool:
        return True

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        return self._open().get(self._key(key), start, stop)

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        return at_once(lambda request: self.get(*request), requests, _AT_ONCE)

    def exists(self, key: str) -> bool:
        return self._open().exists(self._key(key))

    def put_new(self, key: str, data: bytes) -> bool:
        return self._open().create(self._key(key), data) is not None

    def put(self, key: str, data: bytes) -> None:
        self._open().put(self._key(key), data)

    def put_all(self, items: Iterable[tuple[str, bytes]], still_mine: Callable[[], None]) -> None:
        at_once(lambda item: self._put_over(*item, still_mine), list(items), _AT_ONCE)

    def put_frames(
        self, items: Sequence[tuple[str, bytes]], still_mine: Callable[[], None]
    ) -> None:
        at_once(lambda item: self._put_frame(*item, still_mine), items, _AT_ONCE)

    def copy(self, pairs: Sequence[tuple[str, str]], still_mine: Callable[[], None]) -> None:
        at_once(lambda pair: self._copy(*pair, still_mine), pairs, _AT_ONCE)

    def delete(self, keys: Sequence[str]) -> None:
        self._open().delete([self._key(key) for key in keys])

    def list(self, prefix: str, after: str | None = None) -> Iterator[Found]:
        return self._open().listing(check_prefix(self._where, prefix), after)

    def flush(self) -> None:
        """Do nothing: every put is durable when it returns."""

    @contextlib.contextmanager
    def writer(self, timeout: float) -> Iterator[BucketLease]:
        self._open()
        deadline = time.monotonic() + max(timeout, 0.0)
        if not self._writing.acquire(timeout=max(timeout, 0.0)):
            raise self._locked(timeout, None)
        try:
            lease = self._take_writer(timeout, deadline)
            try:
                yield lease
            finally:
                lease.release()
        finally:
            self._writing.release()

    def lease(self, session: int, name: str, expires: float | None, *, in_write: bool) -> Lease:
        """Take the lease of a session; see `Objects.lease`.

        With `expires` None the life of the process counts as a sign of life, and the lease is
        free some time after its end; it cannot be kept for ever as that of a directory.
        """
        taken = take(
            self._open(),
            _lease_key(session),
            self._lease_seconds if expires is None else expires,
            expired_too=in_write,
            lost=lambda: lost(self._where, name),
            is_alive=expires is None,
            renews_always=True,
        )
        if not isinstance(taken, BucketLease):
            raise locked(self._where, name)
        return taken

    def is_expired(self, session: int) -> bool:
        key = _lease_key(session)
        data = self._open().get(key, None, None)
        return data is not None and parse(self._where, key, data).is_expired

    def close(self) -> None:
        self._is_closed = True

    def _open(self) -> Requests:
        if self._is_closed:
            raise Closed(f"{self._where}: the archive is closed")
        return self._requests

    def _key(self, key: str) -> str:
        return check_key(self._where, key)

    def _copy(self, source: str, target: str, still_mine: Callable[[], None]) -> None:
        if self._open().copy_new(self._key(source), self._key(target)):
            return
        # There is one, which may be a leftover: as with frames that are put.
        data = self.get(source)
        if data is None:
            raise NotFound(f"{self._where}: no object {source!r} to copy")
        self._put_frame(target, data, still_mine)

    def _put_frame(self, key: str, data: bytes, still_mine: Callable[[], None]) -> None:
        if self._open().create(self._key(key), data) is None:
            self._put_over(key, data, still_mine)

    def _put_over(self, key: str, data: bytes, still_mine: Callable[[], None]) -> None:
        requests = self._open()
        found = requests.get_tagged(self._key(key))
        if found is not None and found.data == data:
            return
        still_mine()
        if found is None:
            tag = requests.create(key, data)
        else:
            tag = requests.replace(key, data, found.tag)
        if tag is None:
            raise Locked(
                f"{self._where}: {key}: another writer has put it meanwhile; nothing of this "
                "transaction is stored; try again"
            )

    def _take_writer(self, timeout: float, deadline: float) -> BucketLease:
        pause = _FIRST_PAUSE
        while True:
            taken = take(
                self._open(), WRITER_KEY, self._lease_seconds, expired_too=True, lost=self._lost
            )
            if isinstance(taken, BucketLease):
                return taken
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._locked(timeout, taken)
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _lost(self) -> Locked:
        return Locked(
            f"{self._where}: another writer took over, since this one was not heard of for "
            f"{self._lease_seconds:g} s; nothing of this transaction is stored; try again"
        )

    def _locked(self, timeout: float, holder: State | None) -> Locked:
        text = f"{self._where}: another writer held the lock for {timeout:g} s; "
        if holder is not None and (seconds := holder.expires - time.time()) > 0:
            text += f"if it died the lock is free in {seconds:.0f} s; "
        return Locked(text + "raise lock_timeout or try again")


def _lease_key(session: int) -> str:
    return f"{LEASE_PREFIX}{session:016x}"
