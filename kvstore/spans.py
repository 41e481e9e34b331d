"""Who serves which tokens of a stream: the session itself, or owners it shares frames with.

A stream is a raw head (perhaps) and blocks, and the blocks fall into spans of one owner each, one
after the other. FORMAT.md section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .session_record import SessionRecord, StreamName


@dataclass(frozen=True, slots=True)
class Head:
    """The raw head of a stream: tokens that readers take from it for ever.

    Attributes
    ----------
    owner
        Who stores it.
    n_tokens
        How many of its tokens belong to the stream, from the stream's first.
    own
        Whether the session stores it itself; another owner's may hold more tokens.
    """

    owner: int
    n_tokens: int
    own: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Successive blocks of a stream that one owner serves.

    Attributes
    ----------
    owner
        Who stores them.
    first_block, stop_block
        Their numbers in this stream.
    stop
        Position where the owner's tokens end; the last block may be cut there.
    offset
        Positions here minus positions there.
    shift
        Block numbers here minus block numbers there.
    own
        Whether the session stores them itself: a block that is not full is then its tail.
    """

    owner: int
    first_block: int
    stop_block: int
    stop: int
    offset: int
    shift: int
    own: bool


#: Raw head and spans of a stream.
Served: TypeAlias = tuple[Head | None, tuple[Span, ...]]


@dataclass(frozen=True, slots=True)
class _Source:
    owner: int
    begin: int
    stop: int
    offset: int
    start: int  # of the owner's stream, there
    n_head: int
    own: bool


def head_of(record: SessionRecord, stream: StreamName) -> Head | None:
    """Return a stream's raw head, or None."""
    return _served(record, stream)[0]


def spans_of(record: SessionRecord, stream: StreamName) -> tuple[Span, ...]:
    """Return the spans of a stream in order; none while all its tokens are in the raw head."""
    return _served(record, stream)[1]


def _served(record: SessionRecord, stream: StreamName) -> Served:
    """Return head and spans of a stream; streams that are alike have the same."""
    alike: object = record.streams[stream]
    if record.parts:
        rows = ((p.stops[stream], p.starts[stream], p.heads[stream]) for p in record.parts)
        alike = alike, *rows
    served: Served | None = record.served.get(alike)
    if served is None:
        served = record.served[alike] = _head(record, stream), _spans(record, stream)
    return served


def _head(record: SessionRecord, stream: StreamName) -> Head | None:
    n_own = record.streams[stream].n_head
    if n_own:
        return Head(record.owner, n_own, own=True)
    # Also of a part that has no blocks of the stream any more.
    for part in reversed(record.parts):
        if part.heads[stream]:
            return Head(part.owner, part.heads[stream], own=False)
    return None


def _spans(record: SessionRecord, stream: StreamName) -> tuple[Span, ...]:
    block_tokens, base = record.streams[stream].block_tokens, record.streams[stream].start
    spans = []
    for source in _sources(record, stream):
        if source.offset == 0 and base + source.n_head >= source.stop:
            continue  # all tokens up to its end are in its raw head
        # Whoever begins inside a block has coded all of it.
        first = (source.begin - base) // block_tokens
        stop = -(-(source.stop - base) // block_tokens)
        shift = (source.offset + source.start - base) // block_tokens
        spans.append(Span(source.owner, first, stop, source.stop, source.offset, shift, source.own))
    return tuple(spans)


def header_of(record: SessionRecord, stream: StreamName) -> int | None:
    """Return the owner of the header that the stream goes on with; None before there is one."""
    if record.streams[stream].has_header:
        return record.owner
    spans = spans_of(record, stream)
    return spans[-1].owner if spans else None


def id_parts_until(record: SessionRecord, stop: int) -> tuple[tuple[int, int], ...]:
    """Return (owner, position where they end) of the first `stop` token ids, own ones last."""
    found, begin = [], 0
    for owner, end in (*record.id_parts, (record.owner, record.n_tokens)):
        if min(end, stop) > begin:
            begin = min(end, stop)
            found.append((owner, begin))
    return tuple(found)


def id_spans(record: SessionRecord, chunk_tokens: int) -> list[tuple[int, int, int]]:
    """Return (owner, first chunk, stop chunk) of the token ids."""
    if not record.has_ids:
        return []
    found: list[tuple[int, int, int]] = []
    begin = 0
    for owner, stop in (*record.id_parts, (record.owner, record.n_tokens)):
        if stop > begin:
            found.append((owner, begin // chunk_tokens, -(-stop // chunk_tokens)))
        begin = stop
    return found


def _sources(record: SessionRecord, stream: StreamName) -> list[_Source]:
    """Return who has tokens in a stream, in order; the session itself last."""
    state = record.streams[stream]
    found = []
    begin = state.start
    for part in record.parts:
        stop, start, n_head = part.stops[stream], part.starts[stream], part.heads[stream]
        if stop > begin:
            found.append(_Source(part.owner, begin, stop, part.offset, start, n_head, own=False))
            begin = stop
    if record.n_tokens > begin:
        found.append(
            _Source(record.owner, begin, record.n_tokens, 0, state.start, state.n_head, own=True)
        )
    return found
