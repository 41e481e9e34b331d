"""Which frames a stream has, and which of them cover a range. FORMAT.md section 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvcodecs.spec import Kind

from . import keys
from .records import SessionRecord, StreamState


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored frame of a stream.

    Attributes
    ----------
    key
        Where it is.
    raw
        Whether it is the head, stored raw.
    first_token, n_tokens
        What it holds.
    start, stop
        The part of it that is read; after a raw head, the first block's is not all of it.
    name
        ``"layer 3 k block 7"`` and the like.
    """

    key: bytes
    raw: bool
    first_token: int
    n_tokens: int
    start: int
    stop: int
    name: str


def pieces(
    owner: int, layer: int, kind: Kind, state: StreamState, n_tokens: int, start: int, stop: int
) -> Iterator[Piece]:
    """Yield the frames that cover committed tokens ``[start, stop)`` of a stream, in order.

    Parameters
    ----------
    state, n_tokens
        Layout and committed tokens, from the session record.
    """
    name = f"layer {layer} {kind}"
    head_stop = state.start + state.n_head
    if start < min(stop, head_stop):
        yield Piece(
            keys.stream_key(keys.HEAD, owner, layer, kind),
            True,
            state.start,
            state.n_head,
            start,
            min(stop, head_stop),
            f"{name} head",
        )
    at = max(start, head_stop)
    while at < stop:
        block = (at - state.start) // state.block_tokens
        first = state.start + block * state.block_tokens
        n_block = min(state.block_tokens, n_tokens - first)
        sealed = n_block == state.block_tokens
        key = (
            keys.frame_key(owner, layer, kind, block)
            if sealed
            else keys.stream_key(keys.TAIL, owner, layer, kind)
        )
        until = min(stop, first + n_block)
        what = f"block {block}" if sealed else f"tail (block {block})"
        yield Piece(key, False, first, n_block, at, until, f"{name} {what}")
        at = until


def all_pieces(
    owner: int, layer: int, kind: Kind, state: StreamState, n_tokens: int
) -> Iterator[Piece]:
    """Yield every frame that a stream must have: the head, and all blocks behind its header."""
    if state.n_head and state.has_header:
        # Readers take the first tokens from the head, yet blocks hold them too.
        head_stop = state.start + state.n_head
        yield from pieces(owner, layer, kind, state, n_tokens, state.start, head_stop)
        state = replace(state, n_head=0)
    yield from pieces(owner, layer, kind, state, n_tokens, state.start, n_tokens)


def count_frames(record: SessionRecord) -> int:
    """Return how many frames a record promises at least, raw heads before blocks not counted."""
    n = 0
    for state in record.streams.values():
        n_own = max(record.n_tokens - state.start, 0)
        n += -(-n_own // state.block_tokens) if state.has_header else min(n_own, 1)
    return n
