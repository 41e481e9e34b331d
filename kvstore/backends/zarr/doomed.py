"""What was deleted waits until no snapshot needs it, and then goes. FORMAT.md section 9.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvcodecs.errors import Corrupt

from .commits import COMMITS, commit_key, commit_numbers
from .in_use import Doomed, unused
from .objects import Objects
from .places import DOOMED, Lookup, doomed_key, due_of, group_key, pack_json

#: Objects that an ordinary commit deletes, about.
A_FEW: Final = 500
# Of very many this part goes at a time, so that the list of the others is not written too often.
_PART: Final = 8
#: The number under which a commit dooms the tables that it merged; its frames count from 0.
OF_TABLES: Final = 0xFFFFFFFF


@dataclass
class Swept:
    """What `sweep` did.

    Attributes
    ----------
    puts
        What the commit that follows is to put (None: delete).
    deleted
        Keys of the objects that are gone.
    """

    puts: dict[bytes, bytes | None] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)


def free_due(lookup: Lookup, due_ns: int) -> int:
    """Return `due_ns`, or a time close to it at which nothing else is due."""
    while next(lookup.raw_scan(doomed_key(due_ns, 0)[:-4]), None) is not None:
        due_ns += 1
    return due_ns


def sweep(
    objects: Objects,
    lookup: Lookup,
    now_ns: int,
    most: int | None,
    still_mine: Callable[[], None],
) -> Swept:
    """Delete objects whose time has come; doing it again after a crash does no harm.

    Parameters
    ----------
    most
        About how many at most; None for all.
    still_mine
        Raises `Locked` if the right to write is lost; asked before anything is deleted.
    """
    swept = Swept()
    room = most
    entries: list[tuple[bytes, Doomed]] = []
    for key, value in lookup.raw_scan(DOOMED):
        try:
            if due_of(key) > now_ns or (room is not None and room <= 0):
                break
            doomed = Doomed.unpack(value)
        except Corrupt:
            continue  # `collect` says so
        entries.append((key, doomed))
        if room is not None:
            room -= len(doomed.objects)
    old_commits = _deletable_commits(objects, [doomed for _, doomed in entries])
    for key, doomed in entries:
        left = _sweep_one(objects, lookup, doomed, old_commits, most, swept, still_mine)
        swept.puts[key] = pack_json(left) if left else None
    # One after the other: see `commits.last_commit`.
    for commit in old_commits:
        still_mine()
        objects.delete([commit])
    swept.deleted += old_commits
    return swept


def _sweep_one(
    objects: Objects,
    lookup: Lookup,
    doomed: Doomed,
    old_commits: list[str],
    most: int | None,
    swept: Swept,
    still_mine: Callable[[], None],
) -> dict[str, object]:
    """Delete objects of one entry; return what is left of it."""
    left: dict[str, object] = {}
    commits = [key for key in doomed.objects if key.startswith(COMMITS)]
    others = [key for key in doomed.objects if not key.startswith(COMMITS)]
    n = len(others) if most is None else max(most, len(others) // _PART)
    now = unused(lookup, others[:n])
    still_mine()
    objects.delete(now)
    swept.deleted += now
    waiting = [key for key in commits if key not in old_commits and objects.exists(key)]
    if waiting or others[n:]:
        left["objects"] = waiting + others[n:]
    trees = []
    for tree in doomed.trees:
        found = [item.key for item in islice(objects.list(f"{tree}/"), most)]
        still_mine()
        objects.delete(found)
        swept.deleted += found
        if most is not None and len(found) >= most:
            trees.append(tree)
        else:
            swept.puts[group_key(tree)] = None
    if trees:
        left["trees"] = trees
    return left


def _deletable_commits(objects: Objects, entries: list[Doomed]) -> list[str]:
    """Return the commits that may go, in order: none while an older one is still there."""
    due = {key for doomed in entries for key in doomed.objects if key.startswith(COMMITS)}
    found: list[str] = []
    for number in sorted(commit_numbers(objects)) if due else ():
        if commit_key(number) not in due:
            break
        found.append(commit_key(number))
    return found
