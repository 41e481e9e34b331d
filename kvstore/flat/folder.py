"""Folders of flat layers: made whole, and opened."""

from __future__ import annotations

import builtins
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from kvcodecs.errors import Corrupt, InvalidArgument, NotFound, Unsupported
from kvcodecs.frame import seal_record
from kvcodecs.spec import KState

from ..files import read_file, sync_folder
from ..identity import Model, check_model
from ..metadata import canonical_json
from ..mismatch import check_identity
from ..place import FLAT_PREFIX, FLAT_SIGN, flat_folders
from ..records import load_json, located, read_count
from .agreement import check_common, check_copies, make_even
from .asking import Schemes, check_path, make_header
from .file import partial_name
from .header import Header
from .layer import FlatLayer
from .session import FlatSession
from .system_errors import translate

SESSION_MAGIC: Final = b"KVFS"
SESSION_FILE: Final = FLAT_SIGN
FORMAT: Final = 1
_MOST_BYTES: Final = 64 << 20


def create(
    path: str | os.PathLike[str],
    model: Model,
    *,
    scheme: Schemes = "q8_0",
    store_k: KState = "pre",
    capacity: int = 1024,
    max_rows: int | None = None,
    sparse: bool = False,
    pread: bool = False,
) -> FlatSession:
    """Create a folder of flat layers, one for each layer of `model`; it appears when it is whole.

    Parameters
    ----------
    scheme, store_k, capacity, max_rows, sparse, pread
        As for `FlatLayer.create`.

    Raises
    ------
    InvalidArgument
        Something of that name is there, nothing may be created, or rows of a layer that are not
        whole blocks.
    NotFound
        No such folder.
    Full
        No room on the disk.
    """
    check_model(model)
    target = plain_path(path)
    taken = f"{target}: exists already; give another name, or remove it"
    if os.path.lexists(target):
        raise InvalidArgument(taken)
    if not target.parent.is_dir():
        raise NotFound(f"{target.parent}: no such directory")
    number = secrets.randbits(62) | 1
    headers = _headers(model, scheme, store_k, capacity, max_rows, number)
    made = partial = target.parent / partial_name(target.name)
    layers: list[FlatLayer] = []
    try:
        partial.mkdir()
        for index, header in enumerate(headers):
            name = layer_file(index)
            layer = FlatLayer._from_header(
                os.fspath(partial / name),
                header,
                sparse=sparse,
                pread=pread,
                where=os.fspath(target / name),
            )
            layers.append(layer)
        data = {"format": FORMAT, "session": number, "model": model.to_json()}
        with builtins.open(partial / SESSION_FILE, "xb") as file:
            file.write(seal_record(SESSION_MAGIC, canonical_json(data)))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(os.fspath(partial))
        try:
            os.rename(partial, target)
        except OSError as error:
            raise (InvalidArgument(taken) if os.path.lexists(target) else error) from error
        made = target
        sync_folder(os.fspath(target.parent))
    except BaseException as error:
        for layer in layers:
            layer.close()
        # By name: listing a folder takes a descriptor, and there may be none.
        for name in (*map(layer_file, range(len(layers))), SESSION_FILE):
            with suppress(OSError):
                os.unlink(made / name)
        with suppress(OSError):
            made.rmdir()
        if isinstance(error, OSError):
            raise translate(error, os.fspath(target), "create") from error
        raise
    return FlatSession(os.fspath(target), model, layers)


def open(
    path: str | os.PathLike[str],
    mode: Literal["r", "a"] = "r",
    *,
    expect: Model | None = None,
    pread: bool = False,
    sparse: bool = False,
) -> FlatSession:
    """Open a folder of flat layers to read, or to append.

    Parameters
    ----------
    path
        Of one session; ``flat:`` before it, as the command line has it, changes nothing.
        `sessions` finds those in a folder.

    Raises
    ------
    NotFound, Truncated, Corrupt, Unsupported
        There is none, a file is missing or was cut or damaged, or is of a newer release.
    IdentityMismatch
        Another model than `expect`.
    Locked
        ``mode="a"``, and somebody else appends.
    """
    folder = plain_path(path)
    model, number = read_session(folder)
    if expect is not None:
        check_identity(model, expect, os.fspath(folder))
    layers: list[FlatLayer] = []
    try:
        for index in range(model.n_layers):
            where = os.fspath(folder / layer_file(index))
            try:
                layer = FlatLayer.open(where, mode, pread=pread, sparse=sparse)
            except NotFound:
                raise Corrupt(f"{where}: missing; restore a copy of the folder") from None
            layers.append(layer)
            layer._check_belongs(number, index, model)
        session = FlatSession(os.fspath(folder), model, layers)
        check_copies(session.where, dict(enumerate(layers)))
        check_common(session)
        if mode == "a":
            make_even(session)
    except BaseException:
        for layer in layers:
            layer.close()
        raise
    return session


def sessions(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of flat layers that are directly in a folder, by name.

    The folder itself if it is one of flat layers; none in one of an archive.

    Raises
    ------
    NotFound, InvalidArgument
        No such folder, or it cannot be listed.
    """
    folder = plain_path(path)
    try:
        os.listdir(folder)
    except OSError as error:
        raise translate(error, os.fspath(folder), "read") from error
    return flat_folders(folder)


def anonymous(
    model: Model,
    *,
    scheme: Schemes = "q8_0",
    store_k: KState = "pre",
    capacity: int = 1024,
    max_rows: int | None = None,
) -> FlatSession:
    """Return flat layers in memory that the kernel may swap, gone when they are closed."""
    check_model(model)
    headers = _headers(model, scheme, store_k, capacity, max_rows, 0)
    layers = [FlatLayer._from_header(None, h, sparse=True, pread=False) for h in headers]
    return FlatSession("anonymous session", model, layers)


def layer_file(layer: int) -> str:
    """Return what the file of a layer is called."""
    return f"layer-{layer:05}.kvf"


def _headers(
    model: Model,
    scheme: Schemes,
    store_k: KState,
    capacity: int,
    max_rows: int | None,
    session: int,
) -> list[Header]:
    return [
        make_header(
            model.stream(index, "k"),
            model.stream(index, "v") if model.has_stream(index, "v") else None,
            scheme, store_k, capacity, max_rows, session, index,
        )
        for index in range(model.n_layers)
    ]  # fmt: skip


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Return a path without the ``flat:`` that the command line has before it."""
    return Path(check_path(check_path(path).removeprefix(FLAT_PREFIX)))


def read_session(folder: Path) -> tuple[Model, int]:
    """Return the model of a session and its number; `NotFound`, `Corrupt` or `Unsupported`."""
    where = os.fspath(folder / SESSION_FILE)
    try:
        data = read_file(where, _MOST_BYTES)
    except NotFound:
        found = flat_folders(folder)
        if found == [folder]:
            raise Corrupt(f"{where}: missing; restore a copy of the folder") from None
        inside = [repr(os.fspath(path)) for path in found]
        several = f"{', '.join(inside[:3])}, ... ({len(inside)})" if inside[3:] else None
        raise NotFound(
            f"{folder}: a folder of sessions: open {several or ' or '.join(inside)}"
            if inside
            else f"{folder}: no session of flat layers there"
        ) from None
    fields: Mapping[str, Any] = load_json(SESSION_MAGIC, data, where)
    version = fields.get("format")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: format {version!r}")
    if version > FORMAT:
        raise Unsupported(f"{where}: format {version}, this release reads up to {FORMAT}; upgrade")
    try:
        with located(where):
            return Model.from_json(fields["model"]), read_count(fields["session"])
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{where}: {error!r}") from error
