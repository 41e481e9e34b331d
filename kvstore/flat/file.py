"""A layer's file: positional reads and writes, the writer's lock, and maps that are checked.

Everything is written with `pwrite`, and maps are for reading alone: a full disk is then an error
of a call and not a signal, and no stray store can reach a row. The kernel keeps maps and writes
coherent. Memory without a file is one that has no name (`memfd_create`): pages that the kernel may
swap, with the same calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Closed, InvalidArgument, Locked, NotFound, Truncated
from kvcodecs.frame import byte_view

from ..files import sync_folder
from .pages import Advice, Map, advise, punch
from .system_errors import translate

Bytes = npt.NDArray[np.uint8]


def partial_name(name: str) -> str:
    """Return the name that something has until it is whole; of a long one, only the beginning."""
    return f".{name[:50]}.{secrets.token_hex(4)}.partial"


class LayerFile:
    """An open file.

    A forked child reads what it has inherited; it neither writes nor lets go of the lock.

    Attributes
    ----------
    where
        Prefix of error messages: the path.
    is_named
        Whether it has a name in a file system.
    pread
        Whether it is read with ``pread``, and never mapped.
    """

    def __init__(self, fd: int, where: str, *, is_named: bool, pread: bool) -> None:
        self._fd, self.where = fd, where
        self.is_named, self.pread = is_named, pread
        self._process = os.getpid()
        self._is_locked = False
        self._failed = False

    @classmethod
    def open(cls, path: str, *, write: bool, pread: bool) -> LayerFile:
        """Open a file that exists; for writing, as the only one that does.

        Raises
        ------
        NotFound, Locked
        InvalidArgument
            It is no regular file, or there is no permission.
        """
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its other end
        except OSError as error:
            raise translate(error, path, "write" if write else "read") from error
        file = cls(fd, path, is_named=True, pread=pread)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidArgument(f"{path}: not a regular file, expected that of a layer")
            if write:
                file._lock()
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def create(
        cls, path: str, where: str, *, pread: bool, begin: Callable[[LayerFile], None]
    ) -> LayerFile:
        """Create a file, which has its name once `begin` has written it and it is durable.

        Raises
        ------
        InvalidArgument
            There is something of that name, or no permission to create anything.
        NotFound
            No such folder.
        Full
            No room.
        """
        taken = f"{path}: exists already; give another name, or remove it"
        if os.path.lexists(path):
            raise InvalidArgument(taken)
        folder, name = os.path.split(path)
        folder = folder or "."
        partial = os.path.join(folder, partial_name(name))
        try:
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise NotFound(f"{folder}: no such directory") from None
            raise translate(error, where, "create") from error
        file, made = cls(fd, where, is_named=True, pread=pread), partial
        try:
            file._lock()
            begin(file)
            file.sync()
            try:
                os.link(partial, path)
            except OSError:  # taken, or a file system without links
                if os.path.lexists(path):
                    raise InvalidArgument(taken) from None
                os.rename(partial, path)
            else:
                os.unlink(partial)
            made = path
            sync_folder(folder)
        except BaseException as error:
            file.close()
            with suppress(OSError):
                os.unlink(made)
            if isinstance(error, OSError):
                raise translate(error, where, "create") from error
            raise
        return file

    @classmethod
    def anonymous(cls, begin: Callable[[LayerFile], None]) -> LayerFile:
        """Return memory without a name, gone with the last map of it."""
        where = "anonymous layer"
        try:
            fd = os.memfd_create("kvstore flat", os.MFD_CLOEXEC)
        except OSError as error:
            raise translate(error, where, "create") from error
        file = cls(fd, where, is_named=False, pread=False)
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
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidArgument(
                    f"{self.where}: the file system does not lock files ({error.strerror}); put "
                    "it on another one, or open it with mode='r'"
                ) from error
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
    def is_inherited(self) -> bool:
        """Whether this process has it from a fork."""
        return self._process != os.getpid()

    def check_own(self) -> None:
        """Raise `Closed` if this process may not write, as its parent does."""
        self.fd  # noqa: B018
        if self.is_inherited:
            raise Closed(
                f"{self.where}: opened before a fork, and appended to in the parent process alone; "
                "it can be read here"
            )

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
        self.check_size(offset + n_bytes)  # no memory for what a damaged file claims to have
        out = np.empty(n_bytes, np.uint8)
        self.read_into(offset, out.data)
        return out

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with `preadv`; `Truncated` if there are fewer bytes."""
        at = 0
        while at < view.nbytes:
            n = os.preadv(self.fd, [view[at:]], offset + at)
            if n == 0:
                raise Truncated(
                    f"{self.where}: ends at byte {offset + at}, {offset + view.nbytes} are needed: "
                    "it was cut; restore a copy"
                )
            at += n

    def write(self, offset: int, data: bytes | npt.NDArray[Any]) -> None:
        """Write bytes in place.

        Raises
        ------
        Full
            No room; some of the bytes may be written.
        """
        self.check_own()
        if self._failed:
            raise Closed(f"{self.where}: the disk failed to store a commit; open it again")
        view, at = byte_view(data), 0
        while at < view.nbytes:
            try:
                at += os.pwrite(self._fd, view[at:], offset + at)
            except OSError as error:
                raise translate(error, self.where) from error

    def reserve(self, offset: int, size: int, *, sparse: bool) -> None:
        """Make the file so long, with room on the disk unless `sparse`.

        Raises
        ------
        Full
            No room; the file is as it was.
        """
        self.check_own()
        before = self.size
        try:
            if sparse or not self.is_named:
                if before < offset + size:
                    os.ftruncate(self._fd, offset + size)
            else:
                os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            if self.size > before:
                os.ftruncate(self._fd, before)
            raise translate(error, self.where) from error

    def sync(self) -> None:
        """Make all that was written durable.

        After an error nobody knows what the disk has: nothing is written any more.
        """
        self.check_own()
        if not self.is_named:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._failed = True
            raise translate(error, self.where) from error

    def map(self, offset: int, size: int) -> tuple[Map, Bytes]:
        """Map a part for reading; it stays as long as anybody refers to it."""
        self.check_size(offset + size)
        try:
            mapped = Map(self.fd, offset, size)
        except OSError as error:
            raise translate(error, self.where, "read") from error
        return mapped, np.asarray(mapped)

    def punch(self, offset: int, size: int) -> None:
        """Give the room of a part back, if the file system can; it then reads as zeros."""
        self.check_own()
        if size > 0:
            punch(self._fd, offset, size)

    def advise(self, mapped: Map | None, offset: int, lo: int, hi: int, what: Advice) -> None:
        """Tell the kernel about bytes ``[lo, hi)`` of a part: see `pages.advise`."""
        advise(self.fd, mapped, offset, lo, hi, what, named=self.is_named)

    def close(self) -> None:
        """Close, and let another one append."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Forked children have descriptors with the same lock.
            if self._is_locked and not self.is_inherited:
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()
