"""Folders with a folder per session: their names, and what is said about a session beside its data.

``session.json`` has the session record and the model as archives have them, and of each stream what
its format cannot say. Token ids are in ``token_ids.i64``: int64, little-endian. Whatever is in the
place of one of these files, reading it ends, with an error that names it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound, Unsupported
from kvcodecs.frame import ErrorStats, crc32c, open_record
from kvcodecs.spec import StreamSpec

from kvstore import Model
from kvstore.files import read_file
from kvstore.keys import check_name
from kvstore.session_record import SESSION_MAGIC, SessionRecord, check_record, unpack_session
from kvstore.token_ids import Ids
from kvtools.formats.stream_copy import first_id, stream_file

SESSION_FILE = "session.json"
#: Zarr's attributes of a group, which say the same in folders of arrays.
ZARR2_FILE = ".zattrs"
IDS_FILE = "token_ids.i64"
VERSION = 1
_ERROR = struct.Struct("<ddQ")
#: Longest name of a file; a session's may be longer once it is escaped.
_MAX_FOLDER_BYTES = 200
_MOST_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What ``session.json`` says.

    Attributes
    ----------
    streams
        An object for each stream, by `stream_file`; none of files that nothing is said about.
    ids_crc32c
        Of the token ids, 8 hex digits; None without them.
    """

    name: str
    record: SessionRecord
    model: Model
    streams: dict[str, dict[str, Any]]
    ids_crc32c: str | None = None


def folder_name(name: str) -> str:
    """Return a file name for a session: its own, with what paths do not take as ``%2F``.

    A long one ends in a hash.
    """
    text = "".join(
        c if c.isalnum() or c in "-_.,+@= " else "".join(f"%{b:02X}" for b in c.encode())
        for c in name
    )
    if text.startswith(".") or text.endswith("."):
        text = text.replace(".", "%2E")
    if len(text.encode()) <= _MAX_FOLDER_BYTES:
        return text
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    cut = text.encode()[: _MAX_FOLDER_BYTES - 20].decode(errors="ignore")
    return f"{cut}~{digest}"


def sidecar_data(
    what: str,
    name: str,
    record: SessionRecord,
    model: Model,
    streams: dict[str, Any],
    ids: Ids | None,
) -> dict[str, Any]:
    """Return what is said about a session, as JSON."""
    about_ids = {} if ids is None else {"token_ids": {"crc32c": _checksum(_ids_bytes(ids))}}
    return {
        "format": what,
        "version": VERSION,
        "name": name,
        "record": json.loads(bytes(open_record(SESSION_MAGIC, record.pack(name)))),
        "model": model.to_json(),
        **about_ids,
        "streams": streams,
    }


def write_json(path: Path, data: object) -> None:
    """Write a JSON file durably."""
    write_file(path, [json.dumps(data, indent=1, ensure_ascii=False).encode()])


def read_json(path: Path) -> Any:
    """Read a JSON file; `NotFound` if there is none, `Corrupt` if it is not JSON."""
    data = read_file(path, _MOST_JSON_BYTES)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: not JSON: {error}") from error


def read_sidecar(data: Any, what: str, path: Path) -> Sidecar:
    """Read what is said about a session.

    Raises
    ------
    Corrupt, Unsupported
        Damaged, or of a newer release.
    """
    try:
        if data["format"] != what:
            raise Corrupt(f"{path}: format {data['format']!r}, expected {what!r}")
        if data["version"] != VERSION:
            raise Unsupported(f"{path}: version {data['version']!r}; upgrade to read it")
        model = Model.from_json(data["model"])
        record = unpack_session(data["record"], model.streams(), str(path))
        if record.model != model.digest or record.parts or record.id_parts:
            raise Corrupt(f"{path}: the record is not of this model, or shares frames")
        name = check_name(data["name"])
        check_record(record, name, model, "record")
        streams = {file: data["streams"][file] for file in _stream_files(model)}
        if not all(isinstance(about, dict) for about in streams.values()):
            raise Corrupt(f"{path}: streams that are no objects")
        ids_crc32c = str(data["token_ids"]["crc32c"]) if record.has_ids else None
        return Sidecar(name, record, model, streams, ids_crc32c)
    except InvalidArgument as error:
        text = str(error)
        raise Corrupt(text if str(path) in text else f"{path}: {text}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, KvError):
            raise
        raise Corrupt(f"{path}: {error!r}") from error


def _stream_files(model: Model) -> list[str]:
    return [stream_file(layer, kind) for layer, kind in model.streams()]


def session_folders(root: Path) -> list[Path]:
    """Return the folders of a folder that hold sessions, by name."""
    try:
        found = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    except FileNotFoundError:
        raise NotFound(f"{root}: no such folder") from None
    return found


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a file durably, and return how many bytes it has."""
    n_bytes = 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            n_bytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return n_bytes


def write_ids(path: Path, ids: Ids) -> None:
    """Write token ids."""
    write_file(path, [_ids_bytes(ids)])


def read_ids(path: Path, sidecar: Sidecar) -> Ids | None:
    """Read the token ids of a session; None if it has none.

    Raises
    ------
    NotFound, Corrupt
        Not there, or others than were written.
    """
    record = sidecar.record
    if not record.has_ids:
        return None
    n = record.n_tokens - first_id(record)
    data = read_file(path, 8 * n) if n else b""
    if len(data) != 8 * n:
        raise Corrupt(f"{path}: {len(data)} bytes, expected {n} token ids of 8")
    if _checksum(data) != sidecar.ids_crc32c:
        raise Corrupt(f"{path}: not the token ids that were written; restore a copy")
    return np.frombuffer(data, "<i8").astype(np.int64)


def _ids_bytes(ids: Ids) -> bytes:
    return ids.astype("<i8").tobytes()


def _checksum(data: bytes) -> str:
    return f"{crc32c(data):08x}"


def most_bytes(spec: StreamSpec, n_tokens: int) -> int:
    """Return how long a block with its header may be: no codec takes 8 bytes for a value."""
    return 8 * spec.channels * (n_tokens + 64) + 4096


def pack_errors(errors: Iterable[ErrorStats]) -> str:
    """Write the errors of blocks as text."""
    return base64.b64encode(b"".join(_ERROR.pack(*error) for error in errors)).decode("ascii")


def unpack_errors(text: object, n_blocks: int, where: str) -> Iterator[ErrorStats]:
    """Yield what `pack_errors` wrote, unknown errors if there is nothing.

    Raises
    ------
    Corrupt
        Errors that cannot be, or of another number of blocks.
    """
    if text is None:
        for _ in range(n_blocks):
            yield ErrorStats.unknown()
        return
    try:
        data = base64.b64decode(str(text), validate=True)
    except ValueError as error:
        raise Corrupt(f"{where}: errors: {error}") from error
    if len(data) != n_blocks * _ERROR.size:
        raise Corrupt(f"{where}: errors of other than {n_blocks} blocks")
    for max_error, sum_squares, n_values in _ERROR.iter_unpack(data):
        found = ErrorStats(max_error, sum_squares, n_values)
        if not found.is_valid() or math.isinf(max_error):
            raise Corrupt(f"{where}: impossible errors {found}")
        yield found
