"""Appending to a session: all streams together, and one atomic commit for them.

FORMAT.md section 5 gives the order of a commit and what a crash at each point leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.errors import Corrupt, Full, InvalidArgument, Locked, NotFound
from kvcodecs.frame import ErrorStats
from kvcodecs.rope import Rope, RopeTable, check_tensor, to_coded
from kvcodecs.spec import F32, Kind, KState, StreamSpec

from . import keys
from .backend import Backend, Lease, Snapshot
from .identity import Model
from .reader import Reader, pieces
from .records import (
    CHUNK_TOKENS,
    MAX_TOKENS,
    Ids,
    SessionRecord,
    StreamName,
    StreamState,
    check_ids,
    pack_ids,
    unpack_ids,
)
from .stream import Prepared, StreamWriter

Tensor: TypeAlias = npt.NDArray[Any]
Tensors: TypeAlias = "Tensor | Sequence[Tensor | None] | None"

#: Tokens that are brought into the coded domain at a time.
PASS_TOKENS: Final = 1024
#: Sealed frames are stored ahead of the commit once there are this many bytes of them.
SPILL_BYTES: Final = 8 << 20
#: What ``block_tokens="auto"`` aims at: frames of 32 KB at 2.5 bits per value. Pages of 4 KB
#: then waste 6 % on average, which leaves room for records within 1.08 times the frames.
_FRAME_BYTES: Final = 32768
_BITS_PER_VALUE: Final = 2.5
_MIN_BLOCK: Final = 128
_MAX_BLOCK: Final = 1024


def auto_block_tokens(spec: StreamSpec) -> int:
    """Return the least power of two from 128 to 1024 whose frames reach about 32 KB.

    LMDB rounds values up to pages of 4 KB, so small frames waste much.
    """
    block = _MIN_BLOCK
    while block < _MAX_BLOCK and block * spec.channels * _BITS_PER_VALUE / 8 < _FRAME_BYTES:
        block *= 2
    return block


def make_streams(record: SessionRecord, model: Model, where: str) -> dict[StreamName, StreamWriter]:
    """Return writers for all streams of a session, at their beginning."""
    return {
        (layer, kind): StreamWriter(
            record.owner,
            layer,
            kind,
            model.stream(layer, kind),
            record.codecs[kind],
            record.fit_tokens,
            record.streams[layer, kind],
            f"{where} layer {layer} {kind}",
        )
        for layer, kind in model.streams()
    }


class SessionWriter:
    """The one appender of a session; made from its committed state, under its lease."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        record: SessionRecord,
        reader: Reader,
        snapshot: Snapshot,
        lease: Lease,
        lock_timeout: float,
    ) -> None:
        self._backend, self._name, self._lease = backend, name, lease
        self._timeout = lock_timeout
        self._where = reader.where
        self._model = reader.model
        self.record = record
        self.n_tokens = record.n_tokens
        self._streams = make_streams(record, reader.model, reader.where)
        self._has_ids, self._post = record.has_ids, record.post
        # Token ids from the last full chunk on.
        self._first_chunk = record.n_tokens // CHUNK_TOKENS if record.has_ids else 0
        self._ids: list[Ids] = []
        self._resume(record, reader, snapshot)

    def append(
        self, k: Tensors, v: Tensors, k_state: KState, token_ids: object, start: int | None
    ) -> None:
        """Check everything, then push everything. See `Session.append`."""
        if k_state not in ("pre", "post"):
            raise InvalidArgument(f"{self._where}: k_state {k_state!r}, expected 'pre' or 'post'")
        if start is not None and start != self.n_tokens:
            raise InvalidArgument(
                f"{self._where}: append at start={start}, but n_tokens={self.n_tokens} tokens "
                f"are there ({self.record.n_tokens} committed)"
            )
        tensors = self._tensors({"k": k, "v": v})
        n_new = max(x.shape[1] for x in tensors.values())
        if self.n_tokens + n_new > MAX_TOKENS:
            raise InvalidArgument(f"{self._where}: more than {MAX_TOKENS} tokens")
        ids = self._check_ids(token_ids, n_new)
        starts = {name: self._check_count(name, x.shape[1], n_new) for name, x in tensors.items()}
        tables: dict[Rope, RopeTable] = {}
        prepared: dict[StreamName, Prepared] = {}
        for name, x in tensors.items():
            stream = self._streams[name]
            moved = starts[name]
            if moved is not None:
                stream.begin_at(moved)
            try:
                prepared[name] = self._prepare(stream, x, k_state, tables)
            except InvalidArgument:
                if self.n_tokens == 0:
                    for other in self._streams.values():
                        other.begin_at(0)
                raise
        patience = [True]
        for name, item in prepared.items():
            self._streams[name].push(item, lambda: self._spill(patience))
        if ids is not None and n_new:
            self._ids.append(ids)
            self._has_ids = True
        self._post = self._post or any(item.post and item.n_tokens for item in prepared.values())
        self.n_tokens += n_new

    def commit(self) -> SessionRecord:
        """Make everything appended durable in one transaction. See `Session.commit`."""
        if self.n_tokens == self.record.n_tokens:
            return self.record
        for stream in self._streams.values():
            stream.fix_if_due()
        record = replace(
            self.record,
            n_tokens=self.n_tokens,
            streams={name: stream.state for name, stream in self._streams.items()},
            has_ids=self._has_ids,
            post=self._post,
        )
        puts = [put for stream in self._streams.values() for put in stream.puts()]
        puts += self._id_puts()
        # In key order: a tree that grows at its end fills its pages.
        puts.sort(key=lambda put: put[0])
        key = keys.session_key(self._name)
        with self._backend.write(self._timeout) as transaction:
            if transaction.get(key) is None:
                raise NotFound(f"{self._where}: deleted while it was appended to")
            for name, value in puts:
                if value is None:
                    transaction.delete(name)
                else:
                    transaction.put(name, value)
            transaction.put(key, record.pack())
        for stream in self._streams.values():
            stream.committed()
        self._forget_full_chunks()
        self.record = record
        return record

    def close(self) -> None:
        """Drop what was not committed and give the lease back."""
        self._lease.release()

    def _resume(self, record: SessionRecord, reader: Reader, snapshot: Snapshot) -> None:
        n = record.n_tokens
        for (layer, kind), stream in self._streams.items():
            state = record.streams[layer, kind]
            if state.has_header:
                stream.resume_header(*reader.header(snapshot, layer, kind))
                n_sealed, n_tail = divmod(max(n - state.start, 0), state.block_tokens)
                blocks = replace(state, n_head=0)
                tail = [
                    reader.decode(snapshot, piece, layer, kind)
                    for piece in pieces(record.owner, layer, kind, blocks, n, n - n_tail, n)
                ]
                coded, error, _ = tail[0] if tail else (None, ErrorStats.none(), "")
                stream.resume_blocks(n_sealed, coded, error)
            elif n > state.start:
                (piece,) = pieces(record.owner, layer, kind, state, n, state.start, n)
                coded, _, dtype = reader.decode(snapshot, piece, layer, kind)
                stream.resume_head(coded, dtype, post=record.post and kind == "k")
        n_ids = n % CHUNK_TOKENS
        if self._has_ids and n_ids:
            self._ids = [read_ids(snapshot, record, n - n_ids, n, self._where)]

    def _tensors(self, given: Mapping[Kind, Tensors]) -> dict[StreamName, Tensor]:
        """Return the tensor of every stream, checked for shape and dtype."""
        found: dict[StreamName, Tensor] = {}
        for kind, tensors in given.items():
            n_layers = self._model.n_layers
            items: Any = [None] * n_layers if tensors is None else tensors
            if len(items) != n_layers:
                raise InvalidArgument(
                    f"{self._where}: {kind} has {len(items)} layers, the model {n_layers}"
                )
            for layer, item in enumerate(items):
                where = f"{self._where} layer {layer} {kind}"
                has_stream = (layer, kind) in self._streams
                if (item is not None) != has_stream:
                    what = "given, but the model has none" if item is not None else "missing"
                    raise InvalidArgument(f"{where}: {what}")
                if has_stream:
                    x = np.asarray(item)
                    check_tensor(x, self._model.stream(layer, kind), where)
                    found[layer, kind] = x
        return found

    def _check_count(self, name: StreamName, n: int, n_new: int) -> int | None:
        """Check a stream's number of new tokens; return where it starts if that moves."""
        layer, kind = name
        if n == n_new:
            return None
        windowed = self._model.layers[layer].window is not None
        if windowed and self.n_tokens == 0:
            return n_new - n
        hint = "; only the first append may be shorter" if windowed else ""
        raise InvalidArgument(
            f"{self._where} layer {layer} {kind}: {n} tokens, other layers bring {n_new}{hint}"
        )

    def _check_ids(self, token_ids: object, n_new: int) -> Ids | None:
        if token_ids is None:
            if self._has_ids and n_new:
                raise InvalidArgument(f"{self._where}: token_ids missing; earlier tokens have them")
            return None
        if self.n_tokens and not self._has_ids:
            raise InvalidArgument(f"{self._where}: token_ids given; earlier tokens have none")
        try:
            return check_ids(token_ids, n_new)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._where}: {error}") from error

    def _prepare(
        self, stream: StreamWriter, x: Tensor, k_state: KState, tables: dict[Rope, RopeTable]
    ) -> Prepared:
        start, n = stream.end, x.shape[1]
        rope = stream.spec.rope
        state: KState = k_state if rope is not None else "pre"
        table = None
        if rope is not None and state == "post" and n:
            table = tables.get(rope)
            if table is None or table.first_token > start:
                table = tables[rope] = rope.table(start, start + n)
        if n <= PASS_TOKENS:
            coded = [to_coded(x, stream.spec, state, start, table)]
            return stream.prepare(lambda: coded, n, k_state, x.dtype.name)

        def chunks() -> Iterator[F32]:
            for at in range(0, n, PASS_TOKENS):
                part = x[:, at : at + PASS_TOKENS]
                yield to_coded(part, stream.spec, state, start + at, table)

        return stream.prepare(chunks, n, k_state, x.dtype.name)

    def _spill(self, patience: list[bool]) -> None:
        """Store sealed frames ahead of the commit, so that they do not pile up in memory.

        Nobody sees them before the record says so. No room or no lock now is no failure: they
        stay in memory, and the commit will say.
        """
        streams = list(self._streams.values())
        if not patience[0] or sum(s.sealed_bytes for s in streams) < SPILL_BYTES:
            return
        try:
            with self._backend.write(self._timeout) as transaction:
                for stream in streams:
                    for name, value in stream.take_sealed():
                        if value is not None:
                            transaction.put(name, value)
        except (Full, Locked):
            patience[0] = False
            return
        for stream in streams:
            stream.sealed_stored()

    def _id_puts(self) -> Iterator[tuple[bytes, bytes]]:
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        for i, at in enumerate(range(0, len(ids), CHUNK_TOKENS)):
            key = keys.tokens_key(self.record.owner, self._first_chunk + i)
            yield key, pack_ids(ids[at : at + CHUNK_TOKENS])

    def _forget_full_chunks(self) -> None:
        if self._ids:
            ids = np.concatenate(self._ids)
            n_full = len(ids) // CHUNK_TOKENS
            self._first_chunk += n_full
            self._ids = [ids[n_full * CHUNK_TOKENS :]]


