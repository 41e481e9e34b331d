"""A folder beside its target that is moved there when complete, and never stays behind.

It is removed when the work fails. A process that is killed cannot do that; its folder is told from
one in use by a lock that ends with its owner, and removed by the next one for the same target.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvtools.signals import undisturbed


@contextlib.contextmanager
def folder_for(target: Path) -> Iterator[Path]:
    """Yield a new empty folder; rename it to its target inside the block, or it is removed.

    Raises
    ------
    OSError
        The folder cannot be made.
    """
    _remove_abandoned(target)
    made: tuple[Path, int] | None = None
    try:
        with undisturbed():  # a signal that comes meanwhile is heard once the folder is known
            made = _create(target)
        yield made[0]
    finally:
        if made is not None:
            with undisturbed():
                shutil.rmtree(made[0], ignore_errors=True)
                os.close(made[1])


def _create(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        os.mkdir(folder)
        lock = -1
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held = _lock(lock)
            if held is None or (held and os.path.samestat(os.stat(folder), os.fstat(lock))):
                return folder, lock
            os.close(lock)  # taken for abandoned between its making and its locking: once more
        except FileNotFoundError:
            if lock >= 0:
                os.close(lock)
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            raise


def _lock(folder: int) -> bool | None:
    """Lock a folder: whether it was free; None where folders cannot be locked."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _remove_abandoned(target: Path) -> None:
    ours = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{8}[.]tmp")
    try:
        with os.scandir(target.parent) as entries:
            found = [
                entry.path
                for entry in entries
                if ours.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return  # what cannot be listed may still be written to
    for path in found:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _lock(folder):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(folder)
