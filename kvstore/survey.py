"""A walk over all sessions that a damaged one does not stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcodecs.errors import Corrupt, KvError

from . import keys
from .info import SessionInfo, session_info
from .reader import Reader

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
            reader = Reader(model, where)
            found.sessions.append(session_info(snapshot, name, record, reader))
        except KvError as error:
            found.damaged[name] = error
    return found
