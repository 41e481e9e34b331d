"""From ``icechunk:...`` to objects in a repository, in a local directory or open already."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

import icechunk
from kvcodecs.errors import InvalidArgument, NotFound

from ...backend import Mode
from ...place import ICECHUNK_PREFIX
from .icechunk import IcechunkObjects

_OPTIONS: Final = ("branch", "tag", "snapshot_id")
_NUMBERED: Final = re.compile(r"<repository (\d+)>")

_numbers = count(1)
_open: weakref.WeakValueDictionary[int, icechunk.Repository] = weakref.WeakValueDictionary()


def path_of(repository: Any) -> str:
    """Return a path that stands for an open repository as long as there is one."""
    if not isinstance(repository, icechunk.Repository):
        raise InvalidArgument(f"{repository!r}: expected a path or an Icechunk repository")
    found = [number for number, other in list(_open.items()) if other is repository]
    number = found[0] if found else next(_numbers)
    _open[number] = repository
    return f"{ICECHUNK_PREFIX}<repository {number}>"


def open_objects(
    path: str, mode: Mode, options: Mapping[str, str] | None
) -> tuple[IcechunkObjects, str]:
    """Return the objects of an archive in a repository, and a name for what they are.

    Parameters
    ----------
    path
        ``"icechunk:DIRECTORY"``, or of `path_of`. With mode "a" the repository is made if there
        is none.
    options
        ``branch``, or ``tag`` or ``snapshot_id``.

    Raises
    ------
    NotFound
        No such repository, branch, tag or snapshot.
    InvalidArgument
        Other options, or several.
    """
    options = dict(options or {})
    for name, value in options.items():
        if name not in _OPTIONS or not isinstance(value, str):
            raise InvalidArgument(
                f"{path}: storage option {name}={value!r}; of an Icechunk repository there are "
                f"{', '.join(_OPTIONS)}, strings"
            )
    if len(options) > 1:
        raise InvalidArgument(f"{path}: {' and '.join(sorted(options))} exclude each other")
    text = path.removeprefix(ICECHUNK_PREFIX)
    match = _NUMBERED.fullmatch(text)
    if match:
        repository, directory, place = _open.get(int(match[1])), None, text
        if repository is None:
            raise NotFound(f"{path}: this repository is not open any more")
    else:
        directory = os.path.abspath(text)
        repository, place = _local(directory, mode, path), os.path.realpath(directory)
    objects = IcechunkObjects(repository, where=path, directory=directory, **options)
    return objects, repr((ICECHUNK_PREFIX, place, sorted(options.items())))


def _local(directory: str, mode: Mode, path: str) -> icechunk.Repository:
    if "ICECHUNK_LOG" not in os.environ:
        # It warns of writers at the same time, which our lock keeps apart.
        icechunk.set_logs_filter("error")
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise InvalidArgument(f"{path}: a file; a repository is a directory")
    if not os.path.isdir(os.path.dirname(directory)):
        raise NotFound(f"{path}: its parent directory does not exist")
    is_there = os.path.isdir(directory) and bool(os.listdir(directory))
    if not is_there and mode == "r":
        raise NotFound(f"{path}: no such repository; open it with mode='a' to begin one")
    try:
        storage = icechunk.local_filesystem_storage(directory)
        if is_there:
            return icechunk.Repository.open(storage)
        return icechunk.Repository.create(storage)
    except (icechunk.IcechunkError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise InvalidArgument(f"{path}: no Icechunk repository can be opened: {text}") from error
