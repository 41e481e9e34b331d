"""From a KV file to what an archive takes: the model's identity, and streams in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind

from kvstore import LayerSpec, Model
from kvtools.kvfile import KvFile, Stream

#: Bytes of input in memory at a time; the encoder works on a few copies of it.
CHUNK_BYTES = 1 << 20
#: Key of the header's metadata under which `unpack` keeps what only we understand.
METADATA_KEY = "kvstore"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Successive token chunks of one stream; may be iterated any number of times."""

    kv: KvFile
    stream: Stream

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return self.kv.chunks(self.stream, CHUNK_BYTES)


class FileSource:
    """The streams of a `KvFile`, as `Archive.ingest` reads them; layers count from 0."""

    def __init__(self, kv: KvFile) -> None:
        self._kv = kv

    def n_tokens(self, layer: int, kind: Kind) -> int:
        """Tokens of one stream."""
        return self._stream(layer, kind).tokens

    def chunks(self, layer: int, kind: Kind) -> Chunks:
        """One stream in chunks [heads][n][head_dim], in the file's dtype."""
        return Chunks(self._kv, self._stream(layer, kind))

    def _stream(self, layer: int, kind: Kind) -> Stream:
        entry = self._kv.layers[layer]
        stream = entry.k if kind == "k" else entry.v
        if stream is None:
            raise InvalidArgument(f"layer {layer} has no V")
        return stream


def build_model(
    kv: KvFile,
    *,
    name: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    rope: Rope | None = None,
) -> Model:
    """Return the identity of the KV in a file.

    What is passed here wins over what `unpack` left in the file, that over the plain metadata,
    and that over the sidecar.

    Raises
    ------
    InvalidArgument
        The file's metadata describes another geometry than its tensors.
    """
    layers = tuple(
        LayerSpec(layer.k.heads, layer.k.head_dim, None if layer.v is None else layer.v.head_dim)
        for layer in kv.layers
    )
    for layer, spec in zip(kv.layers, layers, strict=True):
        if layer.v is not None and layer.v.heads != spec.heads:
            raise InvalidArgument(
                f"{kv.file.path}: layer {layer.number} has {spec.heads} heads of K and "
                f"{layer.v.heads} of V"
            )
    stored = _stored_model(kv)
    if stored is None:
        return Model(
            name=name or kv.text_hint("model") or "unknown",
            layers=layers,
            rope=rope or kv.rope(),
            revision=revision or kv.text_hint("revision") or "",
            dtype=dtype or kv.dtype("k", "v"),
        )
    shapes = [(layer.heads, layer.head_dim_k, layer.head_dim_v) for layer in stored.layers]
    if shapes != [(layer.heads, layer.head_dim_k, layer.head_dim_v) for layer in layers]:
        raise InvalidArgument(
            f"{kv.file.path}: metadata {METADATA_KEY!r} describes other layers than the tensors"
        )
    if rope is not None:
        stored = replace(
            stored, rope=rope, layers=tuple(replace(layer, rope="model") for layer in stored.layers)
        )
    return replace(
        stored,
        name=name or stored.name,
        revision=revision or stored.revision,
        dtype=dtype or kv.dtype("k", "v"),
    )


def _stored_model(kv: KvFile) -> Model | None:
    text = kv.file.metadata.get(METADATA_KEY)
    if text is None:
        return None
    where = f"{kv.file.path}: metadata {METADATA_KEY!r}"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or "model" not in data:
        raise Corrupt(f"{where} has no model")
    return Model.from_json(data["model"])


def has_rope(model: Model) -> bool:
    """Whether K of every layer can be turned between before and after RoPE."""
    return all(model.stream(i, "k").rope is not None for i in range(model.n_layers))
