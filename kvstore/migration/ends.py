"""The archives of a migration as workers of a cluster open them: once for all tasks of a run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from socket import gethostname
from typing import Any, Final

from kvcodecs.errors import Locked, NotFound

from ..catalog import Catalog
from ..opening import open as open_archive
from ..place import Place, open_backend
from .moving import Mover, Target
from .needed import Item, load_item

#: How long archives stay open without a task: a client that was killed does not close them.
_IDLE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ends:
    """Where sessions come from and go to, as workers open both.

    Attributes
    ----------
    source_options
        Of `kvstore.open`.
    backend_options
        Of `open_backend`, for an archive that is being built.
    archive_options
        Of `kvstore.open`, for one that is there; None for one that is being built.
    run
        Names the migration, between whose tasks both stay open; "": they do not.
    """

    source: str
    target: str
    source_options: Mapping[str, Any]
    backend_options: Mapping[str, Any]
    archive_options: Mapping[str, Any] | None
    timeout: float
    run: str = ""

    @contextmanager
    def open(self, name: str, value: bytes) -> Iterator[tuple[Mover, Item]]:
        """Open both; yield what moves values between them, and the session.

        Raises
        ------
        Locked
            The session is not what the client found.
        """
        with _opened(self) as opened, opened.source._read() as snapshot:
            item = load_item(snapshot, Catalog(opened.source.path), name)
            if item.value != value:
                raise Locked(
                    f"{item.where}: has changed since the migration began; go on with resume=True"
                )
            mover = Mover(snapshot, opened.target, resume=True)
            yield mover, item

    @contextmanager
    def open_target(self) -> Iterator[Target]:
        """Open the target."""
        if self.archive_options is not None:
            with open_archive(self.target, "a", **self.archive_options) as archive:
                yield Target(archive._backend, archive._catalog, archive._room, archive._timeout)
            return
        folder = Place.of(self.target).folder
        if folder is not None and not folder.is_dir():
            raise NotFound(f"{self.target}: not there on {gethostname()}, where a worker runs")
        backend = open_backend(self.target, "a", **self.backend_options)
        try:
            yield Target(backend, Catalog(backend.path), None, self.timeout)
        finally:
            backend.close()


class _Opened:
    """Both archives, open for one task at a time."""

    def __init__(self, ends: Ends) -> None:
        self.run, self.idle_since = ends.run, 0.0
        options = {"snapshot_seconds": math.inf, **ends.source_options}
        with ExitStack() as stack:
            self.source = stack.enter_context(open_archive(ends.source, **options))
            self.target = stack.enter_context(ends.open_target())
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


_idle: list[_Opened] = []
_idle_lock = threading.Lock()
_closer: threading.Thread | None = None


@contextmanager
def _opened(ends: Ends) -> Iterator[_Opened]:
    _close(lambda opened: opened.run != ends.run)
    with _idle_lock:
        opened = _idle.pop() if _idle and _idle[-1].run == ends.run else None
    if opened is None:
        opened = _Opened(ends)
    try:
        yield opened
    except BaseException:
        opened.close()
        raise
    if ends.run:
        _keep(opened)
    else:
        opened.close()


def _keep(opened: _Opened) -> None:
    global _closer
    opened.idle_since = time.monotonic()
    with _idle_lock:
        _idle.append(opened)
        if _closer is None:
            _closer = threading.Thread(target=_close_idle, name="kvstore-ends", daemon=True)
            _closer.start()


def _close_idle() -> None:
    """Close what has been idle for long, until there is none."""
    global _closer
    while True:
        time.sleep(_IDLE_SECONDS / 4)
        deadline = time.monotonic() - _IDLE_SECONDS
        _close(partial(_is_older, deadline))
        with _idle_lock:
            if not _idle:
                _closer = None
                return


def _is_older(deadline: float, opened: _Opened) -> bool:
    return opened.idle_since < deadline


def close_idle(run: str) -> None:
    """Close what tasks of a migration have left open. Runs in a worker."""
    _close(lambda opened: opened.run == run)


def _close(wanted: Callable[[_Opened], bool]) -> None:
    with _idle_lock:
        closed = [opened for opened in _idle if wanted(opened)]
        _idle[:] = [opened for opened in _idle if opened not in closed]
    for opened in closed:
        opened.close()
