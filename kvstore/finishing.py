"""Finishing sessions: nothing is appended any more, so many blocks may share an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvcodecs.errors import InvalidArgument

from .backend import Transaction
from .sharing import put_record

if TYPE_CHECKING:
    from .opened import OpenArchive

#: Large enough that a million blocks are a thousand objects, small enough to be put at once.
SHARD_BYTES: Final = 32 << 20
_LEAST_SHARD_BYTES: Final = 1 << 10


def seal(
    archive: OpenArchive,
    names: Iterable[str],
    *,
    shard_bytes: int | None,
    progress: Callable[[int, int], object] | None,
) -> list[str]:
    """Finish sessions, one transaction each; return the names of those that were not before.

    See `Archive.seal`.
    """
    if shard_bytes is not None and (
        type(shard_bytes) is not int or not _LEAST_SHARD_BYTES <= shard_bytes < 1 << 40
    ):
        raise InvalidArgument(
            f"shard_bytes {shard_bytes!r}: expected an integer, at least {_LEAST_SHARD_BYTES}, or "
            "None"
        )
    todo, done = list(dict.fromkeys(names)), []
    for i, name in enumerate(todo):
        if progress is not None:
            progress(i, len(todo))
        if _finish(archive, name, shard_bytes):
            done.append(name)
    if progress is not None:
        progress(len(todo), len(todo))
    return done


def _finish(archive: OpenArchive, name: str, shard_bytes: int | None) -> bool:
    session = archive.session(name)
    if session.finished and shard_bytes is None:
        return False

    def work(transaction: Transaction) -> bool:
        record = session._record(transaction)
        changed = shard_bytes is not None and transaction.shard(name, shard_bytes)
        if not record.finished:
            finished = replace(record, finished=True)
            put_record(transaction, archive._catalog, name, record, finished)
        return changed or not record.finished

    # An appender has the session open: it would find its commits refused.
    lease = archive.take_lease(session._id, name)
    try:
        return archive._room.write(work, keep=(session._id,), frees=True)
    finally:
        lease.release()
