"""Values that are not frames: JSON inside the checked envelope of `kvcodecs.frame`.

Archive and identity records are here, session records next door. FORMAT.md section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvcodecs.errors import Corrupt, InvalidArgument, Truncated, Unsupported
from kvcodecs.frame import open_record, seal_record

from .identity import Model
from .metadata import canonical_json
from .versions import FORMAT_VERSION

ARCHIVE_MAGIC: Final = b"KVA1"
IDENTITY_MAGIC: Final = b"KVI1"
HEADER_MAGIC: Final = b"KVH1"

#: Largest number in a record.
MAX_COUNT: Final = 1 << 62


def pack_archive(data: Mapping[str, Any]) -> bytes:
    """Return the archive record with these fields, of the newest format."""
    return seal_record(ARCHIVE_MAGIC, canonical_json({**data, "format": FORMAT_VERSION}))


def check_archive(value: memoryview | bytes, where: str) -> dict[str, Any]:
    """Return the archive record's JSON if this release can read the archive.

    Raises
    ------
    Unsupported
        Written by a newer release.
    Truncated, Corrupt
        Damaged.
    """
    data = load_json(ARCHIVE_MAGIC, value, where)
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: archive record: format {version!r}")
    if version > FORMAT_VERSION:
        raise Unsupported(
            f"{where}: archive format {version}, this release reads up to {FORMAT_VERSION}; "
            "install a newer kvstore to read it"
        )
    try:
        read_count(data.get("created", 0))
        read_count(data.get("quota", 0))
    except ValueError as error:
        raise Corrupt(f"{where}: archive record: {error}") from error
    return data


def pack_identity(model: Model) -> bytes:
    """Return the identity record of a model."""
    return seal_record(IDENTITY_MAGIC, canonical_json(model.to_json()))


def unpack_identity(value: memoryview | bytes, digest: bytes, where: str) -> Model:
    """Return the model of an identity record stored under `digest`."""
    model = Model.from_json(load_json(IDENTITY_MAGIC, value, where))
    if model.digest != digest:
        raise Corrupt(f"{where}: identity record is stored under another model's digest")
    return model


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of an error that does not say it yet."""
    try:
        yield
    except (Corrupt, InvalidArgument, Truncated, Unsupported) as error:
        if where in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error


def load_json(magic: bytes, value: memoryview | bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a record.

    Raises
    ------
    Truncated, Corrupt
        Damaged, or another kind of record.
    """
    body = open_record(magic, value, where)
    try:
        data = json.loads(bytes(body), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: record is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Corrupt(f"{where}: record is not a JSON object")
    return data


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_count(value: object) -> int:
    """Return a number of a record; `ValueError` unless it is a count of at most `MAX_COUNT`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{value!r} is not a count")
    return value
