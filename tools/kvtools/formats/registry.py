"""The formats that are no archives, and how a path asks for one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.place import ARCHIVE_SIGNS, FLAT_PREFIX, flat_folders
from kvtools.formats.session_folder import SESSION_FILE, session_folders


@dataclass(frozen=True, slots=True)
class Format:
    """A format with a folder for each session.

    Attributes
    ----------
    prefix, suffix
        What a path begins or ends with that asks for it; empty where nothing does.
    codec
        The one to pack values with that have none yet.
    finder
        Returns the folders of sessions that a plain folder has.
    """

    name: str
    prefix: str
    suffix: str
    codec: str
    finder: Callable[[str], list[Path]]

    def is_target(self, text: str) -> bool:
        """Whether a path asks for it."""
        if self.prefix:
            return text.startswith(self.prefix)
        return text.rstrip("/").endswith(self.suffix)

    def is_source(self, text: str) -> bool:
        """Whether sessions of it are there, or are said to be."""
        prefixed = bool(self.prefix) and text.startswith(self.prefix)
        return prefixed or bool(self.finder(text))

    def folder(self, text: str) -> str:
        """Return the folder that a path means."""
        return text.removeprefix(self.prefix)

    @property
    def exporting(self) -> Any:
        """The module with ``begin(folder)`` and ``write_session(...)``: see `foreign.Export`."""
        return importlib.import_module(f"kvtools.formats.{self.name}_export")

    @property
    def importing(self) -> Any:
        """The module with ``sessions(folder)``, a list of `foreign.Found`."""
        return importlib.import_module(f"kvtools.formats.{self.name}_import")


def source_format(text: str) -> Format | None:
    """Return the format of what is there; None for archives."""
    return next((found for found in FORMATS if found.is_source(text)), None)


def target_format(text: str) -> Format | None:
    """Return the format that a path asks for; None for archives."""
    return next((found for found in FORMATS if found.is_target(text)), None)


def without_prefix(text: str) -> str:
    """Return the folder of a path that may ask for a format."""
    found = target_format(text)
    return text if found is None else found.folder(text)


def tkv_folders(text: str) -> list[Path]:
    """Return folders of stream files: this one, or those in it if any has them."""
    root = Path(text)
    if not root.is_dir() or any((root / name).exists() for name in ARCHIVE_SIGNS):
        return []
    if _has_streams(root):
        return [root]
    folders = session_folders(root)
    return folders if any(_has_streams(folder) for folder in folders) else []


def _has_streams(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(
            entry.name == SESSION_FILE
            or (entry.name.startswith(("k_", "v_")) and entry.name.endswith(".tkv"))
            for entry in entries
        )


def _none(text: str) -> list[Path]:
    return []


#: Flat layers first: their folders may have a ``session.json`` as well.
FORMATS = (
    Format("flat", FLAT_PREFIX, "", "ggml.q8_0", flat_folders),
    Format("zarr2", "zarr2:", "", "kvr1", _none),
    Format("tkv", "", ".tkvdir", "tkv1", tkv_folders),
)
