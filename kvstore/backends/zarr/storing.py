"""Frames are put where they belong, before a commit refers to them. FORMAT.md section 9.4."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from kvcodecs.errors import KvError, NotFound

from .in_use import unused
from .objects import Objects, Writer
from .places import ASIDE, Lookup
from .placing import Placed

# Where the owner is in a frame.
_OWNER_BYTES: Final = slice(8, 16)


def store_frames(objects: Objects, writer: Writer, placed: Placed) -> None:
    """Put frames where `placing` wants them; what may be needed again is copied aside first."""
    rescues = _to_rescue(objects, placed.rescues)
    if rescues:
        _copy(objects, rescues, writer)
        objects.flush()  # before anything takes their place
    _copy(objects, placed.copies, writer)
    for source, start, stop, target in placed.excerpts:
        data = objects.get(source, start, stop)
        if data is not None:
            objects.put_frames([(target, data)], writer.check)
    if placed.frames:
        objects.put_frames(placed.frames, writer.check)


def _to_rescue(objects: Objects, rescues: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rescues that are to be done.

    A writer that died may have done some, and then put other frames in the places: copying those
    would overwrite what it saved.
    """
    heads = objects.get_many([(source, 0, _OWNER_BYTES.stop) for source, _ in rescues])
    found = []
    for (source, target), head in zip(rescues, heads, strict=True):
        owner = bytes.fromhex(target.removeprefix(ASIDE).partition("/")[0])
        if head is not None and head[_OWNER_BYTES] == owner[::-1]:
            found.append((source, target))
    return found


def _copy(objects: Objects, pairs: Sequence[tuple[str, str]], writer: Writer) -> None:
    if not pairs:
        return
    try:
        objects.copy(pairs, writer.check)
    except NotFound:
        # A lost frame is for `verify` to tell, and must not keep the others from being stored.
        for pair in pairs:
            with contextlib.suppress(NotFound):
                objects.copy([pair], writer.check)


def take_back(objects: Objects, writer: Writer, base: Lookup, placed: Placed) -> None:
    """Delete frames of a transaction that found no room, as far as nothing else is there.

    What could not be done here is a leftover for `collect`.
    """
    with contextlib.suppress(KvError):
        writer.check()
        objects.delete(unused(base, [key for key, _ in placed.frames]))
