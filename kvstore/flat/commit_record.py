"""The bytes of a commit record: which rows a layer has. FORMAT.md section 11.3."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvcodecs.errors import Corrupt, Unsupported
from kvcodecs.frame import crc32c
from kvcodecs.spec import Kind

from .header import FORMAT, MAX_POSITION

#: The two copies of the newest one.
COMMIT_OFFSETS: Final = (8192, 12288)
COMMIT_BYTES: Final = 512
MAX_SEGMENTS: Final = 1 << 20
#: The largest number of a commit, of a layer or its session: far more than there ever are.
MAX_COMMITS: Final = 1 << 62

_COMMIT_MAGIC: Final = b"KVFC"
# Magic, format, sequence, state, tag.
_COMMIT: Final = struct.Struct("<4sIQQQQIIIIQI")
_CRC: Final = struct.Struct("<I")


class State(NamedTuple):
    """Which rows a layer has.

    Attributes
    ----------
    origin
        Position of the row in slot 0 of the first segment.
    dropped
        Rows before this position were dropped.
    end
        One past the position of the last row.
    n_segments
        Segments the file has.
    epoch
        How often rows were taken back.
    k_crc, v_crc
        CRC-32C of the rows of the unfinished checksum block; 0 where there is none.
    session_commit
        Number of the commit of its session that the rows are of, counted from 0, none yet.
    """

    origin: int = 0
    dropped: int = 0
    end: int = 0
    n_segments: int = 1
    epoch: int = 0
    k_crc: int = 0
    v_crc: int = 0
    session_commit: int = 0

    @property
    def start(self) -> int:
        """Position of the first row."""
        return max(self.origin, self.dropped)

    def crc(self, kind: Kind) -> int:
        """Return the checksum of the unfinished block."""
        return self.k_crc if kind == "k" else self.v_crc


def pack_commit(state: State, sequence: int, tag: int) -> bytes:
    """Return a commit record; `tag` is the checksum of the header that it belongs to."""
    body = _COMMIT.pack(
        _COMMIT_MAGIC,
        FORMAT,
        sequence,
        state.origin,
        state.dropped,
        state.end,
        state.n_segments,
        state.epoch,
        state.k_crc,
        state.v_crc,
        state.session_commit,
        tag,
    ).ljust(COMMIT_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(crc32c(body))


def unpack_commit(data: bytes, tag: int, where: str) -> tuple[int, State] | None:
    """Return sequence number and state of a commit record; None if it is damaged.

    Raises
    ------
    Unsupported
        Written by a newer release.
    Corrupt
        Of another file.
    """
    if len(data) < COMMIT_BYTES:
        return None
    body, checksum = data[: COMMIT_BYTES - _CRC.size], data[COMMIT_BYTES - _CRC.size :]
    if crc32c(body) != _CRC.unpack(checksum[: _CRC.size])[0]:
        return None
    magic, version, sequence, *fields, found_tag = _COMMIT.unpack_from(body)
    state = State(*fields)
    if magic != _COMMIT_MAGIC:
        return None
    if version > FORMAT:
        raise Unsupported(f"{where}: commit record of format {version}; upgrade to read it")
    if found_tag != tag:
        raise Corrupt(f"{where}: the commit record of another file")
    possible = state.start <= state.end <= MAX_POSITION
    possible &= max(sequence, state.session_commit) <= MAX_COMMITS
    if not (possible and 1 <= state.n_segments <= MAX_SEGMENTS):
        raise Corrupt(f"{where}: impossible commit record {state}, sequence {sequence}")
    return sequence, state
