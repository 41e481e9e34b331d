"""Sessions that were written as zarr format 2 into an archive; see `zarr2_export`.

Payloads are copied back. A last block that is padded there is coded again without its padding: the
values are the same, and so are the bytes, since coding decoded values again gives them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.codec import BlockCodec, codec_by_number
from kvcodecs.container import BLOCK_CODECS, read_blocks, read_head
from kvcodecs.errors import Corrupt, KvError, NotFound
from kvcodecs.frame import header_tag, pack_frame, seal_record
from kvcodecs.shared import shared_digest
from kvcodecs.spec import Kind, StreamSpec

import kvstore
from kvstore import keys
from kvstore.files import read_file
from kvstore.records import HEADER_MAGIC
from kvstore.session_record import StreamState
from kvstore.shared_objects import object_puts
from kvtools.formats.importing import Incoming
from kvtools.formats.session_folder import (
    ZARR2_FILE,
    most_bytes,
    read_ids,
    read_json,
    read_sidecar,
    session_folders,
    unpack_errors,
)
from kvtools.formats.stream_copy import raw_payload, stream_file
from kvtools.formats.zarr2_export import FORMAT, HEAD_SUFFIX, IDS_NAME, decode_payload

_MOST_SHARED_BYTES = 1 << 30


class Zarr2Session:
    """One group of arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ZARR2_FILE
        data = read_json(path)
        if not isinstance(data, dict) or "kvstore" not in data:
            raise NotFound(f"{path}: no session that kvstore migrate wrote")
        self._sidecar = read_sidecar(data["kvstore"], FORMAT, path)
        self.name = self._sidecar.name

    def incoming(self, archive: kvstore.Archive) -> Incoming:
        """Return the session as it will be in an archive."""
        sidecar = self._sidecar
        ids = read_ids(self.folder / IDS_NAME / "0", sidecar)
        return Incoming.of(archive, self.name, sidecar.record, sidecar.model, ids)

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield headers, frames and heads; see `TkvSession.values`."""
        for layer, kind in self._sidecar.model.streams():
            yield from self._stream(layer, kind)

    def _stream(self, layer: int, kind: Kind) -> Iterator[tuple[bytes, bytes]]:
        record = self._sidecar.record
        state = record.streams[layer, kind]
        name = stream_file(layer, kind)
        about = self._sidecar.streams[name]
        try:
            if state.has_header:
                yield from self._frames(self.folder / name, layer, kind, state, about)
            if state.n_head:
                yield self._head(self.folder / f"{name}{HEAD_SUFFIX}", layer, kind, state, about)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, KvError):
                raise
            raise Corrupt(f"{self.folder / name}: {error!r}") from error

    def _frames(
        self, folder: Path, layer: int, kind: Kind, state: StreamState, about: dict[str, Any]
    ) -> Iterator[tuple[bytes, bytes]]:
        record, spec = self._sidecar.record, self._sidecar.model.stream(layer, kind)
        codec = codec_by_number(int(about["codec"]))
        size, n_all = state.block_tokens, max(record.n_tokens - state.start, 0)
        n_blocks = -(-n_all // size)
        errors = unpack_errors(about["errors"], n_blocks, str(folder))
        header = base64.b64decode(about["header"]) if not n_blocks else b""
        objects = {}
        for text in about.get("shared", []):
            data = base64.b64decode(text)
            objects[shared_digest(data)] = data
        for block, error in enumerate(errors):
            path = folder / f"0.{block}.0"
            params, payload, original, n_there = self._chunk(path, codec, spec, size, about)
            if header and original != header:
                raise Corrupt(f"{path}: coded with other statistics than the chunks before")
            header = original
            first, n_tokens = state.start + block * size, min(size, n_all - block * size)
            objects = codec.shared(params)
            own = codec.unpack(spec, header, objects.__getitem__)
            if n_there < n_tokens:
                raise Corrupt(f"{path}: {n_there} tokens, expected {n_tokens}")
            if n_there > n_tokens:
                plain = replace(params, spec=StreamSpec(kind, spec.heads, spec.head_dim))
                coded = np.empty((spec.heads, n_there, spec.head_dim), np.float32)
                decode_payload(codec, plain, payload, coded)
                encoder = codec.encoder(own, first)
                kept = np.ascontiguousarray(coded[:, :n_tokens])
                encoder.resume(kept, payload, error)
                payload = memoryview(encoder.payload())
            frame = pack_frame(
                codec=codec.number,
                kind=kind,
                owner=record.owner,
                layer=layer,
                first_token=first,
                n_tokens=n_tokens,
                payload=payload,
                header_tag=header_tag(header),
                error=error,
            )
            sealed = keys.frame_key(record.owner, layer, kind, block)
            tail = keys.stream_key(keys.TAIL, record.owner, layer, kind)
            yield (sealed if n_tokens == size else tail), frame
        if about["header_tag"] != f"{header_tag(header):016x}":
            raise Corrupt(f"{folder}: another stream header than was written")
        if not objects.keys() >= set(codec.needs(header)):
            raise Corrupt(f"{folder}: the codebook is missing")
        yield from object_puts(objects.items())
        key = keys.stream_key(keys.HEADER, record.owner, layer, kind)
        yield key, seal_record(HEADER_MAGIC, bytes([codec.number]) + header)

    def _chunk(
        self, path: Path, codec: BlockCodec, spec: StreamSpec, size: int, about: dict[str, Any]
    ) -> tuple[Any, memoryview, bytes, int]:
        """Return parameters and payload of a chunk, the stream's header as it was, and tokens."""
        # A chunk has its codebook, which may be large.
        more = _MOST_SHARED_BYTES if codec.name == "fibquant" else 0
        data = memoryview(read_file(path, most_bytes(spec, size) + more))
        try:
            head, header, rest = read_head(data)
            found = BLOCK_CODECS.get(head.layout), head.kind, head.heads, head.head_dim
            if found != (codec.name, spec.kind, spec.heads, spec.head_dim) or head.n_blocks != 1:
                raise Corrupt(f"{found}, {head.n_blocks} blocks: not a block of this stream")
            params, (payload,) = read_blocks(head, header, rest)
        except KvError as error:
            raise type(error)(f"{path}: {error}") from error
        original = params
        if hasattr(params, "sink"):
            original = replace(params, sink=int(about["sink"]))
        return params, payload, codec.pack(original), head.n_tokens

    def _head(
        self, folder: Path, layer: int, kind: Kind, state: StreamState, about: dict[str, Any]
    ) -> tuple[bytes, bytes]:
        spec, owner = self._sidecar.model.stream(layer, kind), self._sidecar.record.owner
        said = about["head"]
        dtype = str(said["dtype"])
        shape = (spec.heads, state.n_head, spec.head_dim)
        values = self._plain(folder, shape, "<f2" if dtype == "float16" else "<f4")
        (error,) = unpack_errors(said["error"], 1, str(folder))
        frame = pack_frame(
            codec=0,
            kind=kind,
            owner=owner,
            layer=layer,
            first_token=state.start,
            n_tokens=state.n_head,
            payload=raw_payload(np.ascontiguousarray(values, np.float32), spec, dtype),
            error=error,
        )
        return keys.stream_key(keys.HEAD, owner, layer, kind), frame

    def _plain(self, folder: Path, shape: tuple[int, ...], dtype: str) -> Any:
        path = folder / ".".join("0" for _ in shape)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not n_bytes:
            return np.empty(shape, dtype)
        data = read_file(path, n_bytes)
        if len(data) != n_bytes:
            raise Corrupt(f"{path}: {len(data)} bytes, expected {n_bytes}")
        return np.frombuffer(data, dtype).reshape(shape)


def sessions(folder: str) -> list[Zarr2Session]:
    """Return the sessions of a group that `zarr2_export` wrote."""
    folders = session_folders(Path(folder))
    if not folders:
        raise NotFound(f"{folder}: no sessions")
    return [Zarr2Session(path) for path in folders]