def read_ids(snapshot: Snapshot, record: SessionRecord, start: int, stop: int, where: str) -> Ids:
    """Return the committed token ids ``[start, stop)``; a copy.

    Raises
    ------
    Truncated, Corrupt
        A chunk is missing or damaged.
    """
    parts: list[Ids] = [np.empty(0, np.int64)]
    for chunk in range(start // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS)):
        first = chunk * CHUNK_TOKENS
        ids = read_id_chunk(snapshot, record, chunk, where)
        parts.append(ids[max(start - first, 0) : stop - first])
    return np.concatenate(parts)


def read_id_chunk(snapshot: Snapshot, record: SessionRecord, chunk: int, where: str) -> Ids:
    """Return the committed ids of one chunk."""
    where = f"{where} token ids chunk {chunk}"
    value = snapshot.get(keys.tokens_key(record.owner, chunk))
    if value is None:
        raise Corrupt(f"{where}: missing")
    n_expected = min(CHUNK_TOKENS, record.n_tokens - chunk * CHUNK_TOKENS)
    return unpack_ids(value, n_expected, where)


def new_layout(
    model: Model, block_tokens: int | str, has_header: bool
) -> dict[StreamName, StreamState]:
    """Return the layout of a session without tokens."""
    if block_tokens != "auto" and not (
        isinstance(block_tokens, int) and 1 <= block_tokens <= 1 << 20
    ):
        raise InvalidArgument(f"block_tokens {block_tokens!r}: 'auto' or 1 to {1 << 20}")
    layout: dict[StreamName, StreamState] = {}
    for name in model.streams():
        auto = auto_block_tokens(model.stream(*name))
        n = auto if isinstance(block_tokens, str) else block_tokens
        layout[name] = StreamState(n, has_header=has_header)
    return layout


def check_configs(codec: CodecConfig | Mapping[Kind, CodecConfig]) -> dict[Kind, CodecConfig]:
    """Return one configuration per kind.

    Raises
    ------
    InvalidArgument
        Not a configuration, or a mapping with other keys than "k" and "v".
    """
    configs: dict[Kind, CodecConfig]
    if isinstance(codec, Mapping):
        if set(codec) != {"k", "v"}:
            raise InvalidArgument(f"codec: a mapping needs the keys 'k' and 'v', has {list(codec)}")
        configs = {"k": codec["k"], "v": codec["v"]}
    else:
        configs = {"k": codec, "v": codec}
    for config in configs.values():
        codec_for(config)
    return configs
