"""What the system's errors about a layer's file mean for the caller."""

from __future__ import annotations

import errno
from typing import Final, Literal

from kvcodecs.errors import Full, InvalidArgument, KvError, NotFound

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE: Final = (errno.ENOENT, errno.ENOTDIR)
_NO_FILE: Final = (errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG)
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE)


def translate(
    error: OSError, where: str, wanted: Literal["read", "write", "create"] = "write"
) -> KvError | OSError:
    """Return the error of ours that says what `error` means; itself where a disk fails.

    Parameters
    ----------
    wanted
        What was to be done with the file.
    """
    code, text = error.errno, error.strerror
    if code in _NO_ROOM:
        return Full(
            f"{where}: {text}; make room on the disk, or drop rows; what was committed is unharmed"
        )
    if code in (*_NOT_ALLOWED, *_NO_FILE) and wanted == "create":
        return InvalidArgument(
            f"{where}: cannot be created ({text}); give another name or folder, or have the "
            "permissions changed"
        )
    if code in _NOT_ALLOWED and wanted == "write":
        return InvalidArgument(
            f"{where}: cannot be written ({text}); open it with mode='r', or have the permissions "
            "changed"
        )
    if code in _NOT_ALLOWED:
        return InvalidArgument(f"{where}: cannot be read ({text}); have the permissions changed")
    if code in _NO_PLACE:
        return NotFound(f"{where}: not there ({text})")
    if code in _NO_FILE:
        return InvalidArgument(f"{where}: not the file of a layer ({text})")
    if code in _TOO_MANY:
        return Full(f"{where}: {text}; close some, or raise the limit (ulimit -n)")
    if code == errno.ENOMEM:
        return Full(f"{where}: no address space or memory; open it with pread=True")
    if code == errno.ENODEV:
        return InvalidArgument(f"{where}: nothing here can be mapped; open it with pread=True")
    return error
