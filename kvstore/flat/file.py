"""A layer's file: positional reads and writes, maps that are checked before use, and advice.

Everything is written with `pwrite`, and maps are for reading alone: a full disk is then an error
of a call and not a signal, and no stray store can reach a row. The kernel keeps maps and writes
coherent. Memory without a file is one that has no name (`memfd_create`): pages that the kernel may
swap, with the same calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Closed, Full, InvalidArgument, KvError, Locked, NotFound, Truncated

from ..files import sync_folder

Bytes = npt.NDArray[np.uint8]

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MADV_PAGEOUT: Final = 21


class LayerFile:
    """An open file.

    Attributes
    ----------
    where
        Prefix of error messages: the path.
    is_named
        Whether it has a name in a file system.
    """

    def __init__(self, fd: int, where: str, *, is_named: bool, pread: bool) -> None:
        self._fd, self.where = fd, where
        self.is_named, self.pread = is_named, pread
        self._is_locked = False
        self._failed = False

    @classmethod
    def open(cls, path: str, *, write: bool, pread: bool) -> LayerFile:
        """Open a file that exists; for writing, as the only one that does.

        Raises
        ------
        NotFound, Locked, InvalidArgument
        """
        try:
            fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{path}: not there") from None
        except IsADirectoryError:
            raise InvalidArgument(f"{path}: a directory, expected the file of a layer") from None
        file = cls(fd, path, is_named=True, pread=pread)
        if write:
            file._lock()
        return file

    @classmethod
    def create(cls, path: str, *, pread: bool, begin: Callable[[LayerFile], None]) -> LayerFile:
        """Create a file, which has its name once `begin` has written it and it is durable.

        Raises
        ------
        InvalidArgument
            There is something of that name.
        NotFound
            No such folder.
        Full
            No room.
        """
        if os.path.lexists(path):
            raise InvalidArgument(f"{path}: exists already; give another name, or remove it")
        folder, name = os.path.split(path)
        folder = folder or "."
        try:
            fd, partial = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".partial")
        except FileNotFoundError:
            raise NotFound(f"{folder}: no such directory") from None
        file = cls(fd, path, is_named=True, pread=pread)
        try:
            os.fchmod(fd, 0o666 & ~_umask())
            file._lock()
            begin(file)
            file.sync()
            try:
                os.link(partial, path)
            except FileExistsError:
                raise InvalidArgument(
                    f"{path}: exists already; give another name, or remove it"
                ) from None
            except OSError:  # a file system without links
                os.rename(partial, path)
            else:
                os.unlink(partial)
            sync_folder(folder)
        except BaseException:
            file.close()
            if os.path.lexists(partial):
                os.unlink(partial)
            raise
        return file

    @classmethod
    def anonymous(cls, begin: Callable[[LayerFile], None]) -> LayerFile:
        """Return memory without a name, gone with the last map of it."""
        fd = os.memfd_create("kvstore flat", os.MFD_CLOEXEC)
        file = cls(fd, "anonymous layer", is_named=False, pread=False)
        try:
            begin(file)
        except BaseException:
            file.close()
            raise
        return file

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise Locked(
                f"{self.where}: somebody else has it open for appending; open it with mode='r', or "
                "close the other one"
            ) from None
        self._is_locked = True

    @property
    def fd(self) -> int:
        """The descriptor; `Closed` once there is none."""
        if self._fd < 0:
            raise Closed(f"{self.where}: closed; open it again")
        return self._fd

    @property
    def size(self) -> int:
        """Bytes of the file, as of now."""
        return os.fstat(self.fd).st_size

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes: holes do not count."""
        return os.fstat(self.fd).st_blocks * 512

    def check_size(self, end: int) -> None:
        """Raise `Truncated` if the file ends before `end`."""
        size = self.size
        if size < end:
            raise Truncated(
                f"{self.where}: {size} bytes, {end} are needed: it was cut; restore a copy"
            )

    def read(self, offset: int, n_bytes: int) -> Bytes:
        """Return bytes read with `preadv`; `Truncated` if there are fewer."""
        out = np.empty(n_bytes, np.uint8)
        view, at = out.data, 0
        while at < n_bytes:
            n = os.preadv(self.fd, [view[at:]], offset + at)
            if n == 0:
                raise Truncated(
                    f"{self.where}: ends at byte {offset + at}, {offset + n_bytes} are needed: it "
                    "was cut; restore a copy"
                )
            at += n
        return out

    def write(self, offset: int, data: bytes | memoryview | npt.NDArray[Any]) -> None:
        """Write bytes in place.

        Raises
        ------
        Full
            No room; some of the bytes may be written.
        """
        if self._failed:
            raise Closed(f"{self.where}: the disk failed to store a commit; open it again")
        view, at = np.frombuffer(data, np.uint8).data, 0
        while at < view.nbytes:
            try:
                at += os.pwrite(self.fd, view[at:], offset + at)
            except OSError as error:
                raise self._no_room(error) from error

    def reserve(self, offset: int, size: int, *, sparse: bool) -> None:
        """Make the file so long, with room on the disk unless `sparse`.

        Raises
        ------
        Full
            No room; the file is as it was.
        """
        before = self.size
        try:
            if sparse or not self.is_named:
                if before < offset + size:
                    os.ftruncate(self.fd, offset + size)
            else:
                os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if self.size > before:
                os.ftruncate(self.fd, before)
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> KvError | OSError:
        if error.errno in _NO_ROOM:
            return Full(
                f"{self.where}: {error.strerror}; make room on the disk, or drop rows; what was "
                "committed is unharmed"
            )
        return error

    def sync(self) -> None:
        """Make all that was written durable, as `msync` of every map would.

        After an error nobody knows what the disk has: nothing is written any more.
        """
        if not self.is_named:
            return
        try:
            os.fdatasync(self.fd)
        except OSError:
            self._failed = True
            raise

    def map(self, offset: int, size: int) -> tuple[mmap.mmap, Bytes]:
        """Map a part for reading; it stays as long as anybody refers to it."""
        self.check_size(offset + size)
        try:
            mapped = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
        except ValueError:
            self.check_size(offset + size)
            raise
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise Full(
                f"{self.where}: no address space for {size} more bytes; open it with pread=True"
            ) from error
        return mapped, np.frombuffer(mapped, np.uint8)

    def punch(self, offset: int, size: int) -> bool:
        """Give the room of a part back, which then reads as zeros; False if that cannot be."""
        if size <= 0:
            return True
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(
            ctypes.c_int(self.fd),
            ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE),
            ctypes.c_int64(offset),
            ctypes.c_int64(size),
        )
        return int(done) == 0

    def advise(self, mapped: mmap.mmap | None, offset: int, lo: int, hi: int, what: str) -> None:
        """Tell the kernel about bytes ``[lo, hi)``, relative to a part that begins at `offset`.

        Advice that it does not take is lost, and nothing else.
        """
        page = mmap.PAGESIZE
        if what == "release":
            lo, hi = -(-lo // page) * page, hi // page * page  # pages that are wholly inside
        else:
            lo = lo // page * page
        if lo >= hi:
            return
        if mapped is not None:
            # Maps are shared: what is released stays, in the file or in the memory without a name.
            advice = {
                "prefetch": mmap.MADV_WILLNEED,
                "random": mmap.MADV_RANDOM,
                "release": mmap.MADV_DONTNEED if self.is_named else _MADV_PAGEOUT,
            }[what]
            _quietly(lambda: mapped.madvise(advice, lo, min(hi, len(mapped)) - lo))
        if self.is_named and (mapped is None or what == "release"):
            told = {
                "prefetch": os.POSIX_FADV_WILLNEED,
                "random": os.POSIX_FADV_RANDOM,
                "release": os.POSIX_FADV_DONTNEED,
            }[what]
            _quietly(lambda: os.posix_fadvise(self.fd, offset + lo, hi - lo, told))

    def close(self) -> None:
        """Close, and let another one append."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Maps have descriptors of their own, with the same lock.
            if self._is_locked:
                _quietly(lambda: fcntl.flock(fd, fcntl.LOCK_UN))
            os.close(fd)

    def abandon(self) -> None:
        """Close in a forked child, whose parent has the lock."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            self.abandon()


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError:
        return


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
