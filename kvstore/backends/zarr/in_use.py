"""Which objects are in use: what `collect` leaves, and what a doomed object may hold again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvcodecs.errors import Corrupt
from kvcodecs.spec import Kind

from ... import keys
from ...session_record import StreamName
from .places import (
    ASIDE,
    BOOKS,
    DOOMED,
    GROUP,
    IN_ARRAY,
    IS_ASIDE,
    Lookup,
    Reference,
    array_of,
    book_of,
    chunk_of,
    home_of,
    load_fields,
    locations,
    owners_in,
)
from .sessions import Stored, n_sealed, shared_blocks, stored_session
from .tails import tail_tokens

_CHUNK_PARTS = 6


class Doomed(NamedTuple):
    """Objects that wait for their deletion, as one key of the backend's own says.

    Attributes
    ----------
    objects
        Their keys.
    trees
        Paths of groups: all that is below, and then the group's path is free again.
    """

    objects: list[str]
    trees: list[str]

    @classmethod
    def unpack(cls, value: bytes) -> Doomed:
        fields: dict[str, Any] = load_fields(value, "objects to delete")
        found = [fields.get("objects", []), fields.get("trees", [])]
        for names in found:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise Corrupt(f"objects to delete: {names!r}; restore a copy of the archive")
        return cls(*found)


def unused(lookup: Lookup, objects: Iterable[str]) -> list[str]:
    """Return those of some doomed objects that do not hold a stored frame again.

    The chunk of a block that was taken back, or stored ahead of a commit that never came, may be
    that of another frame by now.
    """
    groups: dict[str, _Group] = {}
    return [key for key in objects if not _is_used(lookup, key, groups)]


class _Group(NamedTuple):
    """What a group may have: frames of these owners, and these blocks of others."""

    owners: list[int]
    shared: frozenset[tuple[StreamName, int]]


def _is_used(lookup: Lookup, key: str, groups: dict[str, _Group]) -> bool:
    parts = key.removeprefix(ASIDE).split("/")
    if key.startswith(ASIDE):
        owners, (array, number), home = [int(parts[0], 16)], parts[1:], IS_ASIDE
        shared: frozenset[tuple[StreamName, int]] = frozenset()
    elif len(parts) == _CHUNK_PARTS and parts[2] == "c":
        group, array, number, home = parts[0], parts[1], parts[4], IN_ARRAY
        found = groups.get(group)
        if found is None:
            session = session_in(lookup, group)
            blocks = {} if session is None else shared_blocks(session.record)
            found = groups[group] = _Group(owners_in(lookup, group), frozenset(blocks))
        owners, shared = found
    elif key.startswith(BOOKS):
        return lookup.raw(keys.shared_key(bytes.fromhex(parts[2]))) is not None
    else:
        return False  # a commit, a merged table, a shard: such names are never used twice
    kind: Kind = "k" if array.startswith("k") else "v"
    layer, block = int(array.partition("_")[2]), int(number)
    for owner in owners:
        stored = lookup.raw(keys.frame_key(owner, layer, kind, block))
        if stored is not None and Reference.unpack(stored).home == home:
            return True
    return ((layer, kind), block) in shared


def session_in(lookup: Lookup, group: str) -> Stored | None:
    """Return the session that a group shows, or None."""
    for owner in reversed(owners_in(lookup, group)):
        for _, name in lookup.raw_scan(keys.user_key(owner, keys.FOR_EVER, 0)[:-8]):
            text = name.decode("utf-8", "replace")
            stored = stored_session(lookup, text, lookup.raw(keys.SESSION + name))
            if stored is not None and stored.record.owner == owner:
                return stored
    return None


def sessions(lookup: Lookup) -> Iterator[tuple[str, Stored]]:
    """Yield (path of the group, session) of all sessions that can be read."""
    for key, value in lookup.raw_scan(keys.SESSION):
        stored = stored_session(lookup, keys.name_of(key), value)
        home = home_of(lookup, stored.record.owner) if stored is not None else None
        if stored is not None and home is not None:
            yield home.group, stored


def referenced(lookup: Lookup) -> Iterator[str]:
    """Yield the keys of all objects in use; ``group/`` stands for all that is below it.

    Commits and segments are not among them. What waits for its deletion is.
    """
    for key, value in lookup.raw_scan(keys.FRAME):
        yield locations(lookup, key, value)[0][0]
    for key, _ in lookup.raw_scan(keys.SHARED):
        yield book_of(key)
    for group, stored in sessions(lookup):
        yield f"{group}/zarr.json"
        home = home_of(lookup, stored.record.owner)
        if home is not None and home.shard_blocks:
            yield f"{group}/"
            continue
        for stream in stored.record.streams:
            yield array_of(group, *stream) + "/zarr.json"
        for (stream, block), _ in shared_blocks(stored.record).items():
            yield chunk_of(group, *stream, block)
        for stream in stored.record.streams:
            if tail_tokens(stored, stream):
                yield chunk_of(group, *stream, n_sealed(stored.record, stream))
    for key, value in lookup.raw_scan(GROUP):
        if not load_fields(value, "group").get("owners"):
            yield f"{key[len(GROUP) :].decode()}/"
    for _, value in lookup.raw_scan(DOOMED):
        doomed = Doomed.unpack(value)
        yield from doomed.objects
        yield from (f"{tree}/" for tree in doomed.trees)
