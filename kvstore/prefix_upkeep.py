"""The prefix index kept true: entries come with a commit and go with their last user.

An owner has entries up to the last token that a prompt can be given from any session that uses
it. FORMAT.md section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvcodecs.errors import KvError

from .backend import Snapshot, Transaction
from .identity import Model
from .prefix import HASH_TOKENS, Chain, changes, entry_keys
from .session_record import SessionRecord
from .token_ids import Ids, read_ids
from .users import indexed, is_prefix, users_of

if TYPE_CHECKING:
    from .catalog import Catalog


class PrefixKeys:
    """The entries that one appender adds, commit by commit.

    Parameters
    ----------
    model
        The session's.
    where
        Prefix of error messages.
    """

    def __init__(self, model: Model, where: str) -> None:
        self._model, self._where = model, where
        self._chain: Chain | None = None
        self._next: Chain | None = None

    def grow(
        self, transaction: Transaction, stored: SessionRecord, record: SessionRecord, ids: Ids
    ) -> None:
        """Store the entries of a record that grows by `ids`; `committed` makes it last.

        `stored` is the record before, whose token ids can be read.
        """
        self._next = None
        if not is_prefix(record, self._model):
            return
        n_before, faithful = stored.n_tokens, record.n_faithful_tokens
        begin = owned_ids(record)[0]
        known = None
        if self._chain is None:
            known = read_ids(transaction, stored, 0, n_before, self._where)
            chain = Chain(self._model)
            chain.extend(known)
        else:
            chain = self._chain.copy()
        removed, added = changes(chain, ids[: max(faithful - n_before, 0)], record.owner)
        own_before = any(owner == record.owner for owner, _, _ in indexed(stored))
        if known is not None and begin < min(n_before, faithful) and not own_before:
            # The first commit of a fork: it may serve tokens now that its parent served.
            first = begin // HASH_TOKENS
            stop = min(n_before, faithful)
            tail = known[first * HASH_TOKENS : stop]
            before = entry_keys(chain.hashes[first:], tail, begin, stop, record.owner, first)
            added += set(before).difference(removed)
        for key in removed:
            transaction.delete(key)
        for key in added:
            transaction.put(key, b"")
        self._next = chain

    def committed(self) -> None:
        """Note that what `grow` stored is durable."""
        self._chain = self._next


def owned_ids(record: SessionRecord) -> tuple[int, int]:
    """Return the range of tokens whose entries are of the session's own owner."""
    begin = record.id_parts[-1][1] if record.id_parts else 0
    return begin, record.n_faithful_tokens


def add_entries(transaction: Transaction, record: SessionRecord, model: Model, ids: Ids) -> None:
    """Store the entries of a session's own owner; `ids` are those of all its tokens."""
    begin, stop = owned_ids(record)
    if not is_prefix(record, model) or begin >= stop:
        return
    chain = Chain(model)
    chain.extend(ids[:stop])
    first = begin // HASH_TOKENS
    tail = ids[first * HASH_TOKENS : stop]
    for key in entry_keys(chain.hashes[first:], tail, begin, stop, record.owner, first):
        transaction.put(key, b"")


def unindex(
    transaction: Transaction,
    catalog: Catalog,
    record: SessionRecord,
    model: Model,
    owners: Iterable[int],
) -> None:
    """Remove the entries that nobody can serve once a session needs less of `owners`.

    Parameters
    ----------
    record
        The session before; its token ids are still stored, its users' keys are up to date.
    """
    if not is_prefix(record, model):
        return
    ends = {owner: stop for owner, _, stop in indexed(record)}
    todo = [(owner, ends[owner], _kept(transaction, owner)) for owner in owners if owner in ends]
    todo = [(owner, stop, kept) for owner, stop, kept in todo if kept < stop]
    if not todo:
        return
    try:
        n = max(stop for _, stop, _ in todo)
        ids = read_ids(transaction, record, 0, n, catalog.path)
    except KvError:
        return  # the ids are damaged: entries that lead nowhere are harmless, `gc` removes them
    chain = Chain(model)
    chain.extend(ids)
    for owner, stop, kept in todo:
        first = kept // HASH_TOKENS
        hashes = chain.hashes[first:]
        tail = ids[first * HASH_TOKENS : stop]
        for key in list(entry_keys(hashes, tail, kept, stop, owner, first)):
            transaction.delete(key)
        if kept % HASH_TOKENS:
            tail = tail[: kept - first * HASH_TOKENS]
            for key in list(entry_keys(hashes, tail, kept - 1, kept, owner, first)):
                transaction.put(key, b"")


def expected_entries(
    snapshot: Snapshot,
    records: Iterable[tuple[SessionRecord, Model]],
    where: str,
    on_error: Callable[[SessionRecord, KvError], None],
) -> Iterator[bytes]:
    """Yield every entry that an archive with these sessions should have."""
    widest: dict[int, tuple[int, int, SessionRecord, Model]] = {}
    for record, model in records:
        if not is_prefix(record, model):
            continue
        for owner, begin, stop in indexed(record):
            known = widest.get(owner)
            if known is None or stop > known[1]:
                widest[owner] = (min(begin, known[0]) if known else begin, stop, record, model)
            else:
                widest[owner] = (min(begin, known[0]), *known[1:])
    for owner, (begin, stop, record, model) in widest.items():
        try:
            ids = read_ids(snapshot, record, 0, stop, where)
        except KvError as error:
            on_error(record, error)
            continue
        chain = Chain(model)
        chain.extend(ids)
        first = begin // HASH_TOKENS
        tail = ids[first * HASH_TOKENS :]
        yield from entry_keys(chain.hashes[first:], tail, begin, stop, owner, first)


def _kept(snapshot: Snapshot, owner: int) -> int:
    """Return up to which token somebody can still serve a prefix of an owner's."""
    return max((user.until for user in users_of(snapshot, owner)), default=0)
