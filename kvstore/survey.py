"""A walk over all sessions that a damaged one does not stop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcodecs.errors import Corrupt, InvalidArgument, KvError

from . import keys
from .identity import Model
from .info import SessionInfo, session_info
from .metadata import check_metadata
from .reader import Reader
from .session_record import SessionRecord

if TYPE_CHECKING:
    from .backend import Snapshot
    from .opened import OpenArchive


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A session as its record describes it, without a look at its frames.

    Attributes
    ----------
    first_token
        Tokens before it were trimmed.
    pinned
        Whether eviction leaves it alone.
    finished
        Whether nothing is appended any more; see `Archive.seal`.
    created, updated, used
        Unix time of creation, of the last commit and of the last use that is known, seconds.
    """

    name: str
    model: Model
    n_tokens: int
    first_token: int
    has_token_ids: bool
    pinned: bool
    finished: bool
    created: int
    updated: int
    used: float
    metadata: Mapping[str, Any]


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
    for key, _ in snapshot.sizes(keys.SESSION):
        try:
            names.append(keys.name_of(key))
        except Corrupt:
            continue  # `verify` reports it
    return names


def survey(archive: OpenArchive, snapshot: Snapshot) -> Survey:
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


def session_filter(
    prefix: object, model: object, metadata: Mapping[str, Any] | None, pinned: object, n: object
) -> Callable[[str, SessionRecord | None], bool]:
    """Return what says whether a session meets the conditions of `Archive.sessions`.

    Asked without its record it says whether the record has to be looked at.

    Raises
    ------
    InvalidArgument
        A condition that is none.
    """
    wanted = check_metadata(metadata)
    if not isinstance(prefix, str):
        raise InvalidArgument(f"prefix {prefix!r}: expected a string")
    if pinned is not None and not isinstance(pinned, bool):
        raise InvalidArgument(f"pinned {pinned!r}: expected True, False or None")
    if isinstance(n, bool) or not isinstance(n, int):
        raise InvalidArgument(f"min_tokens {n!r}: expected a number of tokens")
    if model is not None and not isinstance(model, Model):
        raise InvalidArgument(f"model {model!r}: expected a kvstore.Model")
    digest = None if model is None else model.digest

    def keep(name: str, record: SessionRecord | None) -> bool:
        if record is None or not name.startswith(prefix):
            return name.startswith(prefix)
        return (
            record.n_tokens >= n
            and pinned in (None, record.pinned)
            and digest in (None, record.model)
            and all(
                key in record.metadata and record.metadata[key] == value
                for key, value in wanted.items()
            )
        )

    return keep


def list_sessions(
    archive: OpenArchive, snapshot: Snapshot, keep: Callable[[str, SessionRecord | None], bool]
) -> list[SessionEntry]:
    """Return the sessions whose records can be read and that `keep` says yes to, by name."""
    uses = archive._backend.last_uses()
    found = []
    for name in session_names(snapshot):
        if not keep(name, None):
            continue
        try:
            record = archive._catalog.record(snapshot, name)
            if not keep(name, record):
                continue
            model = archive._catalog.model(snapshot, record.model)
        except KvError:
            continue  # `damaged` tells
        entry = SessionEntry(
            name=name,
            model=model,
            n_tokens=record.n_tokens,
            first_token=record.first,
            has_token_ids=record.has_ids,
            pinned=record.pinned,
            finished=record.finished,
            created=record.created,
            updated=record.updated,
            used=last_use(record, uses) / 1e9,
            metadata=copy.deepcopy(dict(record.metadata)),
        )
        found.append(entry)
    return found


def last_use(record: SessionRecord, uses: Mapping[int, int]) -> int:
    """Return when a session was last used, in nanoseconds since 1970."""
    return max(uses.get(record.id, 0), record.updated * 1_000_000_000)
