"""Which frames a stream has, and which of them cover a range. FORMAT.md section 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcodecs.spec import Kind

from . import keys
from .session_record import SessionRecord
from .spans import Span, head_of, spans_of


class Piece(NamedTuple):
    """One stored frame of a stream.

    Attributes
    ----------
    keys
        Where it is: under the first of them that exists and holds this block.
    owner
        Who stored it.
    raw
        Whether it is the head, stored raw.
    first_token, n_tokens
        What it holds; the position is the session's.
    exact
        Whether it holds no more: a frame of another owner may have grown since it was shared.
    offset
        Positions in the session minus those that the frame was written for.
    start, stop
        The part of it that is read, as positions of the session.
    layer, kind, what
        Parts of its name.
    block
        Its number in this stream; None for the head.
    """

    keys: tuple[bytes, ...]
    owner: int
    raw: bool
    first_token: int
    n_tokens: int
    exact: bool
    offset: int
    start: int
    stop: int
    layer: int
    kind: Kind
    what: str
    block: int | None

    @property
    def name(self) -> str:
        """``"layer 3 k block 7"`` and the like."""
        return f"layer {self.layer} {self.kind} {self.what}"


def pieces(
    record: SessionRecord,
    layer: int,
    kind: Kind,
    start: int,
    stop: int,
    *,
    blocks_only: bool = False,
) -> Iterator[Piece]:
    """Yield the frames that cover committed tokens ``[start, stop)`` of a stream, in order.

    With `blocks_only` the tokens that readers take from the raw head come from blocks too.
    """
    state = record.streams[layer, kind]
    at = start
    head = head_of(record, (layer, kind))
    if head is not None and not blocks_only:
        head_stop = state.start + head.n_tokens
        if start < min(stop, head_stop):
            at = min(stop, head_stop)
            yield Piece(
                keys=(keys.stream_key(keys.HEAD, head.owner, layer, kind),),
                owner=head.owner,
                raw=True,
                first_token=state.start,
                n_tokens=head.n_tokens,
                exact=head.own,
                offset=0,
                start=start,
                stop=at,
                layer=layer,
                kind=kind,
                what="head",
                block=None,
            )
    if at >= stop:
        return
    for span in spans_of(record, (layer, kind)):
        first = max((at - state.start) // state.block_tokens, span.first_block)
        last = min(-(-(stop - state.start) // state.block_tokens), span.stop_block)
        for block in range(first, last):
            first_token = state.start + block * state.block_tokens
            block_stop = min(first_token + state.block_tokens, span.stop)
            yield _block(
                span, layer, kind, block, first_token, block_stop, state.block_tokens, at, stop
            )


def _block(
    span: Span,
    layer: int,
    kind: Kind,
    block: int,
    first_token: int,
    block_stop: int,
    block_tokens: int,
    start: int,
    stop: int,
) -> Piece:
    n_tokens = block_stop - first_token
    sealed = keys.frame_key(span.owner, layer, kind, block - span.shift)
    tail = keys.stream_key(keys.TAIL, span.owner, layer, kind)
    what = f"block {block}"
    if n_tokens == block_tokens:
        places: tuple[bytes, ...] = (sealed,)
    elif span.own:
        places, what = (tail,), f"tail (block {block})"
    else:
        # Cut from another owner's block: its tail, unless that was sealed and is another block
        # now. Not the other way round: beside the tail, a sealed frame of the same block is a
        # leftover of an appender that stored ahead of a commit and never made it.
        places, what = (tail, sealed), f"cut block {block}"
    return Piece(
        keys=places,
        owner=span.owner,
        raw=False,
        first_token=first_token,
        n_tokens=n_tokens,
        exact=len(places) == 1,
        offset=span.offset,
        start=max(start, first_token),
        stop=min(stop, block_stop),
        layer=layer,
        kind=kind,
        what=what,
        block=block,
    )


def all_pieces(record: SessionRecord, layer: int, kind: Kind) -> Iterator[Piece]:
    """Yield every frame that a stream must have: the head, and all blocks behind its header.

    Readers take the first tokens from the head, yet blocks hold them too. Frames that lie wholly
    before the first token that was not trimmed are not among them, unless an appender goes on
    from them: a block that is not full, or a head with no blocks behind it.
    """
    state = record.streams[layer, kind]
    n_trimmed = max(record.first - state.start, 0)
    head = head_of(record, (layer, kind))
    if head is not None and (head.n_tokens > n_trimmed or not spans_of(record, (layer, kind))):
        yield from pieces(record, layer, kind, state.start, state.start + head.n_tokens)
    first = state.start + n_trimmed // state.block_tokens * state.block_tokens
    yield from pieces(record, layer, kind, first, record.n_tokens, blocks_only=True)


def count_frames(record: SessionRecord) -> int:
    """Return how many frames a record promises at least, raw heads before blocks not counted."""
    n = 0
    for stream, state in record.streams.items():
        spans = spans_of(record, stream)
        if not spans:
            n += record.n_tokens > state.start
        trimmed = max(record.first - state.start, 0) // state.block_tokens
        n += sum(max(s.stop_block - max(s.first_block, trimmed), 0) for s in spans)
    return n
