"""What a migration is to do: which sessions, in which order, and what they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, KvError, NotFound
from kvcodecs.spec import Kind

from ..backend import Snapshot
from ..catalog import Catalog, listed_names
from ..layout import check_streams
from ..opened import OpenArchive
from ..pieces import count_frames
from ..session_record import load_session, unpack_session
from ..survey import session_names
from .needed import Item, load_item
from .recoding import is_recoded, recoded_owner


class Plan:
    """The sessions of one snapshot that are migrated.

    Parameters
    ----------
    wanted
        Names and patterns; None for all.
    codecs
        What they shall be coded with; None for what they are.
    with_ranges
        Whether sessions are coded anew that have ranges of others, whatever their codec: their
        blocks have several headers, or other positions than they were coded at.

    Attributes
    ----------
    order
        Their names. Parents come before those that share their frames: a backend that keeps frames
        with their session finds it there.
    shared
        Owners that several of those need whose frames are moved.
    home
        The session that an owner's frames are said to be of.
    """

    def __init__(
        self,
        source: OpenArchive,
        snapshot: Snapshot,
        wanted: str | Iterable[str] | None,
        codecs: Mapping[Kind, CodecConfig] | None,
        *,
        with_ranges: bool = False,
    ) -> None:
        self._with_ranges = with_ranges
        self.path, self.snapshot, self.codecs = source.path, snapshot, codecs
        # A new one: what was read before says nothing about what is stored now.
        self._catalog = Catalog(source.path)
        users: dict[int, list[str]] = {}
        heirs: dict[int, str] = {}
        needs: dict[str, list[int]] = {}
        #: About how many frames are read.
        self.n_frames = 0
        for name in chosen_names(session_names(snapshot), wanted, source.path):
            item = self.load(name)
            needs[name] = owners = list(item.claims)
            self.n_frames += count_frames(item.record)
            if self.is_recoded(item):
                check_streams(item.model, codecs or item.record.codecs, item.where)
                continue
            heirs[item.record.owner] = name
            for owner in owners:
                users.setdefault(owner, []).append(name)
        self.shared = frozenset(owner for owner, names in users.items() if len(names) > 1)
        self.order = _parents_first(needs, heirs)
        self.home = {owner: heirs.get(owner, names[0]) for owner, names in users.items()}

    def load(self, name: str) -> Item:
        """Return a session as the source has it."""
        return load_item(self.snapshot, self._catalog, name)

    def is_recoded(self, item: Item) -> bool:
        """Whether a session is coded anew."""
        if self.codecs is None:
            return False
        has_range = self._with_ranges and item.record.n_faithful is not None
        return has_range or is_recoded(item.record, self.codecs)

    def new_owner(self, item: Item) -> int:
        """Return the owner of a session that is coded anew."""
        return recoded_owner(item, self.codecs or item.record.codecs)

    def is_outcome(self, value: bytes, item: Item, where: str) -> bool:
        """Whether a stored record is that of the session once it is migrated."""
        if not self.is_recoded(item):
            return value == item.value
        try:
            data = load_session(value, item.name, where)
            record = unpack_session(data, item.model.streams(), where)
        except KvError:
            return False
        return record.owner == self.new_owner(item)


def chosen_names(names: list[str], wanted: str | Iterable[str] | None, path: str) -> list[str]:
    """Return the names that are wanted, in byte order; a name goes before a pattern.

    Raises
    ------
    NotFound
        A name or pattern that no session has.
    """
    if wanted is None:
        return names
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    there = set(names)
    found: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidArgument(f"sessions {pattern!r}: expected names or patterns")
        matching = [pattern] if pattern in there else [n for n in names if fnmatchcase(n, pattern)]
        if not matching:
            others = f"; there are {listed_names(names)}" if names else ""
            raise NotFound(f"{path}: no session {pattern!r}{others}")
        found.update(matching)
    return sorted(found, key=lambda name: name.encode())


def _parents_first(needs: Mapping[str, list[int]], heirs: Mapping[int, str]) -> list[str]:
    order: dict[str, None] = {}
    for name in needs:
        todo = [name]
        while todo:
            parents = (heirs[owner] for owner in needs[todo[-1]] if owner in heirs)
            before = next((p for p in parents if p not in order and p not in todo), None)
            if before is None:
                order[todo.pop()] = None
            else:
                todo.append(before)
    return list(order)
