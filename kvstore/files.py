"""What file systems are asked in several places."""

from __future__ import annotations

import errno
import os
import stat

from kvcodecs.errors import Corrupt, Full, InvalidArgument, NotFound


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make durable which names a directory has."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def has_name(fd: int, path: str) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return what a small file holds; nothing that may be in its place makes it wait.

    Parameters
    ----------
    most
        Bytes that it may have.

    Raises
    ------
    NotFound
        Nothing of that name.
    Corrupt
        Longer, or no regular file: a folder, a pipe, a link to nothing.
    InvalidArgument
        No permission, or too long a name.
    Full
        Too many files are open.
    """
    where = os.fspath(path)
    try:
        fd = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        code, text = error.errno, error.strerror
        if code in (errno.ENOENT, errno.ENOTDIR) and not os.path.islink(where):
            raise NotFound(f"{where}: not there") from None
        if code in (errno.EACCES, errno.EPERM):
            raise InvalidArgument(
                f"{where}: cannot be read ({text}); have the permissions changed"
            ) from None
        if code == errno.ENAMETOOLONG:
            raise InvalidArgument(f"{where}: not there ({text})") from None
        if code in (errno.EMFILE, errno.ENFILE):
            raise Full(f"{where}: {text}; close some, or raise the limit (ulimit -n)") from None
        if code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise Corrupt(f"{where}: not a file ({text}); restore a copy") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Corrupt(f"{where}: not a regular file; restore a copy")
        if status.st_size > most:
            raise Corrupt(f"{where}: {status.st_size} bytes, at most {most} are expected")
        with open(fd, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(fd)
