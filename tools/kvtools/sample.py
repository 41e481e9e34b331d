"""The packaged sample, or a file of the user's, loaded whole: for `demo` and `bench`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, NotFound

from kvstore import Model
from kvtools.kvfile import KvFile
from kvtools.source import build_model
from kvtools.tensorfile import TensorFile

SAMPLE_NAME = "smollm2_135m_prose.safetensors"
#: Queries of a file's last tokens before RoPE: [layers][query heads][tokens][head_dim].
QUERIES = "q_pre_last"


@dataclass(frozen=True, slots=True)
class Sample:
    """KV in memory.

    Attributes
    ----------
    label
        Where it came from.
    model
        Identity, with RoPE.
    k, v : lists of [heads][tokens][head_dim]
        K before RoPE, and V, per layer, in the file's dtype.
    token_ids : (tokens,) int64
        Made up if the file has none.
    q : lists of [query heads][queries][head_dim], or None
        Queries of the last tokens before RoPE, per layer, where the file has them.
    """

    label: str
    model: Model
    k: list[npt.NDArray[Any]]
    v: list[npt.NDArray[Any]]
    token_ids: npt.NDArray[np.int64]
    q: list[npt.NDArray[Any]] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.k[0].shape[1])

    @property
    def n_values(self) -> int:
        return sum(x.size for x in (*self.k, *self.v))

    def tiled(self, n_tokens: int, n_layers: int | None = None) -> Sample:
        """Repeat the tokens, and the layers, until there are as many as asked for.

        Repeated values are as hard to code as the originals: no codec here looks further back
        than one token.
        """
        layers = range(self.model.n_layers if n_layers is None else n_layers)
        here = np.arange(n_tokens) % self.n_tokens
        k = [self.k[i % len(self.k)][:, here] for i in layers]
        v = [self.v[i % len(self.v)][:, here] for i in layers]
        specs = tuple(self.model.layers[i % self.model.n_layers] for i in layers)
        model = Model(name=self.model.name, layers=specs, rope=self.model.rope)
        return Sample(self.label, model, k, v, self.token_ids[here])


def load_sample(path: str | None = None) -> Sample:
    """Load the packaged sample, or the file at `path`.

    Raises
    ------
    NotFound
        A layer has no K or no V.
    InvalidArgument
        K is after RoPE, or a layer has fewer tokens than others.
    """
    if path is not None:
        return _load(path, path)
    with resources.as_file(resources.files("kvtools") / "data" / SAMPLE_NAME) as packaged:
        return _load(str(packaged), "packaged sample")


def _load(path: str, label: str) -> Sample:
    with TensorFile(path) as file:
        kv = KvFile(file)
        if kv.k_state != "pre":
            raise InvalidArgument(f"{path}: K is after RoPE; a tensor k_pre is needed here")
        if kv.n_tokens == 0:
            raise InvalidArgument(f"{path}: has no tokens, nothing can be measured")
        kv.require_v("a benchmark needs K and V of every layer")
        k, v = [], []
        for layer in kv.layers:
            if layer.v is None:
                raise NotFound(f"{path}: layer {layer.number} has no V, which is needed here")
            for stream in (layer.k, layer.v):
                if stream.tokens != kv.n_tokens:
                    raise InvalidArgument(
                        f"{path}: layer {layer.number} has {stream.tokens} tokens, others have "
                        f"{kv.n_tokens}; all of them are needed here"
                    )
            k.append(kv.read(layer.k, 0, kv.n_tokens))
            v.append(kv.read(layer.v, 0, kv.n_tokens))
        ids = kv.token_ids()
        if ids is None:
            ids = np.arange(kv.n_tokens, dtype=np.int64)
        return Sample(label, build_model(kv), k, v, ids, _queries(file, k))


def _queries(file: TensorFile, k: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]] | None:
    """Return the tensor of queries, if there is one that goes with `k`."""
    if QUERIES not in file.tensors:
        return None
    q = file.read(QUERIES)
    heads, n_tokens, head_dim = k[0].shape
    if q.ndim != 4 or len(q) != len(k) or q.shape[3] != head_dim or q.shape[1] % heads:
        return None
    return list(q) if 0 < q.shape[2] <= n_tokens else None
