"""What changes a session's tokens without appending: fork, roll back, trim at the front.

None of them copies or codes a frame. A fork names its parent's owner for the tokens it shares; a
rollback is a fork in place, with a new owner for what comes next, so that what an owner has
committed for a token never changes. FORMAT.md section 4.3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from kvcodecs.errors import InvalidArgument

from . import keys
from .backend import Snapshot, Transaction
from .catalog import Catalog
from .receipts import cut_receipts, trim_receipts
from .session_record import Part, SessionRecord, StreamState
from .sharing import claims_of, pruned, put_record
from .spans import header_of, id_parts_until


def fork(
    transaction: Transaction,
    catalog: Catalog,
    record: SessionRecord,
    name: str,
    at: int | None,
    session: int,
    metadata: Mapping[str, Any],
    replaces: int | None,
    where: str,
) -> None:
    """Publish a session that shares the first `at` tokens of `record`.

    Parameters
    ----------
    session
        Id of the new session.
    replaces
        As for `Catalog.publish`.
    where
        The parent, for messages.
    """
    if replaces == record.id:
        raise InvalidArgument(f"{where}: a fork cannot replace its parent; use truncate")
    at = record.n_tokens if at is None else at
    new, values = cut(transaction, record, at, session, where)
    now = int(time.time())
    new = replace(
        new,
        id=session,
        n_rollbacks=0,
        pinned=False,
        finished=False,
        receipts=None if record.receipts is None else new.n_tokens,
        created=now,
        updated=now,
        metadata=metadata,
    )
    model = catalog.model(transaction, record.model)
    catalog.publish(transaction, name, new, model, values, replaces)


def roll_back(
    transaction: Transaction,
    catalog: Catalog,
    name: str,
    record: SessionRecord,
    n_tokens: int,
    owner: int,
    where: str,
) -> None:
    """Take back the committed tokens from `n_tokens` on; `owner` is new."""
    new, values = cut(transaction, record, n_tokens, owner, where)
    for key, value in values.items():
        transaction.put(key, value)
    receipts = None if record.receipts is None else min(record.receipts, n_tokens)
    cut_receipts(transaction, record, n_tokens)
    new = replace(
        new, n_rollbacks=record.n_rollbacks + 1, updated=int(time.time()), receipts=receipts
    )
    put_record(transaction, catalog, name, record, new, shrunk=claims_of(record))


def trim_front(
    transaction: Transaction,
    catalog: Catalog,
    name: str,
    record: SessionRecord,
    first: int,
    where: str,
) -> None:
    """Drop the blocks that lie wholly before position `first`; nothing before it can be read."""
    first = check_position(first, f"{where}: trim")
    check_unfinished(record, where)
    if first > record.n_tokens:
        raise InvalidArgument(f"{where}: trim at {first}: {record.n_tokens} tokens are committed")
    if first > record.first:
        new = pruned(replace(record, first=first))
        trim_receipts(transaction, new)
        put_record(transaction, catalog, name, record, new, shrunk=claims_of(record))


def check_position(position: object, what: str) -> int:
    """Return a position among a session's tokens as Python's own integer, which JSON takes."""
    if isinstance(position, bool) or not isinstance(position, int | np.integer) or position < 0:
        raise InvalidArgument(f"{what} at {position!r}: expected a number of tokens")
    return int(position)


def check_unfinished(record: SessionRecord, where: str) -> None:
    """Raise `InvalidArgument` if a session's tokens stay what they are for good."""
    if record.finished:
        raise InvalidArgument(
            f"{where}: finished by `kvstore seal`: nothing is appended to it or taken from it; "
            "fork it to go on"
        )


def cut(
    snapshot: Snapshot, record: SessionRecord, at: int, owner: int, where: str
) -> tuple[SessionRecord, dict[bytes, bytes]]:
    """Return the record of the first `at` tokens with a new owner, and what to store with it."""
    at = check_position(at, f"{where}: cut")
    if at > record.n_tokens:
        raise InvalidArgument(
            f"{where}: cut at {at}: {record.n_tokens} tokens are committed; commit first what "
            "was appended"
        )
    least = max(record.first, *(state.start for state in record.streams.values()))
    if 0 < at < least:
        raise InvalidArgument(
            f"{where}: cut at {at}: layers begin at token {least}, after a trim or by their window"
        )
    parts = parts_until(record, at)
    # What comes next is coded as this session codes, not as the one that a range was taken from.
    begins_foreign = record.n_faithful is not None and at > record.n_faithful
    values = _headers(snapshot, record, owner) if at == 0 or begins_foreign else {}
    streams = {
        name: StreamState(state.block_tokens, state.start if at else 0, has_header=bool(values))
        for name, state in record.streams.items()
    }
    faithful = record.n_faithful
    new = replace(
        record,
        owner=owner,
        n_tokens=at,
        first=record.first if at else 0,
        streams=streams,
        parts=parts,
        id_parts=id_parts_until(record, at),
        n_faithful=faithful if faithful is not None and faithful < at else None,
        has_ids=record.has_ids and at > 0,
    )
    return pruned(new), values


def parts_until(record: SessionRecord, at: int) -> tuple[Part, ...]:
    """Return the parts of the first `at` tokens, the session's own among them."""
    own = Part(
        owner=record.owner,
        stops=dict.fromkeys(record.streams, record.n_tokens),
        offset=0,
        heads={name: state.n_head for name, state in record.streams.items()},
        starts={name: state.start for name, state in record.streams.items()},
    )
    parts = []
    ends = dict.fromkeys(record.streams, 0)
    for part in (*record.parts, own):
        stops = {name: min(stop, at) for name, stop in part.stops.items()}
        heads = {
            name: min(part.heads[name], max(at - state.start, 0))
            for name, state in record.streams.items()
        }
        if any(heads.values()) or any(stops[name] > ends[name] for name in ends):
            parts.append(replace(part, stops=stops, heads=heads))
            ends = stops
    return tuple(parts)


def _headers(snapshot: Snapshot, record: SessionRecord, owner: int) -> dict[bytes, bytes]:
    """Return the stream headers under a new owner, if there are all of them: a session that
    begins anew keeps the statistics."""
    values = {}
    for layer, kind in record.streams:
        source = header_of(record, (layer, kind))
        if source is None:
            return {}
        value = snapshot.get(keys.stream_key(keys.HEADER, source, layer, kind))
        if value is None:
            return {}
        values[keys.stream_key(keys.HEADER, owner, layer, kind)] = bytes(value)
    return values
