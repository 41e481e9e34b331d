"""JSON that goes into records: the user's metadata, and the one spelling of a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvcodecs.errors import InvalidArgument

MAX_METADATA_BYTES: Final = 1 << 20
MAX_METADATA_DEPTH: Final = 32


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a session's metadata, as it will be read back.

    Raises
    ------
    InvalidArgument
        Not a JSON object, or more of it than a record should hold, which every commit rewrites.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata {metadata!r}: expected a JSON object (a dict)")
    text = canonical_json(dict(metadata or {}))
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata of {len(text)} bytes: at most {MAX_METADATA_BYTES}; keep it elsewhere"
        )
    try:
        found: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be read back: {error}") from error
    # Level by level: no recursion, however deep.
    level: list[Any] = [found]
    for _ in range(MAX_METADATA_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    if any(isinstance(item, dict | list) for item in level):
        raise InvalidArgument(f"metadata nests more than {MAX_METADATA_DEPTH} levels deep")
    return found


def canonical_json(data: object) -> bytes:
    """Return compact JSON with sorted keys.

    Raises
    ------
    InvalidArgument
        `data` holds something that JSON cannot.
    """
    try:
        text = json.dumps(
            data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error
