"""From a KV file to what an archive takes: the model's identity, and streams in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind

from kvstore import LayerSpec, Model
from kvtools.hints import METADATA_KEY
from kvtools.kvfile import KvFile, Stream

#: Bytes of input in memory at a time; the encoder works on a few copies of it.
CHUNK_BYTES = 1 << 20


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


def build_model(kv: KvFile, *, rope: Rope | None = None, **stated: Any) -> Model:
    """Return the identity of the KV in a file.

    `stated` are other fields of `Model`, None where nothing is stated. What is passed here wins
    over what `unpack` left in the file, that over the plain metadata, and that over the sidecar.
    The dtype that `unpack` left is the model's, whatever the tensors are written in.

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
    given = {field: value for field, value in stated.items() if value is not None}
    if stored is None:
        found = {
            "name": kv.hints.text("model") or "unknown",
            "revision": kv.hints.text("revision") or "",
            "dtype": kv.dtype("k", "v"),
        }
        return Model(layers=layers, rope=rope or kv.hints.rope(), **{**found, **given})
    shapes = [(layer.heads, layer.head_dim_k, layer.head_dim_v) for layer in stored.layers]
    if shapes != [(layer.heads, layer.head_dim_k, layer.head_dim_v) for layer in layers]:
        raise InvalidArgument(
            f"{kv.file.path}: metadata {METADATA_KEY!r} describes other layers than the tensors"
        )
    if rope is not None:
        stored = replace(
            stored, rope=rope, layers=tuple(replace(layer, rope="model") for layer in stored.layers)
        )
    return replace(stored, **given)


def _stored_model(kv: KvFile) -> Model | None:
    """Return the model that `unpack` left, without V where the file is read without."""
    stored = kv.hints.stored
    if stored is None or not kv.no_v:
        return stored
    return replace(stored, layers=tuple(replace(x, head_dim_v=None) for x in stored.layers))


def has_rope(model: Model) -> bool:
    """Whether K of any layer differs before and after RoPE."""
    return any(model.stream(i, "k").rope is not None for i in range(model.n_layers))
