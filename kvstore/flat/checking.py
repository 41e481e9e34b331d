"""Checking a folder of flat layers: everything in it, whatever else is damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from kvcodecs.errors import Corrupt, KvError, NotFound

from ..identity import Model
from .agreement import check_copies
from .folder import layer_file, plain_path, read_session
from .layer import FlatLayer

# How often, and after how many seconds, layers that disagree are looked at again.
_LOOKS: Final = 50
_PAUSE: Final = 0.01


@dataclass(slots=True)
class FlatReport:
    """What `verify` found.

    Attributes
    ----------
    problems
        Everything that is wrong.
    n_layers, n_blocks, n_bytes
        Files, checksum blocks and bytes of rows that were looked at.
    """

    problems: list[KvError] = field(default_factory=list)
    n_layers: int = 0
    n_blocks: int = 0
    n_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> FlatReport:
    """Check a session of flat layers: every file, every block, and that its layers agree.

    Unlike `FlatSession.verify` it goes on after damage, also where the session cannot be opened.

    Parameters
    ----------
    progress
        Called with how many layers are done, and how many there are.

    Raises
    ------
    NotFound
        There is no session.
    """
    folder, report = plain_path(path), FlatReport()
    belongs: tuple[Model, int] | None = None
    try:
        belongs = read_session(folder)
        names = [layer_file(index) for index in range(belongs[0].n_layers)]
    except NotFound:
        raise
    except KvError as error:
        report.problems.append(error)
        names = _layer_names(folder)
    with ExitStack() as stack:
        layers: dict[int, FlatLayer] = {}
        for index, name in enumerate(names):
            try:
                layer = stack.enter_context(_opened(folder / name))
                report.n_layers += 1
                if belongs is not None:
                    layer._check_belongs(belongs[1], index, belongs[0])
                report.n_blocks += layer.verify(report.problems.append)
                report.n_bytes += layer.n_bytes
                layers[index] = layer
            except KvError as error:
                report.problems.append(error)
            if progress is not None:
                progress(index + 1, len(names))
        difference = _difference(layers)
        try:
            check_copies(os.fspath(folder), layers)
        except Corrupt as error:
            report.problems.append(error)
            difference = ""  # opening it cannot mend that
    if difference:
        report.problems.append(
            Corrupt(
                f"{folder}: layers disagree: {difference}; the session has what all of them have, "
                "and kvstore.flat.open with mode='a' makes them agree"
            )
        )
    return report


def _layer_names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if fnmatch(name, "layer-*.kvf"))
    except OSError:  # the record of the session could not be read either
        return []


def _opened(path: Path) -> FlatLayer:
    try:
        return FlatLayer.open(path)
    except NotFound:
        raise Corrupt(f"{path}: missing; restore a copy of the folder") from None


def _difference(layers: dict[int, FlatLayer]) -> str:
    """Return which layers have other rows than most; a writer may be between two of them."""
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE)
        ranges = {index: (layer.start, layer.stop) for index, layer in layers.items()}
        if len(set(ranges.values())) <= 1:
            return ""
    counts = list(ranges.values())
    usual = max(set(counts), key=counts.count)
    others = [f"layer {i} has [{a}, {b})" for i, (a, b) in ranges.items() if (a, b) != usual]
    return f"{', '.join(others)}, others [{usual[0]}, {usual[1]})"
