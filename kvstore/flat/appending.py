"""Appending rows to an open layer, dropping them, and making both durable."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Full, InvalidArgument
from kvcodecs.frame import crc32c
from kvcodecs.spec import Kind, KState

from .asking import check_whole
from .commit_record import State
from .file import Bytes, LayerFile
from .header import MAX_POSITION, Header
from .state import Commits
from .stored_layer import StoredLayer


class AppendableLayer(StoredLayer):
    """An open file, which may be appended to."""

    def __init__(
        self, file: LayerFile, header: Header, commits: Commits, *, writable: bool
    ) -> None:
        super().__init__(file, header, commits, writable=writable)
        self._sparse = False
        # As appended: `_state`; what readers see: `_committed`; before the last append: `_before`.
        self._committed = self._before = self._state
        if writable:
            self._segments.check_whole()
            if not commits.is_same:
                commits.repair(self._state)
            self._punch(self._state.origin, self._state)

    def append(
        self,
        k: npt.ArrayLike,
        v: npt.ArrayLike | None = None,
        *,
        k_state: KState | None = None,
        start: int | None = None,
    ) -> None:
        """Append rows; `commit` makes them durable and visible to others.

        Parameters
        ----------
        k, v : (heads, n, head_dim) float16, bfloat16, float32 or float64
            `v` None for a layer without V.
        k_state
            Whether `k` was taken before RoPE (``"pre"``) or after it (``"post"``); None: as the
            file keeps it (`store_k`), so that nothing is rotated.
        start
            Guards against appending twice: the position of the first new row. It may be any in a
            layer that never had rows.

        Raises
        ------
        InvalidArgument
            Shapes, a position, or values that the scheme cannot hold.
        Full
            No room on the disk, or more than `max_rows`; nothing is appended.
        """
        with self._lock:
            self._check_writable()
            given = {"k": k, "v": v}
            at = self._position(start)
            rows = {
                kind: self._coder.encode(kind, given[kind], k_state, at, self._file.where)
                for kind in self.header.kinds
            }
            if self.header.v is None and v is not None:
                raise InvalidArgument(f"{self._file.where}: v is given, the layer has none")
            n = {len(x) for x in rows.values()}
            if len(n) > 1:
                raise InvalidArgument(f"{self._file.where}: k and v have different token counts")
            self.append_rows(rows, start=at)

    def append_rows(self, rows: Mapping[Kind, Bytes], *, start: int | None = None) -> None:
        """Append rows as they are stored, ``(n, row_bytes)`` uint8 each: copied, never decoded.

        K of a layer that keeps it before RoPE is in coded channel order, as `stored_rows` gives it.
        With no rows and a `start`, a layer that never had rows begins there.
        """
        with self._lock:
            self._check_writable()
            at, n = self._position(start), self._check_rows(rows)
            if at + n > MAX_POSITION:
                raise InvalidArgument(
                    f"{self._file.where}: {n} rows from position {at} on: positions end at "
                    f"{MAX_POSITION}"
                )
            if self._must_commit(n):
                self.commit()
            self._before = state = self._state
            if not state.end:
                state = state._replace(origin=at, dropped=at, end=at)
            if not n:
                self._state = state  # where the first row will be is settled
                return
            lo = at - state.origin
            if self.header.max_rows is None:
                while lo + n > self._segments.n_rows:
                    self._segments.add(sparse=self._sparse)
            crcs = {
                kind: self._segments.extend(kind, lo, rows[kind], state.crc(kind))
                for kind in self.header.kinds
            }
            self._state = state._replace(
                end=at + n,
                n_segments=len(self._segments),
                k_crc=crcs["k"],
                v_crc=crcs.get("v", 0),
            )

    def _must_commit(self, n_rows: int) -> bool:
        """Whether appending so many rows to a ring commits first, to have the room of dropped ones.

        Raises
        ------
        Full
            More than `max_rows`.
        """
        with self._lock:
            state, most = self._state, self.header.max_rows
            if most is None:
                return False
            if state.end - state.start + n_rows > most:
                raise Full(
                    f"{self._file.where}: {state.end - state.start} rows, {n_rows} more do not fit "
                    f"into {most}; drop_front the oldest first"
                )
            if not state.end:
                return False
            # What a crash would leave has to be whole until the drop is durable.
            first = self._block_start(self._committed)
            return state.end + n_rows - first > self._segments.n_rows

    def commit(self) -> None:
        """Make all appended rows, and what was dropped, durable and visible to others."""
        self._commit(self._state.dropped)

    @property
    def _session_commit(self) -> int:
        """Number of the session's commit that the committed rows are of."""
        with self._lock:
            # What a writer knows to be durable, where a commit has failed.
            state = self._committed if self.is_appendable else self._commits.load()
            return state.session_commit

    @property
    def _has_appended(self) -> bool:
        """Whether there is something to commit besides what was dropped."""
        return self._state._replace(dropped=self._committed.dropped) != self._committed

    def _commit_appended(self, session_commit: int) -> None:
        """Commit without what was dropped: for layers that are to drop it together."""
        with self._lock:
            self._state = self._state._replace(session_commit=session_commit)
            self._commit(self._committed.dropped)

    def _commit(self, dropped: int) -> None:
        with self._lock:
            self._check_writable()
            before, state = self._committed, self._state._replace(dropped=dropped)
            if state == before:
                return
            self._file.sync()
            self._commits.store(state)
            self._committed = state
            if before.origin == state.origin:
                self._punch(self._block_start(before), state)

    def _punch(self, start: int, state: State) -> None:
        """Give back the room of rows from position `start` on that are dropped."""
        stop = self._block_start(state)
        if self.header.max_rows is None and start < stop:
            self._segments.punch(start - state.origin, stop - state.origin)

    def flush(self) -> None:
        """Commit: on return the disk has it, as after ``msync`` of every map with ``MS_SYNC``.

        Maps are read-only, and what is written with ``pwrite`` is in the same pages as they show;
        ``fdatasync`` writes these out and waits for the disk, which is what ``msync`` does.
        """
        self.commit()

    def drop_front(self, n_rows: int) -> None:
        """Drop the oldest rows, at most as many as there are; nothing is rewritten.

        In a ring (`max_rows`) new rows take their room, which is what a window needs. Otherwise it
        goes back to the disk at the next `commit`, whole pages of whole checksum blocks, and the
        file grows on: for as many rows as were ever appended.
        """
        with self._lock:
            self._check_writable()
            n = check_whole(n_rows, f"{self._file.where}: drop_front", 0, MAX_POSITION)
            state = self._state
            self._state = state._replace(dropped=min(state.start + n, state.end))

    def _forget(self, stop: int) -> None:
        """Undo the last `append` if there is more than `stop` says."""
        with self._lock:
            if self._state.end != stop:
                self._state = self._before

    def take_back(self, stop: int) -> None:
        """Take the newest rows back, so that `stop` is one past the last; durable at once.

        Commits what else was appended and dropped. 0 takes all rows back, and leaves a layer that
        never had any, unless some were dropped. `FlatSession.take_back` is for all layers together.
        """
        self._take_back(stop, None)

    def _take_back(self, stop: int, session_commit: int | None) -> None:
        with self._lock:
            self._check_writable()
            state = self._state
            if session_commit is not None:
                state = state._replace(session_commit=session_commit)
            if stop == 0 and state.start == state.origin:
                new = state._replace(origin=0, dropped=0, end=0)
            else:
                where = f"{self._file.where}: take_back"
                new = state._replace(end=check_whole(stop, where, state.start, state.end))
            if new == state:
                self._state = new
                self.commit()
                return
            hi = new.end - new.origin
            lo = hi // self.header.block_rows * self.header.block_rows
            crcs: dict[Kind, int] = {"k": 0, "v": 0}
            for kind in self.header.kinds:
                crcs[kind] = crc32c(*self._checked(kind, state, lo, hi))
            self._state = new._replace(
                epoch=state.epoch + 1 & 0xFFFFFFFF, k_crc=crcs["k"], v_crc=crcs["v"]
            )
            self.commit()

    def _position(self, start: int | None) -> int:
        end = self._state.end
        if start is None:
            return end
        at = check_whole(start, f"{self._file.where}: start", 0, MAX_POSITION)
        if at != end and end:
            raise InvalidArgument(f"{self._file.where}: append at start={at}, but {end} are there")
        return at

    def _check_rows(self, rows: Mapping[Kind, Bytes]) -> int:
        if not isinstance(rows, Mapping) or set(rows) != set(self.header.kinds):
            given = list(rows) if isinstance(rows, Mapping) else type(rows).__name__
            raise InvalidArgument(
                f"{self._file.where}: rows of {given}, expected a mapping with "
                f"{list(self.header.kinds)}"
            )
        for kind, x in rows.items():
            if not isinstance(x, np.ndarray):
                raise InvalidArgument(f"{self._file.where} {kind}: rows that are no array")
            size = self.header.row_bytes(kind)
            if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != size:
                raise InvalidArgument(
                    f"{self._file.where} {kind}: rows of {x.dtype} {x.shape}, expected uint8 "
                    f"(n, {size})"
                )
        n = {len(x) for x in rows.values()}
        if len(n) > 1:
            raise InvalidArgument(f"{self._file.where}: k and v have different numbers of rows")
        return n.pop()

    def _check_writable(self) -> None:
        self._file.check_own()
        if not self._writable:
            raise InvalidArgument(f"{self._file.where}: opened to read; open it with mode='a'")
