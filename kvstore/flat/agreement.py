"""Whether the layers of a session agree, and making them agree after a crash. FORMAT.md 11.1."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument

from .layer import FlatLayer
from .session import FlatSession


def check_common(session: FlatSession) -> None:
    """Raise `Corrupt` if the layers have no tokens in common."""
    starts = [layer.start for layer in session.layers]
    stops = [layer.stop for layer in session.layers]
    if all(stops) and max(starts) > min(stops):
        raise Corrupt(
            f"{session.where}: layer {int(np.argmax(starts))} begins at {max(starts)}, and layer "
            f"{int(np.argmin(stops))} ends at {min(stops)}; restore a copy of the folder"
        )


def check_copies(where: str, layers: Mapping[int, FlatLayer]) -> None:
    """Raise `Corrupt` if the file of a layer is a copy of another time.

    A crash leaves layers that are one commit of the session apart.
    """
    before, numbers = None, _session_commits(layers)
    while numbers != before:  # a writer may have made several commits from one to the other
        if not numbers or max(numbers.values()) - min(numbers.values()) <= 1:
            return
        before, numbers = numbers, _session_commits(layers)
    oldest, newest = (f(numbers, key=numbers.__getitem__) for f in (min, max))
    behind = [index for index, number in numbers.items() if number < numbers[newest] - 1]

    def name(index: int) -> str:
        return os.path.basename(layers[index].where)

    raise Corrupt(
        f"{where}: {_listed(behind)} behind: {name(oldest)} is of commit {numbers[oldest]}, "
        f"{name(newest)} of commit {numbers[newest]}, so one of them is a copy of another "
        "time; restore a copy of that file, or of the whole folder"
    )


def _session_commits(layers: Mapping[int, FlatLayer]) -> dict[int, int]:
    return {index: layer._session_commit for index, layer in layers.items()}


def _listed(indices: Sequence[int]) -> str:
    names = ", ".join(map(str, indices[:5])) + (", ..." if indices[5:] else "")
    return f"layer {names} is" if len(indices) == 1 else f"layers {names} are"


def make_even(session: FlatSession) -> None:
    """Take back, and drop, what layers have more than others after a crash in a commit."""
    start, stop = session.start, session.stop
    for layer in session.layers:
        if layer.stop > stop:
            try:
                layer.take_back(stop)
            except InvalidArgument as error:
                raise Corrupt(f"{error}; restore a copy of the folder") from error
    for layer in session.layers:
        layer.drop_front(max(0, start - layer.start))
        layer.commit()
    newest = max(layer._session_commit for layer in session.layers)
    for layer in session.layers:  # last: until then a crash leaves what it found
        layer._commit_appended(newest)
