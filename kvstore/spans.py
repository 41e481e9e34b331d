"""Who serves which tokens of a stream: the session itself, or owners it shares frames with.

A stream is a raw head (perhaps) and blocks. Each block is served by one owner: the last one
that has tokens in it, since whoever goes on after a cut codes the cut block again. So the blocks
of a stream fall into spans, one after the other. FORMAT.md section 4.3.
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
        alike = alike, *((part.starts[stream], part.heads[stream]) for part in record.parts)
    served: Served | None = record.served.get(alike)
    if served is None:
        sources = _sources(record, stream)
        served = record.served[alike] = _head(sources), _spans(record, stream, sources)
    return served


def _head(sources: list[_Source]) -> Head | None:
    for source in reversed(sources):
        if source.n_head:
            return Head(source.owner, source.n_head, source.own)
    return None


def _spans(record: SessionRecord, stream: StreamName, sources: list[_Source]) -> tuple[Span, ...]:
    state = record.streams[stream]
    block_tokens, base = state.block_tokens, state.start
    if not sources:
        return ()
    firsts = [_first_block(record, stream, i, sources) for i in range(len(sources))]
    stops = [*firsts[1:], -(-(record.n_tokens - base) // block_tokens)]
    spans = []
    for source, first, stop in zip(sources, firsts, stops, strict=True):
        if first < stop and not _is_headless(source, base):
            shift = (source.offset + source.start - base) // block_tokens
            spans.append(
                Span(source.owner, first, stop, source.stop, source.offset, shift, source.own)
            )
    return tuple(spans)


def header_of(record: SessionRecord, stream: StreamName) -> int | None:
    """Return the owner of the header that the stream goes on with; None before there is one."""
    if record.streams[stream].has_header:
        return record.owner
    spans = spans_of(record, stream)
    return spans[-1].owner if spans else None


def id_spans(record: SessionRecord, chunk_tokens: int) -> list[tuple[int, int, int]]:
    """Return (owner, first chunk, stop chunk) of the token ids; chunks are served as blocks are."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for owner, stop in (*record.id_parts, (record.owner, record.n_tokens)):
        if stop > begin and record.has_ids:
            first = begin // chunk_tokens
            if found and found[-1][2] > first:
                found[-1] = (*found[-1][:2], first)
            found.append((owner, first, -(-stop // chunk_tokens)))
            begin = stop
    return [(owner, first, stop) for owner, first, stop in found if first < stop]


def _sources(record: SessionRecord, stream: StreamName) -> list[_Source]:
    """Return who has tokens in a stream, in order; the session itself last."""
    state = record.streams[stream]
    found = []
    begin = state.start
    for part in record.parts:
        if part.stop > begin:
            start, n_head = part.starts[stream], part.heads[stream]
            found.append(
                _Source(part.owner, begin, part.stop, part.offset, start, n_head, own=False)
            )
            begin = part.stop
    if record.n_tokens > begin:
        found.append(
            _Source(record.owner, begin, record.n_tokens, 0, state.start, state.n_head, own=True)
        )
    return found


def _is_headless(source: _Source, base: int) -> bool:
    """Whether all tokens up to the end of a source are in its raw head."""
    return source.offset == 0 and base + source.n_head >= source.stop


def _first_block(record: SessionRecord, stream: StreamName, i: int, sources: list[_Source]) -> int:
    """Return the first block that a source serves: the one its first token is in.

    After tokens that are in a raw head alone it is block 0: the blocks begin there.
    """
    state = record.streams[stream]
    if i == 0 or _is_headless(sources[i - 1], state.start):
        return 0
    return (sources[i].begin - state.start) // state.block_tokens
