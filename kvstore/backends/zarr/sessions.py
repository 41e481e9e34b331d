"""What the session records say of arrays: which session has which blocks, and whose they are."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvcodecs.errors import KvError

from ... import keys
from ...identity import Model
from ...records import unpack_identity
from ...session_record import SessionRecord, StreamName, load_session, model_of, unpack_session
from ...spans import header_of, spans_of
from .places import Lookup


class Stored(NamedTuple):
    """A session as its record says, with its model."""

    name: str
    record: SessionRecord
    model: Model


def stored_session(lookup: Lookup, name: str, value: bytes | None) -> Stored | None:
    """Return what a session record says; None if there is none, or it cannot be read.

    Damage is for the engine to find: such a session keeps the arrays that it has.
    """
    if value is None:
        return None
    try:
        data = load_session(value, name, name)
        digest = model_of(data, name)
        identity = lookup.raw(keys.identity_key(digest))
        if identity is None:
            return None
        model = _model(identity, digest)
        return Stored(name, unpack_session(data, model.streams(), name), model)
    except KvError:
        return None


@lru_cache(maxsize=64)
def _model(value: bytes, digest: bytes) -> Model:
    return unpack_identity(value, digest, "model")


def n_sealed(record: SessionRecord, stream: StreamName) -> int:
    """Return how many whole blocks of a stream are committed; 0 while it has no header."""
    state = record.streams[stream]
    if header_of(record, stream) is None:
        return 0
    return max(record.n_tokens - state.start, 0) // state.block_tokens


def first_own(record: SessionRecord, stream: StreamName) -> int:
    """Return the first block that the session stores, or will store, under its own owner."""
    state = record.streams[stream]
    end = max([state.start, *(part.stops[stream] for part in record.parts)])
    return (end - state.start) // state.block_tokens


def shared_blocks(record: SessionRecord) -> dict[tuple[StreamName, int], tuple[int, int]]:
    """Return (owner, block there) of the whole blocks that other owners serve, by block here."""
    found: dict[tuple[StreamName, int], tuple[int, int]] = {}
    if not record.parts:
        return found
    for stream, state in record.streams.items():
        end = n_sealed(record, stream)
        first = max(record.first - state.start, 0) // state.block_tokens
        for span in spans_of(record, stream):
            if not span.own:
                for block in range(max(span.first_block, first), min(span.stop_block, end)):
                    found[stream, block] = span.owner, block - span.shift
    return found
