"""Walks over all sessions that a damaged one does not stop: what they are, and what is garbage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcodecs.errors import Corrupt, KvError, Locked

from . import keys
from .info import SessionInfo, session_info
from .reader import Reader
from .records import SessionRecord
from .token_ids import CHUNK_TOKENS

if TYPE_CHECKING:
    from .archive import Archive
    from .backend import Snapshot


@dataclass(slots=True)
class Survey:
    """What `survey` found.

    Attributes
    ----------
    sessions
        Those that can be described.
    damaged
        Why the others cannot, by name.
    """

    sessions: list[SessionInfo] = field(default_factory=list)
    damaged: dict[str, KvError] = field(default_factory=dict)


def session_names(snapshot: Snapshot) -> list[str]:
    """Return the names of all sessions, in byte order; keys that are no names are left out."""
    names = []
    for key, _ in snapshot.scan(keys.SESSION):
        try:
            names.append(keys.parse(key).name or "")
        except Corrupt:
            continue  # `verify` reports it
    return names


def survey(archive: Archive, snapshot: Snapshot) -> Survey:
    """Describe every session of an archive."""
    found = Survey()
    for name in session_names(snapshot):
        where = f"{archive.path}: session {name!r}"
        try:
            record = archive._catalog.record(snapshot, name)
            model = archive._catalog.model(snapshot, record.model)
            reader = Reader(model, record.owner, where)
            found.sessions.append(session_info(snapshot, name, record, reader))
        except KvError as error:
            found.damaged[name] = error
    return found


def collect_garbage(archive: Archive) -> int:
    """Remove leftovers of killed writers; return their bytes. See `Archive.gc`."""
    backend = archive._backend
    n_bytes = 0
    with backend.write(archive._timeout) as transaction:
        live, all_read = _live(archive, transaction)
        for owner in _owners(transaction):
            if owner not in live and not all_read:
                continue  # it may be a damaged session's
            try:
                lease = backend.lease(owner, live[owner][0] if owner in live else f"{owner:016x}")
            except Locked:
                continue  # somebody is appending, or storing a session not yet published
            try:
                found = [
                    (key, value.nbytes)
                    for prefix in keys.OWNED
                    for key, value in transaction.scan(keys.owner_prefix(prefix, owner))
                    if owner not in live or not _is_needed(key, live[owner][1])
                ]
                for key, size in found:
                    transaction.delete(key)
                    n_bytes += size
            finally:
                lease.release()
        models = {record.model for _, record in live.values()}
        unused = [
            (key, value.nbytes)
            for key, value in transaction.scan(keys.IDENTITY)
            if all_read and key[1:] not in models
        ]
        for key, size in unused:
            transaction.delete(key)
            n_bytes += size
    return n_bytes


def _live(
    archive: Archive, snapshot: Snapshot
) -> tuple[dict[int, tuple[str, SessionRecord]], bool]:
    """Return name and record of every owner, and whether every record could be read."""
    live: dict[int, tuple[str, SessionRecord]] = {}
    names = session_names(snapshot)
    all_read = len(names) == sum(1 for _ in snapshot.scan(keys.SESSION))
    for name in names:
        try:
            record = archive._catalog.record(snapshot, name, fresh=True)
            archive._catalog.model(snapshot, record.model, fresh=True)
            live[record.owner] = name, record
        except KvError:
            all_read = False
    return live, all_read


def _owners(snapshot: Snapshot) -> list[int]:
    found = set()
    for prefix in keys.OWNED:
        for key, _ in snapshot.scan(prefix):
            try:
                owner = keys.parse(key).owner
            except Corrupt:
                continue  # `verify` reports it
            if owner is not None:
                found.add(owner)
    return sorted(found)


def _is_needed(stored: bytes, record: SessionRecord) -> bool:
    """Whether a key of a published session is one that its record says exists."""
    try:
        key = keys.parse(stored)
    except Corrupt:
        return True  # not a key of ours to judge
    if key.prefix == keys.TOKENS:
        index = key.index or 0
        return record.has_ids and index * CHUNK_TOKENS < record.n_tokens
    if key.layer is None or key.kind is None:
        return False
    state = record.streams.get((key.layer, key.kind))
    if state is None:
        return False
    n_own = record.n_tokens - state.start
    if key.prefix == keys.HEADER:
        return state.has_header
    if key.prefix == keys.HEAD:
        return state.n_head > 0
    if key.prefix == keys.TAIL:
        return state.has_header and n_own % state.block_tokens > 0
    return state.has_header and (key.index or 0) < n_own // state.block_tokens
