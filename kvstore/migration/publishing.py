"""What makes moved frames a session: its record, who uses what, and the prefix index.

The index of the archive that a session comes from is not moved but made anew from the token ids:
which entries an owner has depends on who else uses it.
"""

from __future__ import annotations

from kvcodecs.errors import InvalidArgument

from .. import keys
from ..backend import Snapshot, Transaction
from ..catalog import Catalog
from ..identity import Model
from ..prefix import HASH_TOKENS, Chain, entry_keys
from ..session_record import SessionRecord
from ..sharing import put_record, user_keys
from ..token_ids import Ids, read_ids
from ..users import indexed, is_prefix, users_of
from .moving import Target
from .needed import Item


def indexed_ids(snapshot: Snapshot, item: Item) -> Ids | None:
    """Return the token ids that prompts are matched with, None for a session that none matches."""
    if not is_prefix(item.record, item.model):
        return None
    return read_ids(snapshot, item.record, 0, item.record.n_faithful_tokens, item.where)


def publish(transaction: Transaction, catalog: Catalog, item: Item, ids: Ids | None) -> None:
    """Store all that makes a session of frames that are there.

    Raises
    ------
    InvalidArgument
        The name is taken.
    """
    if transaction.get(keys.session_key(item.name)) is not None:
        raise InvalidArgument(f"{catalog.path}: session {item.name!r} exists already")
    catalog._publish_model(transaction, item.record.model, item.model)
    if ids is not None:
        add_all_entries(transaction, item.record, item.model, ids)
    put_record(transaction, catalog, item.name, None, item.record)
    _put_receipts(transaction, item)
    transaction.put(keys.session_key(item.name), item.value)  # every byte, whoever wrote them


def enlist(transaction: Transaction, catalog: Catalog, item: Item, ids: Ids | None) -> None:
    """Store what `publish` does, but for the record: there is no session yet."""
    catalog._publish_model(transaction, item.record.model, item.model)
    if ids is not None:
        add_all_entries(transaction, item.record, item.model, ids)
    for key in user_keys(item.record, item.model):
        transaction.put(key, item.name.encode("utf-8"))
    _put_receipts(transaction, item)


def _put_receipts(transaction: Transaction, item: Item) -> None:
    for key, value in item.receipts.items():
        transaction.put(key, value)


def add_all_entries(
    transaction: Transaction, record: SessionRecord, model: Model, ids: Ids
) -> None:
    """Store the entries of the index of all owners that a session reads its ids from.

    Those that other sessions of theirs brought are there, up to the last token that these serve.
    """
    chain = Chain(model)
    chain.extend(ids)
    for owner, begin, stop in indexed(record):
        others = [user.until for user in users_of(transaction, owner) if user.id != record.id]
        kept = max(others, default=0)
        if kept >= stop:
            stop -= stop % HASH_TOKENS  # the entry of the last few is there, and says more
        elif kept % HASH_TOKENS:
            for key in _entries(chain, ids, kept - 1, kept, owner):
                transaction.delete(key)
        for key in _entries(chain, ids, begin, stop, owner):
            transaction.put(key, b"")


def _entries(chain: Chain, ids: Ids, begin: int, stop: int, owner: int) -> list[bytes]:
    if begin >= stop:
        return []
    first = begin // HASH_TOKENS
    tail = ids[first * HASH_TOKENS : stop]
    return list(entry_keys(chain.hashes[first:], tail, begin, stop, owner, first))


def forget_lists(target: Target) -> None:
    """Remove users, index and receipts from an archive to be, which an earlier try has left."""
    for prefix in (keys.USER, keys.PREFIX, keys.RECEIPT):
        while _delete_some(target, prefix):
            pass


def _delete_some(target: Target, prefix: bytes, most: int = 10_000) -> bool:
    def work(transaction: Transaction) -> bool:
        found = []
        for key, _ in transaction.scan(prefix):
            found.append(key)
            if len(found) == most:
                break
        for key in found:
            transaction.delete(key)
        return len(found) == most

    return target.write(work)
