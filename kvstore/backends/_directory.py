"""The directory of an LMDB archive: what may be begun or opened, and room for the lock file."""

from __future__ import annotations

import errno
import os
from typing import Final

from kvcodecs.errors import Full, InvalidArgument, NotFound, Truncated

from ..last_use import FOLDED_FILE, USES_FILE
from ..lease import LEASE_DIRECTORY
from ._open_lock import OPEN_LOCK

DATA_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"
#: What compaction makes before it renames them; left by one that was killed.
COMPACTED_DATA_FILE: Final = "data.mdb.new"
COMPACTED_LOCK_FILE: Final = "lock.mdb.new"
MAX_READERS: Final = 1022
#: Length of LMDB's lock file: 64 bytes for each reader, and two more lines of 64.
LOCK_BYTES: Final = 64 * (MAX_READERS + 2)
#: What may be there where an archive begins.
NO_DATA: Final = frozenset((LOCK_FILE, OPEN_LOCK, LEASE_DIRECTORY, USES_FILE, FOLDED_FILE))
#: In a group of zarr format 2.
_ZARR2_SIGN: Final = ".zgroup"
NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def check_directory(path: str, create: bool, shown: str, *, is_open: bool) -> None:
    """Check that there is an archive at `path`, or with `create` that one may begin there.

    Parameters
    ----------
    shown
        The path as the caller spelled it.
    is_open
        Whether this process has the archive open already.

    Raises
    ------
    NotFound, InvalidArgument, Truncated, Full
        No archive, another kind of file or directory, an archive that has lost its data, or no
        room for a new directory.
    """
    try:
        if create and not os.path.lexists(path):
            os.mkdir(path)
        names = set(os.listdir(path))
        if DATA_FILE in names:
            _check_data(path, names, create and not is_open, shown)
            return
    except FileNotFoundError:
        what = "its parent directory does not exist" if create else "no such archive"
        raise NotFound(f"{shown}: {what}") from None
    except NotADirectoryError:
        raise InvalidArgument(f"{shown}: a file; an archive is a directory") from None
    except OSError as error:
        kind = Full if error.errno in NO_SPACE else InvalidArgument
        raise kind(f"{shown}: {error.strerror}") from error
    if not create:
        what = f"no archive in this directory ({DATA_FILE} is missing)"
        if _ZARR2_SIGN in names:
            what += f"; zarr format 2 comes into one by kvstore migrate zarr2:{shown} DST"
        raise NotFound(f"{shown}: {what}")
    if names - NO_DATA:
        raise InvalidArgument(f"{shown}: neither an archive nor an empty directory")


def _check_data(path: str, names: set[str], may_begin: bool, shown: str) -> None:
    if os.stat(os.path.join(path, DATA_FILE)).st_size:
        return
    # A writer killed at the very start leaves an empty file, which LMDB begins anew. It has made
    # the lock file before, and the folder of leases is made after the first pages. In any other
    # company an empty file is an archive that has lost its data.
    if not may_begin or LOCK_FILE not in names or LEASE_DIRECTORY in names:
        raise Truncated(f"{shown}: {DATA_FILE} is empty; restore a copy")


def mark_begun(path: str) -> None:
    """Make the folder of leases: an empty data file is damage from now on."""
    try:
        os.makedirs(os.path.join(path, LEASE_DIRECTORY), exist_ok=True)
    except OSError as error:
        # Without the right to write there is nothing to lose; without room, leases will say so.
        if error.errno not in NO_SPACE | {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise InvalidArgument(f"{path}: {LEASE_DIRECTORY}: {error.strerror}") from error


def reserve_lock_file(path: str, shown: str) -> None:
    """Give the lock file the blocks that LMDB will write through its map.

    LMDB makes the file sparse, and where the disk is full dies of SIGBUS when it touches it.

    Raises
    ------
    Full
        No space for it.
    """
    name = os.path.join(path, LOCK_FILE)
    try:
        stat = os.stat(name)
        if stat.st_size >= LOCK_BYTES and stat.st_blocks * 512 >= LOCK_BYTES:
            return
    except OSError:
        pass  # not there yet
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise Full(
                f"{shown}: no space for {LOCK_FILE} ({LOCK_BYTES} bytes), which LMDB needs to open "
                "an archive; make room"
            ) from error
        # Not allowed, or a file system that cannot reserve: LMDB says what it thinks of that.
