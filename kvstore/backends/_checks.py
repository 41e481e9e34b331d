"""Arguments and errors that all backends have in common."""

from __future__ import annotations

from kvcodecs.errors import Closed, InvalidArgument


def check_limit(n_bytes: object) -> int | None:
    """Return the limit of an archive; `InvalidArgument` if it is neither bytes nor None."""
    if n_bytes is None or (type(n_bytes) is int and 0 < n_bytes < 1 << 63):
        return n_bytes
    raise InvalidArgument(f"limit {n_bytes!r} is not a positive number of bytes")


def no_shards(where: str) -> InvalidArgument:
    """Return the error of a backend that keeps all frames in one place anyway."""
    return InvalidArgument(
        f"{where}: only zarr archives have shards; leave --shard out, or migrate it to zarr:PATH"
    )


def expired(where: str, seconds: float) -> Closed:
    """Return the error of a snapshot that has been open for too long."""
    return Closed(
        f"{where}: the snapshot is older than {seconds:g} s, it would make the archive grow; "
        "begin again"
    )
