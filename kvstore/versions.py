"""Versions of the archive format: what changed, how old ones are read, and how they become new.

The one place that knows which there are. A release reads every version up to its own and writes
the newest. FORMAT.md section 8 says the same in words; `tests/golden/archives` has an archive of
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from kvcodecs.errors import KvError

    from .backend import Transaction
    from .opened import OpenArchive

#: Turns an archive of the version before into one of this version, inside a transaction; what it
#: could not make new, since it is damaged, is returned.
Step: TypeAlias = "Callable[[OpenArchive, Transaction], list[KvError]]"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the archive format.

    Attributes
    ----------
    number
        ``format`` of the archive record.
    first_release
        The first release that wrote it.
    change
        What is different from the version before.
    reading
        How this release reads it as it is.
    backends
        Where archives of it may be found.
    step
        Makes it of the version before; None for the first one.
    """

    number: int
    first_release: str
    change: str
    reading: str
    backends: tuple[str, ...]
    step: Step | None = None


def _index(archive: OpenArchive, transaction: Transaction) -> list[KvError]:
    # Imported here: records need the newest number, and that module needs records.
    from .garbage import index_anew

    _, errors = index_anew(archive, transaction)
    return errors


VERSIONS: Final = (
    Version(
        number=1,
        first_release="before 0.1.0",
        change="the first one",
        reading="as version 2, for its records are records without parts; prefixes are not matched",
        backends=("lmdb",),
    ),
    Version(
        number=2,
        first_release="0.1.0",
        change="sessions share frames: parts, lists of users, and the prefix index",
        reading="natively",
        backends=("lmdb", "zarr"),
        step=_index,
    ),
)

#: What this release writes, and the newest that it reads.
FORMAT_VERSION: Final = VERSIONS[-1].number
