"""A copy of an LMDB archive as of one moment, made under a name that is not its own yet.

It takes its name once it is whole and on the disk: whoever sees a backup has all of it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from kvcodecs.errors import Full, InvalidArgument, Locked

from ..files import sync_folder
from ._compact import Progress, Stopped, check_copy, check_unused, copy_pages, give_owner
from ._directory import DATA_FILE, NO_SPACE, check_directory
from ._environment import Environment, is_open_here
from ._open_lock import alone

#: Ends the name of a backup that is not whole yet.
UNFINISHED: Final = ".new"


@contextlib.contextmanager
def keep_to_oneself(path: str) -> Iterator[None]:
    """Keep all other processes from an archive; the caller opens it inside.

    Raises
    ------
    Locked
        Somebody has it open, in this process or another.
    NotFound, InvalidArgument, Truncated
        No archive, or one that cannot be written.
    """
    directory = os.path.abspath(path)
    check_directory(directory, False, path, is_open=False)
    with contextlib.ExitStack() as stack:
        try:
            if is_open_here(directory):
                raise BlockingIOError
            stack.enter_context(alone(directory))
            check_unused(directory)
        except BlockingIOError:
            raise Locked(
                f"{path}: is open, here or in another process; close it everywhere first"
            ) from None
        except OSError as error:
            raise InvalidArgument(f"{path}: cannot be locked: {error.strerror or error}") from error
        yield


def back_up(source: Environment, place: str, shown: str, progress: Progress | None = None) -> None:
    """Make `place` an archive that has what `source` has; see `LmdbBackend.back_up`."""
    new = place + UNFINISHED
    try:
        _remove(new)
        os.mkdir(new, 0o700)
        try:
            _fill(source, new, shown, progress)
            if os.path.lexists(place):
                raise InvalidArgument(f"{place}: exists already; name another place for the backup")
            os.rename(new, place)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(new)
            raise
        sync_folder(os.path.dirname(place))
    except Stopped as stopped:
        raise stopped.by from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise Full(f"{place}: no space for the backup; the archive is as it was") from error
        raise InvalidArgument(f"{place}: no backup there: {error.strerror or error}") from error


def _fill(source: Environment, new: str, shown: str, progress: Progress | None) -> None:
    data = os.path.join(new, DATA_FILE)
    fd = os.open(data, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        n_bytes = copy_pages(source, fd, progress)
        check_copy(source.env, data, n_bytes, shown)
        give_owner(fd, os.stat(os.path.join(source.path, DATA_FILE)))
        os.fsync(fd)
    finally:
        os.close(fd)
    like = os.stat(source.path)
    with contextlib.suppress(PermissionError):
        os.chown(new, like.st_uid, like.st_gid)
    os.chmod(new, stat.S_IMODE(like.st_mode))
    sync_folder(new)


def _remove(new: str) -> None:
    """Remove what a backup has left that was killed; anything else there is an error."""
    with contextlib.suppress(FileNotFoundError):
        if set(os.listdir(new)) - {DATA_FILE}:
            raise InvalidArgument(f"{new}: not left by a backup; move it away")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(new, DATA_FILE))
        os.rmdir(new)
