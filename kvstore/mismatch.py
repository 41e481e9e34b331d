"""Whether stored KV is of the model that is expected, and if not, which field says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from kvcodecs.errors import IdentityMismatch
from kvcodecs.rope import Rope

from .identity import HOW, WHICH, LayerRope, LayerSpec, Model, Shard, check_model


def check_identity(found: Model, expected: Model, where: str) -> None:
    """Check that a stored model is the expected one.

    Raises
    ------
    IdentityMismatch
        Names the first field that differs.
    InvalidArgument
        `expected` is not a model.
    """
    check_model(expected)
    difference = _difference(found, expected)
    if difference is not None:
        name, have, want = difference
        raise IdentityMismatch(
            f"{where}: stored for another model: {name} is {have!r}, expected {want!r}",
            field=name,
            expected=want,
            found=have,
        )


def _difference(found: Model, expected: Model) -> tuple[str, object, object] | None:
    return (
        _field_difference("", WHICH, found, expected)
        or _rope_difference("rope", found.rope, expected.rope)
        or _layer_difference(found.layers, expected.layers)
        or _field_difference("", HOW, found, expected)
        or _shard_difference(found.shard, expected.shard)
    )


def _field_difference(
    prefix: str, names: Sequence[str], found: object, expected: object
) -> tuple[str, object, object] | None:
    for name in names:
        have, want = getattr(found, name), getattr(expected, name)
        if have != want:
            return prefix + name, have, want
    return None


def _layer_difference(
    found: tuple[LayerSpec, ...], expected: tuple[LayerSpec, ...]
) -> tuple[str, object, object] | None:
    if len(found) != len(expected):
        return "n_layers", len(found), len(expected)
    sizes = [part.name for part in fields(LayerSpec) if part.name != "rope"]
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        prefix = f"layers[{index}]."
        difference = _field_difference(prefix, sizes, mine, theirs)
        difference = difference or _rope_difference(f"{prefix}rope", mine.rope, theirs.rope)
        if difference is not None:
            return difference
    return None


def _shard_difference(
    found: Shard | str, expected: Shard | str
) -> tuple[str, object, object] | None:
    if isinstance(found, Shard) and isinstance(expected, Shard):
        return _field_difference("shard.", ("rank", "size", "heads"), found, expected)
    return None if found == expected else ("shard", found, expected)


def _rope_difference(
    name: str, found: LayerRope, expected: LayerRope
) -> tuple[str, object, object] | None:
    if not (isinstance(found, Rope) and isinstance(expected, Rope)):
        return None if found == expected else (name, found, expected)
    if found.n_pairs != expected.n_pairs:
        return f"{name}.n_pairs", found.n_pairs, expected.n_pairs
    unequal = np.flatnonzero(found.inv_freq.view(np.uint32) != expected.inv_freq.view(np.uint32))
    if unequal.size:
        i = int(unequal[0])
        have, want = float(found.inv_freq[i]), float(expected.inv_freq[i])
        return f"{name}.inv_freq", f"{have!r} at index {i}", f"{want!r} at index {i}"
    if found.style != expected.style:
        return f"{name}.style", found.style, expected.style
    if found.scaling != expected.scaling:
        return f"{name}.scaling", found.scaling, expected.scaling
    return None
