"""Sessions as `.tkv` stream files: a folder per session, a file per stream.

``NAME.tkvdir/SESSION/k_000.tkv`` and so on; K is the coded domain, before RoPE and in coded channel
order. ``k_000.head`` is the raw head of a stream, a frame: its tokens are in the file as well,
coded. ``session.json`` and ``token_ids.i64`` hold what the files cannot say, so that the session
comes back as it was. Payloads are copied, not coded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs import _core
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.frame import ErrorStats, header_tag, pack_frame
from kvcodecs.spec import MAX_VALUES
from kvcodecs.tkv1.params import TKV1Params
from kvcodecs.tkv1.tkvheader import ChannelStatistics, TkvParams, pack_header

from kvstore.backend import Snapshot
from kvstore.migration.needed import Item
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
    StreamCopy,
    all_ids,
    check_alike,
    refused,
    standing_alone,
    stream_file,
)

FORMAT = "kvstore tkv folder"
TKV1_NUMBER = 1


def begin(folder: Path) -> None:
    """Make a folder that of all sessions: it is one as it is."""


def _check_header(copy: StreamCopy) -> None:
    header = copy.header()
    if header is not None and header[0].number != TKV1_NUMBER:
        why = f"is coded with {header[0].name}, and .tkv files hold TKV1"
        raise refused(copy, why, "--codec tkv1")


def write_session(
    snapshot: Snapshot, item: Item, folder: Path, *, verify: bool
) -> tuple[int, bool]:
    """Write the files of one session.

    Returns
    -------
    n_bytes
        Bytes written.
    alone
        Whether it shared frames, or had some trimmed, and stands alone now.

    Raises
    ------
    InvalidArgument
        A stream that no `.tkv` file can hold as it is.
    """
    streams = {name: StreamCopy(snapshot, item, name) for name in item.record.streams}
    for copy in streams.values():
        _check_header(copy)
    record = standing_alone(item, streams)
    folder.mkdir()
    about: dict[str, Any] = {}
    n_bytes = 0
    for (layer, kind), copy in streams.items():
        name = stream_file(layer, kind)
        entry: dict[str, Any] = {}
        about[name] = entry
        header = copy.header()
        if header is not None:
            path = folder / f"{name}.tkv"
            entry |= _write_stream(path, copy, header[1], header[2])
            n_bytes += entry["bytes"]
        head = copy.head()
        if head is not None:
            frame = pack_frame(
                codec=0,
                kind=kind,
                owner=record.owner,
                layer=layer,
                first_token=copy.start,
                n_tokens=head.n_tokens,
                payload=head.payload,
                error=head.error,
            )
            n_bytes += write_file(folder / f"{name}.head", [frame])
    ids = all_ids(snapshot, item)
    if ids is not None:
        write_ids(folder / IDS_FILE, ids)
    if verify:
        for name, entry in about.items():
            if entry and checksum(folder / f"{name}.tkv") != entry["crc32c"]:
                raise Corrupt(f"{folder / name}.tkv: is not what was written")
    data = sidecar_data(FORMAT, item.name, record, item.model, about, ids)
    write_json(folder / SESSION_FILE, data)  # last: with it the session is whole
    return n_bytes, record is not item.record


def _write_stream(
    path: Path, copy: StreamCopy, params: TKV1Params, header: bytes
) -> dict[str, Any]:
    spec = params.spec
    n_tokens = copy.n_tokens if copy.has_blocks else 0
    if n_tokens * spec.channels > MAX_VALUES:
        raise InvalidArgument(f"{copy.where}: more than {MAX_VALUES} values, too many for a file")
    fields = TkvParams(
        kind=copy.kind,
        heads=spec.heads,
        head_dim=spec.head_dim,
        step=params.step,
        # A file counts tokens from its first one.
        sink=max(params.sink - copy.start, 0),
        sink_div=params.sink_div,
        block_tokens=copy.state.block_tokens,
        ar=params.ar,
        lane_channels=0 if params.width == spec.head_dim else params.width,
    )
    statistics = ChannelStatistics(params.mean.astype(np.int64), params.rho, params.cls)
    errors: list[ErrorStats] = []
    crc = 0

    def parts() -> Iterator[bytes | memoryview]:
        nonlocal crc
        for part in _parts(pack_header(fields, n_tokens, statistics), copy, params, header, errors):
            crc = _core.crc32c(crc, part)
            yield part

    n_bytes = write_file(path, parts())
    return {
        "bytes": n_bytes,
        "crc32c": f"{crc:08x}",
        "start": copy.start,
        "sink": params.sink,
        "header_tag": f"{header_tag(header):016x}",
        "errors": pack_errors(errors),
    }


def _parts(
    head: bytes, copy: StreamCopy, params: TKV1Params, header: bytes, errors: list[ErrorStats]
) -> Iterator[bytes | memoryview]:
    yield head
    for block in copy.blocks():
        check_alike(copy, block, params, header)
        errors.append(block.error)
        yield block.payload


def checksum(path: Path) -> str:
    """Return the CRC-32C of a file, 8 hex digits."""
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            crc = _core.crc32c(crc, part)
    return f"{crc:08x}"
