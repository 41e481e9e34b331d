"""What a path or an address asks for: which backend, in which folder, and opening it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcodecs.errors import InvalidArgument, NotFound

from . import keys
from .backend import (
    GRACE_SECONDS,
    SNAPSHOT_SECONDS,
    Backend,
    Mode,
    Repository,
    check_seconds,
)

MEMORY_PREFIX: Final = "memory:"
ZARR_PREFIX: Final = "zarr:"
ICECHUNK_PREFIX: Final = "icechunk:"
#: Of folders of flat layers, which are no archives: `kvstore.flat`.
FLAT_PREFIX: Final = "flat:"
PARTIAL_SUFFIX: Final = ".partial"
#: In a directory that is an archive of the zarr backend.
_ZARR_SIGN: Final = os.path.join("_kvstore", "zarr.json")
#: In a folder of flat layers.
FLAT_SIGN: Final = "session"
#: What archives have and folders of sessions do not.
ARCHIVE_SIGNS: Final = ("data.mdb", "_kvstore")
#: Says the same of a folder whose `FLAT_SIGN` was lost.
_FLAT_LAYER: Final = "layer-00000.kvf"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Place:
    """A path or address as `kvstore.open` takes it.

    Attributes
    ----------
    text
        As given.
    folder
        Where it is in the file system; None for memory and object storage.
    prefix
        What stands before the folder in `text`.
    """

    text: str
    folder: Path | None
    prefix: str = ""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Place:
        """Read a path or an address."""
        if hasattr(path, "writable_session"):  # an Icechunk repository
            return cls(repr(path), None)
        if not isinstance(path, str | os.PathLike):
            raise InvalidArgument(f"path {path!r}: expected a string or a path")
        text = os.fspath(path)
        if text.startswith(FLAT_PREFIX):
            raise _no_archive(text)
        if text.startswith((MEMORY_PREFIX, ICECHUNK_PREFIX)) or "://" in text:
            return cls(text, None)
        prefix = ZARR_PREFIX if text.startswith(ZARR_PREFIX) else ""
        rest = text.removeprefix(prefix).rstrip("/") or "/"
        return cls(text, Path(rest), prefix)

    @property
    def absolute(self) -> str:
        """The same place for a process with another working directory."""
        return self.text if self.folder is None else f"{self.prefix}{self.folder.absolute()}"

    @property
    def partial(self) -> Place:
        """Where an archive is built that will be here."""
        if self.folder is None:
            return self
        folder = self.folder.with_name(self.folder.name + PARTIAL_SUFFIX)
        return Place(f"{self.prefix}{folder}", folder, self.prefix)

    def holds(self, options: Mapping[str, Any]) -> str:
        """Return ``"nothing"``, ``"archive"`` or, where nothing is renamed, ``"partial"``.

        Raises
        ------
        InvalidArgument
            Something else is there.
        """
        if self.folder is not None:
            return "archive" if self._is_taken(self.folder) else "nothing"
        try:
            backend = open_backend(self.text, "r", **options)
        except NotFound:
            return "nothing"
        try:
            with backend.read() as snapshot:
                if snapshot.get(keys.ARCHIVE) is not None:
                    return "archive"
                return "nothing" if snapshot.at_or_after(b"\0") is None else "partial"
        finally:
            backend.close()

    def _is_taken(self, folder: Path) -> bool:
        if not os.path.lexists(folder):
            if not folder.parent.is_dir():
                raise NotFound(f"{self.text}: its parent directory does not exist")
            return False
        if not folder.is_dir():
            raise InvalidArgument(f"{self.text}: a file; an archive is a directory")
        return any(folder.iterdir())

    def is_within(self, other: Place) -> bool:
        """Whether this is the same place as another one, or inside it."""
        if self.folder is None or other.folder is None:
            mine, theirs = self.text.rstrip("/"), other.text.rstrip("/")
            return mine == theirs or mine.startswith(theirs + "/")
        mine_at = Path(os.path.realpath(self.folder))
        return mine_at.is_relative_to(os.path.realpath(other.folder))


def flat_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of flat layers that are there, by name: `path` itself, or in it.

    Also those that are damaged, so that whoever opens them can say so.
    """
    root = os.fspath(path)
    if _is_flat(root):
        return [Path(root)]
    if any(os.path.exists(os.path.join(root, sign)) for sign in ARCHIVE_SIGNS):
        return []
    try:
        names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    except OSError:  # no folder, or one that nobody may read: whoever opens it says so
        return []
    found = [os.path.join(root, name) for name in names]
    return [Path(at) for at in found if _is_flat(at)]


def _is_flat(folder: str) -> bool:
    sign = os.path.join(folder, FLAT_SIGN)
    # A folder of that name may be a session that is called so.
    has_sign = os.path.lexists(sign) and not os.path.isdir(sign)
    return has_sign or os.path.lexists(os.path.join(folder, _FLAT_LAYER))


