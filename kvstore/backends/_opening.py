"""Opens LMDB on the directory of an archive, with as large a map as the process can have."""

from __future__ import annotations

import os
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, mmap
from typing import Any, Final

import lmdb
from kvcodecs.errors import Closed, Full, InvalidArgument, KvError, Truncated

from ._directory import DATA_FILE, LOCK_FILE, MAX_READERS, mark_begun, reserve_lock_file
from ._errors import translate

# A large map costs address space only; a process with a limit on that gets a smaller one.
_MAP_LADDER: Final = (1 << 40, 1 << 36, 1 << 33, 1 << 30)


def open_environment(
    path: str, data: str, map_size: int | None, create: bool, shown: str
) -> tuple[Any, bool]:
    """Open LMDB on a checked directory; return its environment, and whether it can be written.

    Parameters and errors are those of `acquire`; `data` is the path of the data file.
    """
    exists = os.path.exists(data)
    n_bytes = os.stat(data).st_size if exists else 0
    lock = os.path.join(path, LOCK_FILE)
    writable = (not exists or os.access(data, os.W_OK)) and os.access(
        lock if os.path.exists(lock) else path, os.W_OK
    )
    sizes = [size for size in _MAP_LADDER if size >= 2 * n_bytes] or [4 * n_bytes]
    if map_size is not None:
        sizes = [map_size]
    # A reader takes a writable environment too: the process can have only this one, and may
    # want to write later. Without the right to write, LMDB still wants its lock file; only
    # where that cannot be had is it read without (no writer can be active there either).
    attempts: list[dict[str, Any]] = [{}]
    if not writable:
        attempts = [{"readonly": True}, {"readonly": True, "lock": False}]
    reserve_lock_file(path, shown)
    error: lmdb.Error | None = None
    for options in attempts:
        for size in sizes:
            try:
                env = lmdb.open(
                    os.fsencode(path),  # LMDB's own way to bytes refuses names that are not UTF-8
                    map_size=size,
                    create=create,
                    mode=0o666,
                    max_readers=MAX_READERS,
                    max_spare_txns=0,  # a spare would share its reader slot with a forked child
                    lib_version=0,  # the two formats exclude each other; never the default's
                    **options,
                )
            except lmdb.MemoryError as failure:
                error = failure
                continue
            except lmdb.Error as failure:
                error = failure
                break
            if options.get("lock", True):
                env.reader_check()  # frees the slots of readers that were killed
            if create and writable:
                mark_begun(path)
            return env, writable
    if error is None:
        raise Full(f"{shown}: no map size fits")
    raise explain(error, data, shown) from error


def explain(error: lmdb.Error, data: str, shown: str) -> KvError:
    """Return the error of ours for one that opening the data file raised."""
    n_bytes = os.stat(data).st_size if os.path.exists(data) else None
    if "already open in this process" in str(error):
        return Closed(
            f"{shown}: already open in this process: by the lmdb package itself, or the process "
            "that this one was forked from was just using it; use a process started anew"
        )
    if n_bytes is not None and not os.access(data, os.R_OK):
        return InvalidArgument(f"{shown}: no right to read {DATA_FILE}")
    if isinstance(error, lmdb.InvalidError) and n_bytes is not None and n_bytes < 8192:
        return Truncated(f"{shown}: {DATA_FILE} has only {n_bytes} bytes")
    return translate(error, shown)


def can_map(n_bytes: int) -> bool:
    """Whether the process has so much address space left."""
    try:
        mmap(-1, n_bytes, MAP_PRIVATE | MAP_ANONYMOUS, PROT_READ).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True
