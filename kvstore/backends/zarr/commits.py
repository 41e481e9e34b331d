"""Commit records: one object each, put where there is none, and which of them is the last.

A commit has the changes of its transaction and names the older tables that go on below them.
Commits are deleted in the order of their numbers, and never the last one. FORMAT.md section 9.2.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvcodecs.errors import Corrupt, NotFound, Truncated, Unsupported
from kvcodecs.frame import crc32c

from .objects import Objects
from .places import ROOT
from .placing import Sync
from .segment import FOOTER_BYTES, WHOLE_BYTES

COMMITS: Final = ROOT + "commits/"
SEGMENTS: Final = ROOT + "segments/"
MAGIC: Final = b"KVZC"
FORMAT_VERSION: Final = 1

#: What is read of a record: of nearly all the whole, and what it says of itself of the others.
FIRST_BYTES: Final = WHOLE_BYTES

_HEAD: Final = struct.Struct("<4sIQ")  # magic, bytes of the JSON, bytes of the table
_CRC: Final = struct.Struct("<I")
_COMMIT_NAME: Final = re.compile(r"commits/([0-9a-f]{16})")
_SEGMENT_NAME: Final = re.compile(r"segments/([0-9a-f]{16})-[0-9a-f]{8}")
_NONCE: Final = re.compile(r"[0-9a-f]{16}")
_NOTHING: Final = re.compile("")
# A run of newest tables is merged if it has so many.
_LEAST_RUN: Final = 4
# Into the run goes each older one that is not this many times as long as what is newer.
_RATIO: Final = 2
# Or all are merged, once they are so many times as long as need be, and these bytes.
_MOST_WASTE: Final = 3
_WASTE_BYTES: Final = 1 << 18
# How often to look for commits where none are: in a long directory a new one may be missed, and the
# one before be gone meanwhile.
_LOOKS: Final = 2
# More than any archive has, since tables at least double in length from the newest to the oldest.
_MOST_TABLES: Final = 1 << 10  # each takes less than 128 bytes of `FIRST_BYTES`


class Listed(NamedTuple):
    """A table as a commit names it.

    Attributes
    ----------
    name
        Key of its object below ``_kvstore/``; of a merged table, or of an older commit.
    n_bytes
        Length of the object.
    crc
        Of the table's footer, which stands for the whole.
    """

    name: str
    n_bytes: int
    crc: int

    @property
    def key(self) -> str:
        return ROOT + self.name

    @property
    def is_commit(self) -> bool:
        return self.name.startswith("commits/")


@dataclass(frozen=True)
class Commit:
    """What a commit record says, its own table of changes aside.

    Attributes
    ----------
    number
        Counts from 1.
    epoch
        Of the writer; see `objects.Writer`.
    nonce
        16 random hex digits.
    previous
        Those of the commit before, which this one goes on from; empty for the first.
    tables
        What is below its own changes, the newest first.
    n_entries, used_bytes
        Number, and bytes, of the engine's keys and values; frames count as values.
    table_bytes
        The part of them that is in tables: references instead of frames.
    sync
        What was to be done for zarr's tools.
    time
        Unix seconds.
    """

    number: int
    epoch: int
    nonce: str
    previous: str
    tables: tuple[Listed, ...]
    n_entries: int
    used_bytes: int
    table_bytes: int
    sync: Sync = field(default_factory=Sync)
    time: int = 0

    def pack(self, table: bytes) -> bytes:
        """Return the whole record, with its own table of changes."""
        fields = {
            "format": FORMAT_VERSION,
            "number": self.number,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "previous": self.previous,
            "tables": [list(listed) for listed in self.tables],
            "n_entries": self.n_entries,
            "used_bytes": self.used_bytes,
            "table_bytes": self.table_bytes,
            "sync": self.sync.to_json(),
            "time": self.time,
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        head = _HEAD.pack(MAGIC, len(text), len(table))
        return b"".join((head, _CRC.pack(crc32c(head, text)), text, table))

    @classmethod
    def unpack(cls, data: bytes, number: int, where: str) -> tuple[Commit, int]:
        """Read a record; its table is read by `segment.Segment`.

        Parameters
        ----------
        data
            The object, or the first `FIRST_BYTES` of a longer one.

        Returns
        -------
        commit : Commit
        n_bytes : int
            Length of the object.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            Not the record of this number, or of a newer release.
        """
        fields, n_bytes = _fields(data, where)
        version = fields.get("format")
        if type(version) is int and version > FORMAT_VERSION:
            raise Unsupported(
                f"{where}: commit format {version}; this release reads up to {FORMAT_VERSION}: "
                "install a newer kvstore"
            )
        try:
            if version != FORMAT_VERSION or fields["number"] != number:
                raise ValueError(f"format {version!r}, number {fields['number']!r}")
            found = cls(
                number=_count(fields["number"]),
                epoch=_count(fields["epoch"]),
                nonce=_matching(_NONCE, fields["nonce"]),
                previous=_matching(_NONCE if number > 1 else _NOTHING, fields["previous"]),
                tables=_tables(fields["tables"], number),
                n_entries=_count(fields["n_entries"]),
                used_bytes=_count(fields["used_bytes"]),
                table_bytes=_count(fields["table_bytes"]),
                sync=Sync.from_json(fields["sync"]),
                time=_count(fields["time"]),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Corrupt(f"{where}: not a commit: {error}; restore a copy") from error
        return found, n_bytes


def commit_key(number: int) -> str:
    """Return the key of a commit's object."""
    return f"{COMMITS}{number:016x}"


