"""A range of one session appended to another, at another place of its context.

K is stored before RoPE, so a token's frame is the same wherever it goes: where the blocks of both
sessions lie alike, whole blocks are shared as a fork shares them, and reading turns K for the new
positions. Of the rest, rows that stand alone are copied where both streams code alike, and what is
left is decoded and coded again. FORMAT.md section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from kvcodecs.errors import InvalidArgument, NotFound

from . import keys
from .backend import Snapshot, Transaction
from .lineage import parts_until
from .mismatch import check_identity
from .pieces import pieces
from .prefix_upkeep import add_entries
from .receipt_making import session_receipt
from .receipts import add_receipt, pack_receipt
from .session_record import Part, SessionRecord, StreamName, StreamState
from .sharing import claims_of, put_record
from .spans import head_of, header_of, id_parts_until
from .stored_rows import StoredRows, stored_rows
from .token_ids import CHUNK_TOKENS, pack_ids, read_ids
from .users import is_prefix
from .writer import PASS_TOKENS, SessionWriter

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """What `Session.append_range` did.

    Attributes
    ----------
    n_tokens
        Tokens appended.
    n_shared
        How many of them, the first, share the source's frames: their values are the source's.
    max_error
        Largest difference between a value of the source and the one now stored for it, in the
        coded domain, measured; 0.0 if all are shared or copied. The source's own error comes on
        top.
    """

    n_tokens: int
    n_shared: int
    max_error: float


def append_range(session: Session, source: Session, start: int, stop: int) -> AppendedRange:
    """Append committed tokens ``[start, stop)`` of `source`, and commit.

    The KV stays what it was in the source's context, so prompts match the session only up to
    where the range begins.

    Blocks are shared from the first token on if both sessions have the same codec and, in every
    stream, the same block size, and the range and its new place begin where a block does, after
    the source's raw head. Whatever is left, to a fraction of the largest block or all, is decoded
    and coded again, except with the same `ggml` scheme: its rows are copied, wherever they lie.

    Parameters
    ----------
    session
        Must have no other appender; what was appended to it before is committed first.
    source
        A session of an equal model; of another archive nothing is shared.
    start, stop
        Positions in `source`.

    Raises
    ------
    IdentityMismatch
        The models differ.
    InvalidArgument
        Not a range of what is committed, before what was trimmed or what a windowed layer begins
        with; one session has token ids and the other has none; a value is beyond this
        session's step.
    NotFound
        The source is deleted or rolled back meanwhile; the values that were to be copied are not
        appended.
    Locked, Full
        See `Session.commit`. Shared blocks are committed before the others: `n_committed` says
        what is there.
    """
    with session._lock:
        writer = session._appender()
        check_identity(source.model, session.model, source._where)
        writer.commit()
        at = writer.n_tokens
        n_rollbacks = _checked(source, start, stop).n_rollbacks
        n_shared = 0
        if start < stop and source._archive is session._archive:
            n_shared = _share(session, writer, source, start, stop, n_rollbacks)
        try:
            if n_shared:
                session._writer = writer = _reopened(session, writer)
            elif start < stop:
                writer.foreign_from = at
            for lo in range(start + n_shared, stop, PASS_TOKENS):
                _copy(writer, source, lo, min(lo + PASS_TOKENS, stop))
            _check_same(_checked(source, start, stop), n_rollbacks, source._where)
            writer.commit()
        except BaseException:
            session._writer = _reopened(session, writer)  # without the tokens not committed
            raise
        writer.foreign_from = None
    error = _largest_error(session, source, start + n_shared, stop, at - start, n_rollbacks)
    return AppendedRange(stop - start, n_shared, error)


def _reopened(session: Session, writer: SessionWriter) -> SessionWriter:
    return session._archive._writer(session, writer.lease)


def _checked(source: Session, start: int, stop: int) -> SessionRecord:
    """Return the source's record, which has the range."""
    with source._archive._read() as snapshot:
        record = source._record(snapshot)
    _check(record, start, stop, source._where)
    return record


