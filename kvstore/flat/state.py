"""What of a layer is committed: reading and writing the two copies of its commit record.

A commit writes the first copy, waits for the disk, and writes the second one: whatever is cut off
or damaged, one of them is whole. FORMAT.md section 11.3.
"""

from __future__ import annotations

from typing import Final

from kvcodecs.errors import Corrupt, Truncated
from kvcodecs.frame import crc32c

from .commit_record import COMMIT_BYTES, COMMIT_OFFSETS, State, pack_commit, unpack_commit
from .file import LayerFile
from .header import HEADER_BYTES, Header

_READS: Final = 100
#: From the first copy to the end of the second.
_COPIES_BYTES: Final = COMMIT_OFFSETS[1] + COMMIT_BYTES - COMMIT_OFFSETS[0]


class Commits:
    """The commit records of an open file."""

    def __init__(self, file: LayerFile, header: bytes) -> None:
        self._file, self._tag = file, crc32c(header)
        self._seen, self._state = b"", State()
        self.sequence = 0
        #: Whether both copies are whole, and whether they are the same.
        self.is_whole = self.is_same = True

    def load(self) -> State:
        """Return the newest committed state.

        Raises
        ------
        Corrupt
            Neither copy is whole.
        """
        for _ in range(_READS):
            data = self._file.read(COMMIT_OFFSETS[0], _COPIES_BYTES).tobytes()
            if data == self._seen:
                return self._state
            found = [
                unpack_commit(data[at : at + COMMIT_BYTES], self._tag, self._file.where)
                for at in (0, COMMIT_OFFSETS[1] - COMMIT_OFFSETS[0])
            ]
            whole = [record for record in found if record is not None]
            if whole:
                self.sequence, state = max(whole, key=lambda record: record[0])
                self.is_whole, self.is_same = len(whole) == 2, found[0] == found[1]
                self._seen, self._state = data, state
                return state
            # A writer may be at one of them, and the other one then is whole: look again.
        raise Corrupt(f"{self._file.where}: no whole commit record; restore a copy")

    def store(self, state: State) -> None:
        """Make `state` the committed one, durably; what it refers to is durable already."""
        record = pack_commit(state, self.sequence + 1, self._tag)
        self._file.write(COMMIT_OFFSETS[0], record)
        self._file.sync()
        self._file.write(COMMIT_OFFSETS[1], record)
        self.sequence += 1

    def repair(self, state: State) -> None:
        """Write anew the copy that is damaged, or older; `state` is what `load` found."""
        record = pack_commit(state, self.sequence, self._tag)
        for offset in COMMIT_OFFSETS:
            if self._file.read(offset, COMMIT_BYTES).tobytes() != record:
                self._file.write(offset, record)
        self._file.sync()

    def check_copies(self) -> None:
        """Raise `Corrupt` if one of the copies is damaged."""
        for _ in range(_READS):
            self.load()  # a writer may be at one of them
            if self.is_whole:
                return
        raise Corrupt(
            f"{self._file.where}: a copy of the commit record is damaged; open it with mode='a', "
            "which writes it anew from the other one"
        )


def read_header(file: LayerFile) -> tuple[Header, Commits]:
    """Return the header of an open file, and its commit records.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        No layer's file, a damaged one, or one of a newer release.
    """
    if file.size < COMMIT_OFFSETS[1] + COMMIT_BYTES:
        raise Truncated(f"{file.where}: {file.size} bytes: no layer's file, or cut")
    data = file.read(0, HEADER_BYTES).tobytes()
    return Header.unpack(data, file.where), Commits(file, data)
