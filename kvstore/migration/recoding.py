"""Coding a stored session anew with another codec, stream by stream, in constant memory.

The originals are gone: what is coded is what the old frames decode to, and the error of that is
measured. The new frames record a bound on the error against the originals, block by block:

* largest error: that of the old frames of these tokens, plus the new one;
* sum of squares: ``(sqrt(old) + sqrt(new)) ** 2``, by the triangle inequality. Where an old frame
  has more tokens than are taken from it, all of its sum counts.

Where the old error is unknown the new one is. A stream that stays in its `ggml` scheme is not coded
anew: its rows are copied, with the errors that their frames say. The coded session stands alone:
tokens of parts and of raw heads become blocks of its own, and blocks before a trim are left out, so
that its streams start where the first block that was kept does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.frame import ErrorStats, open_frame, pack_frame
from kvcodecs.spec import F32, Kind, StreamSpec

from .. import keys
from ..backend import Snapshot, Transaction
from ..layout import make_streams
from ..metadata import canonical_json
from ..passing import Passing
from ..pieces import Piece, all_pieces, pieces
from ..reader import Reader
from ..receipt_making import receipt_of_stored, session_receipt
from ..receipts import pack_receipt
from ..session_record import SessionRecord, StreamName, StreamState
from ..shared_objects import put_all
from ..source_digests import SourceHasher
from ..spans import head_of, spans_of
from ..stored_frame import first_value
from ..stored_rows import StoredRows, stored_rows
from ..stream import Prepared, Put, StreamWriter
from ..token_ids import CHUNK_TOKENS, pack_ids, read_id_chunk
from ..writer import SPILL_BYTES
from .moving import Target
from .needed import Item

_FLUSH_BYTES: Final = SPILL_BYTES // 2
#: Decoded values of a stream that are kept for the next pass; longer ones are decoded again.
_KEPT_BYTES: Final = 32 << 20
_PERSON: Final = b"kvs recode"


def is_recoded(record: SessionRecord, codecs: Mapping[Kind, CodecConfig]) -> bool:
    """Whether a session has to be coded anew to have these codecs; raw values stay as they are."""
    return any(
        record.codecs[kind] != config and not (config.codec == record.codecs[kind].codec == "raw")
        for kind, config in codecs.items()
    )


def recoded_owner(item: Item, codecs: Mapping[Kind, CodecConfig]) -> int:
    """Return the owner of a session that is coded anew: the same for the same work.

    So who begins again after a kill finds what was done, and two who do it get the same archive.
    """
    configs = canonical_json({kind: config.to_json() for kind, config in codecs.items()})
    digest = blake2b(item.value + configs, digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "big") or 1


def recoded_record(item: Item, codecs: Mapping[Kind, CodecConfig]) -> SessionRecord:
    """Return the record of the session to be, its streams before the first token."""
    record, owner = item.record, recoded_owner(item, codecs)
    return replace(
        record,
        id=owner,
        owner=owner,
        codecs=dict(codecs),
        streams={
            name: StreamState(state.block_tokens, _first(record, name))
            for name, state in record.streams.items()
        },
        parts=(),
        id_parts=(),
        n_recoded=record.n_recoded + (not _is_copied(record, codecs)),
        receipts=None if record.receipts is None else record.first,
    )


def _is_copied(record: SessionRecord, codecs: Mapping[Kind, CodecConfig]) -> bool:
    """Whether all rows stay as they are, to stand alone."""
    return all(
        record.codecs[kind] == config and codec_for(config).rows_stand_alone
        for kind, config in codecs.items()
    )


def _first(record: SessionRecord, stream: StreamName) -> int:
    """Return the first token of the first block that was not trimmed."""
    state = record.streams[stream]
    n_trimmed = max(record.first - state.start, 0)
    return state.start + n_trimmed // state.block_tokens * state.block_tokens


def compound(old: ErrorStats, new: ErrorStats) -> ErrorStats:
    """Return a bound on the error of values that were coded twice; see the module."""
    if not (old.is_known and new.is_known):
        return ErrorStats.unknown()
    root = math.sqrt(old.sum_squares) + math.sqrt(new.sum_squares)
    return ErrorStats(old.max_error + new.max_error, root * root, new.n_values)


@dataclass(slots=True)
class _Sink:
    """Values of one stream on their way, a few MB to a transaction."""

    target: Target
    n_bytes: int = 0
    _values: dict[bytes, bytes] = field(default_factory=dict)
    _n_waiting: int = 0

    def add(self, values: Mapping[bytes, bytes]) -> None:
        """Store values in one transaction, now or later."""
        self._values.update(values)
        self._n_waiting += sum(map(len, values.values()))
        if self._n_waiting >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        values, n_bytes = dict(sorted(self._values.items())), self._n_waiting

        def store(transaction: Transaction) -> None:
            put_all(transaction, values.items())

        if values:
            self.target.write(store, n_bytes=n_bytes)
        self.n_bytes += n_bytes
        self._values, self._n_waiting = {}, 0


class _Decoded:
    """A stream as it is stored, decoded: its chunks, for any number of passes."""

    def __init__(self, snapshot: Snapshot, item: Item, stream: StreamName) -> None:
        self._snapshot, self._item, self._stream = snapshot, item, stream
        self._reader = Reader(item.model, item.where)
        record = item.record
        first, head = _first(record, stream), head_of(record, stream)
        state = record.streams[stream]
        # A head that ends before the first token that was kept need not be there.
        without = head is not None and state.start + head.n_tokens <= record.first
        self.first, self.n_tokens = first, max(record.n_tokens - first, 0)
        self._blocks_only = without and bool(spans_of(record, stream))
        spec = item.model.stream(*stream)
        self._kept: list[tuple[Piece, F32, ErrorStats]] | None = None
        self._keeps = spec.n_values(self.n_tokens) * 4 <= _KEPT_BYTES
        #: Pieces of the pass that goes on, with their errors, and the dtypes that raw ones have.
        self.errors: deque[tuple[int, int, ErrorStats]] = deque()
        self.dtypes: set[str] = set()
        #: Bytes of the frames of one pass.
        self.n_bytes = 0

    def chunks(self) -> Iterator[F32]:
        """Yield successive tokens in the coded domain."""
        self.errors.clear()
        if self._kept is not None:
            for piece, coded, error in self._kept:
                self.errors.append((piece.start, piece.stop, error))
                yield coded
            return
        kept = []
        self.n_bytes = 0
        passing = Passing(self._snapshot)
        for piece in self._pieces():
            value = first_value(self._snapshot, piece, self._reader.where)
            found = self._reader.decode(self._snapshot, piece, *self._stream)
            coded, error = found.coded, found.error
            if not piece.exact:
                error = self._reader.open(self._snapshot, piece, *self._stream)[1].error
            self.dtypes.add(found.dtype)
            self.errors.append((piece.start, piece.stop, error))
            if value is not None:
                self.n_bytes += value.nbytes
                passing.add(value)
            coded = np.ascontiguousarray(coded)
            if self._keeps:
                kept.append((piece, coded, error))
            yield coded
        passing.release()
        if self._keeps:
            self._kept = kept

    def stored(self) -> StoredRows | None:
        """Return the tokens as they are stored, if their rows can be copied."""
        passing = Passing(self._snapshot)

        def done(payload: memoryview) -> None:
            self.n_bytes += payload.nbytes
            passing.add(payload)

        return stored_rows(self._reader, self._snapshot, self._pieces, done)

    def error_of(self, start: int, stop: int) -> ErrorStats:
        """Return a bound on the error of tokens that have been yielded; asked in order."""
        while self.errors and self.errors[0][1] <= start:
            self.errors.popleft()
        found = ErrorStats.none()
        for first, last, error in self.errors:
            if first < stop and last > start:
                found = found.merge(error)
        return found

    def _pieces(self) -> Iterator[Piece]:
        stop = self._item.record.n_tokens
        return pieces(
            self._item.record, *self._stream, self.first, stop, blocks_only=self._blocks_only
        )


def recode_stream(
    snapshot: Snapshot,
    item: Item,
    new: SessionRecord,
    stream: StreamName,
    target: Target,
    *,
    advance: Callable[[int, int], None],
    n_threads: int | None = None,
) -> tuple[StreamState, int]:
    """Code one stream and store its frames; nothing names them yet.

    The value that says that a stream is whole (its header, or its raw head) is stored last.

    Parameters
    ----------
    new
        From `recoded_record`.
    advance
        Called with tokens that are done, and bytes of the source that were read for them.

    Returns
    -------
    state
        How the stream is laid out.
    n_bytes
        Bytes stored.
    """
    layer, kind = stream
    where = f"{item.where} layer {layer} {kind}"
    writer = make_streams(new, item.model, where)[stream]
    decoded = _Decoded(snapshot, item, stream)
    sink = _Sink(target)
    if decoded.n_tokens == 0:
        return writer.state, 0
    spec = item.model.stream(layer, kind)
    stored = decoded.stored()
    copied = None if stored is None else writer.prepare_rows(stored)
    prepared = copied or _prepared(writer, decoded, new, spec)

    def store(puts: Iterator[Put] | list[Put]) -> None:
        values = {}
        for key, value in puts:
            if value is not None:
                is_coded = key[:1] in _FRAMES and copied is None
                values[key] = _with_error(value, decoded, where) if is_coded else value
        sink.add(values)

    def on_seal() -> None:
        store(writer.take_sealed())
        writer.sealed_stored()
        advance(writer.end - decoded.first, decoded.n_bytes)

    writer.push(prepared, on_seal, n_threads)
    writer.fix_if_due()
    store(writer.puts())
    sink.flush()
    advance(decoded.n_tokens, decoded.n_bytes)
    return writer.state, sink.n_bytes


def _prepared(
    writer: StreamWriter, decoded: _Decoded, new: SessionRecord, spec: StreamSpec
) -> Prepared:
    """Return the decoded tokens, ready to be coded anew."""
    post = new.post and spec.rope is not None
    if decoded.n_tokens < new.fit_tokens:
        for _ in decoded.chunks():
            pass
    dtype = decoded.dtypes.pop() if len(decoded.dtypes) == 1 else "float32"
    return writer.prepare(decoded.chunks, decoded.n_tokens, "post" if post else "pre", dtype)


_FRAMES: Final = (keys.FRAME, keys.TAIL, keys.HEAD)


def _with_error(frame: bytes, decoded: _Decoded, where: str) -> bytes:
    """Return a new frame with the error against the originals."""
    head, payload = open_frame(frame, where)
    old = decoded.error_of(head.first_token, head.stop_token)
    return pack_frame(
        codec=head.codec,
        kind=head.kind,
        owner=head.owner,
        layer=head.layer,
        first_token=head.first_token,
        n_tokens=head.n_tokens,
        payload=payload,
        header_tag=head.header_tag,
        error=compound(old, head.error),
    )


def whole_stream(snapshot: Snapshot, new: SessionRecord, stream: StreamName) -> StreamState | None:
    """Return the layout of a stream that an earlier try has stored whole, or None."""
    state = new.streams[stream]
    n_tokens = max(new.n_tokens - state.start, 0)
    if not n_tokens:
        return state
    if snapshot.get(keys.stream_key(keys.HEADER, new.owner, *stream)) is not None:
        return replace(state, has_header=True)
    if snapshot.get(keys.stream_key(keys.HEAD, new.owner, *stream)) is not None:
        return replace(state, n_head=n_tokens)
    return None


def recoding_receipt(
    source: Snapshot, item: Item, target: Snapshot, new: SessionRecord, where: str
) -> dict[bytes, bytes]:
    """Return the receipt of a session that was coded anew, by key; nothing if it keeps none.

    Its source is what the old frames decode to, in the coded domain.
    """
    first, stop, now = item.record.first, new.n_tokens, int(time.time())
    if new.receipts is None or first == stop:
        return {}
    old, reader, receipts = Reader(item.model, item.where), Reader(item.model, where), []
    for stream in new.streams:
        spec = item.model.stream(*stream)
        hasher = SourceHasher(spec.heads, spec.head_dim)
        begin = max(first, item.record.streams[stream].start)
        passing = Passing(source)
        for piece in pieces(item.record, *stream, begin, stop):
            decoded = old.decode(source, piece, *stream)
            hasher.update(decoded.coded)
            passing.add(decoded.payload)
        passing.release()
        todo, n_tokens = all_pieces(new, *stream), hasher.n_tokens
        receipts.append(
            receipt_of_stored(
                target, reader, new, stream, todo, hasher.digest(), n_tokens, now, "compress"
            )
        )
    receipt = session_receipt(item.name, new, first, stop, receipts, "recode", now)
    return {keys.receipt_key(new.id, 0): pack_receipt(receipt)}


def recode_ids(snapshot: Snapshot, item: Item, new: SessionRecord, target: Target) -> int:
    """Store a session's token ids under its new owner; return their bytes."""
    sink = _Sink(target)
    if item.record.has_ids:
        first = item.record.first // CHUNK_TOKENS
        for chunk in range(first, -(-item.record.n_tokens // CHUNK_TOKENS)):
            ids = read_id_chunk(snapshot, item.record, chunk, item.where)
            sink.add({keys.tokens_key(new.owner, chunk): pack_ids(ids, new.owner, chunk)})
    sink.flush()
    return sink.n_bytes