def _check(record: SessionRecord, start: int, stop: int, where: str) -> None:
    least = max(record.first, *(state.start for state in record.streams.values()))
    numbers = all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (start, stop)
    )
    if not numbers or not 0 <= start <= stop <= record.n_tokens:
        raise InvalidArgument(
            f"{where}: range [{start}, {stop}): {record.n_tokens} tokens are committed"
        )
    if start < min(least, stop):
        raise InvalidArgument(f"{where}: range [{start}, {stop}): layers begin at token {least}")


def _check_same(record: SessionRecord, n_rollbacks: int, where: str) -> None:
    """Raise `NotFound` if tokens of the source were taken back: others may be in their place."""
    if record.n_rollbacks != n_rollbacks:
        raise NotFound(f"{where}: tokens were taken back while a range of it was appended")


def _share(
    session: Session,
    writer: SessionWriter,
    source: Session,
    start: int,
    stop: int,
    n_rollbacks: int,
) -> int:
    """Take over the source's whole blocks, if they lie alike; return their tokens."""
    archive = session._archive
    owner = archive.new_owner()

    def work(transaction: Transaction) -> int:
        here = writer.stored(transaction)
        there = source._record(transaction)
        _check(there, start, stop, source._where)
        _check_same(there, n_rollbacks, source._where)
        n_shared = _n_alike(here, there, start, stop)
        if not n_shared:
            return 0
        new = _with_range(here, there, start, start + n_shared, owner)
        for key, value in _headers(transaction, here, there, owner):
            transaction.put(key, value)
        for key, value in _ids(transaction, here, there, new, start, session._where):
            transaction.put(key, value)
        shrunk = claims_of(here)
        ids = None
        if is_prefix(new, session.model):
            ids = read_ids(transaction, here, 0, here.n_faithful_tokens, session._where)
        put_record(transaction, archive._catalog, session.name, here, new, shrunk=shrunk)
        if new.receipts is not None:
            at, end = here.n_tokens, new.n_tokens
            receipt = session_receipt(session.name, new, at, end, (), "range")
            add_receipt(transaction, new.id, pack_receipt(receipt))
        if ids is not None:
            add_entries(transaction, new, session.model, ids)
        return n_shared

    return archive._room.write(work, keep=(session._id, source._id))


def _n_alike(here: SessionRecord, there: SessionRecord, start: int, stop: int) -> int:
    """Return how many tokens from `start` are in blocks that can be shared."""
    at, sizes = here.n_tokens, []
    if at and here.has_ids != there.has_ids:
        return 0  # the append that follows says what is wrong
    # A block that is cut later goes on with the codec it has: it must be the session's own.
    if here.codecs != there.codecs:
        return 0
    for stream, mine in here.streams.items():
        theirs = there.streams[stream]
        head = head_of(there, stream)
        begin = theirs.start + (0 if head is None else head.n_tokens)
        alike = mine.block_tokens == theirs.block_tokens and start >= begin
        # Tokens that are in the raw head alone have to be coded with those that follow.
        raw = at > mine.start and header_of(here, stream) is None
        aligned = (at - mine.start) % mine.block_tokens == 0
        if not alike or raw or not aligned or (start - theirs.start) % theirs.block_tokens:
            return 0
        sizes.append(mine.block_tokens)
    size = math.lcm(*sizes)
    return (stop - start) // size * size


def _with_range(
    here: SessionRecord, there: SessionRecord, start: int, stop: int, owner: int
) -> SessionRecord:
    """Return the record with the source's tokens at its end and a new owner for what follows."""
    at = here.n_tokens
    shift = at - start
    none = dict.fromkeys(here.streams, 0)
    parts = list(parts_until(here, at))
    for part in parts_until(there, stop):
        stops = {name: max(end, start) + shift for name, end in part.stops.items()}
        if any(end > at for end in stops.values()):
            taken = Part(part.owner, stops, part.offset + shift, none, part.starts)
            if parts and taken == replace(parts[-1], stops=stops):
                parts.pop()  # goes on where the range before ended
            parts.append(taken)
    return replace(
        here,
        owner=owner,
        n_tokens=stop + shift,
        streams={
            name: StreamState(state.block_tokens, state.start, has_header=True)
            for name, state in here.streams.items()
        },
        parts=tuple(parts),
        # The chunk that the range's ids begin in is stored anew.
        id_parts=id_parts_until(here, at - at % CHUNK_TOKENS) if here.has_ids else (),
        n_faithful=here.n_faithful_tokens,
        has_ids=here.has_ids if at else there.has_ids,
        post=here.post or there.post,
    )