def segment_name(number: int, nonce: str) -> str:
    """Return the name of the table that commit `number` merges."""
    return f"segments/{number:016x}-{nonce[:8]}"


def last_commit(objects: Objects, known: int) -> int:
    """Return the number of the last commit; 0 if there is none.

    Parameters
    ----------
    known
        One that was the last once, or 0.

    Raises
    ------
    NotFound
        The archive has been removed.
    """
    if known:
        # In this order: while the older one is there, no newer one has been deleted.
        if not objects.exists(commit_key(known + 1)) and objects.exists(commit_key(known)):
            return known
        numbers = commit_numbers(objects, commit_key(known))
        if numbers:
            return max(numbers)
    for _ in range(_LOOKS):
        numbers = commit_numbers(objects)
        if numbers:
            return max(numbers)
    if known:
        raise NotFound(f"{objects.where}: the archive is gone; no commit is there any more")
    return 0


def commit_numbers(objects: Objects, after: str | None = None) -> list[int]:
    """Return the numbers of the commits that are there, those after a key if one is given."""
    found = (
        _COMMIT_NAME.fullmatch(item.key.removeprefix(ROOT)) for item in objects.list(COMMITS, after)
    )
    return [int(match[1], 16) for match in found if match]


def n_to_merge(tables: tuple[Listed, ...], table_bytes: int) -> int:
    """Return how many of the newest tables are to be merged into one; 0 for none.

    All commits go, so that they can be deleted in order; then each older table that is not much
    longer than what is newer. So lengths at least double from one table to the next. Where most
    of what the tables have is out of date, all go.

    Parameters
    ----------
    tables
        The newest first.
    table_bytes
        What is not out of date; see `Commit`.
    """
    if sum(listed.n_bytes for listed in tables) > _MOST_WASTE * table_bytes + _WASTE_BYTES:
        return len(tables)
    n = n_bytes = 0
    for listed in tables:
        if not listed.is_commit and listed.n_bytes >= _RATIO * n_bytes:
            break
        n += 1
        n_bytes += listed.n_bytes
    return n if n >= _LEAST_RUN else 0


def _fields(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    start = _HEAD.size + _CRC.size
    if len(data) < start:
        raise Truncated(f"{where}: {len(data)} bytes are no commit; restore a copy")
    magic, n_text, n_table = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(f"{where}: magic {magic!r}, expected {MAGIC!r}; restore a copy")
    if len(data) < start + n_text:
        raise Truncated(f"{where}: {len(data)} bytes, cut short; restore a copy")
    text = data[start : start + n_text]
    if (crc32c(data[: _HEAD.size], text),) != _CRC.unpack_from(data, _HEAD.size):
        raise Corrupt(f"{where}: wrong crc32c; restore a copy")
    n_bytes = start + n_text + n_table
    if len(data) != min(n_bytes, FIRST_BYTES):
        error = Truncated if len(data) < n_bytes else Corrupt
        raise error(f"{where}: {len(data)} bytes where its head says {n_bytes}; restore a copy")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not a commit: {error}; restore a copy") from error
    if not isinstance(fields, dict):
        raise Corrupt(f"{where}: not a commit: no JSON object; restore a copy")
    return fields, n_bytes


def _count(value: object) -> int:
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    raise ValueError(f"{value!r} is no count")


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    raise ValueError(f"{value!r} is no name")


def _tables(value: object, number: int) -> tuple[Listed, ...]:
    """Check a list of tables: commits that follow each other, then merged ones, none twice."""
    if not isinstance(value, list) or len(value) > _MOST_TABLES:
        raise ValueError("no list of tables")
    found = []
    below, commits_end = number, False
    for item in value:
        name, n_bytes, crc = item
        match = _COMMIT_NAME.fullmatch(name) if isinstance(name, str) else None
        if match is not None and not commits_end and int(match[1], 16) == below - 1 > 0:
            below -= 1
        else:
            commits_end = True
            if int(_matching(_SEGMENT_NAME, name).split("/")[1][:16], 16) > number:
                raise ValueError(f"{name!r} is of a later commit")
        if _count(n_bytes) < FOOTER_BYTES or _count(crc) >= 1 << 32:
            raise ValueError(f"{name!r}: {n_bytes} bytes, crc {crc}")
        found.append(Listed(name, n_bytes, crc))
    if len({listed.name for listed in found}) < len(found):
        raise ValueError("a table is named twice")
    return tuple(found)
