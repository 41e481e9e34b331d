"""Sessions of block-quantised codecs as flat layers: a folder per session, rows copied.

``flat:FOLDER/SESSION`` is a session that `kvstore.flat.open` opens. ``session.json`` beside its
layers and ``token_ids.i64`` hold what flat layers cannot say, so that the session comes back as it
was: FORMAT.md section 10.4.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.frame import ErrorStats, extend_crc32c, pack_frame
from kvcodecs.ggml import GGML
from kvcodecs.ggml.codec import CODEC
from kvcodecs.spec import Kind

from kvstore import flat
from kvstore.backend import Snapshot
from kvstore.flat.file import Bytes
from kvstore.flat.layer import FlatLayer
from kvstore.migration.needed import Item
from kvstore.session_record import SessionRecord, StreamName
from kvtools.formats.session_folder import (
    IDS_FILE,
    SESSION_FILE,
    pack_errors,
    sidecar_data,
    write_file,
    write_ids,
    write_json,
)
from kvtools.formats.stream_copy import (
    Block,
    StreamCopy,
    all_ids,
    check_alike,
    refused,
    standing_alone,
    stream_file,
)

FORMAT = "kvstore flat folder"
#: Rows before the first token, of the block that the first token is in.
FRONT_SUFFIX = ".front"
_READ_ROWS = 4096


def begin(folder: Path) -> None:
    """Remove the layers that a killed migration was making."""
    for left in folder.glob(".*.partial"):
        shutil.rmtree(left)


def write_session(
    snapshot: Snapshot, item: Item, folder: Path, *, verify: bool
) -> tuple[int, bool]:
    """Write the layers of one session; see `tkv_export.write_session`."""
    streams = {name: StreamCopy(snapshot, item, name) for name in item.record.streams}
    for copy in streams.values():
        _check(copy, item.record)
    record = standing_alone(item, streams)
    about: dict[str, Any] = {}
    with flat.create(
        folder,
        item.model,
        scheme=_schemes(item.record),
        capacity=max(record.n_tokens - record.first, 1),
    ) as session:
        n_bytes = 0
        for index, layer in enumerate(session.layers):
            copies = {kind: streams[index, kind] for kind in layer.header.kinds}
            written = {kind: _Written(copy, record) for kind, copy in copies.items()}
            layer.append_rows(_no_rows(layer), start=record.first)
            for rows in _together({kind: part.rows() for kind, part in written.items()}):
                layer.append_rows(rows)
            for kind, part in written.items():
                name = stream_file(index, kind)
                about[name] = part.entry()
                if part.front:
                    n_bytes += write_file(folder / f"{name}{FRONT_SUFFIX}", [part.front])
        session.commit()
        n_bytes += session.n_bytes
    ids = all_ids(snapshot, item)
    if ids is not None:
        write_ids(folder / IDS_FILE, ids)
    if verify:
        _check_written(folder, about)
    data = sidecar_data(FORMAT, item.name, record, item.model, about, ids)
    write_json(folder / SESSION_FILE, data)  # last: with it the session is whole
    return n_bytes, record is not item.record


def _schemes(record: SessionRecord) -> dict[Kind, str | GGML]:
    return {kind: c for kind, c in record.codecs.items() if isinstance(c, GGML)}


def _check(copy: StreamCopy, record: SessionRecord) -> None:
    """Raise `InvalidArgument` for a stream that flat layers cannot hold."""
    config, header = record.codecs[copy.kind], copy.header()
    if not isinstance(config, GGML):
        why = f"is coded with {config.codec}, and flat layers hold rows of ggml's schemes"
        raise refused(copy, why, "--codec ggml.q8_0")
    if header is not None and (header[0] is not CODEC or header[1].scheme.name != config.scheme):
        raise refused(copy, f"has blocks of another codec than {config.codec}")
    if copy.state.n_head:
        raise refused(copy, "has first tokens that are not coded")
    if record.streams[copy.layer, copy.kind].start > record.first:
        raise InvalidArgument(
            f"{copy.where}: begins at token {copy.start}, and all flat layers of a session have "
            f"the same tokens; kvstore trim --front {copy.start} makes all of its layers begin "
            "there"
        )


class _Written:
    """A stream on its way to a flat layer: what is said about it, as far as it has been read."""

    def __init__(self, copy: StreamCopy, record: SessionRecord) -> None:
        self._copy, self._record = copy, record
        self._errors: list[ErrorStats] = []
        self._crc = 0
        #: Frame of the rows before the session's first token.
        self.front = b""

    def rows(self) -> Iterator[Bytes]:
        """Yield the rows from the session's first token on."""
        header, first = self._copy.header(), self._record.first
        for block in self._copy.blocks():
            if header is not None:
                check_alike(self._copy, block, header[1], header[2])
            self._errors.append(block.error)
            rows = np.frombuffer(block.payload, np.uint8).reshape(block.n_tokens, -1)
            n = min(max(first - block.first_token, 0), block.n_tokens)
            if n:
                self.front = self._frame(block, rows[:n])
            self._crc = extend_crc32c(self._crc, rows[n:].reshape(-1))
            yield rows[n:]

    def entry(self) -> dict[str, Any]:
        """Return what ``session.json`` says."""
        return {"crc32c": f"{self._crc:08x}", "errors": pack_errors(self._errors)}

    def _frame(self, block: Block, rows: Bytes) -> bytes:
        return pack_frame(
            codec=CODEC.number,
            kind=self._copy.kind,
            owner=self._record.owner,
            layer=self._copy.layer,
            first_token=block.first_token,
            n_tokens=len(rows),
            payload=rows.reshape(-1),
        )


def _no_rows(layer: FlatLayer) -> dict[Kind, Bytes]:
    return {
        kind: np.empty((0, layer.header.row_bytes(kind)), np.uint8) for kind in layer.header.kinds
    }


def _together(parts: Mapping[Kind, Iterator[Bytes]]) -> Iterator[dict[Kind, Bytes]]:
    """Yield rows of K and V of the same tokens, whose blocks may be of different sizes."""
    waiting: dict[Kind, Bytes] = {}
    while True:
        for kind, rows in parts.items():
            while kind not in waiting or not len(waiting[kind]):
                found = next(rows, None)
                if found is None:
                    break
                waiting[kind] = found
        n = min((len(waiting.get(kind, ())) for kind in parts), default=0)
        if not n:
            return
        yield {kind: rows[:n] for kind, rows in waiting.items()}
        waiting = {kind: rows[n:] for kind, rows in waiting.items()}


def _check_written(folder: Path, about: Mapping[str, Any]) -> None:
    with flat.open(folder) as session:
        session.verify()
        for layer, kind in session.model.streams():
            if checksum(session, (layer, kind)) != about[stream_file(layer, kind)]["crc32c"]:
                raise Corrupt(f"{folder}: layer {layer} {kind} is not what was written")


def checksum(session: flat.FlatSession, stream: StreamName, stop: int | None = None) -> str:
    """Return the CRC-32C of a stream's rows, those before `stop`: 8 hex digits."""
    layer, crc, stop = session.layer(stream[0]), 0, session.stop if stop is None else stop
    for start in range(session.start, stop, _READ_ROWS):
        rows = layer.stored_rows(stream[1], start, min(start + _READ_ROWS, stop))
        crc = extend_crc32c(crc, rows.reshape(-1))
    return f"{crc:08x}"