def _headers(
    snapshot: Snapshot, here: SessionRecord, there: SessionRecord, owner: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that the session goes on with: its own, or the source's for a new one."""
    for layer, kind in here.streams:
        source = header_of(here, (layer, kind))
        if source is None:
            source = header_of(there, (layer, kind)) or there.owner
        value = snapshot.get(keys.stream_key(keys.HEADER, source, layer, kind))
        if value is not None:  # its loss shows where it is read
            yield keys.stream_key(keys.HEADER, owner, layer, kind), bytes(value)


def _ids(
    snapshot: Snapshot,
    here: SessionRecord,
    there: SessionRecord,
    new: SessionRecord,
    start: int,
    where: str,
) -> Iterator[tuple[bytes, bytes]]:
    if not new.has_ids:
        return
    at, n = here.n_tokens, new.n_tokens
    first = at // CHUNK_TOKENS * CHUNK_TOKENS
    before = read_ids(snapshot, here, first, at, where) if at > first else None
    taken = read_ids(snapshot, there, start, start + n - at, where)
    ids = taken if before is None else np.concatenate([before, taken])
    for lo in range(0, len(ids), CHUNK_TOKENS):
        chunk = (first + lo) // CHUNK_TOKENS
        packed = pack_ids(ids[lo : lo + CHUNK_TOKENS], new.owner, chunk)
        yield keys.tokens_key(new.owner, chunk), packed


def _copy(writer: SessionWriter, source: Session, start: int, stop: int) -> None:
    """Append tokens of the source: their rows where the codec has such, else their values."""
    k, v = source.read_all(start, stop, dtype="float32")
    ids = source.token_ids(start, stop)
    writer.append(k, v, "pre", ids, None, None, _stored_rows(source, start, stop))


def _stored_rows(source: Session, start: int, stop: int) -> dict[StreamName, StoredRows]:
    """Return tokens as they are stored, of the streams whose rows stand alone."""
    found = {}
    with source._archive._read() as snapshot:
        record = source._record(snapshot)
        _check(record, start, stop, source._where)
        for layer, kind in record.streams:
            todo = partial(pieces, record, layer, kind, start, stop)
            rows = stored_rows(source._reader, snapshot, todo)
            if rows is not None:
                found[layer, kind] = rows.kept()
    return found


def _largest_error(
    session: Session, source: Session, start: int, stop: int, shift: int, n_rollbacks: int
) -> float:
    """Return the largest difference between the source's values and the session's."""
    largest = 0.0
    try:
        for lo in range(start, stop, PASS_TOKENS):
            hi = min(lo + PASS_TOKENS, stop)
            theirs = source.read_all(lo, hi, dtype="float32")
            mine = session.read_all(lo + shift, hi + shift, dtype="float32")
            for a, b in zip(_tensors(theirs), _tensors(mine), strict=True):
                largest = max(largest, float(np.max(np.abs(a - b), initial=0.0)))
        _check_same(_checked(source, start, stop), n_rollbacks, source._where)
    except (NotFound, InvalidArgument):
        # The source has gone, or is another one. What was measured when the blocks were coded
        # is at least as much: other tokens of theirs are in it.
        return _coding_error(session, start + shift, stop + shift)
    return largest


def _coding_error(session: Session, start: int, stop: int) -> float:
    largest = 0.0
    with session._archive._read() as snapshot:
        record = session._record(snapshot)
        for layer, kind in record.streams:
            for piece in pieces(record, layer, kind, start, stop):
                _, header, _ = session._reader.open(snapshot, piece, layer, kind)
                largest = max(largest, header.error.max_error)
    return largest


def _tensors(kv: tuple[Any, Any]) -> Iterator[Any]:
    for tensors in kv:
        yield from (x for x in tensors if x is not None)
