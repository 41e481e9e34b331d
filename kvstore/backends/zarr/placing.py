"""What a transaction does to objects: frames that get a place, move aside, or are doomed.

A session's group has the chunks of all its whole blocks: its own frames, and copies (hard links)
of those that it shares. The group belongs to the owners that the session had, one after the
other. Deleted objects stay for a while, since snapshots may still read them. FORMAT.md section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcodecs.spec import Kind

from ... import keys
from .places import (
    IN_ARRAY,
    IN_SHARD,
    IS_ASIDE,
    Home,
    Reference,
    array_of,
    aside_of,
    book_of,
    chunk_of,
    doomed_key,
    frame_of,
    group_key,
    group_of,
    home_key,
    home_of,
    locations,
    owners_in,
    pack_json,
    shard_of,
)
from .places import Lookup as Lookup
from .sessions import Stored, first_own, n_sealed, shared_blocks, stored_session
from .tails import tail_tokens

Changes: TypeAlias = Mapping[bytes, bytes | memoryview | None]


@dataclass
class Sync:
    """What is to be done to zarr's documents after a commit; doing it twice does no harm.

    Attributes
    ----------
    sessions
        Names of those whose documents change.
    closed
        Paths of groups that are no sessions any more.
    hidden
        Paths of arrays that are none any more.
    """

    sessions: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sessions or self.closed or self.hidden)

    def to_json(self) -> dict[str, object]:
        return {"sessions": self.sessions, "closed": self.closed, "hidden": self.hidden}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Sync:
        """Read what `to_json` returned; raises `ValueError`."""
        found = []
        for name in ("sessions", "closed", "hidden"):
            value = data.get(name, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"{name}: {value!r}")
            found.append([str(item) for item in value])
        return cls(*found)


@dataclass
class Placed:
    """Work for a commit, in this order: rescues, copies and excerpts, frames, and the delta.

    Attributes
    ----------
    puts
        What else goes into the delta: references of frames, and keys of the backend's own. None:
        deleted.
    rescues
        Objects to copy aside before anything takes their place: (from, to).
    copies
        Objects to copy.
    excerpts
        Bytes ``[start, stop)`` of an object to put elsewhere.
    frames
        Objects to put.
    sync
        What follows the commit.
    """

    puts: dict[bytes, bytes | None] = field(default_factory=dict)
    rescues: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    excerpts: list[tuple[str, int, int, str]] = field(default_factory=list)
    frames: list[tuple[str, bytes]] = field(default_factory=list)
    sync: Sync = field(default_factory=Sync)


def place(
    base: Lookup,
    changes: Changes,
    names: Mapping[int, str],
    due_ns: int,
    is_foreign: Callable[[str], bool],
) -> Placed:
    """Return what a transaction does to objects.

    Parameters
    ----------
    base
        What was stored before it.
    changes
        The engine's keys that it puts, and deletes (None). Values of frames are frames.
    names
        Names of the sessions to be that owners belong to which no record names yet.
    due_ns
        When doomed objects may be deleted: nanoseconds since 1970.
    is_foreign
        Whether something else has the path of a group that is free.
    """
    return _Placing(base, changes, names, due_ns, is_foreign).run()


class _Placing:
    def __init__(
        self,
        base: Lookup,
        changes: Changes,
        names: Mapping[int, str],
        due_ns: int,
        is_foreign: Callable[[str], bool],
    ) -> None:
        self._is_foreign = is_foreign
        self._base, self._changes, self._names = base, changes, names
        self._placed = Placed()
        self._doomed: list[str] = []
        self._due_ns, self._n_doomed = due_ns, 0
        self._aside: set[bytes] = set()  # keys of frames that move aside

    def run(self) -> Placed:
        sessions = sorted(key for key in self._changes if key[:1] == keys.SESSION)
        frames = sorted(key for key in self._changes if key[:1] == keys.FRAME)
        pairs = [self._pair(key) for key in sessions]
        # By id: a renamed session is the same before and after, under two names.
        before = {old.record.id: old for _, old, _ in pairs if old is not None}
        live = set()
        for _, _, new in pairs:
            if new is not None:
                live.add(self._settle(new, before.get(new.record.id)).group)
        for old in before.values():
            home = self._home_before(old)
            if home is not None and home.group not in live:
                self._close(home.group, old)
        for key in frames:
            value = self._changes[key]
            if value is None:
                self._drop(key)
            else:
                self._put(key, bytes(value))
        for key, value in self._changes.items():
            if key[:1] == keys.SHARED and value is None:
                self._doomed.append(book_of(key))
            elif key[:1] == keys.SHARED and value is not None:
                self._placed.frames.append((book_of(key), bytes(value)))
        for name, _, new in pairs:
            if new is not None:
                self._show(name, new, before.get(new.record.id))
        if self._doomed:
            self._doom(objects=self._doomed)
        return self._placed

    def raw(self, key: bytes) -> bytes | None:
        """Return a value as of after the transaction; frames that it puts have none yet."""
        if key in self._placed.puts:
            return self._placed.puts[key]
        if key in self._changes:
            value = self._changes[key]
            return None if value is None else bytes(value)
        return self._base.raw(key)

    def raw_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._base.raw_scan(prefix)

    def _home(self, owner: int) -> Home | None:
        return home_of(self, owner)

    def _pair(self, key: bytes) -> tuple[str, Stored | None, Stored | None]:
        """Return name and record of a session before and after."""
        name = keys.name_of(key)
        old = stored_session(self._base, name, self._base.raw(key))
        new = stored_session(self, name, self.raw(key))
        # A record that cannot be read leaves everything where it is.
        return (name, old, new) if new or self.raw(key) is None else (name, None, None)

    def _settle(self, new: Stored, old: Stored | None) -> Home:
        """Give the owner of a session its group."""
        owner = new.record.owner
        home = self._home(owner)
        if home is not None:
            return home
        before = self._home_before(old) if old is not None else None
        if before is None or before.shard_blocks:
            return self._take_group(owner, new.name)
        # Taken back in place: the chunks before the cut stay, frames from there on move aside.
        self._placed.puts[home_key(owner)] = before.pack()
        owners = owners_in(self, before.group)
        self._record_owners(before.group, [*owners, owner])
        for key, reference in self._frames_of(owners, IN_ARRAY):
            _, layer, kind, block = frame_of(key)
            if block >= first_own(new.record, (layer, kind)):
                self._move_aside(key, reference, before)
                self._doomed.append(chunk_of(before.group, layer, kind, block))
        return before

    def _take_group(self, owner: int, name: str) -> Home:
        wanted = group_of(name)
        group, number = wanted, 1
        while self.raw(group_key(group)) is not None or self._is_foreign(group):
            number += 1
            group = f"{wanted}.{number}"
        home = Home(group)
        self._placed.puts[home_key(owner)] = home.pack()
        self._record_owners(group, [owner])
        return home

    def _record_owners(self, group: str, owners: list[int]) -> None:
        self._placed.puts[group_key(group)] = pack_json({"owners": [f"{o:016x}" for o in owners]})

    def _frames_of(self, owners: list[int], *homes: int) -> Iterator[tuple[bytes, Reference]]:
        """Yield the frames of owners that lie in places of the given kinds, as of before."""
        for owner in owners:
            for key, value in self._base.raw_scan(keys.owner_prefix(keys.FRAME, owner)):
                reference = Reference.unpack(value)
                if reference.home in homes and key not in self._aside:
                    yield key, reference

    def _move_aside(self, key: bytes, reference: Reference, home: Home) -> None:
        """Copy a frame aside; if it is deleted in this transaction, only snapshots look there."""
        owner, layer, kind, block = frame_of(key)
        to = aside_of(owner, layer, kind, block)
        if reference.home == IN_SHARD:
            shard = shard_of(home.group, layer, kind, block // home.shard_blocks)
            stop = reference.offset + reference.n_bytes
            self._placed.excerpts.append((shard, reference.offset, stop, to))
        else:
            self._placed.rescues.append((chunk_of(home.group, layer, kind, block), to))
        self._aside.add(key)
        if key in self._changes and self._changes[key] is None:
            self._doomed.append(to)
        else:
            self._placed.puts[key] = Reference(IS_ASIDE, reference.n_bytes).pack()

    def _close(self, group: str, old: Stored) -> None:
        """Take a group away: what others still read moves aside, the rest is doomed."""
        owners = owners_in(self, group)
        for key, reference in list(self._frames_of(owners, IN_ARRAY, IN_SHARD)):
            home = home_of(self._base, frame_of(key)[0])
            if home is not None and not (key in self._changes and self._changes[key] is None):
                self._move_aside(key, reference, home)
            self._aside.add(key)
        for owner in owners:
            self._placed.puts[home_key(owner)] = None
        self._record_owners(group, [])
        self._placed.sync.closed.append(group)
        self._placed.sync.hidden += [
            array_of(group, *stream)
            for stream in old.record.streams
            if n_sealed(old.record, stream) or tail_tokens(old, stream)
        ]
        self._doom(trees=[group])

    def _doom(self, **what: list[str]) -> None:
        self._placed.puts[doomed_key(self._due_ns, self._n_doomed)] = pack_json(what)
        self._n_doomed += 1

    def _drop(self, key: bytes) -> None:
        """Doom the object of a frame that is deleted."""
        stored = self._base.raw(key)
        if stored is None or key in self._aside:
            return
        if Reference.unpack(stored).home != IN_SHARD:
            self._doomed.append(locations(self._base, key, stored)[0][0])

    def _put(self, key: bytes, frame: bytes) -> None:
        owner, layer, kind, block = frame_of(key)
        home = self._home(owner)
        if home is None and owner in self._names:
            home = self._take_group(owner, self._names[owner])
        is_aside = home is None or home.shard_blocks > 0
        if home is None or is_aside:
            to = aside_of(owner, layer, kind, block)
        else:
            to = chunk_of(home.group, layer, kind, block)
        self._placed.frames.append((to, frame))
        stored = self._base.raw(key)
        if stored is not None and not is_aside and Reference.unpack(stored).home == IS_ASIDE:
            self._doomed.append(aside_of(owner, layer, kind, block))
        self._placed.puts[key] = Reference(IS_ASIDE if is_aside else IN_ARRAY, len(frame)).pack()

    def _show(self, name: str, new: Stored, old: Stored | None) -> None:
        """Give a session's group the chunks that it shares, and note whether it looks new."""
        home = self._home(new.record.owner)
        if home is None:
            return
        if old is None or old.name != name or _looks(old) != _looks(new):
            self._placed.sync.sessions.append(name)
            self._placed.sync.hidden += _vanished(home, old, new)
        if home.shard_blocks or (old is not None and _shares_alike(old, new)):
            return
        kept = shared_blocks(old.record) if old is not None else {}
        if old is not None and self._home_before(old) != home:
            kept = {}
        shared = shared_blocks(new.record)
        for place_here, source in shared.items():
            if kept.get(place_here) != source:
                self._link(home, *place_here, *source)
        # What is the session's own by now is not deleted when its time comes.
        for (layer, kind), block in sorted(kept.keys() - shared.keys()):
            self._doomed.append(chunk_of(home.group, layer, kind, block))

    def _home_before(self, old: Stored) -> Home | None:
        return home_of(self._base, old.record.owner)

    def _link(
        self, home: Home, stream: tuple[int, Kind], block: int, owner: int, block_there: int
    ) -> None:
        layer, kind = stream
        to = chunk_of(home.group, layer, kind, block)
        key = keys.frame_key(owner, layer, kind, block_there)
        stored = self._base.raw(key)
        if stored is None:
            return  # lost, or put by this very transaction: the array shows a missing chunk
        at, start, stop = locations(self._base, key, stored)[0]
        if start is not None and stop is not None:
            self._placed.excerpts.append((at, start, stop, to))
        elif at != to:
            self._placed.copies.append((at, to))


def _vanished(home: Home, old: Stored | None, new: Stored) -> list[str]:
    """Return the paths of arrays that have no whole block any more."""
    return [
        array_of(home.group, *stream)
        for stream in new.record.streams
        if old is not None and n_sealed(old.record, stream) and not n_sealed(new.record, stream)
    ]


def _shares_alike(old: Stored, new: Stored) -> bool:
    """Whether two records of a session share the same blocks."""
    return (old.record.parts, old.record.first) == (new.record.parts, new.record.first)


def _looks(stored: Stored) -> tuple[object, ...]:
    """Return all that the documents of a session are made of."""
    record = stored.record
    blocks = tuple(n_sealed(record, stream) for stream in record.streams)
    parts = tuple((part.owner, part.offset) for part in record.parts)
    about = dict(record.metadata)
    return record.owner, record.model, record.first, parts, blocks, record.finished, about
