"""Token ids of a session, in chunks. FORMAT.md section 3.4."""

from __future__ import annotations

import struct
import zlib
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.frame import open_record, seal_record
from kvcodecs.tensor import as_array

from . import keys
from .backend import Snapshot
from .session_record import SessionRecord
from .spans import id_spans

Ids: TypeAlias = npt.NDArray[np.int64]

TOKENS_MAGIC: Final = b"KVT2"
#: Of archive format 1: such a chunk does not say whose it is.
_OLD_MAGIC: Final = b"KVT1"
#: Token ids per stored chunk.
CHUNK_TOKENS: Final = 4096
_CHUNK_HEAD: Final = struct.Struct("<BBHIq")
_PLACE: Final = struct.Struct("<QQ")
_WIDTHS: Final = (1, 2, 4, 8)


def check_ids(token_ids: object, n_tokens: int | None = None) -> Ids:
    """Return token ids as int64; `n_tokens` None means any number.

    Raises
    ------
    InvalidArgument
        Not `n_tokens` integers in one dimension.
    """
    ids = as_array(token_ids, "token_ids")
    if n_tokens is None:
        n_tokens = len(ids) if ids.ndim == 1 else 1
    if ids.shape != (n_tokens,):
        raise InvalidArgument(f"token_ids: shape {ids.shape}, expected ({n_tokens},)")
    if n_tokens and ids.dtype.kind not in "iu":
        raise InvalidArgument(f"token_ids: dtype {ids.dtype}, expected integers")
    if ids.dtype == np.uint64 and n_tokens and int(ids.max()) >= 1 << 63:
        raise InvalidArgument("token_ids: a value does not fit 63 bits")
    return ids.astype(np.int64)


def pack_ids(ids: Ids, owner: int, chunk: int) -> bytes:
    """Return one chunk of token ids: offset from the least, byte planes, deflated if smaller.

    FORMAT.md section 3.4.
    """
    low = int(ids.min())
    spread = int(ids.max()) - low
    width = next(w for w in _WIDTHS if spread < 1 << (8 * w))
    offsets = (ids.astype(np.uint64) - np.uint64(low & (2**64 - 1))).astype(f"<u{width}")
    planes = offsets.view(np.uint8).reshape(len(ids), width).T.tobytes()
    deflated = zlib.compress(planes, 9)
    packed = len(deflated) < len(planes)
    head = _CHUNK_HEAD.pack(width, int(packed), 0, len(ids), low) + _PLACE.pack(owner, chunk)
    return seal_record(TOKENS_MAGIC, head + (deflated if packed else planes))


def unpack_ids(
    value: memoryview | bytes, owner: int, chunk: int, n_expected: int, where: str
) -> Ids:
    """Return the first `n_expected` token ids of a chunk; a copy.

    Raises
    ------
    Truncated, Corrupt
        Damaged, or the chunk of another place.
    """
    is_old = bytes(value[:4]) == _OLD_MAGIC
    body = open_record(_OLD_MAGIC if is_old else TOKENS_MAGIC, value, where)
    try:
        width, packed, reserved, n_tokens, low = _CHUNK_HEAD.unpack_from(body)
        at = _CHUNK_HEAD.size
        if not is_old:
            if _PLACE.unpack_from(body, at) != (owner, chunk):
                raise Corrupt(f"{where}: the token ids of another place are stored here")
            at += _PLACE.size
        if width not in _WIDTHS or packed > 1 or reserved or n_tokens > CHUNK_TOKENS:
            raise Corrupt(f"{where}: token ids: width {width}, {n_tokens} tokens")
        planes: bytes | memoryview = body[at:]
        if packed:
            inflate = zlib.decompressobj()
            planes = inflate.decompress(planes, CHUNK_TOKENS * 8 + 1)
        if len(planes) != n_tokens * width or n_tokens < n_expected:
            raise Corrupt(f"{where}: token ids: {len(planes)} bytes for {n_tokens} tokens")
    except (struct.error, zlib.error) as error:
        raise Corrupt(f"{where}: token ids: {error}") from error
    columns = np.frombuffer(planes, np.uint8).reshape(width, n_tokens)
    offsets = np.ascontiguousarray(columns.T).view(f"<u{width}").reshape(n_tokens)
    ids = offsets.astype(np.uint64) + np.uint64(low & (2**64 - 1))
    return ids.view(np.int64)[:n_expected]


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
    spans = id_spans(record, CHUNK_TOKENS)
    owner = next((owner for owner, first, stop in spans if first <= chunk < stop), None)
    value = None if owner is None else snapshot.get(keys.tokens_key(owner, chunk))
    if owner is None or value is None:
        raise Corrupt(f"{where}: missing")
    n_expected = min(CHUNK_TOKENS, record.n_tokens - chunk * CHUNK_TOKENS)
    return unpack_ids(value, owner, chunk, n_expected, where)
