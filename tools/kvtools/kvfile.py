"""KV tensors in a safetensors file: which tensors, which layers, which RoPE.

Two layouts are read: one 4-D tensor each for K and V, ``k_pre`` or ``k``, and ``v``
[layers][heads][tokens][head_dim]; or one 3-D tensor per layer, ``layers.N.k_pre`` or
``layers.N.k``, and ``layers.N.v``. ``k_pre`` is K before RoPE, ``k`` after it. What the tensors do
not say (RoPE frequencies, model, layer numbers) comes from the header's metadata, or from a
``.json`` file beside the input with the same stem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind, KState

from kvtools.tensorfile import NUMPY_DTYPES, TensorFile, TensorInfo

MAX_SIDECAR_BYTES = 100_000_000
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
        Accept a file without V.

    Attributes
    ----------
    layers : list of Layer
    k_state
        ``"pre"`` or ``"post"``.
    hints : dict
        The sidecar's fields, overridden by the header's metadata.

    Raises
    ------
    NotFound
        No K, or no V.
    InvalidArgument
        Tensors that do not fit together.
    """

    def __init__(
        self, file: TensorFile, *, k_state: KState | None = None, no_v: bool = False
    ) -> None:
        self.file = file
        self.hints = {**_read_sidecar(file.path.with_suffix(".json")), **file.metadata}
        self.k_state, k_name = self._choose_k(k_state)
        self.layers = self._find_layers(k_name)
        if not self.layers:
            raise InvalidArgument(f"{file.path}: no layers")
        without = [layer.number for layer in self.layers if layer.v is None]
        if without and not no_v:
            raise NotFound(f"{file.path}: no V for layers {without}; --no-v if there is none")
        self.n_tokens = self.layers[0].k.tokens
        for layer in self.layers:
            for stream in (layer.k, layer.v):
                self._check(stream)

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
        return self.file.read("token_ids").astype(np.int64)

    def rope(self) -> Rope | None:
        """Return the RoPE that the metadata or the sidecar states, or None."""
        frequencies = self._hint("rope_inv_freq_f32", list)
        if frequencies is None:
            return None
        return rope_from(
            frequencies,
            where=str(self.file.path),
            style=self.hints.get("rope_style", "half"),
            scaling=self._hint("rope_scaling", (int, float), 1.0),
        )

    def text_hint(self, name: str) -> str | None:
        """Return a string of the metadata or the sidecar, such as ``"model"``."""
        value = self.hints.get(name)
        return value if isinstance(value, str) and value else None

    def first_token(self) -> int:
        """Position of the first token; not 0 in what `unpack --range` wrote."""
        return int(self._hint("first_token", int, 0))

    def _hint(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.hints.get(name, default)
        if isinstance(value, str):  # the header's metadata holds strings only
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
            if value is None:
                raise InvalidArgument(f"{self.file.path}: metadata {name!r} is not JSON")
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InvalidArgument(f"{self.file.path}: {name!r} is a {type(value).__name__}")
        return value

    def _choose_k(self, wanted: KState | None) -> tuple[KState, str]:
        has: set[str] = set()
        for name in self.file.tensors:
            match = _PER_LAYER.fullmatch(name)
            if name in ("k", "k_pre") or (match and match[2] != "v"):
                has.add(match[2] if match else name)
        if not has:
            raise NotFound(
                f"{self.file.path}: no K; expected a tensor k_pre or k (4-D), or layers.N.k_pre "
                f"or layers.N.k; the file has {', '.join(sorted(self.file.tensors)) or 'nothing'}"
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
                found.setdefault(int(match[1]), {})[match[2]] = self._stream(info)
        missing = sorted(number for number, streams in found.items() if k_name not in streams)
        if missing:
            raise NotFound(f"{self.file.path}: layers {missing} have V but no {k_name}")
        return [Layer(n, found[n][k_name], found[n].get("v")) for n in sorted(found)]

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
        numbers = self._hint("layers", list) or list(range(n_layers))
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if len(numbers) != n_layers or not whole:
            raise InvalidArgument(f"{self.file.path}: {n_layers} layers, but numbers {numbers}")
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
        return Stream(info.name, leading, *shape, dtype=info.dtype)

    def _check(self, stream: Stream | None) -> None:
        if stream is None:
            return
        if stream.dtype not in ("F16", "BF16", "F32"):
            raise InvalidArgument(
                f"{self.file.path}: tensor {stream.name!r} is {stream.dtype}; "
                "expected F16, BF16 or F32"
            )
        if stream.tokens != self.n_tokens:
            raise InvalidArgument(
                f"{self.file.path}: tensor {stream.name!r} has {stream.tokens} tokens, "
                f"others have {self.n_tokens}"
            )


def rope_from(values: object, *, where: str, style: object, scaling: float) -> Rope:
    """Build a `Rope` from what a JSON document held; `where` goes into error messages."""
    if not isinstance(values, list) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in values
    ):
        raise InvalidArgument(f"{where}: RoPE frequencies are not a list of numbers")
    if style != "half" and style != "interleaved":
        raise InvalidArgument(f"{where}: RoPE style {style!r}; use half or interleaved")
    try:
        frequencies = np.array(values, np.float64)
    except OverflowError:
        raise InvalidArgument(f"{where}: a RoPE frequency is out of range") from None
    return Rope(frequencies, style=style, scaling=scaling)  # type: ignore[arg-type]  # narrows


def read_json(path: Path) -> Any:
    """Parse a JSON file of reasonable size.

    Raises
    ------
    Corrupt
        Not JSON, or absurdly large.
    """
    if path.stat().st_size > MAX_SIDECAR_BYTES:
        raise Corrupt(f"{path}: larger than {MAX_SIDECAR_BYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: not valid JSON: {error}") from error


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise Corrupt(f"{path}: not a JSON object")
    return content
