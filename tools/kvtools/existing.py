"""Archives and sessions that a command changes, which have to be there."""

from __future__ import annotations

from collections.abc import Sequence

from kvcodecs.errors import NotFound

import kvstore
from kvstore.catalog import listed_names


def existing_archive(path: str) -> kvstore.Archive:
    """Open an archive for writing; a missing one is an error, not an empty new one."""
    kvstore.open(path).close()
    return kvstore.open(path, mode="a")


def existing_sessions(archive: kvstore.Archive, names: Sequence[str], else_said: str) -> list[str]:
    """Return the names, each once.

    Raises
    ------
    NotFound
        Some do not exist; the message says `else_said`, and what there is.
    """
    wanted = list(dict.fromkeys(names))
    missing = [name for name in wanted if name not in archive]
    if missing:
        there = archive.names()
        others = f"; there are {listed_names(there)}" if there else ""
        raise NotFound(
            f"{archive.path}: no session {', '.join(map(repr, missing))}; {else_said}{others}"
        )
    return wanted