def _no_archive(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"{text}: flat layers, which are no archive; open them with kvstore.flat.open"
    )


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def open_backend(
    path: str | os.PathLike[str] | Repository,
    mode: Mode,
    *,
    kind: str | None = None,
    map_size: int | None = None,
    snapshot_seconds: float = SNAPSHOT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    storage_options: Mapping[str, str] | None = None,
) -> Backend:
    """Open the backend that `kind` names, or that `path` asks for.

    Parameters
    ----------
    path
        ``"memory:NAME"`` for memory; ``"zarr:DIRECTORY"``, a directory with such an archive, or
        the URL of a bucket for zarr, ``"icechunk:DIRECTORY"`` or an open Icechunk repository
        likewise; else a directory for LMDB.
    mode
        ``"r"`` creates nothing; ``"a"`` creates what is missing.
    kind
        ``"lmdb"``, ``"zarr"``, ``"memory"`` or None to go by `path`.
    map_size
        Upper limit of the archive in bytes; None for the backend's default. One larger than that
        of an archive which this process has open raises it, but not the one of `set_limit`.
    snapshot_seconds
        How long a snapshot may be read from.
    grace_seconds
        Zarr: how long deleted objects are kept for snapshots opened before. Older ones raise
        `NotFound` where they meet one that has gone.
    storage_options
        Of a bucket, as obstore names them; what the environment says need not be said here. Of
        an Icechunk repository ``branch``, or to read only ``tag`` or ``snapshot_id``.

    Raises
    ------
    InvalidArgument
        Unknown mode or backend, an option that it does not have, or an archive that cannot be
        written with mode "a".
    NotFound
        Mode "r" and no archive there.
    """
    if mode not in ("r", "a"):
        raise InvalidArgument(f"mode {mode!r}, expected 'r' (read) or 'a' (create or append)")
    if map_size is not None and not (type(map_size) is int and 0 < map_size < 1 << 63):
        raise InvalidArgument(f"map_size {map_size!r} is not a positive number of bytes")
    check_seconds("snapshot_seconds", snapshot_seconds)
    text, kind = _place(path, kind)
    if kind == "zarr":
        from .backends.zarr.backend import ZarrBackend

        return ZarrBackend(
            text.removeprefix(ZARR_PREFIX),
            mode,
            map_size=map_size,
            snapshot_seconds=snapshot_seconds,
            grace_seconds=grace_seconds,
            storage_options=storage_options,
        )
    if grace_seconds != GRACE_SECONDS or storage_options is not None:
        raise InvalidArgument(
            f"{text}: grace_seconds and storage_options are of the zarr backend, not of {kind!r}"
        )
    # Backends never import each other, and nobody pays for one that is not used.
    if kind == "memory":
        from .backends.memory import MemoryBackend

        name = text.removeprefix(MEMORY_PREFIX)
        return MemoryBackend(name, mode, map_size=map_size, snapshot_seconds=snapshot_seconds)
    if kind == "lmdb":
        from .backends.lmdb import LmdbBackend

        return LmdbBackend(text, mode, map_size=map_size, snapshot_seconds=snapshot_seconds)
    raise InvalidArgument(f"backend {kind!r}, expected 'lmdb', 'zarr' or 'memory'")


def compact_backend(
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[int, int]:
    """Return the free space of an archive to the file system, while nobody has it open.

    Parameters
    ----------
    path, kind
        As for `open_backend`.
    progress
        Called now and then with the bytes written so far and those that there will be; what it
        raises ends the compaction, and the archive is as it was.

    Returns
    -------
    tuple of int
        Bytes of the data file before and after; both the same where nothing is ever free, in
        memory and for zarr.

    Raises
    ------
    Locked
        Somebody has it open, in this process or another.
    Full
        No space for the copy that is made first; the archive is as it was.
    NotFound, InvalidArgument, Truncated, Corrupt
        No archive, one that cannot be written, or a damaged one.
    """
    text, kind = _place(path, kind)
    if kind == "memory":
        from .backends.memory import MemoryBackend

        backend = MemoryBackend(text.removeprefix(MEMORY_PREFIX), "r")
        n_bytes = backend.info().file_bytes
        return n_bytes, n_bytes
    if kind == "zarr":
        from .backends.zarr.backend import ZarrBackend

        opened = ZarrBackend(text.removeprefix(ZARR_PREFIX), "r")
        try:
            n_bytes = opened.info().file_bytes
        finally:
            opened.close()
        return n_bytes, n_bytes
    if kind == "lmdb":
        from .backends._compact import compact

        return compact(text, progress)
    raise InvalidArgument(f"backend {kind!r}, expected 'lmdb', 'zarr' or 'memory'")


def _place(path: object, kind: str | None) -> tuple[str, str]:
    """Return a path as text, and the kind of backend that is there."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if hasattr(path, "writable_session"):
        from .backends.zarr.icechunk_opening import path_of

        text = path_of(path)
    if not isinstance(text, str) or not _is_path(text):
        raise InvalidArgument(f"path {path!r}: expected a string or a path")
    if kind is None:
        if text.startswith(MEMORY_PREFIX):
            kind = "memory"
        elif text.startswith((ZARR_PREFIX, ICECHUNK_PREFIX)) or _URL.match(text):
            kind = "zarr"
        else:
            kind = "zarr" if os.path.isfile(os.path.join(text, _ZARR_SIGN)) else "lmdb"
            if text.startswith(FLAT_PREFIX) or flat_folders(text):
                raise _no_archive(text)
    return text, kind
