"""Storing a whole session in constant memory.

`ingest` takes one stream after the other from a source that can be larger than memory. Frames
go into the archive under an owner that no session names yet; one small transaction at the end
publishes the session. Killed before it, the frames are leftovers that nothing reads.
FORMAT.md section 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, KvError
from kvcodecs.rope import check_k_state, to_coded
from kvcodecs.spec import F32, Kind, KState
from kvcodecs.tensor import check_tensor

from . import keys
from .backend import Transaction
from .catalog import REPLACE_ADVICE
from .identity import Model, check_model
from .layout import check_fit_tokens, first_receipt, make_streams, new_layout
from .metadata import check_metadata
from .receipt_making import StreamLedger, session_receipt
from .receipts import StreamReceipt, pack_receipt
from .session import Session
from .session_record import SessionRecord, StreamName, check_record
from .shared_objects import put_all
from .sharing import free
from .stream import Prepared, Put, StreamWriter
from .token_ids import CHUNK_TOKENS, check_ids, pack_ids
from .writer import SPILL_BYTES

if TYPE_CHECKING:
    from .opened import OpenArchive

#: Smaller than the writer's: the source's own pages count as well.
_FLUSH_BYTES = SPILL_BYTES // 2


class Source(Protocol):
    """A session's tensors, stream by stream."""

    def n_tokens(self, layer: int, kind: Kind) -> int:
        """Tokens of one stream; fewer than the session's only for a layer with a window."""
        ...

    def chunks(self, layer: int, kind: Kind) -> Iterable[npt.NDArray[Any]]:
        """Yield successive token chunks ``(heads, n, head_dim)``; asked for once per pass."""
        ...


def ingest(
    archive: OpenArchive,
    name: str,
    source: Source,
    *,
    model: Model,
    codecs: Mapping[Kind, CodecConfig],
    block_tokens: int | str,
    fit_tokens: int,
    k_state: KState,
    token_ids: object,
    metadata: Mapping[str, Any] | None,
    replace_existing: bool,
    receipts: bool,
    progress: Callable[[int, int], None] | None,
) -> Session:
    """Store a session from `source`; all of it is the prefill that fixes the stream headers.

    Parameters
    ----------
    replace_existing
        Let the new session take the place of one of the same name.
    progress
        Called with values coded so far and values in all.

    Returns
    -------
    session : Session
        As `Archive.session` returns it.

    Raises
    ------
    InvalidArgument
        As `Archive.create_session` and `Session.append`; also a source that yields other
        shapes or counts than it said.
    Locked, Full
        See `Session.commit`. Whatever was written is removed.
    """
    keys.check_name(name)
    replacing = replace_existing and name in archive
    if name in archive and not replacing:
        raise InvalidArgument(f"{archive.path}: session {name!r} exists already; {REPLACE_ADVICE}")
    check_k_state(k_state)
    where = f"{archive.path}: session {name!r}"
    metadata = check_metadata(metadata)
    check_model(model)
    check_fit_tokens(fit_tokens)
    counts = {stream: source.n_tokens(*stream) for stream in model.streams()}
    n_tokens = max(counts.values())
    for (layer, kind), n in counts.items():
        if not 0 <= n <= n_tokens or (n < n_tokens and model.layers[layer].window is None):
            raise InvalidArgument(
                f"{where} layer {layer} {kind}: {n} tokens, other layers have {n_tokens}"
            )
    ids = np.empty(0, np.int64) if token_ids is None else check_ids(token_ids, n_tokens)
    owner, now = archive.new_owner(), int(time.time())
    record = SessionRecord(
        id=owner,
        owner=owner,
        model=model.digest,
        n_tokens=n_tokens,
        codecs=codecs,
        fit_tokens=fit_tokens,
        streams=new_layout(model, codecs, block_tokens, has_header=False, where=where),
        has_ids=len(ids) > 0,
        receipts=first_receipt(receipts),
        post=k_state == "post" and any(model.stream(*s).rope for s in counts) and n_tokens > 0,
        created=now,
        updated=now,
        metadata=metadata,
    )
    # Hours of coding should not end with a record that cannot be published.
    check_record(replace(record, n_tokens=0), name, model, where)
    # Held until published, so that `Archive.gc` leaves the frames alone.
    lease = archive._backend.lease(owner, name)
    try:
        sink = _Sink(archive)
        n_values = sum(model.stream(*s).n_values(n) for s, n in counts.items())
        n_done = 0
        states = {}
        stream_receipts: list[StreamReceipt] = []
        for stream, writer in make_streams(record, model, where).items():
            n = counts[stream]
            writer.begin_at(n_tokens - n)
            chunks = partial(_coded, source, stream, n, writer, k_state)
            # Only a stream too short for a header keeps its values in the dtype they came in.
            dtype = _dtype(source, stream) if n < fit_tokens else "float32"
            advance = partial(_advance, progress, n_done, n_values)
            ledger = StreamLedger(writer) if receipts else None
            puts = _store(writer, writer.prepare(chunks, n, k_state, dtype), sink, advance)
            if ledger is not None:
                for values in source.chunks(*stream):
                    ledger.add(values)
                stream_receipts.append(ledger.receipt(dict(puts), codecs[stream[1]], now))
            states[stream] = writer.state
            n_done += writer.spec.n_values(n)
            advance(writer.spec.n_values(n))
        for chunk, at in enumerate(range(0, len(ids), CHUNK_TOKENS)):
            packed = pack_ids(ids[at : at + CHUNK_TOKENS], owner, chunk)
            sink.add([(keys.tokens_key(owner, chunk), packed)])
        record = replace(record, streams=states)
        puts_left = sink.take()
        if receipts and n_tokens:
            receipt = session_receipt(name, record, 0, n_tokens, stream_receipts, "append", now)
            puts_left[keys.receipt_key(record.id, 0)] = pack_receipt(receipt)
        archive._publish(name, record, model, puts_left, ids, replace=replacing)
    except BaseException as error:
        _remove(archive, owner, error)
        raise
    finally:
        lease.release()
    return archive.session(name)


