"""Objects as files of a local directory.

A key is a path below the root. Objects of which a reader may look for the name (`put_new`, `put`)
are made under a temporary name, ``.<16 hex digits>.tmp`` in the same directory, and get their own
when they are whole. Frames are made under their own, since nothing refers to them before they
are whole. No file is ever written to once it has its name: it may be another object too, through a
hard link.

Durable are, after `Directory.flush`, all objects put before it, and the names of them and of
the directories they are in. What `put_new` puts is durable before it has its name, so that no
crash leaves it torn.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvcodecs.errors import Locked, NotFound

from ...backend import Lease
from ...forklock import ForkLock
from ...lease import is_expired, take_file_lease, take_over_file_lease
from . import _files
from ._at_once import at_once
from ._files import ABSENT, NO_LINKS, translate
from ._keys import WRITER_KEY, check_key, check_prefix
from ._writer_lock import FileWriter, file_writer
from .objects import Found, Objects, Request

# Threads that wait for the disk in `flush`; it takes many requests at a time.
_FLUSHERS = 8
# A directory that is there may be gone before a file is in it, if another writer leaves it empty.
_MOST_TRIES = 100


class Directory(Objects):
    """Objects below a directory.

    Parameters
    ----------
    path
        The directory. A writer makes it if its parent is there, a reader needs nothing.
    shown
        What messages call it; None for `path` as it is.
    """

    def __init__(self, path: str | os.PathLike[str], *, shown: str | None = None) -> None:
        text = os.fspath(path)
        self._root = os.path.abspath(text)
        self._base = self._root.rstrip("/") + "/"
        self._where = shown or text
        # Not durable yet. Files are fsynced before directories.
        self._files: set[str] = set()
        self._directories: set[str] = set()
        self._failed: set[str] = set()  # files of which the disk has refused some
        self._known: set[str] = set()  # directories with durable names
        self._lock, self._flushing = ForkLock(), ForkLock()

    @property
    def where(self) -> str:
        return self._where

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return self._root

    @property
    def is_remote(self) -> bool:
        return False

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        path = self._path(key)
        try:
            return _files.read(path, start, stop)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise translate(error, self._where, key) from error

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        return [self.get(*request) for request in requests]

    def exists(self, key: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self._path(key)).st_mode)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise translate(error, self._where, key) from error

    def put_new(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._explained(key):
            if os.path.lexists(path):
                return False
            temporary = self._temporary(path, data, durable=True)
            try:
                is_new = self._link_new(temporary, path)
            finally:
                _files.remove(temporary)
                if not os.path.lexists(path):
                    self._prune({os.path.dirname(path)})
        if is_new:
            self._note(None, path)
        return is_new

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._explained(key):
            self._replace(path, data)

    def put_frames(
        self, items: Sequence[tuple[str, bytes]], still_mine: Callable[[], None]
    ) -> None:
        for key, data in items:
            path = self._path(key)
            with self._explained(key):
                try:
                    self._within_parents(path, partial(_files.create, path, data))
                except FileExistsError:
                    # After a failed flush the system may show bytes that the disk does not have.
                    if path in self._failed or not _files.is_same(path, data):
                        still_mine()
                        self._replace(path, data)
                        continue
                except OSError:
                    self._prune({os.path.dirname(path)})
                    raise
                self._note(path, path)

    def copy(self, pairs: Sequence[tuple[str, str]], still_mine: Callable[[], None]) -> None:
        for source, target in pairs:
            old, new = self._path(source), self._path(target)
            with self._explained(f"{source} to {target}"):
                if not os.path.isfile(old):
                    raise NotFound(f"{self._where}: no object {source!r} to copy")
                try:
                    self._within_parents(new, partial(_link, old, new))
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    self._replace(new, _files.read(old))
            self._note(new if old in self._files or new in self._files else None, new)

    def delete(self, keys: Sequence[str]) -> None:
        parents = set()
        for key in keys:
            path = self._path(key)
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno not in ABSENT and not os.path.isdir(path):
                    raise translate(error, self._where, key) from error
            parents.add(os.path.dirname(path))
            with self._lock:
                self._files.discard(path)
                self._failed.discard(path)
        self._prune(parents)

    def list(self, prefix: str, after: str | None = None) -> Iterator[Found]:
        check_prefix(self._where, prefix)
        try:
            yield from self._walk(prefix, after or "")
        except OSError as error:
            raise translate(error, self._where, prefix or "listing") from error

    def flush(self) -> None:
        with self._flushing:
            with self._lock:
                files, self._files = self._files, set()
                directories, self._directories = self._directories, set()
            done = False
            try:
                with self._explained("flush"):
                    at_once(self._flush_file, sorted(files), _FLUSHERS)
                    at_once(_files.flush_directory, sorted(directories), _FLUSHERS)
                done = True
            finally:
                with self._lock:
                    if done:
                        self._known |= directories
                    else:
                        self._files |= files
                        self._directories |= directories

    @contextlib.contextmanager
    def writer(self, timeout: float) -> Iterator[FileWriter]:
        path = self._path(WRITER_KEY)
        with contextlib.ExitStack() as stack:
            with self._explained("cannot be written"):
                self._make_parents(path)
                writer = stack.enter_context(file_writer(path, self._where, timeout))
            yield writer

    def lease(self, session: int, name: str, expires: float | None, *, in_write: bool) -> Lease:
        place, where = self._base + "_kvstore", self._where
        try:
            return take_file_lease(place, session, name, expires, shown=where)
        except Locked:
            if expires is None or not in_write or not self.is_expired(session):
                raise
        return take_over_file_lease(place, session, name, expires, shown=where)

    def is_expired(self, session: int) -> bool:
        return is_expired(self._base + "_kvstore", session)

    def close(self) -> None:
        """Do nothing: no file is open between two calls."""

    def _path(self, key: str) -> str:
        return self._base + check_key(self._where, key)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate(error, self._where, what) from error

    def _note(self, file: str | None, path: str) -> None:
        """Note what is to be made durable: a file, and the names that lead to `path`."""
        with self._lock:
            if file is not None:
                self._files.add(file)
            while path != self._root:
                path = os.path.dirname(path)
                if path in self._directories:
                    break
                self._directories.add(path)
                if path in self._known:
                    break

    def _within_parents(self, path: str, act: Callable[[], None]) -> None:
        """Make a name; the directories above it too if they are missing."""
        for i in range(_MOST_TRIES):
            try:
                if i:
                    self._make_parents(path)
                act()
                return
            except FileNotFoundError:
                if i == _MOST_TRIES - 1:
                    raise

    def _make_parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        if os.path.isdir(parent):
            return
        if parent != self._root:
            self._make_parents(parent)
        elif not os.path.isdir(os.path.dirname(parent)):
            raise NotFound(f"{self._where}: its parent directory does not exist")
        with contextlib.suppress(FileExistsError):  # another writer's is as good
            os.mkdir(parent)
        with self._lock:
            self._known.discard(parent)  # one of that name may have been there before
            if parent == self._root:
                self._directories.add(os.path.dirname(parent))

    def _temporary(self, path: str, data: bytes, *, durable: bool = False) -> str:
        name = _files.temporary(path)
        try:
            self._within_parents(name, partial(_files.create, name, data, durable=durable))
        except OSError:
            self._prune({os.path.dirname(path)})
            raise
        return name

    def _replace(self, path: str, data: bytes) -> None:
        temporary = self._temporary(path, data)
        try:
            os.replace(temporary, path)
        except OSError:
            _files.remove(temporary)
            raise
        with self._lock:
            self._failed.discard(path)
        self._note(path, path)

    def _link_new(self, temporary: str, path: str) -> bool:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        else:
            return True
        # Without hard links: nobody else puts a new object meanwhile. The lock ends with us.
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                if os.path.lexists(path):
                    return False
                os.rename(temporary, path)
                return True
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _flush_file(self, path: str) -> None:
        try:
            _files.flush_file(path)
        except OSError as error:
            with self._lock:
                self._failed.add(path)
            raise translate(error, self._where, path[len(self._base) :]) from error

    def _prune(self, parents: set[str]) -> None:
        """Remove directories that are empty, and those above that become so."""
        for parent in sorted(parents, reverse=True):
            path = parent
            while path != self._root:
                try:
                    os.rmdir(path)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        break
                with self._lock:
                    self._known.discard(path)
                path = os.path.dirname(path)

    def _walk(self, prefix: str, after: str) -> Iterator[Found]:
        try:
            with os.scandir(self._base + prefix) as entries:
                # As the keys below a directory are ordered: "a-b" comes before "a/c".
                names = sorted((e.name + "/" * e.is_dir(follow_symlinks=False), e) for e in entries)
        except OSError as error:
            if error.errno in ABSENT:
                return
            raise
        for name, entry in names:
            key = prefix + name
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._walk(key, after)
            elif key > after:
                try:
                    found = entry.stat()  # of a link what it leads to, as `get` reads it
                except OSError as error:
                    if error.errno == errno.ELOOP or error.errno in ABSENT:
                        continue
                    raise
                if stat.S_ISREG(found.st_mode):
                    yield Found(key, found.st_size)


def _link(old: str, new: str) -> None:
    """Make `new` another name of the file `old`, at once if it is that of another."""
    try:
        os.link(old, new)
        return
    except FileExistsError:
        pass
    temporary = _files.temporary(new)
    os.link(old, temporary)
    try:
        os.replace(temporary, new)
    finally:
        _files.remove(temporary)  # two names of one file: the system leaves both
