"""`kvstore unpack`: a session, or a part of it, to a safetensors file.

The file appears complete or not at all, and can be packed again: what tensors cannot say is in the
header's metadata.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, NotFound
from kvcodecs.spec import Kind, float_dtype

import kvstore
from kvstore import Model
from kvstore.catalog import listed_names
from kvstore.receipt_making import receipt_of_read
from kvstore.source_digests import SourceHasher
from kvtools.hints import METADATA_KEY, are_layer_numbers
from kvtools.receipt_file import write_receipt
from kvtools.source import has_rope
from kvtools.tensorfile import TensorWriter
from kvtools.terminal import count_text, progress, show_json, size_text

#: Tokens of one stream in memory at a time.
PIECE_TOKENS = 8192

Shapes = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]
#: Tokens of each stream, by layer (as it counts in the file) and kind.
Spans = dict[tuple[int, Kind], tuple[int, int]]


def run_unpack(args: argparse.Namespace) -> int:
    """Write one file; an existing one is replaced only with ``--force``."""
    offset = args.position_offset
    if offset and args.k_state != "post":
        args.parser.error("--position-offset goes with --k-state post: K before RoPE has none")
    with kvstore.open(args.archive) as archive:
        name = only_session(archive) if args.session is None else args.session
        session = archive.session(name)
        where = f"{args.archive}: session {name!r}"
        layers = _chosen_layers(args.layers, session.model, where)
        numbers = [layer_numbers(session)[i] for i in layers]
        model = replace(session.model, layers=tuple(session.model.layers[i] for i in layers))
        spans = _spans(session, model, layers, args.range, where)
        start, stop = min(first for first, _ in spans.values()), max(s for _, s in spans.values())
        if args.k_state == "post" and not has_rope(model):
            raise InvalidArgument(
                f"{where}: no RoPE is known for these layers, so that K is only had as it was "
                "packed: --k-state pre"
            )
        dtype = float_dtype(args.dtype or model.dtype or "float32")
        layout = _Layout(model, numbers, args.k_state, spans, dtype)
        shapes = layout.shapes()
        token_ids = session.token_ids(start, stop)
        if token_ids is not None:
            shapes["token_ids"] = (_id_dtype(token_ids), token_ids.shape)
        if start + offset < 0:
            raise InvalidArgument(
                f"{where}: --position-offset {offset} puts token {start} at position "
                f"{start + offset}"
            )
        metadata = _metadata(model, name, start + offset, numbers)
        hashers = {} if args.receipt is None else _hashers(model, spans)
        with TensorWriter(args.output, shapes, metadata, overwrite=args.force) as writer:
            if token_ids is not None:
                writer.array("token_ids")[...] = token_ids
            with progress("unpack", quiet=args.quiet or args.json) as advance:
                done, total = 0, sum(last - first for first, last in spans.values())
                for (index, kind), (begin, end) in spans.items():
                    for first, last in _pieces(begin, end):
                        view = layout.view(writer, index, kind)[:, first - begin : last - begin]
                        session.read(
                            layers[index],
                            kind,
                            first,
                            last,
                            args.k_state,
                            dtype.name,
                            out=view,
                            position_offset=offset,
                        )
                        if hashers:
                            hashers[index, kind].update(view)
                        writer.release()
                        done += last - first
                        advance(done, total)
        if hashers:
            receipt = receipt_of_read(
                session,
                {(layers[index], kind): hasher for (index, kind), hasher in hashers.items()},
                {(layers[index], kind): first for (index, kind), (first, _) in spans.items()},
            )
            write_receipt(args.receipt, receipt)
    if args.json:
        tensors = {key: list(shape) for key, (_, shape) in shapes.items()}
        show_json(
            {
                "session": name,
                "start": start,
                "stop": stop,
                "position_offset": offset,
                "tensors": tensors,
            }
        )
    elif not args.quiet:
        n_bytes = writer.path.stat().st_size
        print(
            f"unpacked {name!r}: tokens {start}:{stop}, {count_text(len(layers), 'layer')}, "
            f"{dtype.name}, {size_text(n_bytes)}"
        )
    return 0


def _hashers(model: Model, spans: Spans) -> dict[tuple[int, Kind], SourceHasher]:
    specs = {stream: model.stream(*stream) for stream in spans}
    return {stream: SourceHasher(spec.heads, spec.head_dim) for stream, spec in specs.items()}


def _spans(
    session: kvstore.Session,
    model: Model,
    layers: list[int],
    wanted: tuple[int, int | None] | None,
    where: str,
) -> Spans:
    """Return the tokens of each stream: those asked for, or all that it has.

    Raises
    ------
    InvalidArgument
        The session, or one of the layers, does not have the tokens asked for.
    """
    n_tokens = session.n_committed
    spans: Spans = {}
    for index, kind in model.streams():
        first = session.start_token(layers[index], kind)
        if wanted is None:
            spans[index, kind] = first, n_tokens
            continue
        start, stop = wanted[0], n_tokens if wanted[1] is None else wanted[1]
        if stop > n_tokens or start > stop:
            raise InvalidArgument(f"{where} has tokens 0:{n_tokens}, not {start}:{stop}")
        if start < min(first, stop):
            raise InvalidArgument(
                f"{where} layer {layers[index]} starts at token {first}, by its window or after a "
                "trim; start --range there, choose other --layers, or leave out --range for all "
                "that each layer has"
            )
        spans[index, kind] = start, stop
    return spans


class _Layout:
    """The tensors of the file: a 4-D one per kind where layers are alike, else 3-D ones."""

    def __init__(
        self,
        model: Model,
        numbers: list[int],
        k_state: str,
        spans: Spans,
        dtype: np.dtype[np.generic],
    ) -> None:
        self._model, self._numbers, self._spans, self._dtype = model, numbers, spans, dtype
        self._names = {"k": "k_pre" if k_state == "pre" else "k", "v": "v"}
        geometry = {(layer.heads, layer.head_dim_k, layer.head_dim_v) for layer in model.layers}
        self._stacked = len(geometry) == 1 and len(set(spans.values())) == 1

    def shapes(self) -> Shapes:
        shapes: Shapes = {}
        for (index, kind), (start, stop) in self._spans.items():
            spec = self._model.stream(index, kind)
            one = (spec.heads, stop - start, spec.head_dim)
            shape = (self._model.n_layers, *one) if self._stacked else one
            shapes[self._name(index, kind)] = (self._dtype, shape)
        return shapes

    def view(self, writer: TensorWriter, index: int, kind: Kind) -> npt.NDArray[np.generic]:
        array = writer.array(self._name(index, kind))
        return array[index] if self._stacked else array

    def _name(self, index: int, kind: Kind) -> str:
        name = self._names[kind]
        return name if self._stacked else f"layers.{self._numbers[index]}.{name}"


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a token range at multiples of `PIECE_TOKENS`, which are block boundaries as a rule."""
    while start < stop:
        cut = min(stop, (start // PIECE_TOKENS + 1) * PIECE_TOKENS)
        yield start, cut
        start = cut


def only_session(archive: kvstore.Archive) -> str:
    """Return the name of the archive's only session; otherwise say what to do."""
    names = archive.names()
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotFound(f"{archive.path}: no sessions")
    raise InvalidArgument(
        f"{archive.path}: {len(names)} sessions, choose one with --session: {listed_names(names)}"
    )


def layer_numbers(session: kvstore.Session) -> list[int]:
    """Return the model's own numbers of a session's layers, as `pack` kept them."""
    numbers = session.metadata.get("layers")
    n_layers = session.model.n_layers
    if isinstance(numbers, list) and len(numbers) == n_layers and are_layer_numbers(numbers):
        return list(numbers)
    return list(range(n_layers))


def _chosen_layers(wanted: list[range] | None, model: Model, where: str) -> list[int]:
    """Expand ``--layers``, once all of it is known to be there."""
    if wanted is None:
        return list(range(model.n_layers))
    for span in wanted:
        if span.stop > model.n_layers:
            raise InvalidArgument(
                f"{where} has layers 0 to {model.n_layers - 1}, not {span.stop - 1}"
            )
    return [layer for span in wanted for layer in span]


def _id_dtype(token_ids: npt.NDArray[np.int64]) -> npt.DTypeLike:
    fits = token_ids.size == 0 or (token_ids.min() >= -(2**31) and token_ids.max() < 2**31)
    return np.int32 if fits else np.int64


def _metadata(model: Model, session: str, start: int, numbers: list[int]) -> Mapping[str, str]:
    """Return the header's metadata: ours, and the plain fields that any program can read."""
    ours = {"version": 1, "session": session, "model": model.to_json()}
    metadata = {METADATA_KEY: json.dumps(ours), "layers": json.dumps(numbers)}
    metadata["model"] = model.name
    if model.revision:
        metadata["revision"] = model.revision
    if start:
        metadata["first_token"] = str(start)
    if model.rope is not None:
        metadata["rope_inv_freq_f32"] = json.dumps([float(x) for x in model.rope.inv_freq])
        metadata["rope_style"] = model.rope.style
        metadata["rope_scaling"] = repr(model.rope.scaling)
    return metadata
