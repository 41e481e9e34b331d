"""Appending to a session: all streams together, and one atomic commit for them.

FORMAT.md section 5 gives the order of a commit and what a crash at each point leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
from kvcodecs.errors import Closed, InvalidArgument, KvError, Locked, NotFound
from kvcodecs.plan import available_cpus, check_threads
from kvcodecs.rope import Rope, RopeTable, check_k_state, to_coded
from kvcodecs.spec import F32, KState

from . import keys
from .backend import Lease, Snapshot, Transaction
from .catalog import Catalog
from .given import Tensor, Tensors, given_ids, given_starts, given_tensors
from .layout import make_streams
from .pieces import pieces
from .prefix_upkeep import PrefixKeys
from .reader import Reader
from .receipt_making import Ledgers
from .receipts import add_receipt
from .room import Room
from .session_record import MAX_TOKENS, SessionRecord, StreamName
from .shared_objects import put_all
from .sharing import claims_of, put_record, settled
from .spans import header_of
from .stored_rows import StoredRows
from .stream import Prepared, StreamWriter
from .token_ids import CHUNK_TOKENS, Ids, pack_ids, read_ids

#: Tokens that are brought into the coded domain at a time.
PASS_TOKENS: Final = 1024
#: Sealed frames are stored ahead of the commit once there are this many bytes of them.
SPILL_BYTES: Final = 8 << 20
# Threads cost more than they save on fewer values.
_MANY_VALUES: Final = 1 << 17

_A = TypeVar("_A")
_B = TypeVar("_B")


class SessionWriter:
    """The one appender of a session; made from its committed state, under its lease."""

    def __init__(
        self,
        room: Room,
        catalog: Catalog,
        name: str,
        record: SessionRecord,
        reader: Reader,
        snapshot: Snapshot,
        lease: Lease,
    ) -> None:
        self._room, self._catalog = room, catalog
        self.name, self.lease = name, lease
        self._where = reader.where
        self._model = reader.model
        self.record = record
        self.n_tokens = record.n_tokens
        self._streams = make_streams(record, reader.model, reader.where)
        self._has_ids, self._post = record.has_ids, record.post
        # Token ids from the last full chunk on.
        self._first_chunk = record.n_tokens // CHUNK_TOKENS if record.has_ids else 0
        self._ids: list[Ids] = []
        self._prefix = PrefixKeys(reader.model, reader.where)
        #: Position from which on the KV is of another context than the session's own tokens.
        self.foreign_from: int | None = None
        self._is_whole = True
        self._ledgers = None if record.receipts is None else Ledgers(self._streams)
        self._resume(record, reader, snapshot)

    @property
    def start(self) -> int:
        """First position that every layer has."""
        return max(stream.state.start for stream in self._streams.values())

    def append(
        self,
        k: Tensors,
        v: Tensors,
        k_state: KState,
        token_ids: object,
        start: int | None,
        n_threads: int | None,
        stored: Mapping[StreamName, StoredRows] | None = None,
    ) -> None:
        """Check everything, then push everything. See `Session.append`.

        Streams that are coded as the tokens in `stored` are take these instead of their values.
        """
        self._check_whole()
        self.lease.renew()
        check_k_state(k_state, self._where)
        if start is not None and start != self.n_tokens:
            raise InvalidArgument(
                f"{self._where}: append at start={start}, but n_tokens={self.n_tokens} tokens "
                f"are there ({self.record.n_tokens} committed)"
            )
        tensors = given_tensors(self._model, {"k": k, "v": v}, self._where)
        n_new = max(x.shape[1] for x in tensors.values())
        if self.n_tokens + n_new > MAX_TOKENS:
            raise InvalidArgument(f"{self._where}: more than {MAX_TOKENS} tokens")
        ids = given_ids(token_ids, n_new, self.n_tokens, has_ids=self._has_ids, where=self._where)
        counts = {name: x.shape[1] for name, x in tensors.items()}
        starts = given_starts(self._model, counts, n_new, self.n_tokens, self._where)
        n_threads = check_threads(n_threads) or available_cpus()
        n_values = sum(x.size for x in tensors.values())
        n_workers = min(n_threads, len(tensors)) if n_values >= _MANY_VALUES else 1
        prepared = self._prepare_all(tensors, starts, k_state, stored or {}, n_workers)
        self._is_whole = False
        if self._ledgers is not None:
            self._ledgers.add(tensors)
        self._push_all(prepared, n_workers, max(1, n_threads // n_workers))
        if ids is not None and n_new:
            self._ids.append(ids)
            self._has_ids = True
        self._post = self._post or any(item.post and item.n_tokens for item in prepared.values())
        self.n_tokens += n_new
        self._is_whole = True

    def commit(self) -> SessionRecord:
        """Make everything appended durable in one transaction. See `Session.commit`."""
        self._check_whole()
        if self.n_tokens == self.record.n_tokens:
            return self.record
        due = [stream for stream in self._streams.values() if stream.is_due]
        list(_map(StreamWriter.fix_if_due, due, min(available_cpus(), max(1, len(due)))))
        grown = replace(
            self.record,
            n_tokens=self.n_tokens,
            streams={name: stream.state for name, stream in self._streams.items()},
            has_ids=self._has_ids,
            post=self._post,
            updated=int(time.time()),
        )
        # Tails are coded here, whole.
        streams = self._streams.values()
        many = sum(stream.tail_values for stream in streams) >= _MANY_VALUES
        n_workers = min(available_cpus(), len(streams)) if many else 1
        of_streams = _map(lambda stream: list(stream.puts()), streams, n_workers)
        by_key: dict[bytes, bytes | None] = {}
        for of_stream in of_streams:
            by_key.update(of_stream)
        by_key.update(self._id_puts())
        new_ids, foreign_from = self._new_ids(), self.foreign_from
        # In key order: a tree that grows at its end fills its pages.
        puts = sorted(by_key.items())
        receipt = None
        if self._ledgers is not None:
            receipt = self._ledgers.receipt(self.name, self.record, self.n_tokens, by_key)

        def store(transaction: Transaction) -> SessionRecord:
            stored = self.stored(transaction)
            # What others may change while this session is appended to.
            record = replace(
                grown,
                parts=stored.parts,
                id_parts=stored.id_parts,
                first=stored.first,
                n_faithful=stored.n_faithful if stored.n_faithful is not None else foreign_from,
                pinned=stored.pinned,
                metadata=stored.metadata,
            )
            shrunk: set[int] = set()
            if stored.is_cut:
                # Its own first tokens: cut blocks are coded anew and not needed there any more.
                record = settled(record)
                shrunk.update(claims_of(stored))
            elif record.first and record.streams != stored.streams:
                # With a header there are blocks, and those that were trimmed are among them.
                shrunk.add(record.owner)
            put_all(transaction, puts)
            self._prefix.grow(transaction, stored, record, new_ids)
            put_record(transaction, self._catalog, self.name, stored, record, shrunk=shrunk)
            if receipt is not None:
                add_receipt(transaction, record.id, receipt)
            return record

        n_bytes = len(receipt or b"") + sum(len(v) for _, v in puts if v is not None)
        record = self._room.write(store, keep=(self.record.id,), n_bytes=n_bytes)
        self._room.note_use(record.id)
        self._prefix.committed()
        for stream in self._streams.values():
            stream.committed()
        if self._ledgers is not None:
            self._ledgers.reset()
        self._forget_full_chunks()
        self.record = record
        return record

    def stored(self, transaction: Transaction) -> SessionRecord:
        """Return the session's record, once it is sure that it is still this appender's."""
        self.lease.check()
        try:
            stored = self._catalog.record(transaction, self.name, self.record.id)
        except NotFound as error:
            raise NotFound(f"{self._where}: deleted while it was appended to") from error
        if (stored.owner, stored.n_tokens) != (self.record.owner, self.record.n_tokens):
            raise Locked(
                f"{self._where}: another appender has changed it; open it again and append from "
                "its n_committed"
            )
        return stored

    def close(self) -> None:
        """Drop what was not committed and give the lease back."""
        self.lease.release()

    def _resume(self, record: SessionRecord, reader: Reader, snapshot: Snapshot) -> None:
        n = record.n_tokens
        resumes: list[Callable[[], None]] = []
        n_values = 0
        for (layer, kind), stream in self._streams.items():
            state = record.streams[layer, kind]
            owner = header_of(record, (layer, kind))
            if owner is not None:
                coding = reader.coding(snapshot, owner, layer, kind)
                own = owner == record.owner
                header = None if own else reader.header(snapshot, owner, layer, kind)[1]
                stream.resume_header(coding.codec, coding.params, coding.tag, header)
                n_sealed, n_tail = divmod(max(n - state.start, 0), state.block_tokens)
                tail = list(pieces(record, layer, kind, n - n_tail, n, blocks_only=True))
                resume = partial(stream.resume_blocks, n_sealed)
                if tail:
                    found = reader.decode(snapshot, tail[0], layer, kind)
                    own = tail[0].owner == record.owner
                    n_values += found.coded.size
                    resume = partial(resume, found.coded, found.payload, found.error)
                resumes.append(partial(resume, own=own))
            elif n > state.start:
                (piece,) = pieces(record, layer, kind, state.start, n)
                head = reader.decode(snapshot, piece, layer, kind)
                post = record.post and kind == "k"
                stream.resume_head(head.coded, head.dtype, post=post)
        # Tails are coded anew, which takes longer than to decode them.
        many = n_values >= _MANY_VALUES and len(resumes) > 1
        n_workers = min(available_cpus(), len(resumes)) if many else 1
        list(_map(lambda resume: resume(), resumes, n_workers))
        n_ids = n % CHUNK_TOKENS
        if self._has_ids and n_ids:
            self._ids = [read_ids(snapshot, record, n - n_ids, n, self._where)]

    def _prepare_all(
        self,
        tensors: Mapping[StreamName, Tensor],
        starts: Mapping[StreamName, int | None],
        k_state: KState,
        stored: Mapping[StreamName, StoredRows],
        n_workers: int,
    ) -> dict[StreamName, Prepared]:
        """Check the new tokens of every stream; changes nothing if any is refused."""
        for name, start in starts.items():
            if start is not None:
                self._streams[name].begin_at(start)
        tables: dict[Rope, RopeTable] = {}

        def prepare(name: StreamName) -> Prepared:
            stream = self._streams[name]
            as_stored = stream.prepare_rows(stored[name]) if name in stored else None
            return as_stored or self._prepare(stream, tensors[name], k_state, tables)

        try:
            return dict(zip(tensors, _map(prepare, tensors, n_workers), strict=True))
        except BaseException:
            if self.n_tokens == 0:
                for stream in self._streams.values():
                    stream.begin_at(0)
            raise

    def _push_all(
        self, prepared: Mapping[StreamName, Prepared], n_workers: int, n_threads: int
    ) -> None:
        done: list[StreamWriter] = []
        patience = [True]

        def push(name: StreamName) -> StreamWriter:
            stream = self._streams[name]
            on_seal = None if n_workers > 1 else partial(self._spill, [*done, stream], patience)
            stream.push(prepared[name], on_seal, n_threads)
            return stream

        for stream in _map(push, prepared, n_workers):
            done.append(stream)
            self._spill(done, patience)

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise Closed(
                f"{self._where}: an append was interrupted half-way; close the session and open it "
                "again to go on from its last commit"
            )

    def _prepare(
        self, stream: StreamWriter, x: Tensor, k_state: KState, tables: dict[Rope, RopeTable]
    ) -> Prepared:
        start, n = stream.end, x.shape[1]
        rope = stream.spec.rope
        state: KState = k_state if rope is not None else "pre"
        table = None
        if rope is not None and state == "post" and n:
            table = tables.get(rope)
            if table is None or table.first_token > start:  # two threads may both: no harm
                table = tables[rope] = rope.table(start, start + n)
        if n <= PASS_TOKENS:
            coded = [to_coded(x, stream.spec, state, start, table)]
            return stream.prepare(lambda: coded, n, k_state, x.dtype.name)

        def chunks() -> Iterator[F32]:
            for at in range(0, n, PASS_TOKENS):
                part = x[:, at : at + PASS_TOKENS]
                yield to_coded(part, stream.spec, state, start + at, table)

        return stream.prepare(chunks, n, k_state, x.dtype.name)

    def _spill(self, streams: Sequence[StreamWriter], patience: list[bool]) -> None:
        """Store sealed frames ahead of the commit, so that they do not pile up in memory.

        Nobody sees them before the record says so. If they cannot be stored now, for lack of room
        or a lock, they stay in memory, and the commit will say.
        """
        if not patience[0] or sum(s.sealed_bytes for s in streams) < SPILL_BYTES:
            return

        def store(transaction: Transaction) -> None:
            self.stored(transaction)
            for stream in streams:
                for name, value in stream.take_sealed():
                    if value is not None:
                        transaction.put(name, value)

        try:
            n_bytes = sum(stream.sealed_bytes for stream in streams)
            self._room.write(store, keep=(self.record.id,), n_bytes=n_bytes)
        except KvError:
            patience[0] = False
            return
        for stream in streams:
            stream.sealed_stored()

    def _id_puts(self) -> Iterator[tuple[bytes, bytes]]:
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        for i, at in enumerate(range(0, len(ids), CHUNK_TOKENS)):
            key = keys.tokens_key(self.record.owner, self._first_chunk + i)
            chunk = self._first_chunk + i
            yield key, pack_ids(ids[at : at + CHUNK_TOKENS], self.record.owner, chunk)

    def _new_ids(self) -> Ids:
        """Return the ids of the tokens that are not committed yet."""
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        return ids[max(self.record.n_tokens - self._first_chunk * CHUNK_TOKENS, 0) :]

    def _forget_full_chunks(self) -> None:
        if self._ids:
            ids = np.concatenate(self._ids)
            n_full = len(ids) // CHUNK_TOKENS
            self._first_chunk += n_full
            self._ids = [ids[n_full * CHUNK_TOKENS :]]


def _map(work: Callable[[_A], _B], items: Iterable[_A], n_workers: int) -> Iterator[_B]:
    """Yield ``work(item)`` in order, several at a time."""
    if n_workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(n_workers) as pool:
        yield from pool.map(work, items)
