"""The pages of an open layer: views of them, and advice to the kernel."""

from __future__ import annotations

from kvcodecs.spec import Kind

from .file import Bytes
from .open_layer import OpenLayer
from .pages import Advice


class MappedLayer(OpenLayer):
    """An open layer, and the pages that its rows are in."""

    def raw_rows(self, kind: Kind) -> list[Bytes]:
        """Return the stored rows of each segment, ``(n, row_bytes)``, as read-only views.

        Nothing is copied, and nothing checked: for uploads to a GPU. K that is kept before RoPE is
        in coded channel order, as in `stored_rows`.

        A layer that grows has a view for each segment; position ``p`` is row ``p - layer.origin``
        of them all, one behind the other. Rows before `start` were dropped and may be zeros.
        `capacity`, when the layer is created, makes it one view. Of a ring there is one view of
        all slots, used or not, and ``p`` is in slot ``(p - layer.origin) % len(view)``.

        Views stay valid while anybody has them, also when the layer grows or is closed; the file
        must not be cut.

        Raises
        ------
        InvalidArgument
            The layer was opened with ``pread=True``, which maps nothing, or has no V.
        Truncated
            The file was cut.
        """
        with self._lock:
            state = self._now()
            return self._segments.areas(kind, state.end - state.origin)

    def prefetch_rows(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows ahead; returns at once."""
        self._advise(start, stop, "prefetch")

    def advise_random(self) -> None:
        """Tell the kernel that rows are read here and there: it stops reading ahead."""
        with self._lock:
            self._segments.advise_random()

    def release(self, start: int | None = None, stop: int | None = None) -> None:
        """Let pages of rows go from memory; they are read again from the file when needed.

        Pages that are not on the disk yet stay, so `commit` first. Memory without a file goes to
        the swap, if there is any.
        """
        state = self._now()
        lo = state.start if start is None else start
        self._advise(lo, state.end if stop is None else stop, "release")

    def _advise(self, start: int, stop: int, what: Advice) -> None:
        start, stop = self._positions(start, stop)
        with self._lock:
            state = self._now()
            lo, hi = max(start, state.start), min(stop, state.end)
            if lo < hi:
                self._segments.advise(lo - state.origin, hi - state.origin, what)
