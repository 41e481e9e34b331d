"""What somebody may have meant by a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return ``", did you mean ...?"`` with the one of `names` that is close, or nothing."""
    close = get_close_matches(str(name)[:64].strip().lower(), names, 1)
    return f", did you mean {close[0]}?" if close else ""
