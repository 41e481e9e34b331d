"""What nothing refers to: objects of transactions that never came to their end."""

from __future__ import annotations

import re
import time
from typing import Final

from ... import keys
from ._keys import is_unfinished
from .commit import catch_up, commit_changes
from .commits import COMMITS, SEGMENTS, commit_key, commit_numbers
from .documents import FILE_NAME
from .in_use import Doomed, referenced, sessions
from .objects import Objects, Writer
from .places import (
    ASIDE,
    BOOKS,
    DOOMED,
    GROUP,
    IN_ARRAY,
    ROOT,
    Lookup,
    Reference,
    due_of,
    locations,
    owners_in,
)
from .shared import Head, Shared
from .snapshot import View

# A chunk or a shard.
_CHUNK: Final = re.compile(r"([^/]+)/[kv]_\d{3,}/c([/.])\d+\2\d+\2\d+")
_ASIDE: Final = re.compile(re.escape(ASIDE) + r"([0-9a-f]{16})/([kv])_(\d{3,})/(\d+)")
_OWNER_BYTES: Final = slice(8, 16)


def collect(shared: Shared, head: Head, writer: Writer, grace_seconds: float) -> int:
    """Delete what is due, and what nothing refers to; return the bytes.

    The caller has the right to write, so nobody is in the middle of a transaction.

    Raises
    ------
    Corrupt
        Damage, so that it is not known what is in use. Nothing is deleted but what was due.
    """
    objects = shared.objects
    catch_up(shared, head, writer)
    n_bytes, is_due = _due_bytes(objects, View(head.tables), time.time_ns())
    if is_due:
        commit_changes(
            shared,
            head,
            writer,
            {},
            n_entries=head.n_entries,
            used_bytes=head.used_bytes,
            table_bytes=head.table_bytes,
            grace_seconds=grace_seconds,
            sweep_most=None,
        )
        head = shared.head()
    return n_bytes + _Leftovers(objects, head, writer).delete()


def _due_bytes(objects: Objects, lookup: Lookup, now_ns: int) -> tuple[int, bool]:
    """Return about how many bytes are due to be deleted, and whether anything is."""
    names: set[str] = set()
    trees: set[str] = set()
    is_due = False
    for key, value in lookup.raw_scan(DOOMED):
        if due_of(key) > now_ns:
            break
        doomed, is_due = Doomed.unpack(value), True
        names.update(doomed.objects)
        trees.update(doomed.trees)
    if not is_due:
        return 0, False
    found = objects.list("")
    return sum(
        item.n_bytes for item in found if item.key in names or item.key.partition("/")[0] in trees
    ), True


class _Leftovers:
    """Objects that are no part of what is committed."""

    def __init__(self, objects: Objects, head: Head, writer: Writer) -> None:
        self._writer = writer
        self._objects, self._head, self._lookup = objects, head, View(head.tables)
        used = set(referenced(self._lookup))
        self._used = used
        # Groups of which it is not known what belongs to them stay as they are.
        shown = {group for group, _ in sessions(self._lookup)}
        self._groups: set[str] = set()
        self._kept = {name[:-1] for name in used if name.endswith("/")}
        for key, _ in self._lookup.raw_scan(GROUP):
            group = key[len(GROUP) :].decode()
            self._groups.add(group)
            if group not in shown and owners_in(self._lookup, group):
                self._kept.add(group)
        self._foreign: dict[str, bool] = {}

    def delete(self) -> int:
        """Delete them; return the bytes."""
        found = [item for item in self._objects.list("") if self._is_leftover(item.key)]
        found = [item for item in found if self._is_needless(item.key)]
        self._writer.check()
        self._objects.delete([item.key for item in found])
        return sum(item.n_bytes for item in found) + self._delete_commits()

    def _delete_commits(self) -> int:
        """Delete older commits that are below nothing: the oldest first, as everywhere."""
        needed = {listed.key for listed in self._head.below} | self._used
        n_bytes = 0
        sizes = {item.key: item.n_bytes for item in self._objects.list(COMMITS)}
        for number in sorted(commit_numbers(self._objects)):
            key = commit_key(number)
            if key in needed:
                break
            self._writer.check()
            self._objects.delete([key])
            n_bytes += sizes.get(key, 0)
        return n_bytes

    def _is_leftover(self, key: str) -> bool:
        if is_unfinished(key):
            return True
        if key.startswith(SEGMENTS):
            return key not in self._used and all(key != item.key for item in self._head.below)
        if key.startswith((ASIDE, BOOKS)):
            return key not in self._used
        match = None if key.startswith(ROOT) else _CHUNK.fullmatch(key)
        if match is None or match[1] in self._kept or key in self._used:
            return False
        return match[1] in self._groups or not self._is_foreign(match[1])

    def _is_foreign(self, group: str) -> bool:
        """Whether a group that is no session's is there for other reasons.

        A transaction that did not come to its end has left no document.
        """
        found = self._foreign.get(group)
        if found is None:
            found = self._foreign[group] = any(
                item.key.endswith(f"/{FILE_NAME}") for item in self._objects.list(f"{group}/")
            )
        return found

    def _is_needless(self, key: str) -> bool:
        """Whether a leftover may go; one saved from its place, where another is now, goes back."""
        match = _ASIDE.fullmatch(key)
        if match is None:
            return True
        owner, layer = int(match[1], 16), int(match[3])
        name = keys.frame_key(owner, layer, "k" if match[2] == "k" else "v", int(match[4]))
        reference = self._lookup.raw(name)
        if reference is None:
            return True
        place, start, _ = locations(self._lookup, name, reference)[0]
        begin = start or 0
        head = self._objects.get(place, begin, begin + _OWNER_BYTES.stop)
        if head is not None and head[_OWNER_BYTES] == owner.to_bytes(8, "little"):
            return True
        if Reference.unpack(reference).home != IN_ARRAY:
            return False
        self._objects.copy([(key, place)], self._writer.check)
        return True
