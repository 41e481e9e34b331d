"""The steps of a commit, in an order in which every crash leaves the last commit or this one.

Objects first, which nothing refers to yet; then the record, put where there is none; then the
documents for zarr's tools, which the next writer puts again if this one dies. FORMAT.md 9.4.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kvcodecs.errors import Corrupt, Full, KvError, Locked, Truncated, Unsupported

from ... import keys
from . import view
from .commits import (
    FIRST_BYTES,
    Commit,
    Listed,
    commit_key,
    commit_numbers,
    n_to_merge,
    segment_name,
)
from .documents import FILE_NAME
from .doomed import A_FEW, OF_TABLES, free_due, sweep
from .objects import Objects, Writer
from .places import ROOT, doomed_key, pack_json
from .placing import Sync, place
from .segment import GONE, Entry, Segment, merge_segments, pack_segment
from .sessions import stored_session
from .sharding import shard
from .shared import Head, Shared
from .snapshot import View, is_frame
from .storing import store_frames, take_back


def commit_changes(
    shared: Shared,
    head: Head,
    writer: Writer,
    changes: Mapping[bytes, bytes | None],
    *,
    n_entries: int,
    used_bytes: int,
    table_bytes: int,
    grace_seconds: float,
    shards: Mapping[str, int] | None = None,
    sweep_most: int | None = A_FEW,
) -> list[str]:
    """Store changes of the engine's keys (None: deleted); return the objects deleted by the way.

    Parameters
    ----------
    head
        The last commit.
    n_entries, used_bytes, table_bytes
        Of all keys and values after it; see `commits.Commit`.
    shards
        Names of sessions whose blocks are laid together, and about how many bytes go into one
        shard.
    sweep_most
        How many objects whose time has come are deleted; None for all.

    Raises
    ------
    Locked
        Another writer was faster, or the storage does not answer. Nothing is stored.
    Full, InvalidArgument
        No room, no right. Nothing is stored.
    """
    objects, base = shared.objects, View(head.tables)
    writer.check()
    left_over = catch_up(shared, head, writer)
    if head.commit is None:
        view.begin(objects)
    number, nonce = head.number + 1, secrets.token_hex(8)
    now_ns = time.time_ns()
    due_ns = free_due(base, now_ns + int(grace_seconds * 1e9))
    delta: dict[bytes, Entry] = {}
    deleted: list[str] = []
    if not (
        left_over.closed or left_over.hidden
    ):  # a document that is put late must not be of a group that has gone
        swept = sweep(objects, base, now_ns, sweep_most, writer.check)
        delta.update((key, _entry(value)) for key, value in swept.puts.items())
        deleted = swept.deleted
    placed = place(base, changes, shared.names, due_ns, partial(_is_foreign, objects))
    try:
        store_frames(objects, writer, placed)
    except Full:
        take_back(objects, writer, base, placed)
        raise
    for name, shard_bytes in (shards or {}).items():
        stored = stored_session(base, name, base.raw(keys.session_key(name)))
        if stored is not None:
            placed.puts.update(shard(objects, base, stored, shard_bytes, writer.check, due_ns))
            placed.sync.sessions.append(name)
    run, tables, segments = _merge(shared, head, number)
    if objects.is_remote and run:
        doomed = pack_json({"objects": [listed.key for listed in run]})
        delta[doomed_key(due_ns, OF_TABLES)] = doomed
    delta.update(
        (key, _entry(value)) for key, value in changes.items() if value is None or not is_frame(key)
    )
    delta.update((key, _entry(value)) for key, value in placed.puts.items())
    packed = pack_segment(sorted(delta.items()))
    commit = Commit(
        number=number,
        epoch=writer.epoch,
        nonce=nonce,
        previous=head.commit.nonce if head.commit is not None else "",
        tables=tables,
        n_entries=n_entries,
        used_bytes=used_bytes,
        table_bytes=table_bytes,
        sync=_both(left_over, placed.sync),
        time=now_ns // 10**9,
    )
    data, key = commit.pack(packed.data), commit_key(number)
    objects.flush()
    writer.check()
    _put_commit(objects, key, data)
    _make_sure(objects, writer, commit)
    own = shared.open_own(key, data, packed.crc)
    after = Head(commit, Listed(key.removeprefix(ROOT), len(data), packed.crc), (own, *segments))
    shared.adopt(after)
    objects.flush()
    # It is committed. What fails from here on is done by the next writer, or by `collect`.
    with contextlib.suppress(KvError):
        catch_up(shared, after, writer)
        if run and not objects.is_remote:
            delete_merged(objects, number, run)
    return deleted


def catch_up(shared: Shared, head: Head, writer: Writer) -> Sync:
    """Write the documents that a commit calls for, unless it has been seen to.

    Returns
    -------
    Sync
        What could not be done, for the next commit to call for.
    """
    if head.commit is None or shared.synced == head.number or not head.commit.sync:
        return Sync()
    try:
        left = view.sync(shared.objects, View(head.tables), head.commit.sync, writer.check)
    except KvError:
        return head.commit.sync
    if not left:
        shared.synced = head.number
    return left


def delete_merged(objects: Objects, number: int, run: Sequence[Listed]) -> None:
    """Delete tables that commit `number` has merged, where open files stay readable."""
    # All older commits, also those that a writer left that died here: the oldest first, see
    # `commits.last_commit`.
    for older in sorted(commit_numbers(objects)):
        if older < number:
            objects.delete([commit_key(older)])
    objects.delete([listed.key for listed in run if not listed.is_commit])


def _is_foreign(objects: Objects, group: str) -> bool:
    """Whether a group is somebody's own, or a file has its name."""
    if group == FILE_NAME or (not objects.is_remote and objects.exists(group)):
        return True
    return objects.exists(f"{group}/{FILE_NAME}")


