"""KV tensors in a safetensors file: which tensors, which layers.

Two layouts are read: one 4-D tensor each for K and V, ``k_pre`` or ``k``, and ``v``
[layers][heads][tokens][head_dim]; or one 3-D tensor per layer, ``layers.N.k_pre`` or
``layers.N.k``, and ``layers.N.v``. ``k_pre`` is K before RoPE, ``k`` after it. What the tensors do
not say is in `Hints`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, NotFound
from kvcodecs.spec import Kind, KState, StreamSpec

from kvstore import LayerSpec
from kvstore.identity import MAX_LAYERS
from kvstore.session_record import MAX_TOKENS
from kvtools.hints import Hints
from kvtools.tensorfile import TensorFile
from kvtools.tensorheader import NUMPY_DTYPES, TensorInfo
from kvtools.terminal import listed

#: Characters of a tensor's name that a message shows.
MAX_NAME = 60

_PER_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(k|k_pre|v)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stream:
    """One [heads][tokens][head_dim] tensor of the file: a whole tensor, or a layer of a 4-D one."""

    name: str
    leading: tuple[int, ...]
    heads: int
    tokens: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layer:
    """K and V of one layer; `number` is the model's own layer number."""

    number: int
    k: Stream
    v: Stream | None


class KvFile:
    """The KV of one token sequence in an open safetensors file.

    Parameters
    ----------
    file
        Stays open as long as this object is read from.
    k_state
        Which K to take where the file does not say, or has both.
    no_v
        Leave V out.

    Attributes
    ----------
    layers : list of Layer
    k_state
        ``"pre"`` or ``"post"``.
    n_tokens
        Of the longest stream; layers with a window may have fewer, the last ones.
    no_v
        As given.
    hints : Hints
        What the file says besides its tensors.

    Raises
    ------
    NotFound
        No K.
    InvalidArgument
        Tensors that do not fit together.
    """

    def __init__(
        self, file: TensorFile, *, k_state: KState | None = None, no_v: bool = False
    ) -> None:
        self.file = file
        self.hints = Hints(file)
        self.no_v, self._wanted = no_v, k_state
        self.k_state, k_name = self._choose_k(k_state)
        self.layers = self._find_layers(k_name)
        if not self.layers:
            raise InvalidArgument(f"{file.path}: no layers")
        if no_v:
            self.layers = [replace(layer, v=None) for layer in self.layers]
        streams = [x for layer in self.layers for x in (layer.k, layer.v) if x is not None]
        self.n_tokens = max(stream.tokens for stream in streams)
        for index, layer in enumerate(self.layers):
            for stream in (layer.k, layer.v):
                self._check(index, stream)

    def require_v(self, advice: str) -> None:
        """Check that no layer lacks V, but those whose model has none.

        Raises
        ------
        NotFound
            Names the layers, and ends in `advice`.
        """
        if self.no_v:
            return
        without = [
            layer.number
            for index, layer in enumerate(self.layers)
            if layer.v is None and not self._stored_without_v(index)
        ]
        if without:
            raise NotFound(f"{self.file.path}: no V for layers [{listed(without)}]; {advice}")

    def unused(self) -> list[str]:
        """Names of tensors that are nothing to us, sorted; not what an option leaves out."""
        used = {"token_ids"}
        for layer in self.layers:
            used.add(layer.k.name)
            if layer.v is not None:
                used.add(layer.v.name)
        left_out = {"v"} if self.no_v else set()
        if self._wanted is not None:
            left_out.add("k" if self.k_state == "pre" else "k_pre")
        return sorted(n for n in self.file.tensors if n not in used and _kind(n) not in left_out)

    def dtype(self, *kinds: Kind) -> str:
        """Name of a dtype that holds all values of `kinds`, ``"float16"`` say."""
        names = set()
        for layer in self.layers:
            for kind, stream in (("k", layer.k), ("v", layer.v)):
                if kind in kinds and stream is not None:
                    names.add(NUMPY_DTYPES[stream.dtype].name)
        return names.pop() if len(names) == 1 else "float32"

    def read(self, stream: Stream, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens ``[start, stop)`` into a new array [heads][stop - start][head_dim]."""
        return self.file.read_tokens(stream.name, stream.leading, start, stop)

    def chunks(self, stream: Stream, chunk_bytes: int) -> Iterator[npt.NDArray[Any]]:
        """Read a stream in successive pieces of at most about `chunk_bytes`."""
        row_bytes = stream.heads * stream.head_dim * NUMPY_DTYPES[stream.dtype].itemsize
        step = max(1, chunk_bytes // row_bytes)
        for start in range(0, stream.tokens, step):
            yield self.read(stream, start, min(start + step, stream.tokens))

    def token_ids(self) -> npt.NDArray[np.int64] | None:
        """Token ids, or None if the file has none."""
        if "token_ids" not in self.file.tensors:
            return None
        info = self.file.info("token_ids")
        if info.shape != (self.n_tokens,) or info.dtype[0] not in "IU":
            raise InvalidArgument(
                f"{self.file.path}: token_ids is {info.dtype} {list(info.shape)}, "
                f"expected [{self.n_tokens}] integers"
            )
        ids = self.file.read("token_ids")
        if ids.size and int(ids.max()) > np.iinfo(np.int64).max:
            raise InvalidArgument(f"{self.file.path}: a token id is beyond 64 signed bits")
        return ids.astype(np.int64)

    def _stored(self, index: int) -> LayerSpec | None:
        """Return what `unpack` left of a layer, if anything."""
        stored = self.hints.stored
        if stored is None or stored.n_layers != len(self.layers):
            return None
        return stored.layers[index]

    def _stored_without_v(self, index: int) -> bool:
        layer = self._stored(index)
        return layer is not None and layer.head_dim_v is None

    def _choose_k(self, wanted: KState | None) -> tuple[KState, str]:
        has: set[str] = set()
        for name in self.file.tensors:
            kind = _kind(name)
            if kind in ("k", "k_pre"):
                has.add(kind)
        if not has:
            raise NotFound(
                f"{self.file.path}: no K; expected a tensor k_pre or k (4-D), or layers.N.k_pre "
                f"or layers.N.k; the file has {listed(sorted(self.file.tensors)) or 'nothing'}"
            )
        if has == {"k"}:
            return wanted or "post", "k"
        if has == {"k_pre"}:
            if wanted == "post":
                raise InvalidArgument(f"{self.file.path}: has k_pre only, and --k-state is post")
            return "pre", "k_pre"
        if wanted is None:
            raise InvalidArgument(f"{self.file.path}: has k and k_pre; choose with --k-state")
        return wanted, "k_pre" if wanted == "pre" else "k"

    def _find_layers(self, k_name: str) -> list[Layer]:
        if k_name in self.file.tensors:
            return self._split_4d(k_name)
        found: dict[int, dict[str, Stream]] = {}
        for name, info in self.file.tensors.items():
            match = _PER_LAYER.fullmatch(name)
            if match and match[2] in (k_name, "v"):
                number = self._layer_number(match[1], name)
                found.setdefault(number, {})[match[2]] = self._stream(info)
        missing = sorted(number for number, streams in found.items() if k_name not in streams)
        if missing:
            raise NotFound(f"{self.file.path}: layers [{listed(missing)}] have V but no {k_name}")
        numbers = sorted(found)
        stated = self.hints.layer_numbers() or numbers
        if self.hints.stored is not None and sorted(stated) == numbers:
            numbers = stated  # the order of the stored model's layers
        return [Layer(n, found[n][k_name], found[n].get("v")) for n in numbers]

    def _layer_number(self, digits: str, name: str) -> int:
        # By length first: Python refuses to convert thousands of digits.
        if len(digits) > len(str(MAX_LAYERS)) or int(digits) >= MAX_LAYERS:
            shown = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
            raise InvalidArgument(
                f"{self.file.path}: tensor {shown!r}: layers are numbered 0 to {MAX_LAYERS - 1}"
            )
        return int(digits)

    def _split_4d(self, k_name: str) -> list[Layer]:
        k = self.file.info(k_name)
        v = self.file.tensors.get("v")
        for info in (k, v):
            if info is not None and len(info.shape) != 4:
                raise InvalidArgument(
                    f"{self.file.path}: tensor {info.name!r} has shape {list(info.shape)}, "
                    "expected [layers][heads][tokens][head_dim]"
                )
        n_layers = k.shape[0]
        if v is not None and v.shape[0] != n_layers:
            raise InvalidArgument(f"{self.file.path}: {n_layers} layers of K, {v.shape[0]} of V")
        if n_layers > MAX_LAYERS:  # a tensor without elements can claim any number
            raise InvalidArgument(
                f"{self.file.path}: tensor {k_name!r} has {n_layers} layers, at most {MAX_LAYERS}"
            )
        numbers = self.hints.layer_numbers() or list(range(n_layers))
        if len(numbers) != n_layers:
            raise InvalidArgument(
                f"{self.file.path}: {n_layers} layers, but numbers [{listed(numbers)}]"
            )
        return [
            Layer(
                numbers[index],
                self._stream(k, index),
                None if v is None else self._stream(v, index),
            )
            for index in range(n_layers)
        ]

    def _stream(self, info: TensorInfo, *leading: int) -> Stream:
        shape = info.shape[len(leading) :]
        if len(shape) != 3:
            raise InvalidArgument(
                f"{self.file.path}: tensor {info.name!r} has shape {list(info.shape)}, "
                "expected [heads][tokens][head_dim]"
            )
        heads, tokens, head_dim = shape
        try:
            StreamSpec("k", heads, head_dim)
            if tokens > MAX_TOKENS:
                raise InvalidArgument(f"{tokens} tokens: at most {MAX_TOKENS}")
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.file.path}: tensor {info.name!r}: {error}") from error
        return Stream(info.name, leading, heads, tokens, head_dim, dtype=info.dtype)

    def _check(self, index: int, stream: Stream | None) -> None:
        if stream is None:
            return
        if stream.dtype not in ("F16", "BF16", "F32"):
            raise InvalidArgument(
                f"{self.file.path}: tensor {stream.name!r} is {stream.dtype}; "
                "expected F16, BF16 or F32"
            )
        stored = self._stored(index)
        windowed = stored is not None and stored.window is not None
        if stream.tokens != self.n_tokens and not windowed:
            raise InvalidArgument(
                f"{self.file.path}: tensor {stream.name!r} has {stream.tokens} tokens, "
                f"others have {self.n_tokens}"
            )


def _kind(name: str) -> str | None:
    """Return what a tensor holds by its name: ``"k"``, ``"k_pre"``, ``"v"``, or None."""
    if name in ("k", "k_pre", "v"):
        return name
    match = _PER_LAYER.fullmatch(name)
    return match[2] if match else None
