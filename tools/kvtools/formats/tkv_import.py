"""Folders of `.tkv` stream files into an archive; see `tkv_export` for what is in them.

Payloads are copied. What `write_session` wrote comes back as it was, owner and errors included,
as long as no file has changed. Files without ``session.json`` are a session as well: of a model
of which only the geometry is known, with errors that nobody knows.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcodecs.errors import Corrupt, InvalidArgument, NotFound, Unsupported
from kvcodecs.frame import header_tag, open_frame, pack_frame, seal_record
from kvcodecs.spec import KINDS, Kind
from kvcodecs.tkv1 import TKV1, TkvFile
from kvcodecs.tkv1.codec import CODEC
from kvcodecs.tkv1.params import TKV1Params

import kvstore
from kvstore import LayerSpec, Model, keys
from kvstore.files import read_file
from kvstore.identity import MAX_LAYERS
from kvstore.records import HEADER_MAGIC
from kvstore.session_record import SessionRecord, StreamState
from kvtools.formats.importing import Incoming
from kvtools.formats.registry import tkv_folders
from kvtools.formats.session_folder import (
    IDS_FILE,
    SESSION_FILE,
    Sidecar,
    most_bytes,
    read_ids,
    read_json,
    read_sidecar,
    unpack_errors,
)
from kvtools.formats.stream_copy import stream_file
from kvtools.formats.tkv_export import FORMAT, checksum

_STREAM = re.compile(r"([kv])_([0-9]{1,6})\.tkv")


class TkvSession:
    """One folder of stream files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / SESSION_FILE
        self.is_bare = not os.path.lexists(path)
        self._sidecar = (
            _guess(folder) if self.is_bare else read_sidecar(read_json(path), FORMAT, path)
        )
        self.name = self._sidecar.name

    def incoming(self, archive: kvstore.Archive) -> Incoming:
        """Return the session as it will be in an archive."""
        sidecar = self._sidecar
        ids = read_ids(self.folder / IDS_FILE, sidecar)
        return Incoming.of(archive, self.name, sidecar.record, sidecar.model, ids)

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield headers, frames and heads.

        Raises
        ------
        NotFound, Corrupt, Truncated, Unsupported
            A file is missing, is not what was written, or is none that frames can be made of.
        """
        for layer, kind in self._sidecar.model.streams():
            yield from self._stream(layer, kind)

    def _stream(self, layer: int, kind: Kind) -> Iterator[tuple[bytes, bytes]]:
        record = self._sidecar.record
        state = record.streams[layer, kind]
        name = stream_file(layer, kind)
        about = self._sidecar.streams.get(name, {})
        if state.has_header:
            path = self.folder / f"{name}.tkv"
            if not self.is_bare and checksum(_there(path)) != about.get("crc32c"):
                raise Corrupt(
                    f"{path}: is not what was written; delete {self.folder / SESSION_FILE} to take "
                    "the files as they are, as a session of an unknown model"
                )
            yield from self._frames(path, layer, kind, state, about)
        if state.n_head:
            path, spec = self.folder / f"{name}.head", self._sidecar.model.stream(layer, kind)
            data = read_file(path, most_bytes(spec, state.n_head))
            head, _ = open_frame(data, str(path))
            found = head.owner, head.layer, head.kind, head.first_token, head.n_tokens
            if found != (record.owner, layer, kind, state.start, state.n_head):
                raise Corrupt(f"{path}: the raw head of another stream")
            yield keys.stream_key(keys.HEAD, record.owner, layer, kind), data

    def _frames(
        self, path: Path, layer: int, kind: Kind, state: StreamState, about: dict[str, Any]
    ) -> Iterator[tuple[bytes, bytes]]:
        owner, where = self._sidecar.record.owner, str(path)
        # Unmapped once nothing refers to it.
        file = TkvFile.parse(_mapped(_there(path)))
        params = self._params(file, layer, kind, state, about, where)
        header = CODEC.pack(params)
        tag = header_tag(header)
        if about.get("header_tag", f"{tag:016x}") != f"{tag:016x}":
            raise Corrupt(f"{where}: its header is not what was written")
        errors = unpack_errors(about.get("errors"), file.n_blocks, where)
        for block, error in enumerate(errors):
            first = block * state.block_tokens
            n_tokens = min(state.block_tokens, file.n_tokens - first)
            frame = pack_frame(
                codec=CODEC.number,
                kind=kind,
                owner=owner,
                layer=layer,
                first_token=state.start + first,
                n_tokens=n_tokens,
                payload=file.block_entries(block),
                header_tag=tag,
                error=error,
            )
            sealed = keys.frame_key(owner, layer, kind, block)
            tail = keys.stream_key(keys.TAIL, owner, layer, kind)
            yield (sealed if n_tokens == state.block_tokens else tail), frame
        body = bytes([CODEC.number]) + header
        key = keys.stream_key(keys.HEADER, owner, layer, kind)
        yield key, seal_record(HEADER_MAGIC, body)

    def _params(
        self,
        file: TkvFile,
        layer: int,
        kind: Kind,
        state: StreamState,
        about: dict[str, Any],
        where: str,
    ) -> TKV1Params:
        p, spec = file.params, self._sidecar.model.stream(layer, kind)
        if p.layout != "lane":
            raise Unsupported(
                f"{where}: the stream layout, which no frame can hold: decode it with the "
                "numcodecs codec tkv1, and pack the values"
            )
        n_tokens = max(self._sidecar.record.n_tokens - state.start, 0)
        found = p.kind, p.heads, p.head_dim, p.block_tokens, file.n_tokens
        if found != (kind, spec.heads, spec.head_dim, state.block_tokens, n_tokens):
            raise Corrupt(f"{where}: {found}, other than {SESSION_FILE} says")
        sink = about.get("sink", p.sink)
        if type(sink) is not int or max(sink - state.start, 0) != p.sink:
            raise Corrupt(f"{where}: sinks {p.sink} in the file, {sink} of the session")
        lanes = file.lane_params()
        return replace(lanes, spec=spec, sink=sink)


def sessions(folder: str) -> list[TkvSession]:
    """Return the sessions of a folder of stream files."""
    return [TkvSession(path) for path in tkv_folders(folder)]


def _there(path: Path) -> Path:
    if not path.is_file():
        raise NotFound(f"{path}: not there")
    return path


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise Corrupt(f"{path}: empty") from None


def _guess(folder: Path) -> Sidecar:
    """Return what can be said of files without ``session.json``."""
    headers: dict[tuple[int, Kind], TkvFile] = {}
    for path in sorted(folder.iterdir()):
        match = _STREAM.fullmatch(path.name)
        if match is None:
            continue
        layer = int(match[2])
        if layer >= MAX_LAYERS:
            raise InvalidArgument(f"{path}: layers are numbered 0 to {MAX_LAYERS - 1}")
        file = TkvFile.parse(_mapped(_there(path)))
        kind: Kind = "k" if match[1] == "k" else "v"
        if file.params.kind != kind:
            raise Corrupt(f"{path}: is {file.params.kind.upper()} by its header")
        headers[layer, kind] = file
    n_layers = 1 + max((layer for layer, _ in headers), default=-1)
    if not n_layers:
        raise NotFound(f"{folder}: no {SESSION_FILE} and no files k_000.tkv")
    layers = []
    for layer in range(n_layers):
        k, v = (headers.get((layer, kind)) for kind in KINDS)
        if k is None:
            raise NotFound(f"{folder / stream_file(layer, 'k')}.tkv: not there")
        if v is not None and v.params.heads != k.params.heads:
            raise InvalidArgument(f"{folder}: layer {layer}: K and V differ in their heads")
        layers.append(
            LayerSpec(k.params.heads, k.params.head_dim, v.params.head_dim if v else None)
        )
    model = Model("unknown", tuple(layers))
    counts = {file.n_tokens for file in headers.values()}
    if len(counts) != 1:
        raise InvalidArgument(f"{folder}: streams of {sorted(counts)} tokens")
    steps = {kind: headers.get((0, kind)) for kind in KINDS}
    codecs = {
        kind: TKV1() if file is None else TKV1(step=file.params.step, ar=file.params.ar)
        for kind, file in steps.items()
    }
    owner, now = secrets.randbelow((1 << 64) - 1) + 1, int(time.time())
    record = SessionRecord(
        id=owner,
        owner=owner,
        model=model.digest,
        n_tokens=counts.pop(),
        codecs=codecs,
        fit_tokens=128,
        streams={
            name: StreamState(headers[name].params.block_tokens, has_header=True)
            for name in model.streams()
        },
        created=now,
        updated=now,
    )
    return Sidecar(folder.name, record, model, {})