def _entry(value: bytes | None) -> Entry:
    return GONE if value is None else value


def _both(one: Sync, other: Sync) -> Sync:
    return Sync(
        sorted({*one.sessions, *other.sessions}),
        sorted({*one.closed, *other.closed}),
        sorted({*one.hidden, *other.hidden}),
    )


def _merge(
    shared: Shared, head: Head, number: int
) -> tuple[tuple[Listed, ...], tuple[Listed, ...], tuple[Segment, ...]]:
    """Merge the newest tables if it is time; return those, and what is below the commit now."""
    listed, tables = head.below, head.tables
    n = n_to_merge(listed, head.table_bytes)
    if not n:
        return (), listed, tables
    try:
        far = shared.objects.is_remote
        sources = [table.in_memory() if far else table for table in tables[:n]]
        packed = merge_segments(sources, keep_deleted=n < len(listed))
    except (Truncated, Corrupt, Unsupported):
        return (), listed, tables  # upkeep: damage in one place does not keep others from writing
    if packed is None:
        return listed[:n], listed[n:], tables[n:]
    while True:
        name = segment_name(number, secrets.token_hex(4))
        if shared.objects.put_new(ROOT + name, packed.data):
            break
    merged = shared.open_own(ROOT + name, packed.data, packed.crc)
    new = Listed(name, len(packed.data), packed.crc)
    return listed[:n], (new, *listed[n:]), (merged, *tables[n:])


def _put_commit(objects: Objects, key: str, data: bytes) -> None:
    """Put a commit record where there is none; the answer to an earlier try may have been lost."""
    try:
        if objects.put_new(key, data):
            return
    except KvError as error:
        try:
            found = objects.get(key)
        except KvError:
            raise error from None
        if found != data:
            raise
        return
    if objects.get(key) != data:
        raise _too_late(objects)


def _make_sure(objects: Objects, writer: Writer, commit: Commit) -> None:
    """Make sure that a commit that was just put has become part of the archive.

    A writer that stood still puts it also where those of others were, merged and deleted since.
    """
    key, following = commit_key(commit.number), commit.number + 1
    try:
        writer.check()
        return
    except Locked:
        later = commit_numbers(objects, key)
    if not later:
        return  # the last one
    data = objects.get(commit_key(following), 0, FIRST_BYTES)
    if data is not None:
        if Commit.unpack(data, following, objects.where)[0].previous == commit.nonce:
            return
    elif not objects.exists(key):
        return  # merged, and deleted before the next one, which has gone too
    objects.delete([key])
    raise _too_late(objects)


def _too_late(objects: Objects) -> Locked:
    return Locked(
        f"{objects.where}: another writer has taken over and committed; nothing of this "
        "transaction is stored; try again"
    )
