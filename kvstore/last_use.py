"""When sessions were used last: an advisory file beside an archive that readers may write too.

Records of 24 bytes are appended, one a use, and folded into the latest of each session when the
file has grown. A crash, a full disk or a race may lose some; nothing of that is an error, and a
session that is not in it has simply not been used lately. FORMAT.md section 5.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from typing import Final
from zlib import crc32

from .forklock import ForkLock

USES_FILE: Final = "uses"
#: What the folded file is called before it takes the other's place.
FOLDED_FILE: Final = "uses.new"
#: Length at which the file is folded.
FOLD_BYTES: Final = 1 << 20
#: Sessions that folding keeps, those used last: most of the folded file is room for new uses.
MOST_KEPT: Final = 1 << 15
# What a reader takes of a file that nobody could fold: its end.
_READ_BYTES: Final = 2 * FOLD_BYTES
_NOT_ZERO: Final = re.compile(rb"[^\0]")
_RECORD: Final = struct.Struct("<QQII")  # id, nanoseconds since 1970, crc32 of both, 0
_CHECKED: Final = 16
_PAUSE: Final = 1.0


class UseLog:
    """Notes uses in the directory of an archive; no method raises."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, USES_FILE)
        self._folded = os.path.join(directory, FOLDED_FILE)
        self._lock = ForkLock()
        self._fd, self._pid = -1, os.getpid()
        self._closed = False
        self._last_id, self._last_time, self._retry_at = 0, 0.0, 0.0
        self._fold_above = FOLD_BYTES

    def note(self, session_id: int) -> None:
        """Append that a session is used now, unless that was the last thing noted."""
        now = time.monotonic()
        if session_id == self._last_id and now - self._last_time < _PAUSE:
            return
        with self._lock, contextlib.suppress(OSError, struct.error):
            self._last_id, self._last_time = session_id, now
            fd = self._open(now)
            if fd < 0:
                return
            os.write(fd, _pack(session_id, time.time_ns()))
            n_bytes = os.fstat(fd).st_size
            if n_bytes > self._fold_above:
                self._fold_above = n_bytes + FOLD_BYTES // 4  # before the next try, if this fails
                self._fold(fd)

    def latest(self) -> dict[int, int]:
        """Return nanoseconds since 1970 of the last use of each session that is known."""
        try:
            # Not to wait for a pipe that somebody has put there.
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return {}
        try:
            return parse(_read(fd))
        except OSError:
            return {}
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the file; later notes are dropped."""
        with self._lock:
            self._closed = True
            self._let_go()

    def __del__(self) -> None:
        self.close()

    def _open(self, now: float) -> int:
        """Return a descriptor of the file that has the name now, or -1."""
        if self._closed:
            return -1
        if self._fd >= 0 and (self._pid != os.getpid() or os.fstat(self._fd).st_nlink == 0):
            self._let_go()  # the parent's, or another process has folded it
        if self._fd < 0 and now >= self._retry_at:
            self._retry_at = now + _PAUSE  # unless it can be had
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd, self._pid = os.open(self._path, flags, 0o666), os.getpid()
            self._retry_at, self._fold_above = 0.0, FOLD_BYTES
        return self._fd

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _fold(self, fd: int) -> None:
        # Who finds the lock taken leaves it to the other. The lock is on the file that is
        # replaced, so it is no lock any more once the file has lost its name.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if os.fstat(fd).st_nlink:
                    self._replace()
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _replace(self) -> None:
        latest = sorted(self.latest().items(), key=lambda use: use[1])[-MOST_KEPT:]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        new = os.open(self._folded, flags, 0o666)
        try:
            data = b"".join(_pack(*use) for use in latest)
            os.fchmod(new, os.stat(self._path).st_mode & 0o777)
            if os.write(new, data) == len(data):
                os.rename(self._folded, self._path)
        finally:
            os.close(new)


def parse(data: bytes) -> dict[int, int]:
    """Return the latest time of each id among whole records, wherever they begin.

    A record that was cut short by a full disk is followed by whole ones at odd places.
    """
    latest: dict[int, int] = {}
    at, last = 0, len(data) - _RECORD.size
    while at <= last:
        session_id, time_ns, crc, zero = _RECORD.unpack_from(data, at)
        if session_id and not zero and crc == crc32(data[at : at + _CHECKED]):
            if time_ns > latest.get(session_id, -1):
                latest[session_id] = time_ns
            at += _RECORD.size
        else:
            at = _next_place(data, at)
    return latest


def _next_place(data: bytes, at: int) -> int:
    """Return the next place where a record may begin: it ends with four zeros, and is not all 0."""
    found = data.find(b"\0\0\0\0", at + _RECORD.size - 3)
    if found < 0:
        return len(data)
    at = found - (_RECORD.size - 4)
    used = _NOT_ZERO.search(data, at)
    return len(data) if used is None else max(at, used.start() - _RECORD.size + 1)


def _pack(session_id: int, time_ns: int) -> bytes:
    body = struct.pack("<QQ", session_id, time_ns)
    return body + struct.pack("<II", crc32(body), 0)


def _read(fd: int) -> bytes:
    n_bytes = os.fstat(fd).st_size
    offset = max(0, n_bytes - _READ_BYTES)
    parts = []
    while offset < n_bytes and (part := os.pread(fd, n_bytes - offset, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
