"""Sessions as zarr format 2: a group per session, an array per stream, a chunk per block.

Any zarr opens them, with the numcodecs classes of this project as compressors. A chunk is the
container of one block (kvcodecs FORMAT.md section 8): its payload is copied, the frame around it is
a new one, since a container counts tokens from its own first one: its header has the sinks that are
left of the session's. A stream shorter than a block has a chunk of its own length. The last block
of a longer one is padded with zeros to the size of a chunk, as zarr wants it, which codes it again,
with the same values. K is before RoPE, in coded channel order (section 1.3).

``k_000_head`` is the raw head of a stream, ``token_ids`` the ids, both without compressor. What a
session needs to come back as it was is in the attributes of its group.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.codec import BlockCodec, codec_by_number
from kvcodecs.container import BLOCK_CODECS, DTYPES, MAGIC, Head, Layout, read_head
from kvcodecs.fibquant.config import Axis, FibQuant
from kvcodecs.fibquant.params import FibParams
from kvcodecs.frame import ErrorStats, header_tag, pack_frame, seal_record
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import Plan
from kvcodecs.shared import pack_shared
from kvcodecs.spec import F32, Kind, StreamSpec
from kvcodecs.tkv1 import TKV1

from kvstore.backend import Snapshot
from kvstore.migration.needed import Item
from kvtools.formats.session_folder import (
    ZARR2_FILE,
    pack_errors,
    sidecar_data,
    write_file,
    write_json,
)
from kvtools.formats.stream_copy import (
    Block,
    StreamCopy,
    all_ids,
    check_alike,
    standing_alone,
    stream_file,
)

FORMAT = "kvstore zarr2"
LAYOUTS: dict[str, Layout] = {codec: layout for layout, codec in BLOCK_CODECS.items()}
#: Raw heads and raw streams by what their first byte says; bfloat16, which zarr lacks, widened.
_RAW_DTYPES = ("float32", "float16", "bfloat16")
HEAD_SUFFIX = "_head"
IDS_NAME = "token_ids"


def begin(folder: Path) -> None:
    """Make a folder the group of all sessions."""
    if not (folder / ".zgroup").exists():
        write_json(folder / ".zgroup", {"zarr_format": 2})


def write_session(
    snapshot: Snapshot, item: Item, folder: Path, *, verify: bool
) -> tuple[int, bool]:
    """Write the arrays of one session; see `tkv_export.write_session`."""
    streams = {name: StreamCopy(snapshot, item, name) for name in item.record.streams}
    record = standing_alone(item, streams)
    folder.mkdir()
    write_json(folder / ".zgroup", {"zarr_format": 2})
    about: dict[str, Any] = {}
    n_bytes = 0
    for (layer, kind), copy in streams.items():
        name = stream_file(layer, kind)
        entry: dict[str, Any] = {"start": copy.start}
        spec = item.model.stream(layer, kind)
        if copy.header() is not None:
            n_bytes += _write_stream(folder / name, copy, spec, item.model.dtype, entry, verify)
        head = copy.head()
        if head is not None:
            dtype = _RAW_DTYPES[head.payload[0]]
            entry["head"] = {"dtype": dtype, "error": pack_errors([head.error])}
            values = raw_values(head.payload, spec, head.n_tokens)
            n_bytes += _write_plain(folder / f"{name}{HEAD_SUFFIX}", values)
        about[name] = entry
    ids = all_ids(snapshot, item)
    if ids is not None:
        n_bytes += _write_plain(folder / IDS_NAME, ids.astype("<i8"))
    attributes = {
        "kvstore": sidecar_data(FORMAT, item.name, record, item.model, about, ids),
        "session": item.name,
        "k": "before RoPE, in coded channel order",
    }
    write_json(folder / ZARR2_FILE, attributes)  # last: with it the session is whole
    return n_bytes, record is not item.record


def _write_stream(
    folder: Path,
    copy: StreamCopy,
    spec: StreamSpec,
    model_dtype: str,
    entry: dict[str, Any],
    verify: bool,
) -> int:
    coding = copy.header()
    if coding is None:
        return 0
    codec, params, header = coding
    dtype = _dtype(codec, params, model_dtype)
    n_tokens = copy.n_tokens if copy.has_blocks else 0
    size = min(copy.state.block_tokens, n_tokens) or copy.state.block_tokens
    folder.mkdir()
    compressor = _compressor(codec, params, copy.kind, size)
    _write_array(folder, (spec.heads, n_tokens, spec.head_dim), size, dtype, compressor)
    entry |= {
        "sink": getattr(params, "sink", 0),
        "header_tag": f"{header_tag(header):016x}",
        "codec": codec.number,
    }
    if not n_tokens:
        entry["header"] = base64.b64encode(header).decode("ascii")
        entry["shared"] = [
            base64.b64encode(data).decode("ascii") for data in codec.shared(params).values()
        ]
    n_bytes = 0
    errors: list[ErrorStats] = []
    for number, block in enumerate(copy.blocks()):
        check_alike(copy, block, params, header)
        data = container(block, spec, size, DTYPES.index(dtype))
        n_bytes += write_file(folder / f"0.{number}.0", [data])
        errors.append(block.error)
        if verify:
            read_head(memoryview((folder / f"0.{number}.0").read_bytes()))
    entry["errors"] = pack_errors(errors)
    return n_bytes


def container(block: Block, spec: StreamSpec, size: int, dtype: int) -> bytes:
    """Return a block as a chunk of `size` tokens."""
    plain = StreamSpec(spec.kind, spec.heads, spec.head_dim)
    params = block.params
    if hasattr(params, "sink"):
        params = replace(params, sink=max(params.sink - block.coded_at, 0))
    params = replace(params, spec=plain)
    header = block.codec.pack(params)
    payload: bytes | memoryview = block.payload
    if block.n_tokens < size:
        coded = np.empty((spec.heads, block.n_tokens, spec.head_dim), np.float32)
        decode_payload(block.codec, params, block.payload, coded)
        encoder = block.codec.encoder(params, 0)
        encoder.resume(coded, block.payload, block.error)
        padding = size - block.n_tokens
        encoder.push(np.zeros((spec.heads, padding, spec.head_dim), np.float32))
        payload = encoder.payload()
    head = Head(
        LAYOUTS[block.codec.name], dtype, spec.kind, 0, spec.heads, spec.head_dim, size, size
    )
    frame = pack_frame(
        codec=block.codec.number,
        kind=spec.kind,
        owner=0,
        layer=0,
        first_token=0,
        n_tokens=size,
        payload=payload,
        header_tag=header_tag(header),
        error=block.error,
    )
    objects = block.codec.shared(params)
    shared = [pack_shared(objects[digest]) for digest in block.codec.needs(header)]
    return b"".join([seal_record(MAGIC, head.pack() + header), *shared, frame])


def decode_payload(
    codec: BlockCodec, params: Any, payload: bytes | memoryview, out: F32, first_token: int = 0
) -> None:
    """Decode a block into the coded domain."""
    plan = Plan()
    n = out.shape[1]
    plan.add(
        codec,
        params,
        payload,
        first_token=first_token,
        n_tokens=n,
        start=first_token,
        stop=first_token + n,
        out=out,
        where="",
    )
    plan.run(1)


def raw_values(payload: bytes, spec: StreamSpec, n_tokens: int) -> np.ndarray[Any, Any]:
    """Return the values of a raw payload, in a dtype that zarr has."""
    codec = codec_by_number(0)
    plain = StreamSpec(spec.kind, spec.heads, spec.head_dim)
    out = np.empty((spec.heads, n_tokens, spec.head_dim), np.float32)
    decode_payload(codec, codec.unpack(plain, payload[:1]), payload, out)
    return out.astype("<f2") if _RAW_DTYPES[payload[0]] == "float16" else out


def _dtype(codec: BlockCodec, params: Any, model_dtype: str) -> np.dtype[Any]:
    """Return what zarr reads: the model's dtype; of raw values one that holds them."""
    narrow = params.dtype.name if codec.number == 0 else model_dtype
    return np.dtype(np.float16 if narrow == "float16" else np.float32)


