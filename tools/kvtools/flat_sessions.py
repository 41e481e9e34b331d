"""Sessions of flat layers that a path names, and what is known about each without reading rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcodecs.errors import InvalidArgument, KvError, NotFound
from kvcodecs.frame import ErrorStats
from kvcodecs.spec import KState

from kvstore import Model, flat
from kvstore.place import FLAT_PREFIX, flat_folders
from kvtools.formats.flat_import import FlatSource, folders_in

LAYER_SUFFIX = ".kvf"
_FP16_BITS = 16
_SECTOR = 512


@dataclass(frozen=True, slots=True)
class FlatStream:
    """One stream of flat layers: geometry, scheme and rows."""

    layer: int
    kind: str
    heads: int
    head_dim: int
    scheme: str
    row_bytes: int
    block_rows: int
    start: int
    stop: int
    capacity: int

    @property
    def n_values(self) -> int:
        """Values of one row."""
        return self.heads * self.head_dim

    @property
    def bits_per_value(self) -> float:
        """Of rows, whatever the file reserves."""
        return 8 * self.row_bytes / self.n_values


@dataclass(frozen=True, slots=True)
class FlatInfo:
    """One session of flat layers.

    Attributes
    ----------
    start, stop
        First token, and one past the last.
    store_k
        Whether K is kept before or after RoPE.
    capacity
        Rows that every layer has room for without growing.
    max_rows
        The most rows of a ring; None where layers grow.
    row_bytes
        Of one token, all layers.
    file_bytes, disk_bytes
        Of its files: their lengths, and what they take on the disk.
    has_token_ids, error, metadata
        As ``session.json`` says, where a migration left one.
    """

    name: str
    folder: Path
    model: Model
    start: int
    stop: int
    store_k: KState
    capacity: int
    max_rows: int | None
    row_bytes: int
    file_bytes: int
    disk_bytes: int
    has_token_ids: bool
    error: ErrorStats
    metadata: Mapping[str, Any]
    streams: tuple[FlatStream, ...]

    @property
    def n_bytes(self) -> int:
        """Of the rows that there are."""
        return (self.stop - self.start) * self.row_bytes

    @property
    def bits_per_value(self) -> float:
        """Of rows, whatever the files reserve."""
        return 8 * self.row_bytes / sum(stream.n_values for stream in self.streams)

    @property
    def ratio_fp16(self) -> float:
        """How many times smaller than float16 rows are; NaN without rows."""
        return _FP16_BITS / self.bits_per_value if self.stop > self.start else math.nan

    def schemes(self, kind: str) -> list[str]:
        """Return the schemes of K or V, mostly one."""
        return list(dict.fromkeys(s.scheme for s in self.streams if s.kind == kind))


def flat_sessions(text: str) -> list[Path] | None:
    """Return the folders of the sessions that a path names; None if it names no flat layers.

    Raises
    ------
    NotFound
        ``flat:`` and a folder that has none.
    InvalidArgument
        One layer's file.
    """
    check_no_layer(text)
    if text.startswith(FLAT_PREFIX):
        return folders_in(text.removeprefix(FLAT_PREFIX))
    return flat_folders(text) or None


def check_no_layer(text: str) -> None:
    """Raise `InvalidArgument` for the file of one layer."""
    path = text.removeprefix(FLAT_PREFIX)
    if path.endswith(LAYER_SUFFIX) and os.path.isfile(path):
        raise InvalidArgument(f"{text}: one layer's file; give the folder of its session")


def described(
    folders: list[Path], where: str, wanted: str | None = None
) -> tuple[list[FlatInfo], dict[str, KvError]]:
    """Return what is known about sessions, and why the others cannot be read.

    Raises
    ------
    NotFound
        None is called `wanted`.
    """
    infos: list[FlatInfo] = []
    damaged: dict[str, KvError] = {}
    for folder in folders:
        try:
            infos.append(describe(folder))
        except KvError as error:
            damaged[folder.absolute().name] = error
        except OSError as error:
            why = f"{error.filename or folder}: {error.strerror}"
            damaged[folder.absolute().name] = InvalidArgument(why)
    if wanted is not None:
        infos = [info for info in infos if info.name == wanted]
        damaged = {name: error for name, error in damaged.items() if name == wanted}
        if not infos and not damaged:
            raise NotFound(f"{where}: no session {wanted!r}")
    return sorted(infos, key=lambda info: info.name.encode()), damaged


def describe(folder: Path) -> FlatInfo:
    """Return what is known about a session; errors are those of `kvstore.flat.open`."""
    source = FlatSource(folder)
    known = None if source.sidecar is None else source.sidecar.record
    stats = [path.stat() for path in folder.iterdir() if path.is_file()]
    with flat.open(folder) as session:
        start, stop = session.start, session.stop
        streams = tuple(
            FlatStream(
                index,
                kind,
                layer.spec(kind).heads,
                layer.spec(kind).head_dim,
                layer.scheme(kind).name,
                layer.header.row_bytes(kind),
                layer.header.block_rows,
                layer.start,
                layer.stop,
                layer.capacity,
            )
            for index, layer in enumerate(session.layers)
            for kind in layer.header.kinds
        )
        limits = [layer.header.max_rows for layer in session.layers]
        is_same = source.is_about(session)
        return FlatInfo(
            name=source.name,
            folder=folder,
            model=session.model,
            start=start,
            stop=stop,
            store_k=session.layers[0].k_state,
            capacity=min(layer.capacity for layer in session.layers),
            max_rows=min((n for n in limits if n is not None), default=None),
            row_bytes=sum(layer.bytes_per_row for layer in session.layers),
            file_bytes=sum(stat.st_size for stat in stats),
            disk_bytes=sum(stat.st_blocks * _SECTOR for stat in stats),
            has_token_ids=is_same and known is not None and known.has_ids,
            error=source.error() if is_same else ErrorStats.unknown(),
            metadata={} if known is None else dict(known.metadata),
            streams=streams,
        )


def problems_beside(folder: Path, *, sound: bool) -> list[KvError]:
    """Return what is wrong with what a migration left beside layers.

    That they and their rows fit is looked at where the layers are `sound`.
    """
    try:
        source = FlatSource(folder)
    except KvError as error:
        return [error]
    return list(source.problems()) if sound else []
