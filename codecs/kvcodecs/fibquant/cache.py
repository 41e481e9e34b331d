"""The folder of built books, by profile digest: a convenience that may always be deleted.

``$KVSTORE_CACHE``, else ``kvstore`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. FORMAT.md section 11.2.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

from ..digests import DIGEST_BYTES, raw_digest

_DOMAIN: Final = "kvstore_fibquant_cached_book_v1"
_SUFFIX: Final = ".kvbook"


def load(profile_digest: str) -> bytes | None:
    """Return the packed book of a profile, None where there is none, or a damaged one."""
    path = _path(profile_digest)
    if path is None:
        return None
    try:
        if not path.is_file():  # a pipe would wait for ever
            return None
        data = path.read_bytes()
    except OSError:
        return None
    digest, packed = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return packed if raw_digest(_DOMAIN, packed) == digest else None


def save(profile_digest: str, packed: bytes) -> None:
    """Keep a packed book; a folder that cannot be written is no error.

    The file appears whole or not at all, so that processes may save the same book at once.
    """
    path = _path(profile_digest)
    if path is None:
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(raw_digest(_DOMAIN, packed) + packed)
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def folder() -> Path | None:
    """Return the folder, None for a user without a home who has not chosen one."""
    if chosen := os.environ.get("KVSTORE_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvstore"
    try:
        return Path.home() / ".cache" / "kvstore"
    except RuntimeError:  # this user has no home
        return None


def _path(profile_digest: str) -> Path | None:
    where = folder()
    return None if where is None else where / (profile_digest.removeprefix("blake3:") + _SUFFIX)
