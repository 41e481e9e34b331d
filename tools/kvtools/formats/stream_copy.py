"""A session as formats that are no archive take it: standing alone, its blocks as they are coded.

Payloads are copied. Two things are not: a block of which the session has only the first tokens,
and a raw head of which it lacks some. The block is coded anew from what it decodes to, or its rows
are cut where it has rows, which gives the same values; the head is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from kvcodecs.codec import BlockCodec, codec_by_number
from kvcodecs.errors import InvalidArgument
from kvcodecs.frame import ErrorStats
from kvcodecs.raw import Raw
from kvcodecs.spec import F32, Kind

from kvstore.backend import Snapshot
from kvstore.migration.needed import Item
from kvstore.passing import Passing
from kvstore.pieces import Piece, pieces
from kvstore.reader import Decoded, Reader
from kvstore.session_record import SessionRecord, StreamName, StreamState
from kvstore.spans import head_of, header_of, spans_of
from kvstore.token_ids import CHUNK_TOKENS, Ids, read_ids

_PERSON = b"kvs stands alone"


@dataclass(frozen=True, slots=True)
class Block:
    """A block, coded.

    Attributes
    ----------
    first_token, n_tokens
        What it holds, by the session's positions.
    coded_at
        The position of its first token when it was coded, which is what makes a token a sink.
    codec, params, header
        How it is decoded, and the stream header that says so.
    """

    first_token: int
    n_tokens: int
    coded_at: int
    codec: BlockCodec
    params: Any
    header: bytes
    payload: bytes | memoryview
    error: ErrorStats


@dataclass(frozen=True, slots=True)
class RawHead:
    """The raw head of a stream: the first tokens as they came in."""

    n_tokens: int
    payload: bytes
    error: ErrorStats


class StreamCopy:
    """One stream of a session, standing alone.

    Attributes
    ----------
    start, n_tokens
        First token of the first block that was not trimmed, and how many there are from it on.
    state
        How the stream is laid out.
    """

    def __init__(self, snapshot: Snapshot, item: Item, stream: StreamName) -> None:
        self._snapshot, self._item = snapshot, item
        self.layer, self.kind = stream
        self._reader = Reader(item.model, item.where)
        record = item.record
        state = record.streams[stream]
        n_trimmed = max(record.first - state.start, 0)
        self.start = state.start + n_trimmed // state.block_tokens * state.block_tokens
        self.n_tokens = max(record.n_tokens - self.start, 0)
        self.has_blocks = bool(spans_of(record, stream))
        self._owner = header_of(record, stream)
        head = head_of(record, stream)
        stop = 0 if head is None else state.start + head.n_tokens
        self._head_stop = stop if stop > record.first or not self.has_blocks else 0
        self.state = StreamState(
            state.block_tokens,
            self.start,
            max(self._head_stop - self.start, 0),
            has_header=self._owner is not None,
        )

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self._item.where} layer {self.layer} {self.kind}"

    def header(self) -> tuple[BlockCodec, Any, bytes] | None:
        """Return codec, parameters and header that the stream goes on with, or None."""
        return None if self._owner is None else self._coding(self._owner)

    def head(self) -> RawHead | None:
        """Return the raw head, or None."""
        if not self.state.n_head:
            return None
        record = self._item.record
        (piece,) = pieces(record, self.layer, self.kind, self.start, self._head_stop)
        found = self._decode(piece)
        kept = np.ascontiguousarray(found.coded)
        payload = raw_payload(kept, self._spec(), found.dtype)
        return RawHead(self.state.n_head, payload, found.error)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in order; payloads are valid as long as the snapshot is."""
        if not self.has_blocks:
            return
        record, passing = self._item.record, Passing(self._snapshot)
        for piece in pieces(
            record, self.layer, self.kind, self.start, record.n_tokens, blocks_only=True
        ):
            codec, params, header = self._coding(piece.owner)
            _, head, payload = self._reader.open(self._snapshot, piece, self.layer, self.kind)
            error: ErrorStats = head.error
            coded_at = piece.first_token - piece.offset
            if codec.rows_stand_alone:
                self._decode(piece)  # rows that a read refuses are not copied
            whole: bytes | memoryview = payload
            if head.n_tokens != piece.n_tokens:
                found = self._decode(piece)
                error = found.error
                encoder = codec.encoder(params, coded_at)
                encoder.resume(np.ascontiguousarray(found.coded), found.payload, error)
                whole = encoder.payload()
            yield Block(
                piece.first_token, piece.n_tokens, coded_at, codec, params, header, whole, error
            )
            passing.add(payload)
        passing.release()

    def _spec(self) -> Any:
        return self._item.model.stream(self.layer, self.kind)

    def _decode(self, piece: Piece) -> Decoded:
        return self._reader.decode(self._snapshot, piece, self.layer, self.kind)

    def _coding(self, owner: int) -> tuple[BlockCodec, Any, bytes]:
        coding = self._reader.coding(self._snapshot, owner, self.layer, self.kind)
        _, header = self._reader.header(self._snapshot, owner, self.layer, self.kind)
        return coding.codec, coding.params, header


def refused(copy: StreamCopy, why: str, option: str = "--codec") -> InvalidArgument:
    """Return why a format cannot hold a stream as it is, and the option with which it can."""
    return InvalidArgument(f"{copy.where}: {why}; coded anew it fits: {option}")


def check_alike(copy: StreamCopy, block: Block, params: Any, header: bytes) -> None:
    """Check that one header and the session's own positions are enough to decode a block.

    Raises
    ------
    InvalidArgument
        It is of a range of another session, with a header of its own; or it was coded where the
        first tokens of a context are, which are coded finer, and is elsewhere now.
    """
    if block.header != header:
        raise refused(copy, "has blocks with other statistics, of a range of another session")
    sink = getattr(params, "sink", 0)
    if block.first_token != block.coded_at and min(block.first_token, block.coded_at) < sink:
        raise refused(copy, "has blocks that were the first tokens elsewhere, or are here")


def raw_payload(coded: F32, spec: Any, dtype: str) -> bytes:
    """Return the payload of a raw frame."""
    codec = codec_by_number(0)
    encoder = codec.encoder(codec.fit(Raw(dtype), spec, lambda: ()), 0)
    encoder.push(coded)
    return encoder.payload()


def standing_alone(item: Item, streams: dict[StreamName, StreamCopy]) -> SessionRecord:
    """Return the record of a session without parts, whose streams are these.

    It keeps its id and owner if its frames stay what they are.
    """
    record = item.record
    alone = replace(
        record,
        streams={name: copy.state for name, copy in streams.items()},
        parts=(),
        id_parts=(),
    )
    if not record.parts and not record.id_parts and alone.streams == record.streams:
        return record
    digest = blake2b(item.value, digest_size=8, person=_PERSON).digest()
    owner = int.from_bytes(digest, "big") or 1
    return replace(alone, owner=owner, id=owner)


def all_ids(snapshot: Snapshot, item: Item) -> Ids | None:
    """Return the token ids of a session from `first_id` on, or None."""
    record = item.record
    if not record.has_ids:
        return None
    return read_ids(snapshot, record, first_id(record), record.n_tokens, item.where)


def first_id(record: SessionRecord) -> int:
    """Return the first token whose id is there: of the first chunk that was not trimmed."""
    return record.first // CHUNK_TOKENS * CHUNK_TOKENS


def stream_file(layer: int, kind: Kind) -> str:
    """Return what the files of a stream are called, without their suffix."""
    return f"{kind}_{layer:03d}"
