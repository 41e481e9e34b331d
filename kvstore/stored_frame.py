"""What is stored of a frame."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvcodecs.frame import open_frame

from .backend import Snapshot
from .pieces import Piece

# Frames that are announced to the backend at a time.
_AT_A_TIME: Final = 64


def announced(snapshot: Snapshot, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield pieces, some of them at a time announced to the backend as read next."""
    while some := list(islice(pieces, _AT_A_TIME)):
        snapshot.prefetch([key for piece in some for key in piece.keys])
        yield from some


def first_value(snapshot: Snapshot, piece: Piece, where: str = "") -> memoryview | None:
    """Return what is stored of a frame, or None.

    Raises
    ------
    Truncated, Corrupt
        The frame is in one of two places, and what is in the first is damaged.
    """
    if len(piece.keys) == 1:
        return snapshot.get(piece.keys[0])
    last = piece.keys[-1]
    for key in piece.keys[:-1]:
        value = snapshot.get(key)
        if value is not None:
            header, _ = open_frame(value, where)
            if header.first_token == piece.first_token - piece.offset:
                return value
    return snapshot.get(last)
