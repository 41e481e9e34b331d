"""The longest stored prefix of a prompt: found in the index, settled by the stored token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcodecs.errors import KvError, NotFound

from . import keys
from .backend import Snapshot
from .catalog import Catalog
from .identity import Model
from .prefix import Chain, common_tokens, longest
from .session_record import SessionRecord
from .spans import header_of
from .token_ids import Ids, read_ids
from .users import is_prefix, usable_from

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class Match:
    """What `Archive.match_prefix` found; false if that is nothing.

    Attributes
    ----------
    session
        Holds the prefix, any one of those that share most; None if nothing matches. Reads and
        forks raise `NotFound` should the session be
        deleted, evicted or rolled back before it is read: a miss, never another prompt's KV.
    n_tokens
        Length of the common prefix, in tokens.
    n_sealed
        How many of them are in sealed blocks of every layer: full ones, which nobody rewrites.
    """

    session: Session | None
    n_tokens: int
    n_sealed: int

    def __bool__(self) -> bool:
        return self.n_tokens > 0


@dataclass(frozen=True, slots=True)
class Found:
    """A session that holds a prefix, as of a snapshot."""

    name: str
    record: SessionRecord
    n_tokens: int


class Promise:
    """Makes sure that a matched session still holds the tokens it was matched for.

    Parameters
    ----------
    ids
        The tokens.
    record
        Of the session when they were compared.
    """

    def __init__(self, ids: Ids, record: SessionRecord) -> None:
        self._ids, self._n_rollbacks = ids, record.n_rollbacks

    def check(self, snapshot: Snapshot, record: SessionRecord, where: str) -> None:
        """Compare again if tokens were taken back since.

        Raises
        ------
        NotFound
            They are not all there any more, or were trimmed.
        """
        n = len(self._ids)
        if record.first == 0 and record.n_rollbacks == self._n_rollbacks:
            return
        kept = record.has_ids and record.first == 0 and record.n_faithful_tokens >= n
        if not kept or common_tokens(read_ids(snapshot, record, 0, n, where), self._ids) < n:
            raise NotFound(
                f"{where}: the {n} tokens that matched are not there any more; match again"
            )
        self._n_rollbacks = record.n_rollbacks


def find_prefix(snapshot: Snapshot, catalog: Catalog, ids: Ids, model: Model) -> Found | None:
    """Return the session that shares most with a prompt, or None."""
    chain = Chain(model)
    chain.extend(ids)
    found: dict[int, Found] = {}

    def usable(owner: int, claimed: int) -> int:
        candidate = _candidate(snapshot, catalog, ids, model, owner, claimed)
        if candidate is None:
            return 0
        found[owner] = candidate
        return candidate.n_tokens

    best = longest(snapshot, chain.hashes, ids, usable)
    return None if best is None else found[best[0]]


def _candidate(
    snapshot: Snapshot, catalog: Catalog, ids: Ids, model: Model, owner: int, claimed: int
) -> Found | None:
    """Return what a session that uses `owner` truly shares with the prompt; None if nothing."""
    user = _user(snapshot, owner, claimed)
    if user is None:
        return None
    until, session, name = user
    try:
        record = catalog.record(snapshot, name, session)
        if record.model != model.digest or not is_prefix(record, model):
            return None
        n = min(claimed, until, record.n_faithful_tokens)
        stored = read_ids(snapshot, record, 0, n, f"{catalog.path}: session {name!r}")
    except KvError:
        return None  # damaged: a miss, which `verify` reports
    n = common_tokens(stored, ids)
    least = usable_from(record, model)
    return Found(name, record, n) if least is not None and n >= max(least, 1) else None


def _user(snapshot: Snapshot, owner: int, n_tokens: int) -> tuple[int, int, str] | None:
    """Return a user that can serve `n_tokens` of an owner's prefix, or else the most of it."""
    prefix = keys.owner_prefix(keys.USER, owner)
    wanted = keys.user_key(owner, n_tokens, 0)
    for key in (snapshot.at_or_after(wanted), snapshot.before(wanted)):
        if key is not None and key.startswith(prefix):
            parsed, value = keys.parse(key), snapshot.get(key)
            if value is not None and parsed.until and parsed.session is not None:
                return parsed.until, parsed.session, bytes(value).decode("utf-8", "replace")
    return None


def n_sealed(record: SessionRecord, n_tokens: int) -> int:
    """Return how many of the first tokens lie in sealed blocks of every stream."""
    sealed = []
    for stream, state in record.streams.items():
        has_blocks = header_of(record, stream) is not None
        n_own = max(record.n_tokens - state.start, 0) if has_blocks else 0
        sealed.append(state.start + n_own // state.block_tokens * state.block_tokens)
    return min(n_tokens, *sealed)
