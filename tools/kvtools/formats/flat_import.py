"""Sessions of flat layers into an archive; see `flat_export`.

Rows are copied into frames. What `write_session` wrote comes back as it was, owner and errors
included, as long as its rows are the same. A session that has grown since then keeps the errors of
its old blocks; grown or cut, it keeps name and metadata, but not its token ids, which an archive
has for all tokens or for none. One without ``session.json`` is called what its folder is. K that is
kept after RoPE comes as raw values, to be coded anew.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from kvcodecs.codec import BlockCodec, codec_by_number
from kvcodecs.errors import Corrupt, KvError, NotFound
from kvcodecs.frame import (
    HEADER_BYTES,
    ErrorStats,
    extend_crc32c,
    header_tag,
    open_frame,
    pack_frame,
    seal_record,
)
from kvcodecs.ggml.codec import CODEC, GGMLParams
from kvcodecs.raw import Raw
from kvcodecs.rope import to_coded

import kvstore
from kvstore import flat, keys
from kvstore.files import read_file
from kvstore.flat.file import Bytes
from kvstore.place import FLAT_PREFIX, flat_folders
from kvstore.records import HEADER_MAGIC
from kvstore.session_record import SessionRecord, StreamName
from kvstore.token_ids import Ids
from kvtools.formats.flat_export import FORMAT, FRONT_SUFFIX, checksum
from kvtools.formats.flat_record import check_schemes, is_rotated, new_record
from kvtools.formats.importing import Incoming
from kvtools.formats.session_folder import (
    IDS_FILE,
    SESSION_FILE,
    Sidecar,
    read_ids,
    read_json,
    read_sidecar,
    unpack_errors,
)
from kvtools.formats.stream_copy import raw_payload, stream_file


class FlatSource:
    """One folder of flat layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sidecar = read_about(folder)
        self.name = folder.absolute().name if self.sidecar is None else self.sidecar.name
        #: Errors in `session.json` are those of tokens before this position.
        self._known_stop = 0
        self._record: SessionRecord | None = None

    def incoming(self, archive: kvstore.Archive) -> Incoming:
        """Return the session as it will be in an archive."""
        with flat.open(self.folder) as session:
            record = self._record = self._find_record(session)
            model, is_post = session.model, is_rotated(session)
            left_out = self._left_out(session)
        why = f"{self.folder}: keeps K after RoPE, archives keep it before" if is_post else ""
        return Incoming.of(
            *(archive, self.name, record, model, self._ids(record)),
            only_anew=why,
            left_out=left_out,
        )

    def problems(self) -> Iterator[KvError]:
        """Yield what is wrong with what is beside sound layers, of all that an archive needs."""
        if self.sidecar is None:
            return
        try:
            with flat.open(self.folder) as session:
                record = self._find_record(session)
                for stream in (None, *record.streams):
                    try:
                        if stream is None:
                            self._ids(record)
                        elif self._known_stop:
                            deque(self._stream(session, record, stream), maxlen=0)
                    except KvError as error:
                        yield error
        except KvError as error:
            yield error

    def _ids(self, record: SessionRecord) -> Ids | None:
        if self.sidecar is None or not record.has_ids:
            return None
        return read_ids(self.folder / IDS_FILE, self.sidecar)

    def is_about(self, session: flat.FlatSession) -> bool:
        """Whether ``session.json`` is about the tokens that there are."""
        known = None if self.sidecar is None else self.sidecar.record
        return known is not None and (known.first, known.n_tokens) == (session.start, session.stop)

    def error(self) -> ErrorStats:
        """Return the error of all rows that ``session.json`` is about."""
        merged = ErrorStats.none()
        if self.sidecar is not None:
            for stream in self.sidecar.record.streams:
                for error in self._errors(stream, self.sidecar.record.n_tokens):
                    merged = merged.merge(error)
        return merged

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield headers and frames; see `TkvSession.values`."""
        with flat.open(self.folder) as session:
            record = self._record or self._find_record(session)
            for stream in session.model.streams():
                yield from self._stream(session, record, stream)

    def _find_record(self, session: flat.FlatSession) -> SessionRecord:
        """Return the record that the session is to have."""
        check_schemes(session, self.folder)
        sidecar, is_post = self.sidecar, is_rotated(session)
        if sidecar is not None and sidecar.model != session.model:
            raise Corrupt(
                f"{self.folder / SESSION_FILE}: of another model than the layers; remove it"
            )
        grown = False
        if sidecar is not None and not is_post:
            grown = self._has_grown(session, sidecar)
            if grown or self.is_about(session):
                self._known_stop = sidecar.record.n_tokens
            if self.is_about(session):
                return sidecar.record
        return new_record(session, self.folder, self.name, sidecar, grown=grown)

    def _has_grown(self, session: flat.FlatSession, known: Sidecar) -> bool:
        """Whether all rows are there that ``session.json`` is about, and more."""
        first, stop = known.record.first, known.record.n_tokens
        if not (first == session.start and first < stop < session.stop):
            return False
        return all(
            checksum(session, stream, stop) == known.streams[stream_file(*stream)].get("crc32c")
            for stream in session.model.streams()
        )

    def _left_out(self, session: flat.FlatSession) -> list[str]:
        """Return what does not come along, and why."""
        texts = []
        known = None if self.sidecar is None else self.sidecar.record
        if known is not None and not self.is_about(session):
            what = "errors of new rows" if self._known_stop else "errors"
            texts.append(
                f"{'token ids and ' if known.has_ids else ''}{what} are left out: it was migrated "
                f"to flat layers with tokens [{known.first}, {known.n_tokens}), and has "
                f"[{session.start}, {session.stop}) now"
            )
        limits = [n for x in session.layers if (n := x.header.max_rows) is not None]
        if limits:
            texts.append(f"max_rows={min(limits)} is left out: archives have no rings")
        return [f"session {self.name!r}: {text}" for text in texts]

    def _errors(self, stream: StreamName, n_tokens: int) -> Iterator[ErrorStats]:
        """Yield the errors in ``session.json`` of the blocks that are as they were."""
        if self.sidecar is None:
            return
        record, name = self.sidecar.record, stream_file(*stream)
        state = record.streams[stream]
        n_known = max(record.n_tokens - state.start, 0)
        n_blocks = -(-n_known // state.block_tokens)
        found = unpack_errors(
            self.sidecar.streams[name].get("errors"), n_blocks, f"{self.folder} {name}"
        )
        is_same = n_tokens == record.n_tokens
        for _, error in zip(
            range(n_blocks if is_same else n_known // state.block_tokens), found, strict=False
        ):
            yield error

    def _stream(
        self, session: flat.FlatSession, record: SessionRecord, stream: StreamName
    ) -> Iterator[tuple[bytes, bytes]]:
        layer, kind = stream
        state, name = record.streams[stream], stream_file(layer, kind)
        if not state.has_header:
            return
        codec, header = self._coding(session, record, stream)
        front = self._front(session, record, stream)
        size, n_all, crc = state.block_tokens, max(record.n_tokens - state.start, 0), 0
        errors = self._errors(stream, record.n_tokens) if self._known_stop else iter(())
        for block in range(-(-n_all // size)):
            first = state.start + block * size
            stop = min(first + size, record.n_tokens)
            at = max(first, record.first)
            payload: Bytes | bytes
            if codec is CODEC:
                rows = session.layer(layer).stored_rows(kind, min(at, stop), stop)
                crc = extend_crc32c(crc, rows.reshape(-1))
                if at > first:
                    if len(front) != min(at, stop) - first:
                        raise Corrupt(
                            f"{self.folder / SESSION_FILE}: {len(front)} rows of {name} before the "
                            f"first token, in blocks of {size}"
                        )
                    rows = np.concatenate([front, rows])
                payload = rows.reshape(-1)
            else:
                payload = _raw(session, layer, first, stop)
            frame = pack_frame(
                codec=codec.number,
                kind=kind,
                owner=record.owner,
                layer=layer,
                first_token=first,
                n_tokens=stop - first,
                payload=payload,
                header_tag=header_tag(header),
                error=next(errors, ErrorStats.unknown()),
            )
            sealed = keys.frame_key(record.owner, layer, kind, block)
            tail = keys.stream_key(keys.TAIL, record.owner, layer, kind)
            yield (sealed if stop - first == size else tail), frame
        self._check_same(record, stream, f"{crc:08x}")
        key = keys.stream_key(keys.HEADER, record.owner, layer, kind)
        yield key, seal_record(HEADER_MAGIC, bytes([codec.number]) + header)

    def _coding(
        self, session: flat.FlatSession, record: SessionRecord, stream: StreamName
    ) -> tuple[BlockCodec, bytes]:
        layer, kind = stream
        spec, config = session.model.stream(layer, kind), record.codecs[kind]
        if isinstance(config, Raw):
            codec = codec_by_number(0)
            return codec, codec.pack(codec.fit(config, spec, lambda: ()))
        return CODEC, CODEC.pack(GGMLParams(spec, session.layer(layer).scheme(kind)))

    def _check_same(self, record: SessionRecord, stream: StreamName, crc: str) -> None:
        """Raise `Corrupt` for other rows than ``session.json`` is about."""
        if self.sidecar is None or self._known_stop != record.n_tokens:
            return
        layer, kind = stream
        if self.sidecar.streams[stream_file(layer, kind)].get("crc32c") != crc:
            raise Corrupt(
                f"{self.folder}: rows of layer {layer} {kind} are not those that were written; "
                f"delete {self.folder / SESSION_FILE} to take them as they are, as a session "
                "without token ids"
            )

    def _front(self, session: flat.FlatSession, record: SessionRecord, stream: StreamName) -> Bytes:
        """Return the rows of a stream before the first token; none where it begins a block."""
        state, (layer, kind) = record.streams[stream], stream
        n = min(record.first, record.n_tokens) - state.start
        if n <= 0:
            return np.empty((0, 0), np.uint8)
        path = self.folder / f"{stream_file(layer, kind)}{FRONT_SUFFIX}"
        row_bytes = session.layer(layer).header.row_bytes(kind)
        head, payload = open_frame(read_file(path, n * row_bytes + HEADER_BYTES), str(path))
        found = head.owner, head.layer, head.kind, head.first_token, head.n_tokens
        owner = record.owner if self.sidecar is None else self.sidecar.record.owner
        if found != (owner, layer, kind, state.start, n) or len(payload) != n * row_bytes:
            raise Corrupt(f"{path}: the first rows of another stream")
        return np.frombuffer(payload, np.uint8).reshape(n, row_bytes)


def read_about(folder: Path) -> Sidecar | None:
    """Return what ``session.json`` says, None where there is none."""
    path = folder / SESSION_FILE
    try:
        return read_sidecar(read_json(path), FORMAT, path)
    except NotFound:
        return None


def sessions(folder: str) -> list[FlatSource]:
    """Return the sessions that are in a folder, or that are the folder."""
    return [FlatSource(path) for path in folders_in(folder)]


def folders_in(folder: str) -> list[Path]:
    """Return the folders of sessions; `NotFound` if there are none."""
    found = flat_folders(folder)
    if not found:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(folder)  # one that nobody may read says so
        raise NotFound(f"{FLAT_PREFIX}{folder}: no sessions of flat layers")
    return found


def _raw(session: flat.FlatSession, layer: int, start: int, stop: int) -> bytes:
    """Return the payload of a raw frame of K that is kept after RoPE."""
    k, _ = session.layer(layer).read_rows(start, stop, kinds=("k",), k_state="pre")
    spec = session.model.stream(layer, "k")
    return raw_payload(to_coded(np.asarray(k), spec), spec, "float32")