def _compressor(codec: BlockCodec, params: Any, kind: Kind, size: int) -> dict[str, object]:
    """Return the configuration of the numcodecs class; what it decodes says the rest."""
    if codec.number == 0:
        return {"id": "kvraw", "kind": kind, "block_tokens": size}
    if codec.name == "ggml":
        return {"id": "ggml", "scheme": params.scheme.name, "kind": kind, "block_tokens": size}
    config: dict[str, object]
    if codec.name == "fibquant":
        config = _fibquant(params).to_json()
        del config["raw_layers"]
    elif codec.name == "tkv1":
        lanes = 0 if params.width == params.spec.head_dim else params.width
        asked = TKV1(
            step=params.step,
            sink=0,
            sink_div=min(params.sink_div, TKV1.max_sink_div),
            ar=params.ar,
            lane_channels=lanes,
        )
        config = {**asked.to_json(), "layout": "lane"}
    else:
        config = KVR1(step=params.step, sink=0, sink_div=params.sink_div, ar=params.ar).to_json()
    del config["codec"]
    return {"id": codec.name, "kind": kind, **config, "block_tokens": size}


def _fibquant(params: FibParams) -> FibQuant:
    """Return a configuration whose chunks decode like these."""
    axis: Axis = "per_token" if params.mean is None else "per_channel"
    book = params.book
    if book is None:
        return FibQuant(axis="raw")
    return FibQuant(
        book.k,
        book.n_codewords,
        rotation=book.rotation,
        seed=book.profile.rotation_seed,
        axis=axis,
        first_tokens=0,
        raw_heads=tuple(params.raw_heads),
    )


def _write_plain(folder: Path, values: np.ndarray[Any, Any]) -> int:
    """Write an array without compressor, as one chunk."""
    folder.mkdir()
    data = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": [max(n, 1) for n in values.shape],
        "dtype": values.dtype.newbyteorder("<").str,
        "compressor": None,
        "fill_value": 0,
        "order": "C",
        "filters": None,
    }
    write_json(folder / ".zarray", data)
    if not values.size:
        return 0
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return write_file(folder / ".".join("0" for _ in values.shape), [little.tobytes()])


def _write_array(
    folder: Path,
    shape: tuple[int, int, int],
    size: int,
    dtype: np.dtype[Any],
    compressor: dict[str, object],
) -> None:
    data = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": [shape[0], size, shape[2]],
        "dtype": dtype.newbyteorder("<").str,
        "compressor": compressor,
        "fill_value": "NaN",
        "order": "C",
        "filters": None,
    }
    write_json(folder / ".zarray", data)
