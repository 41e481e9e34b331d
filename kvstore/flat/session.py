"""A session as flat layers: a folder with one file for each layer, and what they belong to."""

from __future__ import annotations

import builtins
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound, Unsupported
from kvcodecs.frame import seal_record
from kvcodecs.spec import Kind, KState

from ..files import sync_folder
from ..identity import Model, check_model
from ..metadata import canonical_json
from ..mismatch import check_identity
from ..place import FLAT_SIGN
from ..records import load_json, read_count
from .asking import Schemes, make_header
from .coding import Tensor
from .layer import FlatLayer

SESSION_MAGIC: Final = b"KVFS"
SESSION_FILE: Final = FLAT_SIGN
FORMAT: Final = 1


class FlatSession:
    """K and V of one token sequence in flat layers; made by `create`, `open` or `anonymous`.

    A commit makes the layers durable one after the other, and a session has the rows that all of
    its layers have: after a crash in the middle it opens at the commit before, and what some layers
    have more is taken back by the next writer.
    """

    def __init__(self, where: str, model: Model, layers: Sequence[FlatLayer]) -> None:
        self._where, self.model = where, model
        self.layers = tuple(layers)

    @property
    def start(self) -> int:
        """Position of the first token that no layer has dropped."""
        return max(layer.start for layer in self.layers)

    @property
    def stop(self) -> int:
        """One past the position of the last token; here also of what is not committed yet."""
        return max(self.start, min(layer.stop for layer in self.layers))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows there are, of all layers."""
        return len(self) * sum(layer.bytes_per_row for layer in self.layers)

    def layer(self, layer: int) -> FlatLayer:
        """Return one layer."""
        self.model.stream(layer, "k")
        return self.layers[layer]

    def append(
        self,
        k: npt.ArrayLike | Sequence[npt.ArrayLike],
        v: npt.ArrayLike | Sequence[npt.ArrayLike | None] | None = None,
        *,
        k_state: KState = "pre",
        start: int | None = None,
    ) -> None:
        """Append tokens to all layers; `commit` makes them durable.

        Parameters
        ----------
        k, v : (layers, heads, n, head_dim), or a list of (heads, n, head_dim) per layer
            None where a layer has no V.
        k_state
            Whether `k` was taken before or after RoPE.
        start
            Guards against appending twice: the position of the first new token.

        Raises
        ------
        InvalidArgument, Full
            As `FlatLayer.append`; nothing is appended.
        """
        n_layers = len(self.layers)
        ks: Any = k
        vs: Any = [None] * n_layers if v is None else v
        for kind, items in (("k", ks), ("v", vs)):
            if len(items) != n_layers:
                raise InvalidArgument(
                    f"{self._where}: {kind} has {len(items)} layers, the model {n_layers}"
                )
        n_tokens = {np.shape(x)[1] for x in (*ks, *vs) if np.ndim(x) == 3}
        if len(n_tokens) > 1:
            raise InvalidArgument(f"{self._where}: layers with {sorted(n_tokens)} tokens")
        before = [layer.stop for layer in self.layers]
        try:
            for layer, k_layer, v_layer in zip(self.layers, ks, vs, strict=True):
                layer.append(k_layer, v_layer, k_state=k_state, start=start)
        except BaseException:
            for layer, stop in zip(self.layers, before, strict=True):
                layer.forget(stop)
            raise

    def commit(self) -> None:
        """Make what was appended and dropped durable, in all layers."""
        for layer in self.layers:
            layer.commit()

    def flush(self) -> None:
        """Commit; it returns when the disk has it."""
        self.commit()

    def drop_front(self, n_tokens: int) -> None:
        """Drop the oldest tokens of all layers; see `FlatLayer.drop_front`."""
        start = self.start
        for layer in self.layers:
            layer.drop_front(start - layer.start + n_tokens)

    def read(
        self,
        layer: int,
        kind: Kind,
        start: int | None = None,
        stop: int | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        n_threads: int | None = None,
    ) -> Tensor:
        """Return tokens ``[start, stop)`` of one stream, checked; see `Session.read`."""
        self.model.stream(layer, kind)
        start, stop = self._range(start, stop)
        found = self.layers[layer].read_rows(
            start,
            stop,
            kinds=(kind,),
            k_state=k_state,
            dtype=dtype or self.model.dtype or "float32",
            n_threads=n_threads,
        )
        result = found[0] if kind == "k" else found[1]
        if result is None:
            raise InvalidArgument(f"{self._where} layer {layer}: has no V")
        return result

    def read_all(
        self,
        start: int | None = None,
        stop: int | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return K and V of every layer, ``(heads, n, head_dim)`` each."""
        start, stop = self._range(start, stop)
        pairs = [
            layer.read_rows(
                start, stop, k_state=k_state, dtype=dtype or self.model.dtype or "float32"
            )
            for layer in self.layers
        ]
        return [k for k, _ in pairs if k is not None], [v for _, v in pairs]

    def verify(self) -> int:
        """Check everything against its checksum; return the number of blocks."""
        return sum(layer.verify() for layer in self.layers)

    def close(self) -> None:
        """Close; what is not committed is lost."""
        for layer in self.layers:
            layer.close()

    def __enter__(self) -> FlatSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FlatSession {self._where!r}, {len(self.layers)} layers>"

    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        first, end = self.start, self.stop
        start = first if start is None else start
        stop = end if stop is None else stop
        if stop > end:
            raise InvalidArgument(f"{self._where}: tokens [{start}, {stop}): there are {end}")
        return start, stop


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
        Something of that name is there, or rows of a layer that are not whole blocks.
    Full
        No room on the disk.
    """
    check_model(model)
    target = Path(path)
    if os.path.lexists(target):
        raise InvalidArgument(f"{target}: exists already; give another name, or remove it")
    if not target.parent.is_dir():
        raise NotFound(f"{target.parent}: no such directory")
    number = secrets.randbits(62) | 1
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    layers: list[FlatLayer] = []
    partial.mkdir()
    try:
        for index in range(model.n_layers):
            header = make_header(
                model.stream(index, "k"),
                model.stream(index, "v") if model.has_stream(index, "v") else None,
                scheme, store_k, capacity, max_rows, number, index,
            )  # fmt: skip
            layer = FlatLayer.from_header(
                os.fspath(partial / layer_file(index)), header, sparse=sparse, pread=pread
            )
            layers.append(layer)
        data = {"format": FORMAT, "session": number, "model": model.to_json()}
        with builtins.open(partial / SESSION_FILE, "xb") as file:
            file.write(seal_record(SESSION_MAGIC, canonical_json(data)))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(os.fspath(partial))
        os.rename(partial, target)
        sync_folder(os.fspath(target.parent))
    except BaseException:
        for layer in layers:
            layer.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for index, layer in enumerate(layers):
        layer.renamed(os.fspath(target / layer_file(index)))
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

    Raises
    ------
    NotFound, Truncated, Corrupt, Unsupported
        There is none, a file is missing or was cut or damaged, or is of a newer release.
    IdentityMismatch
        Another model than `expect`.
    Locked
        ``mode="a"``, and somebody else appends.
    """
    folder = Path(path)
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
            layer.check_belongs(number, index, model)
        session = FlatSession(os.fspath(folder), model, layers)
        if mode == "a":
            stop = session.stop
            for layer in layers:
                # A crash in a commit leaves layers with more.
                layer.drop_front(max(0, session.start - layer.start))
                layer.take_back(stop)
                layer.commit()
    except BaseException:
        for layer in layers:
            layer.close()
        raise
    return session


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
    headers = [
        make_header(
            model.stream(index, "k"),
            model.stream(index, "v") if model.has_stream(index, "v") else None,
            scheme, store_k, capacity, max_rows, 0, index,
        )
        for index in range(model.n_layers)
    ]  # fmt: skip
    layers = [FlatLayer.from_header(None, h, sparse=True, pread=False) for h in headers]
    return FlatSession("anonymous session", model, layers)


def layer_file(layer: int) -> str:
    """Return what the file of a layer is called."""
    return f"layer-{layer:05}.kvf"


def read_session(folder: Path) -> tuple[Model, int]:
    """Return the model of a session and its number; `NotFound`, `Corrupt` or `Unsupported`."""
    where = os.fspath(folder / SESSION_FILE)
    try:
        data = (folder / SESSION_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{folder}: no session of flat layers there") from None
    fields: Mapping[str, Any] = load_json(SESSION_MAGIC, data, where)
    version = fields.get("format")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: format {version!r}")
    if version > FORMAT:
        raise Unsupported(f"{where}: format {version}, this release reads up to {FORMAT}; upgrade")
    try:
        return Model.from_json(fields["model"]), read_count(fields["session"])
    except (KeyError, ValueError) as error:
        raise Corrupt(f"{where}: {error!r}") from error
