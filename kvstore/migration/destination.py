"""Where an archive is migrated to: what is there, and the name it is built under until it is whole.

A new archive in the file system is built beside its place and renamed in the end. On object
storage, where nothing can be renamed, and in memory, it lacks its own record until the end, without
which nobody opens it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcodecs.errors import InvalidArgument, Locked, NotFound

from .. import keys
from ..backend import ICECHUNK_PREFIX, MEMORY_PREFIX, ZARR_PREFIX, open_backend

PARTIAL_SUFFIX: Final = ".partial"


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


def check_apart(source: Place, target: Place) -> None:
    """Raise `InvalidArgument` if one of two places is, or is inside, the other."""
    for inner, outer in ((target, source), (source, target)):
        if inner.is_within(outer):
            same = outer.is_within(inner)
            what = "the same archive as" if same else "inside"
            raise InvalidArgument(f"{inner.text}: is {what} {outer.text}; choose another place")


@contextlib.contextmanager
def partial_folder(folder: Path, *, resume: bool) -> Iterator[None]:
    """Hold the folder that an archive is built in; an empty one does not stay behind.

    Raises
    ------
    InvalidArgument
        An earlier try has left it, and `resume` does not say to go on.
    Locked
        Another migration is at it.
    """
    if not resume and os.path.lexists(folder):
        raise InvalidArgument(
            f"{folder}: left by a migration that did not end; go on with resume=True, or remove it"
        )
    folder.mkdir(exist_ok=resume)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"{folder}: another migration is at it") from None
        yield
    finally:
        os.close(lock)


def move_into_place(partial: Path, target: Path) -> None:
    """Give a finished archive its name, durably.

    Raises
    ------
    InvalidArgument
        Something has been put there meanwhile.
    """
    for folder in (partial, partial.parent):
        _sync(folder)
    try:
        os.rename(partial, target)
    except OSError as error:
        raise InvalidArgument(
            f"{target}: cannot be put there: {error.strerror}; {partial} is whole, rename it"
        ) from error
    _sync(target.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
