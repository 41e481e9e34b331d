"""Sessions of flat layers into an archive; see `flat_export`.

Rows are copied into frames. What `write_session` wrote comes back as it was, owner and errors
included, as long as its rows are the same. A session that has grown or was cut since then keeps its
name and metadata, but not its token ids; one without ``session.json`` is called what its folder is.
Errors of their rows nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.frame import extend_crc32c, header_tag, open_frame, pack_frame, seal_record
from kvcodecs.ggml import GGML
from kvcodecs.ggml.codec import CODEC, GGMLParams
from kvcodecs.spec import Kind

import kvstore
from kvstore import Model, flat, keys
from kvstore.flat.file import Bytes
from kvstore.flat.folder import read_session
from kvstore.layout import new_layout
from kvstore.metadata import canonical_json
from kvstore.migration.needed import make_item
from kvstore.place import FLAT_PREFIX, FLAT_SIGN, flat_folders
from kvstore.records import HEADER_MAGIC
from kvstore.session_record import SessionRecord, StreamName, StreamState
from kvtools.formats.flat_export import FORMAT, FRONT_SUFFIX
from kvtools.formats.importing import Incoming
from kvtools.formats.session_folder import (
    IDS_FILE,
    SESSION_FILE,
    Sidecar,
    read_ids_file,
    read_json,
    read_sidecar,
    unpack_errors,
)
from kvtools.formats.stream_copy import first_id, stream_file

_PERSON = b"kvs flat"


class FlatSource:
    """One folder of flat layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sidecar = read_about(folder)
        self.name = folder.absolute().name if self.sidecar is None else self.sidecar.name
        #: Whether rows and token ids are those that `session.json` is about.
        self._is_same = False
        self._record: SessionRecord | None = None

    def incoming(self, archive: kvstore.Archive) -> Incoming:
        """Return the session as it will be in an archive."""
        with flat.open(self.folder) as session:
            record = self._record = self._find_record(session)
            model = session.model
        ids = None
        if record.has_ids:
            ids = read_ids_file(self.folder / IDS_FILE, record.n_tokens - first_id(record))
        where = f"{archive.path}: session {self.name!r}"
        item = make_item(self.name, record.pack(self.name), record, model, where)
        return Incoming(archive, item, ids)

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield headers and frames; see `TkvSession.values`."""
        with flat.open(self.folder) as session:
            record = self._record or self._find_record(session)
            for stream in session.model.streams():
                yield from self._stream(session, record, stream)

    def _find_record(self, session: flat.FlatSession) -> SessionRecord:
        """Return the record that the session is to have."""
        _check(session, self.folder)
        sidecar, number = self.sidecar, read_session(self.folder)[1]
        if sidecar is not None and sidecar.model != session.model:
            raise Corrupt(
                f"{self.folder / SESSION_FILE}: of another model than the layers; remove it"
            )
        if sidecar is not None:
            known = sidecar.record
            self._is_same = (known.first, known.n_tokens) == (session.start, session.stop)
            if self._is_same:
                return known
        return _new_record(session, self.folder, self.name, number, sidecar)

    def _stream(
        self, session: flat.FlatSession, record: SessionRecord, stream: StreamName
    ) -> Iterator[tuple[bytes, bytes]]:
        layer, kind = stream
        state, name = record.streams[stream], stream_file(layer, kind)
        if not state.has_header:
            return
        about: dict[str, Any] = {}
        if self._is_same and self.sidecar is not None:
            about = self.sidecar.streams[name]
        header = CODEC.pack(
            GGMLParams(session.model.stream(layer, kind), session.layer(layer).scheme(kind))
        )
        front = self._front(record, stream)
        size, n_all, crc = state.block_tokens, max(record.n_tokens - state.start, 0), 0
        errors = unpack_errors(about.get("errors"), -(-n_all // size), f"{self.folder} {name}")
        for block, error in enumerate(errors):
            first = state.start + block * size
            stop = min(first + size, record.n_tokens)
            at = max(first, record.first)
            rows = session.layer(layer).stored_rows(kind, min(at, stop), stop)
            crc = extend_crc32c(crc, rows.reshape(-1))
            if at > first:
                if len(front) != at - first:
                    raise Corrupt(f"{self.folder / name}{FRONT_SUFFIX}: {len(front)} rows")
                rows = np.concatenate([front, rows])
            frame = pack_frame(
                codec=CODEC.number,
                kind=kind,
                owner=record.owner,
                layer=layer,
                first_token=first,
                n_tokens=stop - first,
                payload=rows.reshape(-1),
                header_tag=header_tag(header),
                error=error,
            )
            sealed = keys.frame_key(record.owner, layer, kind, block)
            tail = keys.stream_key(keys.TAIL, record.owner, layer, kind)
            yield (sealed if stop - first == size else tail), frame
        if about.get("crc32c", f"{crc:08x}") != f"{crc:08x}":
            raise Corrupt(
                f"{self.folder}: rows of layer {layer} {kind} are not those that were written; "
                f"delete {self.folder / SESSION_FILE} to take them as they are, as a session "
                "without token ids"
            )
        key = keys.stream_key(keys.HEADER, record.owner, layer, kind)
        yield key, seal_record(HEADER_MAGIC, bytes([CODEC.number]) + header)

    def _front(self, record: SessionRecord, stream: StreamName) -> Bytes:
        """Return the rows of a stream before the first token; none where it begins a block."""
        state, (layer, kind) = record.streams[stream], stream
        n = min(record.first, record.n_tokens) - state.start
        if n <= 0:
            return np.empty((0, 0), np.uint8)
        path = self.folder / f"{stream_file(layer, kind)}{FRONT_SUFFIX}"
        try:
            head, payload = open_frame(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise NotFound(f"{path}: not there") from None
        found = head.owner, head.layer, head.kind, head.first_token, head.n_tokens
        if found != (record.owner, layer, kind, state.start, n):
            raise Corrupt(f"{path}: the first rows of another stream")
        return np.frombuffer(payload, np.uint8).reshape(n, -1)


def read_about(folder: Path) -> Sidecar | None:
    """Return what ``session.json`` says, None where there is none."""
    path = folder / SESSION_FILE
    return read_sidecar(read_json(path), FORMAT, path) if path.exists() else None


def sessions(folder: str) -> list[FlatSource]:
    """Return the sessions that are in a folder, or that are the folder."""
    found = flat_folders(folder)
    if not found:
        raise NotFound(f"{FLAT_PREFIX}{folder}: no sessions of flat layers")
    return [FlatSource(path) for path in found]


def _check(session: flat.FlatSession, folder: Path) -> None:
    """Raise `InvalidArgument` if its rows are not those of an archive's frames."""
    for index, layer in enumerate(session.layers):
        if layer.k_state == "post" and layer.spec("k").rope is not None:
            raise InvalidArgument(
                f"{folder}: layer {index} keeps K after RoPE, archives keep it before; read it "
                "with kvstore.flat, and append it to a session of an archive"
            )
        for kind in layer.header.kinds:
            first = next(x for x in session.layers if kind in x.header.kinds)
            if layer.scheme(kind) != first.scheme(kind):
                raise InvalidArgument(f"{folder}: layers with different schemes of {kind}")


