"""How the blocks of owners are decoded: parsed stream headers, kept for an archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvcodecs.codec import BlockCodec

from .forklock import ForkLock
from .identity import Model
from .session_record import StreamName

#: Owners whose parsed headers are kept: about 100 KB each of a model of 30 layers.
MOST_OWNERS: Final = 64


@dataclass(frozen=True, slots=True)
class Coding:
    """How a stream's frames are decoded: its codec and header, or raw for its head."""

    codec: BlockCodec
    params: Any
    tag: int


class Codings:
    """How the blocks of owners read lately are decoded, for all sessions of an archive.

    Headers are fixed once and owners are never used again, so what was read stays true. To parse
    them takes a tenth of the time of a short read.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[bytes, int], dict[StreamName, Coding]] = {}
        self._lock = ForkLock()

    def of(self, model: Model, owner: int) -> dict[StreamName, Coding]:
        """Return what is known of an owner that stores KV of `model`, to read and add to."""
        key = model.digest, owner
        with self._lock:
            found = self._owners.pop(key, None)
            if found is None:
                found = {}
            self._owners[key] = found  # the last one to go
            if len(self._owners) > MOST_OWNERS:
                del self._owners[next(iter(self._owners))]
        return found
