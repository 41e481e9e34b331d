"""An open layer: what it has now, and its rows, while another process may append or drop some."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.ggml.schemes import Scheme
from kvcodecs.spec import Kind, KState, StreamSpec

from ..forklock import ForkLock
from ..identity import Model
from .asking import check_whole
from .checksums import block_checksums
from .coding import RowCoder
from .commit_record import State
from .file import Bytes, LayerFile
from .header import MAX_POSITION, Header
from .segments import Segments
from .state import Commits

_T = TypeVar("_T")

#: Rows that are checked at a time.
_PIECE_ROWS: Final = 4096


class OpenLayer:
    """What there is of a layer, and its rows as they are stored, under their checksums.

    Safe to use from many threads, one after the other. In a forked child, a layer that its parent
    appends to reads what is committed.
    """

    def __init__(
        self, file: LayerFile, header: Header, commits: Commits, *, writable: bool
    ) -> None:
        self._file, self.header, self._commits = file, header, commits
        self._writable, self._lock = writable, ForkLock()
        self._segments, self._coder = Segments(header, file), RowCoder(header)
        self._state = State()
        self._settle(commits.load())

    @property
    def where(self) -> str:
        """What messages call it: the path of its file."""
        return self._file.where

    @property
    def is_appendable(self) -> bool:
        """Whether rows can be appended: it was opened for that, and in this process."""
        return self._writable and not self._file.is_inherited

    @property
    def start(self) -> int:
        """Position of the first row that was not dropped."""
        return self._now().start

    @property
    def stop(self) -> int:
        """One past the position of the last row; here also of what is not committed yet."""
        return self._now().end

    def __len__(self) -> int:
        state = self._now()
        return state.end - state.start

    @property
    def origin(self) -> int:
        """Position of the first row ever, dropped or not: that of row 0 of `raw_rows`."""
        return self._now().origin

    @property
    def n_committed(self) -> int:
        """One past the position of the last committed row."""
        with self._lock:
            return self._commits.load().end

    @property
    def k_state(self) -> KState:
        """Whether K is stored before or after RoPE."""
        return self.header.k_state

    def spec(self, kind: Kind) -> StreamSpec:
        """Return the geometry of K or V."""
        return self.header.spec(kind)

    def scheme(self, kind: Kind) -> Scheme:
        """Return the scheme of K or V."""
        return self.header.scheme(kind)

    @property
    def bytes_per_row(self) -> int:
        """Of K and V together."""
        return self.header.bytes_per_row

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows there are."""
        return len(self) * self.bytes_per_row

    @property
    def max_rows(self) -> int | None:
        """The most rows of a ring; None where the layer grows."""
        return self.header.max_rows

    @property
    def capacity(self) -> int:
        """Rows that the file has room for without growing, dropped ones counted.

        A full layer doubles it, by a new segment of at most 1 GiB that has a view of its own, and
        room on the disk unless the layer is sparse. Of a ring, its slots, for good: `max_rows`
        rounded up to whole checksum blocks, and one block more.
        """
        with self._lock:
            return self._segments.n_rows

    def close(self) -> None:
        """Close; what is not committed is lost. Views that `raw_rows` gave stay."""
        with self._lock:
            self._file.close()
            self._segments.close()

    def _check_belongs(self, session: int, layer: int, model: Model) -> None:
        """Raise `Corrupt` unless this is the layer of that session of `model`."""
        header = self.header
        found = header.session, header.layer, header.k, header.v
        v = model.stream(layer, "v") if model.has_stream(layer, "v") else None
        if found != (session, layer, model.stream(layer, "k"), v):
            raise Corrupt(f"{self._file.where}: the file of another session or layer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        schemes = ", ".join(f"{kind} {self.scheme(kind).name}" for kind in self.header.kinds)
        return f"<{type(self).__name__} {self._file.where!r}, {schemes}>"

    def _settle(self, state: State) -> None:
        self._segments.know(state.n_segments)
        first = state.origin if self.header.max_rows is None else self._block_start(state)
        if not self._segments.is_cut and state.end - first > self._segments.n_rows:
            raise Corrupt(f"{self._file.where}: impossible commit record {state}")
        self._state = state

    def _now(self) -> State:
        """Return what there is: as appended here, or as committed by another."""
        with self._lock:
            self._file.fd  # noqa: B018  raises `Closed`
            if not self.is_appendable:
                self._settle(self._commits.load())
            return self._state

    def _block_start(self, state: State) -> int:
        """Position of the first row of the first block that is still there."""
        return self._floor(state, state.start)

    def _floor(self, state: State, position: int) -> int:
        """Position of the first row of the block of a row."""
        return position - (position - state.origin) % self.header.block_rows

    def _piece_stop(self, state: State, start: int) -> int:
        """One past the last row that is checked together with `start`: whole blocks."""
        size = self.header.block_rows
        return self._floor(state, start) + max(_PIECE_ROWS // size, 1) * size

    def _positions(self, start: object, stop: object) -> tuple[int, int]:
        """Return what was given as positions, where it is integers."""
        lo, hi = -MAX_POSITION, MAX_POSITION
        return (
            check_whole(start, f"{self._file.where}: start", lo, hi),
            check_whole(stop, f"{self._file.where}: stop", lo, hi),
        )

    def _check_range(self, state: State, start: int, stop: int) -> None:
        what = f"{self._file.where}: rows [{start}, {stop})"
        if not 0 <= start <= stop:
            raise InvalidArgument(f"{what} are not a range")
        if stop > state.end:
            raise InvalidArgument(f"{what}: there are rows up to {state.end}")
        if start < min(state.start, stop):
            raise NotFound(f"{what}: dropped; rows begin at {state.start}")

    def _consistent(self, start: int, stop: int, read: Callable[[State, int, int], _T]) -> _T:
        """Read rows that nobody drops or takes back meanwhile."""
        wanted = self._positions(start, stop)
        return self._consistent_of(lambda _: wanted, read)

    def _consistent_of(
        self,
        wanted: Callable[[State], tuple[int, int]],
        read: Callable[[State, int, int], _T],
    ) -> _T:
        """Read the rows that are `wanted` of those there are at that moment."""
        with self._lock:
            while True:
                state = self._now()
                start, stop = wanted(state)
                self._check_range(state, start, stop)
                damage: Corrupt | None = None
                try:
                    found = read(state, start - state.origin, stop - state.origin)
                except Corrupt as error:
                    damage = error
                if self._still_there(state, start):
                    if damage is not None:
                        raise damage
                    return found
                # What was read may have been written over meanwhile.

    def _still_there(self, before: State, start: int) -> bool:
        """Whether rows from position `start` on are what they were."""
        now = self._now()
        if now.epoch != before.epoch or now.origin != before.origin:
            return False
        return self._block_start(now) <= max(self._block_start(before), start)

    def _checked(
        self, kind: Kind, state: State, lo: int, hi: int, n_threads: int | None = None
    ) -> list[Bytes]:
        """Return what `_read` does; raise the first damage."""
        parts, damage = self._read(kind, state, lo, hi, n_threads)
        if damage:
            raise damage[0]
        return parts

    def _read(
        self, kind: Kind, state: State, lo: int, hi: int, n_threads: int | None = None
    ) -> tuple[list[Bytes], list[Corrupt]]:
        """Return the rows with indices ``[lo, hi)``, one array for each run of them, and damage.

        The blocks that they touch are checked whole.
        """
        if lo == hi:
            return [], []
        size, end = self.header.block_rows, state.end - state.origin
        first, last = lo // size * size, min(-(-hi // size) * size, end)
        parts = [self._segments.rows(kind, run) for run in self._segments.runs(first, last)]
        found = block_checksums(parts, size, n_threads)
        stored = self._segments.checksums(kind, first // size, last // size)
        if last % size:
            stored = np.append(stored, np.uint32(state.crc(kind)))
        damage = []
        for block in np.flatnonzero(found != stored).tolist():
            at = state.origin + first + block * size
            stop = min(at + size, state.origin + last)
            damage.append(
                Corrupt(
                    f"{self._file.where}: {kind} rows [{at}, {stop}): wrong checksum; restore a "
                    "copy"
                )
            )
        parts[0] = parts[0][lo - first :]
        parts[-1] = parts[-1][: len(parts[-1]) - (last - hi)]
        return parts, damage
