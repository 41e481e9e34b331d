"""The documents of zarr format 3 that an archive shows to zarr's own tools. FORMAT.md section 9.5.

Plain JSON, so that nothing here needs zarr. Who reads an archive with zarr finds one group per
session, one array per stream, and our codec's name and configuration in each array.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvcodecs.codec import codec_by_number
from kvcodecs.spec import Kind
from kvcodecs.zarr_configuration import MOST_HEADER_BYTES, NAME, archive_configuration

from ...session_record import SessionRecord
from .places import stream_of
from .sessions import Stored

FILE_NAME: Final = "zarr.json"
HEADERS: Final = "headers"


def group_document(attributes: Mapping[str, object]) -> bytes:
    """Return the document of a group."""
    return _pack({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def stub_document(note: str) -> bytes:
    """Return the document of an empty array.

    What lies below an array is not listed: so tools pass over objects that are none of theirs.
    """
    return bytes_document(0, {"note": note})


def bytes_document(n_bytes: int, attributes: Mapping[str, object]) -> bytes:
    """Return the document of an array of bytes that is one chunk, key ``c/0``."""
    return _array(
        [n_bytes], [max(n_bytes, 1)], "uint8", 0, [{"name": "bytes"}], ["byte"], attributes
    )


def stream_document(
    stored: Stored,
    stream: tuple[int, Kind],
    n_tokens: int,
    headers: Sequence[tuple[int, bytes]],
    shard_blocks: int,
    dimensions: Sequence[str],
    tail_tokens: int = 0,
    objects: Mapping[bytes, bytes] | None = None,
) -> bytes:
    """Return the document of a stream's array.

    Parameters
    ----------
    n_tokens
        Length of the array: whole blocks, all committed, and the last tokens of a finished session.
    tail_tokens
        How many those are.
    headers
        Codec number and stream header of each owner of its blocks; the session's own last.
    shard_blocks
        Blocks of a shard; 0 for none.
    objects
        What the headers need, packed, by digest. The archive keeps it where `places.book_of` says;
        inside shards, from where that is out of reach, the configuration has it.
    """
    layer, kind = stream
    record, spec = stored.record, stored.model.stream(layer, kind)
    state = record.streams[stream]
    chunk = [spec.heads, state.block_tokens, spec.head_dim]
    *others, (number, header) = headers
    configuration = archive_configuration(
        spec,
        codec_by_number(number).name,
        layer,
        header,
        tokens=None if shard_blocks else n_tokens,
        tail_tokens=tail_tokens,
        header_array=headers_array(kind, layer) if needs_array(header, shard_blocks) else None,
        more_headers=[(codec_by_number(n).name, data) for n, data in others],
        shared={digest: data if shard_blocks else None for digest, data in (objects or {}).items()},
    )
    codec: dict[str, object] = {"name": NAME, "configuration": configuration}
    outer = chunk
    if shard_blocks:
        outer = [spec.heads, state.block_tokens * shard_blocks, spec.head_dim]
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        codec = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": chunk,
                "codecs": [codec],
                "index_codecs": [little, {"name": "crc32c"}],
                "index_location": "end",
            },
        }
    about: dict[str, object] = {
        "layer": layer,
        "kind": kind,
        "start": state.start,
        "first": record.first,
    }
    if kind == "k":
        about["k_state"] = "pre"
    return _array(
        [spec.heads, n_tokens, spec.head_dim],
        outer,
        dtype_of(stored),
        "NaN",
        [codec],
        dimensions,
        {"kvstore": about},
        separator="." if shard_blocks else "/",
    )


def dtype_of(stored: Stored) -> str:
    """Return the type of a session's arrays; zarr has no bfloat16, which float32 holds."""
    return "float16" if stored.model.dtype == "float16" else "float32"


def dimension_names(
    record: SessionRecord, shapes: Mapping[tuple[int, Kind], tuple[int, int, int]]
) -> dict[tuple[int, Kind], list[str]]:
    """Return the names of the axes of all arrays of a session.

    Axes of one name have one length and begin at one position, as xarray asks: ``token`` if that
    holds for all arrays, else ``token_k`` and ``token_v``, else one name for each array.
    """
    names: dict[tuple[int, Kind], list[str]] = {stream: [] for stream in shapes}
    for axis, plain in enumerate(("head", "token", "channel")):
        extents = {
            stream: (shape[axis], record.streams[stream].start if axis == 1 else 0)
            for stream, shape in shapes.items()
        }
        for (layer, kind), found in names.items():
            alike = {extent for (_, other), extent in extents.items() if other == kind}
            if len(set(extents.values())) == 1:
                found.append(plain)
            elif len(alike) == 1:
                found.append(f"{plain}_{kind}")
            else:
                found.append(f"{plain}_{stream_of(layer, kind)}")
    return names


def needs_array(header: bytes, shard_blocks: int) -> bool:
    """Whether a stream header is too long for a configuration; inside shards none may be."""
    return len(header) > MOST_HEADER_BYTES and not shard_blocks


def headers_array(kind: Kind, layer: int) -> str:
    """Return the name of the array of a stream's header that is too long for a configuration."""
    return f"{HEADERS}_{stream_of(layer, kind)}"


def _array(
    shape: Sequence[int],
    chunk: Sequence[int],
    dtype: str,
    fill: object,
    codecs: Sequence[object],
    dimensions: Sequence[str],
    attributes: Mapping[str, object],
    separator: str = "/",
) -> bytes:
    return _pack(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
            "fill_value": fill,
            "codecs": list(codecs),
            "dimension_names": list(dimensions),
            "attributes": dict(attributes),
        }
    )


def _pack(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()
