"""Writes an LMDB archive anew without its free pages, while nobody has it open.

The copy is made beside the archive, checked, and takes its place by a rename: whenever the process
is killed, the archive is the old one or the new one. FORMAT.md section 5.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import lmdb
from kvcodecs.errors import Corrupt, Full, InvalidArgument, Locked

from ..files import sync_folder
from ._directory import (
    COMPACTED_DATA_FILE,
    COMPACTED_LOCK_FILE,
    DATA_FILE,
    LOCK_BYTES,
    LOCK_FILE,
    NO_SPACE,
    check_directory,
)
from ._environment import Environment, is_open_here
from ._errors import translate
from ._open_lock import exclude
from ._opening import explain

#: Called with the bytes written so far and those that there will be.
Progress: TypeAlias = Callable[[int, int], object]

_PIECE: Final = 1 << 20
# Values up to this length are compared when the copy is checked; of frames, which have checksums of
# their own, the length is.
_COMPARED_BYTES: Final = 4096


class Stopped(Exception):
    """An error of the caller's `Progress`, which says nothing of the archive."""

    def __init__(self, by: OSError) -> None:
        super().__init__(by)
        self.by = by


def compact(path: str, progress: Progress | None = None) -> tuple[int, int]:
    """Return the free pages of an archive to the file system.

    Parameters
    ----------
    path
        The directory.
    progress
        Called now and then; what it raises ends the compaction, and the archive is the old one.

    Returns
    -------
    tuple of int
        Bytes of the data file before and after.

    Raises
    ------
    Locked
        Somebody has the archive open, in this process or another.
    Full
        No space for the copy; the archive is unharmed.
    NotFound, InvalidArgument, Truncated, Corrupt
        No archive, one that cannot be written, or a damaged one.
    """
    directory = os.path.abspath(path)
    check_directory(directory, False, path, is_open=False)
    if os.path.islink(os.path.join(directory, DATA_FILE)):
        raise InvalidArgument(f"{path}: {DATA_FILE} is a link; compact the archive it belongs to")
    try:
        if is_open_here(directory):
            raise BlockingIOError
        lock = exclude(directory)
        try:
            return _compact(directory, path, progress)
        finally:
            _remove_leftovers(directory)
            lock.release()
    except Stopped as stopped:
        raise stopped.by from None
    except BlockingIOError:
        raise Locked(
            f"{path}: is open, here or in another process; close it everywhere first"
        ) from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise Full(
                f"{path}: no space for the copy that compacting makes; the archive is as it was"
            ) from error
        raise InvalidArgument(f"{path}: cannot be compacted: {error.strerror or error}") from error


def _compact(directory: str, shown: str, progress: Progress | None) -> tuple[int, int]:
    _remove_leftovers(directory)
    data = os.path.join(directory, DATA_FILE)
    new = os.path.join(directory, COMPACTED_DATA_FILE)
    with _opened(directory, data, shown) as source:
        check_unused(directory)
        before = os.stat(data)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            n_bytes = copy_pages(source, fd, progress)
            check_copy(source.env, new, n_bytes, shown)
            give_owner(fd, before)
            os.fsync(fd)
        finally:
            os.close(fd)
        _swap(directory)
    return before.st_size, n_bytes


@contextlib.contextmanager
def _opened(directory: str, data: str, shown: str) -> Iterator[Environment]:
    """Open the archive without LMDB's locks; the one on ``open.lock`` keeps others away."""
    try:
        env = lmdb.open(
            os.fsencode(directory), readonly=True, lock=False, create=False, lib_version=0
        )
    except lmdb.Error as error:
        raise explain(error, data, shown) from error
    try:
        found = os.stat(data)
        source = Environment(env, directory, (found.st_dev, found.st_ino), False, None, None)
    except BaseException:
        env.close()
        raise
    try:
        source.enter()  # the file is as long as it says
        source.leave()
        yield source
    finally:
        source.end()


def check_unused(directory: str) -> None:
    """Raise `BlockingIOError` if any process has LMDB open here; this one has not."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(directory, LOCK_FILE), "r+b") as file,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def copy_pages(source: Environment, fd: int, progress: Progress | None) -> int:
    """Write a compacted copy of what is committed; returns its length."""
    head = source.head()
    n_expected = (2 + head.main.n_pages) * source.page_bytes
    failures: list[lmdb.Error] = []
    # Through a pipe, so that a full disk is told by name, and Ctrl-C is heard.
    reading, writing = os.pipe2(os.O_CLOEXEC)

    def copy() -> None:
        try:
            source.env.copyfd(writing, compact=True)
        except lmdb.Error as error:
            failures.append(error)
        finally:
            os.close(writing)

    thread = threading.Thread(target=copy, name="kvstore-compact", daemon=True)
    n_bytes = 0
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIECE)
        thread.start()
        while piece := os.read(reading, _PIECE):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
            n_bytes += len(piece)
            if progress is not None:
                _report(progress, n_bytes, max(n_bytes, n_expected))
    finally:
        os.close(reading)  # which ends the thread
        thread.join()
    if failures:
        raise translate(failures[0], source.path)
    return n_bytes


def _report(progress: Progress, n_bytes: int, n_expected: int) -> None:
    try:
        progress(n_bytes, n_expected)
    except OSError as error:
        raise Stopped(error) from None


def check_copy(env: Any, new: str, n_bytes: int, shown: str) -> None:
    """Compare keys, lengths and small values; raises `Corrupt`."""
    try:
        copied = lmdb.open(
            os.fsencode(new), subdir=False, readonly=True, lock=False, create=False, lib_version=0
        )
        try:
            last_byte = (copied.info()["last_pgno"] + 1) * copied.stat()["psize"]
            same = n_bytes == os.stat(new).st_size >= last_byte and _is_same(env, copied)
        finally:
            copied.close()
    except lmdb.Error as error:
        raise translate(error, shown) from error
    if not same:
        raise Corrupt(f"{shown}: the copy has not what the archive has; verify it")


def _is_same(env: Any, copied: Any) -> bool:
    with env.begin(buffers=True) as old, copied.begin(buffers=True) as new:
        for (key, value), (new_key, new_value) in zip(old.cursor(), new.cursor(), strict=False):
            if bytes(key) != bytes(new_key) or len(value) != len(new_value):
                return False
            if len(value) <= _COMPARED_BYTES and bytes(value) != bytes(new_value):
                return False
    return bool(env.stat()["entries"] == copied.stat()["entries"])


def give_owner(fd: int, like: os.stat_result) -> None:
    """Give a file the owner, as far as that is allowed, and the rights of another."""
    with contextlib.suppress(PermissionError):
        os.fchown(fd, like.st_uid, like.st_gid)
    os.fchmod(fd, stat.S_IMODE(like.st_mode))


def _swap(directory: str) -> None:
    """Let the copy take the archive's place.

    LMDB's lock file goes with it: it remembers the last transaction, and the copy begins to
    count anew. Nobody has it open, so that a new one only says what the old one would.
    """
    lock, new_lock = (os.path.join(directory, n) for n in (LOCK_FILE, COMPACTED_LOCK_FILE))
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(lock)
        fd = os.open(new_lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
            give_owner(fd, before)
        finally:
            os.close(fd)
        check_unused(directory)
        os.rename(new_lock, lock)
    os.rename(os.path.join(directory, COMPACTED_DATA_FILE), os.path.join(directory, DATA_FILE))
    # If the system dies before this is done, it is the old one or the new one.
    with contextlib.suppress(OSError):
        sync_folder(directory)


def _remove_leftovers(directory: str) -> None:
    for name in (COMPACTED_DATA_FILE, COMPACTED_LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
