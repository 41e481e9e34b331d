"""Which sessions use the frames of an owner, and whether prompts can be matched with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcodecs.errors import Corrupt

from . import keys
from .backend import Snapshot
from .identity import Model
from .session_record import SessionRecord


class User(NamedTuple):
    """A session that uses an owner's frames."""

    until: int
    id: int
    name: str


def users_of(snapshot: Snapshot, owner: int) -> list[User]:
    """Return who uses an owner's frames, by `until`."""
    found = []
    for key, value in snapshot.scan(keys.owner_prefix(keys.USER, owner)):
        try:
            parsed = keys.parse(key)
            name = bytes(value).decode("utf-8")
        except (Corrupt, UnicodeDecodeError):
            continue  # `verify` reports it
        found.append(User(parsed.until or 0, parsed.session or 0, name))
    return found


def is_prefix(record: SessionRecord, model: Model) -> bool:
    """Whether prompts can be matched with a session: its ids are known and nothing is trimmed."""
    return record.has_ids and record.first == 0 and usable_from(record, model) is not None


def usable_from(record: SessionRecord, model: Model) -> int | None:
    """Return the fewest tokens of a session that a model can go on from; None if none do.

    A layer with a window that came later lacks its first tokens; those that the window of the
    next token reaches must be there.
    """
    least = 0
    for (layer, _), state in record.streams.items():
        if state.start:
            window = model.layers[layer].window
            if window is None:
                return None
            least = max(least, state.start + window)
    return least


def indexed(record: SessionRecord) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, begin, stop) of the tokens that a session's owners have entries for."""
    begin = 0
    for owner, stop in (*record.id_parts, (record.owner, record.n_tokens)):
        stop = min(stop, record.n_faithful_tokens)
        if begin < stop:
            yield owner, begin, stop
        begin = max(begin, stop)
