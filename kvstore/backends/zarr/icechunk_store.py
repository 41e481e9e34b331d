"""One Icechunk session's store: what zarr calls, called without waiting for it to be awaited."""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, TypeVar

import icechunk
from kvcodecs.errors import Closed, KvError, Locked
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from .objects import Request

T = TypeVar("T")

#: What Icechunk 1 says, with one class for all errors, of what is not there.
_ABSENT: Final = ("node not found", "invalid chunk index", "only prefixes pointing to")
_MOST_TEXT: Final = 300
#: Icechunk's threads may still be letting go of what they answered with when a script is at its
#: end, and abort the process if the interpreter ends first.
_EXIT_PAUSE: Final = 0.1
atexit.register(time.sleep, _EXIT_PAUSE)


class Store:
    """The objects of a session, by the keys that zarr has for them.

    Parameters
    ----------
    session
        Of a repository.
    where
        The archive, for messages.
    """

    def __init__(self, session: icechunk.Session, where: str) -> None:
        self.session, self._store, self._where = session, session.store, where
        self._prototype = default_buffer_prototype()

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Return an object, or bytes ``[start, stop)`` of it as far as it goes; or None."""
        return self._run(self._get(key, start, stop), key)

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Return what `get` would for each, at the same time."""

        async def all_of_them() -> list[bytes | None]:
            return [await task for task in [_begin(self._get(*request)) for request in requests]]

        return self._run(all_of_them(), "objects") if requests else []

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        return self._run(self._exists(key), key)

    def set(self, key: str, data: bytes) -> None:
        """Put or replace a document, or a chunk inside an array's grid."""
        self._run(self._store.set(key, cpu.Buffer.from_bytes(data)), key)

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Do what `set` does for each, at the same time."""

        async def all_of_them() -> None:
            for task in [_begin(self._store.set(k, cpu.Buffer.from_bytes(d))) for k, d in items]:
                await task

        self._run(all_of_them(), "objects")

    def delete(self, key: str) -> None:
        """Delete a chunk or a node; with a node goes all that is below it."""
        self._run(self._store.delete(key), key)

    def delete_below(self, node: str) -> None:
        """Delete a node and all nodes below it."""
        self._run(self._store.delete_dir(f"{node}/"), node)

    def names(self, node: str) -> list[str]:
        """Return the keys of a node and of all below it; none if there is no such node."""
        return self._run(self._names(f"{node}/" if node else ""), node)

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return the lengths of objects; 0 of one that is not there."""

        async def all_of_them() -> list[int]:
            return [await task for task in [_begin(self._size(key)) for key in keys]]

        return self._run(all_of_them(), "objects") if keys else []

    async def _get(self, key: str, start: int | None, stop: int | None) -> bytes | None:
        try:
            span = None
            if start is not None or stop is not None:
                # Newer releases refuse ranges that go beyond the object, older ones misread them.
                n_bytes = await self._store.getsize(key)
                if not n_bytes:
                    return None  # no chunk; there are no empty ones
                first, last = min(start or 0, n_bytes), min(stop or n_bytes, n_bytes)
                if first >= last:
                    return b""
                span = RangeByteRequest(first, last)
            found = await self._store.get(key, self._prototype, span)
        except Exception as error:
            if _is_absent(error):
                return None
            raise
        return None if found is None else found.to_bytes()

    async def _exists(self, key: str) -> bool:
        try:
            return bool(await self._store.exists(key))
        except Exception as error:
            if _is_absent(error):
                return False
            raise

    async def _size(self, key: str) -> int:
        try:
            return int(await self._store.getsize(key))
        except Exception as error:
            if _is_absent(error):
                return 0
            raise

    async def _names(self, prefix: str) -> list[str]:
        try:
            found: AsyncIterator[str] = self._store.list_prefix(prefix)
            return [key async for key in found]
        except Exception as error:
            if _is_absent(error):
                return []
            raise

    def _run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return sync(coroutine)
        except KvError:
            raise
        except Exception as error:
            raise translate(error, f"{self._where}: {what or 'listing'}") from error


def translate(error: Exception, where: str) -> KvError:
    """Return the error of ours for one that Icechunk raised."""
    text = " ".join(str(error).split())[:_MOST_TEXT]
    if isinstance(error, icechunk.ConflictError):
        return Locked(
            f"{where}: another writer has committed to the branch meanwhile; nothing of this "
            "transaction is stored; try again"
        )
    if "read-only" in text:
        return Closed(f"{where}: a session of Icechunk that can only be read")
    return Locked(f"{where}: the repository did not answer ({text}); try again")


def _begin(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(coroutine)


def _is_absent(error: Exception) -> bool:
    if isinstance(error, KeyError | FileNotFoundError):
        return True
    text = str(error).lower()
    return any(words in text for words in _ABSENT)
