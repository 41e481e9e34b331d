"""Which tokens of a session can be read."""

from __future__ import annotations

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import Kind

from .session_record import SessionRecord


def check_range(
    record: SessionRecord,
    layer: int,
    kind: Kind,
    start: int | None,
    stop: int | None,
    where: str,
    n_appended: int | None = None,
) -> tuple[int, int]:
    """Return a token range that can be read; None means from the first, or to the last, there is.

    Raises
    ------
    InvalidArgument
        Not a range, or beyond what is committed, or before the stream's first token.
    """
    n, first = record.n_tokens, record.streams[layer, kind].start
    where = f"{where} layer {layer} {kind}"
    stop = n if stop is None else check_token(stop, f"{where}: stop")
    start = (
        min(max(record.first, first), stop)
        if start is None
        else check_token(start, f"{where}: start")
    )
    what = f"{where}: tokens [{start}, {stop})"
    if max(record.first, first) <= start <= stop <= n:
        return start, stop
    if not 0 <= start <= stop:
        raise InvalidArgument(f"{what} are not a range")
    if stop > n:
        more = ""
        if n_appended is not None and n_appended > n:
            more = f" of {n_appended} appended; commit first"
        raise InvalidArgument(f"{what}: {n} tokens are committed{more}")
    if start < min(record.first, stop):
        raise InvalidArgument(f"{what}: trimmed; the session starts at token {record.first}")
    if start < min(first, stop):
        raise InvalidArgument(f"{what}: this layer has a window and starts at token {first}")
    return start, stop


def check_token(position: object, what: str) -> int:
    """Return a position as Python's own integer; `InvalidArgument` if it is none."""
    if isinstance(position, bool) or not isinstance(position, int | np.integer):
        raise InvalidArgument(f"{what}: {position!r} is no integer")
    return int(position)
