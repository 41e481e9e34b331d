"""What is read and changed through one LMDB transaction."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import lmdb
from kvcodecs._core import release_pages
from kvcodecs.errors import InvalidArgument, KvError

from ..backend import Value
from ..passing import Passing
from ._checks import expired, no_shards
from ._environment import Environment
from ._errors import translate
from ._heads import Head


class LmdbSnapshot:
    """Reads of one LMDB transaction; unusable once it has ended, or is too old."""

    def __init__(self, txn: Any, where: str, seconds: float) -> None:
        self._txn, self._where = txn, where
        self._seconds, self._expires = seconds, time.monotonic() + seconds

    def get(self, key: bytes) -> memoryview | None:
        if time.monotonic() > self._expires:
            raise expired(self._where, self._seconds)
        try:
            value: memoryview | None = self._txn.get(key)
        except lmdb.Error as error:
            raise self._translate(error) from error
        return value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        self._check_age()
        try:
            with self._txn.cursor() as cursor:
                if not cursor.set_range(prefix):
                    return
                for key, value in cursor:
                    name = bytes(key)
                    if not name.startswith(prefix):
                        return
                    yield name, value
                    self._check_age()
        except lmdb.Error as error:
            raise self._translate(error) from error

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        # The binding touches every page of a value that it finds.
        passing = Passing(self)
        for key, value in self.scan(prefix):
            yield key, value.nbytes
            passing.add(value)
        passing.release()

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Nothing: the values are in the map."""

    def at_or_after(self, key: bytes) -> bytes | None:
        self._check_age()
        try:
            with self._txn.cursor() as cursor:
                return bytes(cursor.key()) if cursor.set_range(key) else None
        except lmdb.Error as error:
            raise self._translate(error) from error

    def before(self, key: bytes) -> bytes | None:
        self._check_age()
        try:
            with self._txn.cursor() as cursor:
                found = cursor.prev() if cursor.set_range(key) else cursor.last()
                return bytes(cursor.key()) if found else None
        except lmdb.Error as error:
            raise self._translate(error) from error

    def zarr_group(self, owner: int) -> str | None:
        return None

    def release(self, view: memoryview) -> None:
        release_pages(view)

    def _check_age(self) -> None:
        if time.monotonic() > self._expires:
            raise expired(self._where, self._seconds)

    def _translate(self, error: lmdb.Error) -> KvError:
        return translate(error, self._where)


class LmdbTransaction(LmdbSnapshot):
    """A snapshot that can be changed; counts what LMDB does not tell before the commit."""

    def __init__(self, txn: Any, where: str, environment: Environment) -> None:
        super().__init__(txn, where, math.inf)
        self._environment = environment
        self._n_changes = self._n_put_pages = 0
        self._head: Head | None = None
        #: The error that LMDB allows nothing after but to roll back.
        self.failed: KvError | None = None

    def release(self, view: memoryview) -> None:
        """Nothing: the view may be of a changed page, which is nowhere else."""

    def put(self, key: bytes, value: Value) -> None:
        self._n_changes += 1
        self._n_put_pages += (len(value) >> 12) + 2  # at least what LMDB takes for a large value
        try:
            self._txn.put(key, value)
        except lmdb.BadValsizeError as error:
            raise InvalidArgument(f"{self._where}: key of {len(key)} bytes") from error
        except lmdb.Error as error:
            raise self._translate(error) from error

    def delete(self, key: bytes) -> None:
        self._n_changes += 1
        try:
            self._txn.delete(key)
        except lmdb.Error as error:
            raise self._translate(error) from error

    def shard(self, name: str, shard_bytes: int) -> bool:
        raise no_shards(self._where)

    def used_bytes(self) -> int:
        if self._head is None:
            self._head = self._environment.head()  # nobody else commits meanwhile
        head = self._head
        n_pages = head.n_used
        if self._n_changes:
            try:
                stat = self._txn.stat(self._environment.main)
            except lmdb.Error as error:
                raise self._translate(error) from error
            n_main = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            n_pages += n_main - head.main.n_pages + self._n_list_pages(head, stat["overflow_pages"])
        return n_pages * self._environment.page_bytes

    def _n_list_pages(self, head: Head, n_overflow: int) -> int:
        """Return by how many pages the list of free pages grows at most.

        Each page that this transaction frees takes 8 bytes there: those of large values that it
        removed, and those of the tree that it changes, all on the way from the root to a leaf.
        """
        n_large = head.main.n_overflow + self._n_put_pages - n_overflow
        n_tree = head.main.n_pages - head.main.n_overflow + self._n_changes
        n_freed = n_large + min(2 * self._n_changes * (head.main.depth + 1), n_tree)
        return -(-8 * n_freed // self._environment.page_bytes) + head.free.depth + 2

    def _translate(self, error: lmdb.Error) -> KvError:
        if self.failed is None:
            self.failed = translate(error, self._where, self._environment.effective_limit)
        return self.failed
