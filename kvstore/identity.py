"""What must match before stored KV may be reused: the model and how its KV is laid out.

A `Model` is stored once per archive and distinct value, under the digest of its canonical JSON.
FORMAT.md section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.rope import Rope
from kvcodecs.spec import KINDS, MAX_HEADS, Kind, StreamSpec, float_dtype

from .keys import DIGEST_BYTES
from .metadata import canonical_json

#: A layer's rope: its own, none at all, or ``"model"`` for the model's.
LayerRope: TypeAlias = Rope | Literal["model"] | None
MAX_LAYERS: Final = 1 << 16
MAX_SHARDS: Final = 1 << 16
# In the order in which differences are reported: those before the geometry, those after it.
WHICH: Final = ("name", "revision", "weights", "tokenizer", "adapter")
HOW: Final = ("dtype", "layout", "salt")
_TEXTS: Final = WHICH + HOW
_FIELDS: Final = {*_TEXTS, "layers", "rope", "layer_ropes", "shard"}


def _whole(what: str, value: object) -> int:
    """Return an integer as Python's own, which JSON takes; not a bool, though it is an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidArgument(f"{what} {value!r}: expected an integer")
    return int(value)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank of a tensor-parallel group holds.

    Parameters
    ----------
    rank, size
        Which of how many.
    heads
        ``(start, stop)``: the range of the whole model's KV heads that is stored.

    Raises
    ------
    InvalidArgument
        Not ``0 <= rank < size`` and ``0 <= start < stop``, or absurdly large.
    """

    rank: int
    size: int
    heads: tuple[int, int]

    def __post_init__(self) -> None:
        rank, size = _whole("shard rank", self.rank), _whole("shard size", self.size)
        if not isinstance(self.heads, tuple | list) or len(self.heads) != 2:
            raise InvalidArgument(f"shard heads {self.heads!r}: expected (start, stop)")
        start, stop = (_whole("shard heads", end) for end in self.heads)
        if not 0 <= rank < size <= MAX_SHARDS:
            raise InvalidArgument(f"shard {rank} of {size}: ranks are 0 to size - 1")
        if not 0 <= start < stop <= MAX_HEADS:
            raise InvalidArgument(f"shard heads {start}:{stop}: not a range of 0:{MAX_HEADS}")
        for name, value in (("rank", rank), ("size", size), ("heads", (start, stop))):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{self.rank}/{self.size}:{self.heads[0]}-{self.heads[1]}"

    def to_json(self) -> list[int]:
        """Return ``[rank, size, start, stop]``."""
        return [self.rank, self.size, *self.heads]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one layer.

    Parameters
    ----------
    heads
        KV heads.
    head_dim_k
        Channels per K head; even.
    head_dim_v
        Channels per V head, or None where V is absent (as with latent attention).
    window
        Tokens that the layer attends to, or None. A layer with a window may start later than
        the session: its first append may bring only the last tokens.
    rope
        ``"model"`` for the model's, None for a layer without one, or the layer's own.
    """

    heads: int
    head_dim_k: int
    head_dim_v: int | None
    window: int | None = None
    rope: LayerRope = "model"

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim_k", "head_dim_v", "window"):
            value = getattr(self, name)
            if value is not None or name in ("heads", "head_dim_k"):
                object.__setattr__(self, name, _whole(name, value))
        if self.window is not None and self.window < 1:
            raise InvalidArgument(f"window {self.window}: must be positive, or None")
        named = isinstance(self.rope, str) and self.rope == "model"
        if not (named or self.rope is None or isinstance(self.rope, Rope)):
            raise InvalidArgument(f"layer rope {self.rope!r}: a Rope, None or 'model'")

    def head_dim(self, kind: Kind) -> int | None:
        """Channels per head of K or V; None where V is absent."""
        return self.head_dim_k if kind == "k" else self.head_dim_v


