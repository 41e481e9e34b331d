"""`kvstore.open` and `kvstore.compact`: what is done to a whole archive by its path."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from .archive import Archive
from .backend import GRACE_SECONDS, SNAPSHOT_SECONDS, Mode, Repository, check_timeout
from .place import compact_backend, open_backend
from .room import check_quota


def open(
    path: str | os.PathLike[str] | Repository,
    mode: Mode = "r",
    *,
    lock_timeout: float = 10.0,
    map_size: int | None = None,
    backend: str | None = None,
    quota_bytes: int | None = None,
    snapshot_seconds: float = SNAPSHOT_SECONDS,
    lease_seconds: float | None = None,
    grace_seconds: float = GRACE_SECONDS,
    storage_options: Mapping[str, str] | None = None,
) -> Archive:
    """Open an archive.

    Parameters
    ----------
    path
        A directory (LMDB); ``"zarr:DIRECTORY"`` for one that zarr opens too, or just the
        directory once that is there; the URL of a bucket, ``"s3://bucket/prefix"``; an open
        Icechunk repository, or ``"icechunk:DIRECTORY"`` for one on this machine; or
        ``"memory:NAME"`` for one that lives in this process.
    mode
        ``"r"`` to read, ``"a"`` to append or create.
    lock_timeout
        Seconds that a write waits for other writers before it raises `Locked`; may be infinite.
    map_size
        Upper limit of the archive in bytes; None for 1 TiB or what the process can map.
    backend
        ``"lmdb"``, ``"zarr"``, ``"memory"`` or None to go by `path`.
    quota_bytes
        Sets the archive's quota; None leaves it as it is. See `Archive.set_quota`.
    snapshot_seconds
        A read that takes longer raises `Closed`: while it lasts the archive cannot use freed
        space again.
    lease_seconds
        How long an appender may be idle before another one may take its session; None: as long as
        its process lives. All who append to an archive should agree.
    grace_seconds
        In a zarr archive: how long deleted blocks are kept, since reads that began before, and
        other tools, may still need them. A read that comes later raises `NotFound`.
    storage_options
        Of a bucket: ``endpoint``, ``region``, ``access_key_id`` and what else obstore takes; what
        the environment says (``AWS_...``) need not be said here. Of an Icechunk repository:
        ``branch``, else ``"main"``, or to read what was there once ``tag`` or ``snapshot_id``.

    Raises
    ------
    NotFound
        Mode "r" and no archive there.
    Truncated, Corrupt, Unsupported
        Damaged, not an archive, or written by a newer release.
    InvalidArgument
        A mode, backend or place that cannot be used, or an option that the backend does not have.
    """
    seconds = check_timeout(lock_timeout)
    check_quota(quota_bytes)
    opened = open_backend(
        path,
        mode,
        kind=backend,
        map_size=map_size,
        snapshot_seconds=snapshot_seconds,
        grace_seconds=grace_seconds,
        storage_options=storage_options,
    )
    archive = Archive(opened, mode, lock_timeout=seconds, lease_seconds=lease_seconds)
    if quota_bytes is not None:
        try:
            if quota_bytes != archive.quota_bytes:
                archive.set_quota(quota_bytes)
        except BaseException:
            archive.close()
            raise
    return archive


def compact(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> tuple[int, int]:
    """Return the free space inside an archive to the file system.

    Copies what is used and replaces the file; killed at any point, the archive is the old one or
    the new one. Needs room for the copy, and nobody who has the archive open.

    Parameters
    ----------
    path
        As for `open`.
    progress
        Called now and then with the bytes written so far and those that there will be.

    Returns
    -------
    before, after
        Bytes of the data file.

    Raises
    ------
    Locked
        Somebody has it open, in this process or another.
    Full
        No room for the copy; the archive is as it was.
    NotFound, InvalidArgument, Truncated, Corrupt
        No archive, one that cannot be written, or a damaged one.
    """
    return compact_backend(path, progress=progress)
