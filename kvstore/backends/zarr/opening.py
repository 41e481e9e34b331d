"""From a path or URL to what all who have that archive open in this process share."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from kvcodecs.errors import InvalidArgument, NotFound, Unsupported

from ...backend import Mode
from ...forklock import ForkLock
from ...place import ICECHUNK_PREFIX
from .directory import Directory
from .objects import Objects
from .shared import Shared

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE_URL: Final = "file://"

_registry: dict[str, Shared] = {}
_lock = ForkLock()


def is_url(path: str) -> bool:
    """Whether a path is that of a bucket."""
    return _URL.match(path) is not None and not path.startswith(_FILE_URL)


def acquire(path: str, mode: Mode, options: Mapping[str, str] | None) -> Shared:
    """Return what is shared of an archive; give it back with `release`.

    Raises
    ------
    NotFound
        No such place.
    InvalidArgument
        Not a place for an archive, or options that it does not have.
    Unsupported
        What a bucket needs is not installed.
    """
    root: str | None
    if path.startswith(ICECHUNK_PREFIX):
        objects, name = _in_repository(path, mode, options)
        root = None
    elif is_url(path):
        objects = _bucket(path, options)
        root, name = None, repr((path, sorted((options or {}).items())))
    else:
        if options is not None:
            raise InvalidArgument(f"{path}: storage_options are for buckets, not for directories")
        objects = _directory(path, mode)
        root = name = os.path.realpath(path.removeprefix(_FILE_URL))
    with _lock:
        shared = _registry.get(name)
        if shared is None:
            shared = _registry[name] = Shared(objects, root)
        else:
            shared.refs += 1
            shared.doubt()
    if shared.objects is not objects:
        objects.close()
    return shared


def release(shared: Shared) -> None:
    """Give it back; with the last one it is closed. Also called by the garbage collector."""
    if shared.is_forked:
        return  # the parent's
    with _lock:
        shared.refs -= 1
        if shared.refs:
            return
        for name, other in list(_registry.items()):
            if other is shared:
                del _registry[name]
    shared.objects.close()


def _after_fork_in_child() -> None:
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _directory(path: str, mode: Mode) -> Directory:
    directory = path.removeprefix(_FILE_URL)
    parent = os.path.dirname(os.path.abspath(directory))
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise InvalidArgument(f"{path}: a file, expected a directory")
    if mode == "a":
        if not os.path.isdir(parent):
            raise NotFound(f"{path}: its parent directory does not exist")
        if not os.access(directory if os.path.isdir(directory) else parent, os.W_OK):
            raise InvalidArgument(f"{path}: not writable here; open it with mode='r'")
    return Directory(directory, shown=path)


def _bucket(path: str, options: Mapping[str, str] | None) -> Objects:
    try:
        from .bucket import Bucket
    except ImportError as error:
        raise Unsupported(
            f"{path}: archives in buckets need obstore: pip install 'kvstore[s3]'"
        ) from error
    return Bucket(path, options)


def _in_repository(path: str, mode: Mode, options: Mapping[str, str] | None) -> tuple[Objects, str]:
    try:
        from .icechunk_opening import open_objects
    except ImportError as error:
        raise Unsupported(
            f"{path}: archives in Icechunk need more: pip install 'kvstore[icechunk]'"
        ) from error
    return open_objects(path, mode, options)
