"""What a caller gives to append, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import Kind
from kvcodecs.tensor import as_array, check_tensor

from .identity import Model
from .session_record import StreamName
from .token_ids import Ids, check_ids

Tensor: TypeAlias = npt.NDArray[Any]
Tensors: TypeAlias = "Tensor | Sequence[Tensor | None] | None"


def given_tensors(
    model: Model, given: Mapping[Kind, Tensors], where: str
) -> dict[StreamName, Tensor]:
    """Return the tensor of every stream, checked for shape and dtype."""
    found: dict[StreamName, Tensor] = {}
    streams = set(model.streams())
    for kind, tensors in given.items():
        items: Any = [None] * model.n_layers if tensors is None else tensors
        if not hasattr(items, "__len__"):
            raise InvalidArgument(f"{where}: {kind} is no sequence of layers")
        if len(items) != model.n_layers:
            raise InvalidArgument(
                f"{where}: {kind} has {len(items)} layers, the model {model.n_layers}"
            )
        for layer, item in enumerate(items):
            at = f"{where} layer {layer} {kind}"
            has_stream = (layer, kind) in streams
            if (item is not None) != has_stream:
                what = "given, but the model has none" if item is not None else "missing"
                raise InvalidArgument(f"{at}: {what}")
            if has_stream:
                x = as_array(item, at)
                check_tensor(x, model.stream(layer, kind), at)
                found[layer, kind] = x
    return found


def given_starts(
    model: Model, counts: Mapping[StreamName, int], n_new: int, n_before: int, where: str
) -> dict[StreamName, int | None]:
    """Check each stream's number of new tokens; return where it starts if that moves.

    Only the first append of a layer with a window may bring fewer than `n_new`.
    """
    starts: dict[StreamName, int | None] = {}
    for (layer, kind), n in counts.items():
        starts[layer, kind] = None
        if n == n_new:
            continue
        windowed = model.layers[layer].window is not None
        if not windowed or n_before:
            hint = "; only the first append may be shorter" if windowed else ""
            raise InvalidArgument(
                f"{where} layer {layer} {kind}: {n} tokens, other layers bring {n_new}{hint}"
            )
        starts[layer, kind] = n_new - n
    return starts


def given_ids(
    token_ids: object, n_new: int, n_before: int, *, has_ids: bool, where: str
) -> Ids | None:
    """Return the ids of `n_new` tokens, given with all tokens of a session or with none."""
    if token_ids is None:
        if has_ids and n_new:
            raise InvalidArgument(f"{where}: token_ids missing; earlier tokens have them")
        return None
    if n_before and not has_ids:
        raise InvalidArgument(f"{where}: token_ids given; earlier tokens have none")
    try:
        return check_ids(token_ids, n_new)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from error
