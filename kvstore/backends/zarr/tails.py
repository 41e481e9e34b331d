"""The last, unfinished block of a finished session: its frame is final, and so is a chunk."""

from __future__ import annotations

from kvcodecs.errors import KvError
from kvcodecs.frame import open_frame

from ... import keys
from ...pieces import pieces
from ...session_record import StreamName
from ...spans import header_of
from .objects import Objects
from .places import Lookup, locations
from .sessions import Stored, n_sealed


def tail_tokens(stored: Stored, stream: StreamName) -> int:
    """Return how many tokens a finished session has behind its last whole block, in a frame."""
    state, record = stored.record.streams[stream], stored.record
    if not record.finished or header_of(record, stream) is None:
        return 0  # tokens that are all in a raw head have no block
    return max(record.n_tokens - state.start, 0) - n_sealed(record, stream) * state.block_tokens


def tail_frame(
    objects: Objects, lookup: Lookup, stored: Stored, stream: StreamName
) -> bytes | None:
    """Return the frame of those tokens; None if there are none, or it is lost or damaged.

    One that was cut from another session's holds more tokens than belong to this one.
    """
    n_tokens = tail_tokens(stored, stream)
    if not n_tokens:
        return None
    stop = stored.record.n_tokens
    *_, piece = pieces(stored.record, *stream, stop - 1, stop, blocks_only=True)
    for key in piece.keys:
        value = lookup.raw(key)
        frame = value
        if value is not None and key[:1] == keys.FRAME:
            frame = objects.get(*locations(lookup, key, value)[0])
        try:
            header = open_frame(frame)[0] if frame is not None else None
        except KvError:
            continue
        if header is not None and header.first_token == piece.first_token - piece.offset:
            return frame
    return None