def _new_record(
    session: flat.FlatSession, folder: Path, name: str, number: int, known: Sidecar | None
) -> SessionRecord:
    """Return a record of the rows that there are; the same whenever they are."""
    start, stop = session.start, session.stop
    model: Model = session.model
    identity = canonical_json({"name": name, "session": number, "start": start, "stop": stop})
    digest = blake2b(identity, digest_size=8, person=_PERSON).digest()
    owner = int.from_bytes(digest, "big") or 1
    updated = int(max(path.stat().st_mtime for path in folder.glob("layer-*.kvf")))
    if known is None:
        schemes = _schemes(session)
        record = SessionRecord(
            id=owner,
            owner=owner,
            model=model.digest,
            n_tokens=0,
            codecs=schemes,
            fit_tokens=128,
            streams=new_layout(model, schemes, "auto", True, str(folder)),
            created=int((folder / FLAT_SIGN).stat().st_mtime),
        )
    else:
        record = known.record
    return replace(
        record,
        id=owner,
        owner=owner,
        n_tokens=stop,
        first=start,
        streams={
            stream: StreamState(state.block_tokens, start, has_header=True)
            for stream, state in record.streams.items()
        },
        n_faithful=None,
        has_ids=False,
        finished=False,
        updated=updated,
    )


def _schemes(session: flat.FlatSession) -> dict[Kind, GGML]:
    k = session.layers[0].scheme("k").name
    v = next((x.scheme("v").name for x in session.layers if x.header.v is not None), k)
    return {"k": GGML(k), "v": GGML(v)}