def _coded(
    source: Source, stream: StreamName, n_tokens: int, writer: StreamWriter, k_state: KState
) -> Iterator[F32]:
    """Yield a stream's chunks in the coded domain, and check that they are what was promised."""
    position, n_seen = writer.state.start, 0
    state: KState = k_state if writer.spec.rope is not None else "pre"
    for chunk in source.chunks(*stream):
        check_tensor(chunk, writer.spec, writer.where)
        n_seen += chunk.shape[1]
        if n_seen > n_tokens:
            break
        yield to_coded(chunk, writer.spec, state, position)
        position += chunk.shape[1]
    if n_seen != n_tokens:
        raise InvalidArgument(
            f"{writer.where}: the source yields {n_seen} tokens or more, it said {n_tokens}"
        )


def _advance(
    progress: Callable[[int, int], None] | None, base: int, n_values: int, n_done: int
) -> None:
    if progress is not None:
        progress(base + n_done, n_values)


def _dtype(source: Source, stream: StreamName) -> str:
    names = {chunk.dtype.name for chunk in source.chunks(*stream)}
    return names.pop() if len(names) == 1 else "float32"


class _Sink:
    """Values on their way into the archive, a few MB to a transaction."""

    def __init__(self, archive: OpenArchive) -> None:
        self._archive = archive
        self._values: dict[bytes, bytes] = {}
        self._n_bytes = 0

    def add(self, puts: Iterable[Put]) -> None:
        for key, value in puts:
            if value is not None:
                self._values[key] = value
                self._n_bytes += len(value)
        if self._n_bytes < _FLUSH_BYTES:
            return
        values = self.take()

        def store(transaction: Transaction) -> None:
            put_all(transaction, values.items())

        self._archive._room.write(store)

    def take(self) -> dict[bytes, bytes]:
        """Return what is not stored yet, in key order, and forget it."""
        values, self._values, self._n_bytes = dict(sorted(self._values.items())), {}, 0
        return values


def _store(
    writer: StreamWriter,
    prepared: Prepared,
    sink: _Sink,
    advance: Callable[[int], None],
) -> list[Put]:
    """Code one stream; its frames go to the sink as they come. Return the last that go."""
    start = writer.end

    def on_seal() -> None:
        sink.add(writer.take_sealed())
        writer.sealed_stored()
        advance(writer.spec.n_values(writer.end - start))

    writer.push(prepared, on_seal)
    writer.fix_if_due()
    puts = list(writer.puts())
    sink.add(puts)
    return puts


def _remove(archive: OpenArchive, owner: int, cause: BaseException) -> None:
    """Remove what an ingest wrote; if that cannot be done now, say so in the cause."""
    try:
        archive._room.write(lambda transaction: free(transaction, archive._catalog, [owner]))
    except KvError as error:
        cause.add_note(f"the frames written so far stay until Archive.gc(): {error}")
