"""Where an archive is migrated to: what is there, and the name it is built under until it is whole.

A new archive in the file system is built beside its place and renamed in the end. On object
storage, where nothing can be renamed, and in memory, it lacks its own record until the end, without
which nobody opens it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvcodecs.errors import InvalidArgument, Locked

from ..files import sync_folder
from ..place import Place


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
        sync_folder(folder)
    try:
        os.rename(partial, target)
    except OSError as error:
        raise InvalidArgument(
            f"{target}: cannot be put there: {error.strerror}; {partial} is whole, rename it"
        ) from error
    sync_folder(target.parent)
