"""Who uses the frames of which owner, and which of them nobody needs any more.

Every session names itself as user of each owner whose frames it reads (keys ``U``). A record
changes in one place, `put_record`: there the users are brought up to date, and what the old
record needed and no user needs now is deleted, all in the caller's transaction. FORMAT.md 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcodecs.errors import Corrupt, InvalidArgument, KvError

from . import keys
from .backend import Snapshot, Transaction
from .identity import Model
from .prefix_upkeep import unindex
from .receipts import delete_receipts
from .session_record import MAX_PARTS, MAX_TOKENS, SessionRecord, StreamName
from .spans import head_of, header_of, id_parts_until, id_spans, spans_of
from .token_ids import CHUNK_TOKENS
from .users import indexed, is_prefix, users_of

if TYPE_CHECKING:
    from .catalog import Catalog


@dataclass(slots=True)
class Claim:
    """What one session needs of one owner; blocks and chunks by the owner's own numbers.

    Attributes
    ----------
    ahead
        First block that an appender may have stored ahead of its commit.
    """

    headers: set[StreamName] = field(default_factory=set)
    heads: set[StreamName] = field(default_factory=set)
    tails: set[StreamName] = field(default_factory=set)
    blocks: dict[StreamName, list[tuple[int, int]]] = field(default_factory=dict)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    ahead: dict[StreamName, int] = field(default_factory=dict)

    @property
    def serves_values(self) -> bool:
        """Whether any stream reads from the owner."""
        return bool(self.headers or self.heads)

    def needs(self, key: keys.Key) -> bool:
        """Whether a key of the owner is among what is needed."""
        index = key.index or 0
        if key.prefix == keys.TOKENS:
            return any(lo <= index < hi for lo, hi in self.chunks)
        if key.layer is None or key.kind is None:
            return False
        stream = key.layer, key.kind
        if key.prefix == keys.FRAME:
            if index >= self.ahead.get(stream, index + 1):
                return True
            return any(lo <= index < hi for lo, hi in self.blocks.get(stream, ()))
        streams = {keys.HEADER: self.headers, keys.HEAD: self.heads, keys.TAIL: self.tails}
        return stream in streams[key.prefix]


def claims_of(record: SessionRecord, *, ahead: bool = False) -> dict[int, Claim]:
    """Return what a session needs, per owner.

    With `ahead` also the frames that its appender, if it has one, stored for the next commit.
    """
    found: dict[int, Claim] = {record.owner: Claim()}
    if ahead:
        found[record.owner].ahead = {
            stream: _first_ahead(record, stream) for stream in record.streams
        }

    def of(owner: int) -> Claim:
        claim = found.get(owner)
        if claim is None:
            claim = found[owner] = Claim()
        return claim

    for stream in record.streams:
        _claim_stream(record, stream, of)
    for owner, first, stop in id_spans(record, CHUNK_TOKENS):
        first = max(first, record.first // CHUNK_TOKENS)
        if first < stop:
            of(owner).chunks.append((first, stop))
    return found


def _first_ahead(record: SessionRecord, stream: StreamName) -> int:
    """Return the first block that an appender may store: all, where it fixes the header."""
    if header_of(record, stream) is None:
        return 0
    state = record.streams[stream]
    return max(record.n_tokens - state.start, 0) // state.block_tokens


def _claim_stream(record: SessionRecord, stream: StreamName, of: Callable[[int], Claim]) -> None:
    state = record.streams[stream]
    if state.has_header:
        of(record.owner).headers.add(stream)
    first = max(record.first - state.start, 0)
    spans = spans_of(record, stream)
    head = head_of(record, stream)
    # While the stream is its head alone, an appender goes on from it; it may be taken back to that
    # as long as no token behind the head is trimmed.
    if head is not None and (head.n_tokens >= first or not spans):
        of(head.owner).heads.add(stream)
    for span in spans:
        begin = max(span.first_block, first // state.block_tokens)
        inherits = span is spans[-1] and not state.has_header
        if begin >= span.stop_block and not inherits:
            continue
        claim = of(span.owner)
        claim.headers.add(stream)
        n_whole = (span.stop - state.start) // state.block_tokens
        stop = min(span.stop_block, n_whole) if span.own else span.stop_block
        if begin < stop:
            blocks = claim.blocks.setdefault(stream, [])
            blocks.append((begin - span.shift, stop - span.shift))
        # Another owner's cut block is its tail until it is sealed.
        if n_whole < span.stop_block:
            claim.tails.add(stream)


def owned_by(snapshot: Snapshot, owner: int) -> Iterator[tuple[bytes, int]]:
    """Yield every key that an owner stores, and the length of its value."""
    for prefix in keys.OWNED:
        yield from snapshot.sizes(keys.owner_prefix(prefix, owner))


def user_keys(record: SessionRecord, model: Model) -> set[bytes]:
    """Return the keys that name a session as user."""
    serves = is_prefix(record, model)
    stops = {owner: stop for owner, _, stop in indexed(record)}
    found = set()
    for owner in claims_of(record):
        until = keys.FOR_EVER if owner == record.owner else stops.get(owner, 0)
        found.add(keys.user_key(owner, until if serves else 0, record.id))
    return found


def put_record(
    transaction: Transaction,
    catalog: Catalog,
    name: str,
    old: SessionRecord | None,
    new: SessionRecord,
    *,
    old_name: str | None = None,
    shrunk: Iterable[int] = (),
) -> None:
    """Store a session's record, and with it who uses what.

    Parameters
    ----------
    old
        The record that it replaces, as of this transaction; None for a new session.
    old_name
        The session's name so far, if that changes.
    shrunk
        Owners of which the session needs less than before; those it does not use any more are
        added.
    """
    if len(new.parts) > MAX_PARTS or new.n_tokens > MAX_TOKENS:
        raise InvalidArgument(
            f"{catalog.path}: session {name!r}: {new.n_tokens} tokens in {len(new.parts)} shared "
            f"parts: at most {MAX_TOKENS} in {MAX_PARTS}; append values instead of ranges"
        )
    if old_name is not None and old_name != name:
        transaction.delete(keys.session_key(old_name))
        catalog.forget(old_name)
    transaction.put(keys.session_key(name), new.pack(name))
    shrunk = set(shrunk)
    if old is not None and old_name is None and not shrunk and _shares_alike(old, new):
        return
    model = catalog.model(transaction, new.model)
    before = user_keys(old, model) if old is not None else set()
    after = user_keys(new, model)
    for key in before - after:
        transaction.delete(key)
    for key in after if old_name is not None else after - before:
        transaction.put(key, name.encode("utf-8"))
    if old is not None:
        less = (claims_of(old).keys() - claims_of(new).keys()).union(shrunk)
        unindex(transaction, catalog, old, model, less)
        free(transaction, catalog, less)


def _shares_alike(old: SessionRecord, new: SessionRecord) -> bool:
    """Whether a record has only grown at its end, as nearly all do."""
    return (old.owner, old.parts, old.id_parts, old.first, old.n_faithful, old.has_ids) == (
        new.owner,
        new.parts,
        new.id_parts,
        new.first,
        new.n_faithful,
        new.has_ids,
    )


def pruned(record: SessionRecord) -> SessionRecord:
    """Return a record without the parts that nothing is read from any more.

    So a session that is rolled back and goes on, again and again, keeps a short record.
    """
    claims = claims_of(record)
    parts = tuple(p for p in record.parts if p.owner in claims and claims[p.owner].serves_values)
    id_parts = tuple(p for p in record.id_parts if p[0] in claims and claims[p[0]].chunks)
    return replace(record, parts=parts, id_parts=id_parts)


def settled(record: SessionRecord) -> SessionRecord:
    """Return the record of the first commit after a cut.

    The blocks and chunks of ids that were cut are the session's own now, whole: the parts end
    before them. A stream that was a raw head alone has all its blocks of its own.
    """
    begins = {}
    for stream, state in record.streams.items():
        cut_at = max(record.parts[-1].stops[stream], state.start)
        n_blocks = (cut_at - state.start) // state.block_tokens
        in_blocks = spans_of(replace(record, n_tokens=cut_at), stream)
        begins[stream] = state.start + n_blocks * state.block_tokens if in_blocks else state.start
    parts = [
        replace(part, stops={name: min(stop, begins[name]) for name, stop in part.stops.items()})
        for part in record.parts
    ]
    ids_cut_at = record.id_parts[-1][1] if record.id_parts else 0
    ids_begin = ids_cut_at // CHUNK_TOKENS * CHUNK_TOKENS
    id_parts = id_parts_until(record, ids_begin)
    return pruned(replace(record, parts=tuple(parts), id_parts=id_parts))


def delete_record(
    transaction: Transaction, catalog: Catalog, name: str, record: SessionRecord
) -> None:
    """Delete a session, and what it alone needed."""
    transaction.delete(keys.session_key(name))
    catalog.forget(name)
    delete_receipts(transaction, record.id)
    model = catalog.model(transaction, record.model)
    for key in user_keys(record, model):
        transaction.delete(key)
    owners = claims_of(record).keys()
    unindex(transaction, catalog, record, model, owners)
    free(transaction, catalog, owners)


def delete_unreadable(transaction: Transaction, catalog: Catalog, session: int) -> None:
    """Delete what a session alone used whose record is gone and could not be read."""
    delete_receipts(transaction, session)
    used = []
    for key, _ in transaction.sizes(keys.USER):
        try:
            parsed = keys.parse(key)
        except Corrupt:
            continue
        if parsed.session == session and parsed.owner is not None:
            used.append((key, parsed.owner))
    for key, _ in used:
        transaction.delete(key)
    free(transaction, catalog, [owner for _, owner in used])


def free(transaction: Transaction, catalog: Catalog, owners: Iterable[int]) -> int:
    """Delete what no user of these owners needs; return the bytes of the values."""
    n_bytes = 0
    for owner in owners:
        if _has_appender(transaction, owner):
            continue
        claims = _claims_on(transaction, catalog, owner)
        if claims is not None:
            n_bytes += sweep(transaction, owner, claims)
    return n_bytes


def _has_appender(snapshot: Snapshot, owner: int) -> bool:
    """Whether the session that appends to an owner is there, whole: it needs all of it.

    The common case, and quick however many forks the session has.
    """
    return next(snapshot.sizes(keys.user_key(owner, keys.FOR_EVER, 0)[:-8]), None) is not None


def sweep(transaction: Transaction, owner: int, claims: list[Claim]) -> int:
    """Delete what an owner stores and none of the claims needs; return the bytes of the values."""
    unused = list(_unused(transaction, owner, claims))
    for key, _ in unused:
        transaction.delete(key)
    return sum(n_bytes for _, n_bytes in unused)


def has_unused(snapshot: Snapshot, owner: int, claims: list[Claim]) -> bool:
    """Whether `sweep` would delete anything."""
    return next(_unused(snapshot, owner, claims), None) is not None


def _unused(snapshot: Snapshot, owner: int, claims: list[Claim]) -> Iterator[tuple[bytes, int]]:
    for key, n_bytes in owned_by(snapshot, owner):
        try:
            parsed = keys.parse(key)
        except Corrupt:
            continue  # not a key of ours to judge
        if not any(claim.needs(parsed) for claim in claims):
            yield key, n_bytes


def _claims_on(snapshot: Snapshot, catalog: Catalog, owner: int) -> list[Claim] | None:
    """Return the claims of an owner's users; None if one of them cannot be read."""
    claims = []
    for user in users_of(snapshot, owner):
        try:
            record = catalog.record(snapshot, user.name)
        except KvError:
            return None  # it may need anything: `gc` decides once the session is gone
        claim = claims_of(record, ahead=True).get(owner) if record.id == user.id else None
        if claim is not None:
            claims.append(claim)
    return claims
