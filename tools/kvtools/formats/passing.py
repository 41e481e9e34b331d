"""Where sessions pass through an archive on their way from one format to another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcodecs.errors import KvError, NotFound

from kvstore.migration.destination import partial_folder
from kvstore.place import PARTIAL_SUFFIX

SUFFIX = ".passing"
_ARCHIVE = "passed.kv"


def passing_folder(folder: Path) -> Path:
    """Return the folder beside a target."""
    return folder.with_name(folder.name + SUFFIX)


@contextmanager
def passing(folder: Path | None, source: str, *, resume: bool = False) -> Iterator[Path]:
    """Yield where an archive may be beside `folder`, the target; None: on object storage.

    It stays if the process is ended in the middle, for whoever goes on with `resume`, and if the
    target keeps something as well. Errors speak of `source` instead.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="kvstore-") as name:
            passed = Path(name) / _ARCHIVE
            with _speaking_of(source, passed):
                yield passed
        return
    if not folder.parent.is_dir():
        raise NotFound(f"{folder}: its parent directory does not exist")
    place = passing_folder(folder)
    passed = place / _ARCHIVE
    with partial_folder(place, resume=resume):
        try:
            with _speaking_of(source, passed):
                yield passed
        except (KvError, OSError):
            kept = (passed, folder)
            if not any(x.with_name(x.name + PARTIAL_SUFFIX).exists() for x in kept):
                shutil.rmtree(place, ignore_errors=True)
            raise
        shutil.rmtree(place)


@contextmanager
def _speaking_of(source: str, passed: Path) -> Iterator[None]:
    try:
        yield
    except KvError as error:
        error.args = (str(error).replace(f"{passed}: ", f"{source}: "),)
        raise