@dataclass(frozen=True, repr=False)
class Model:
    """Identity of the KV in a session.

    All of it must be equal before KV is reused. Text is compared as it is, and an empty one
    equals nothing but an empty one.

    Parameters
    ----------
    name
        The model, for example ``"SmolLM2-135M"``.
    layers
        One `LayerSpec` each.
    rope
        Rotary embedding of the layers that do not say otherwise; None for models without.
    revision
        Of the model, a commit for example.
    dtype
        What reads return by default: ``"float32"``, ``"float16"``, ``"bfloat16"``, or ``""``
        for float32.
    layout
        How heads and channels are arranged, where that can differ.
    shard
        The `Shard` that the layers are; ``""`` for a whole model, any other text as it is.
    salt
        Keeps apart what is equal otherwise, tenants for example.
    weights, tokenizer
        Digests of the files.
    adapter
        Whatever changes the model's weights (LoRA): its name, or better a digest.

    Raises
    ------
    InvalidArgument
        A size that is zero, odd or too large, a RoPE wider than a head, or a value of another
        type.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    rope: Rope | None = None
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    shard: Shard | str = ""
    salt: str = ""
    weights: str = ""
    tokenizer: str = ""
    adapter: str = ""
    _streams: dict[tuple[int, Kind], StreamSpec] = field(
        init=False, repr=False, compare=False, hash=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidArgument(f"model {self.name!r}: {len(self.layers)} layers")
        for text in _TEXTS:
            _check_text(text, getattr(self, text))
        if not isinstance(self.shard, Shard):
            _check_text("shard", self.shard)
        if self.dtype:
            float_dtype(self.dtype)
        if not (self.rope is None or isinstance(self.rope, Rope)):
            raise InvalidArgument(f"model rope {self.rope!r}: expected a Rope or None")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerSpec):
                raise InvalidArgument(f"layers[{index}] {layer!r}: expected a LayerSpec")
            for kind in KINDS:
                head_dim = layer.head_dim(kind)
                if head_dim is None:
                    continue
                rope = self.rope if isinstance(layer.rope, str) else layer.rope
                try:
                    spec = StreamSpec(kind, layer.heads, head_dim, rope if kind == "k" else None)
                except InvalidArgument as error:
                    raise InvalidArgument(f"layers[{index}] {kind}: {error}") from error
                self._streams[index, kind] = spec

    @classmethod
    def uniform(
        cls,
        *,
        name: str,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        rope: Rope | None = None,
        head_dim_v: int | Literal["same"] | None = "same",
        window: int | None = None,
        revision: str = "",
        dtype: str = "",
        layout: str = "",
        shard: Shard | str = "",
        salt: str = "",
        weights: str = "",
        tokenizer: str = "",
        adapter: str = "",
    ) -> Model:
        """Return a model whose layers are all alike; `head_dim_v` None means no V."""
        n_layers = _whole("n_layers", n_layers)
        if not 1 <= n_layers <= MAX_LAYERS:
            raise InvalidArgument(f"model {name!r}: {n_layers} layers")
        layer = LayerSpec(
            n_kv_heads, head_dim, head_dim if head_dim_v == "same" else head_dim_v, window
        )
        return cls(
            name,
            (layer,) * n_layers,
            rope=rope,
            revision=revision,
            dtype=dtype,
            layout=layout,
            shard=shard,
            salt=salt,
            weights=weights,
            tokenizer=tokenizer,
            adapter=adapter,
        )

    def __repr__(self) -> str:
        said = [f"{text}={value!r}" for text in _TEXTS if (value := getattr(self, text))]
        shard = [f"shard={self.shard}"] if self.shard else []
        return f"<Model {', '.join([*said, *shard])}, {self.n_layers} layers>"

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def streams(self) -> list[tuple[int, Kind]]:
        """Return (layer, kind) of every stream, in order."""
        return list(self._streams)

    def stream(self, layer: int, kind: Kind) -> StreamSpec:
        """Return the geometry of one stream.

        Raises
        ------
        InvalidArgument
            No such layer or kind.
        """
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
            raise InvalidArgument(f"layer {layer!r}: expected an integer")
        if not isinstance(kind, str) or kind not in KINDS:
            raise InvalidArgument(f"kind {kind!r}, expected 'k' or 'v'")
        spec = self._streams.get((int(layer), kind))
        if spec is None:
            if not 0 <= layer < self.n_layers:
                raise InvalidArgument(
                    f"layer {layer}: the model has layers 0 to {self.n_layers - 1}"
                )
            raise InvalidArgument(f"layer {layer} has no V")
        return spec

    def has_stream(self, layer: int, kind: Kind) -> bool:
        """Whether the layer has K or V; raises `InvalidArgument` for a layer out of range."""
        self.stream(layer, "k")
        return (layer, kind) in self._streams

    def is_uniform(self, layers: Sequence[int], kind: Kind) -> bool:
        """Whether these layers' streams of `kind` stack into one array."""
        shapes = {
            None if spec is None else (spec.heads, spec.head_dim)
            for spec in (self._streams.get((layer, kind)) for layer in layers)
        }
        return len(shapes) == 1 and None not in shapes

    def to_json(self) -> dict[str, object]:
        """Return a JSON object; equal models give equal objects."""
        ropes: dict[Rope, int] = {}
        counts: list[int] = []
        runs: list[list[object]] = []
        for layer in self.layers:
            rope: object = layer.rope
            if isinstance(rope, Rope):
                rope = ropes.setdefault(rope, len(ropes))
            row = [layer.heads, layer.head_dim_k, layer.head_dim_v, layer.window, rope]
            if runs and runs[-1] == row:
                counts[-1] += 1
            else:
                counts.append(1)
                runs.append(row)
        data: dict[str, object] = {
            "layers": [[n, *row] for n, row in zip(counts, runs, strict=True)]
        }
        data.update({text: getattr(self, text) for text in _TEXTS if getattr(self, text)})
        if self.shard:
            shard = self.shard
            data["shard"] = shard.to_json() if isinstance(shard, Shard) else shard
        if self.rope is not None:
            data["rope"] = self.rope.to_json()
        if ropes:
            data["layer_ropes"] = [rope.to_json() for rope in ropes]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Model:
        """Return what `to_json` described.

        Raises
        ------
        Corrupt
            A field is missing or malformed.
        Unsupported
            A field that this release does not know: it would be lost, and with it what must
            match.
        """
        if not isinstance(data, Mapping):
            raise Corrupt(f"model identity: a {type(data).__name__}, expected an object")
        unknown = [name for name in data if name not in _FIELDS]
        if unknown:
            raise Unsupported(f"model identity: field {unknown[0]!r} is unknown to this release")
        try:
            ropes = [Rope.from_json(rope) for rope in data.get("layer_ropes", [])]
            layers: list[LayerSpec] = []
            for n, heads, head_dim_k, head_dim_v, window, rope in data["layers"]:
                if not 1 <= _whole("a run of", n) <= MAX_LAYERS - len(layers):
                    raise Corrupt(f"model identity: a run of {n} layers")
                own = rope
                if isinstance(rope, int):
                    if not 0 <= _whole("layer rope", rope) < len(ropes):
                        raise Corrupt(f"model identity: layer rope {rope} of {len(ropes)}")
                    own = ropes[rope]
                layers += [LayerSpec(heads, head_dim_k, head_dim_v, window, own)] * n
            rope = None if data.get("rope") is None else Rope.from_json(data["rope"])
            shard = data.get("shard", "")
            if isinstance(shard, list):
                rank, size, start, stop = shard
                shard = Shard(rank, size, (start, stop))
            texts = {text: data.get(text, "") for text in _TEXTS}
            return cls(layers=tuple(layers), rope=rope, shard=shard, **texts)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Corrupt(f"model identity: {error!r}") from error

    @cached_property
    def digest(self) -> bytes:
        """Content address: BLAKE2b of the canonical JSON."""
        return blake2b(canonical_json(self.to_json()), digest_size=DIGEST_BYTES).digest()


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"model {name} {value!r}: expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"model {name} {value!r}: not valid UTF-8") from error


def check_model(model: object) -> None:
    """Raise `InvalidArgument` for anything but a `Model`."""
    if not isinstance(model, Model):
        raise InvalidArgument(f"model {model!r}: expected a kvstore.Model")
