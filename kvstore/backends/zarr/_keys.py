"""Names of objects: what a key may look like, wherever the objects lie."""

from __future__ import annotations

from typing import Final

from kvcodecs.errors import InvalidArgument

#: Beginning and end of the names under which a directory makes objects.
UNFINISHED: Final = (".", ".tmp")
WRITER_KEY: Final = "_kvstore/writer"
LEASE_PREFIX: Final = "_kvstore/leases/"


def check_key(where: str, key: str) -> str:
    """Return a key that stays below the root; `InvalidArgument` if it is none."""
    probe = f"/{key}/"
    if "//" in probe or "/./" in probe or "/../" in probe or "\0" in key or not _is_text(key):
        raise InvalidArgument(
            f"{where}: object {key!r}: expected names with slashes between, none of them empty, "
            "'.' or '..'"
        )
    return key


def check_prefix(where: str, prefix: str) -> str:
    """Return a prefix of keys: empty, or a key and a slash."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgument(f"{where}: prefix {prefix!r}: expected a slash at its end")
        check_key(where, prefix[:-1])
    return prefix


def is_unfinished(key: str) -> bool:
    """Whether a key names what a writer was making when it died; part of no archive."""
    name = key.rpartition("/")[2]
    return name.startswith(UNFINISHED[0]) and name.endswith(UNFINISHED[1])


def _is_text(key: str) -> bool:
    if key.isascii():
        return True
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
