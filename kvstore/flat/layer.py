"""One layer's K and V as block-quantised rows in a file that is mapped, or in memory."""

from __future__ import annotations

import os
from typing import Final, Literal

from kvcodecs.errors import InvalidArgument
from kvcodecs.rope import Rope
from kvcodecs.spec import KState

from .appending import AppendableLayer
from .asking import Schemes, check_path, make_header, make_specs
from .commit_record import State
from .file import LayerFile
from .header import Header
from .segments import Segments
from .state import Commits, read_header

_MODES: Final = ("r", "a")


class FlatLayer(AppendableLayer):
    """K and V of one layer: rows of a fixed size, read by position without their neighbours.

    Made by `create`, `open` or `anonymous`; a context manager. Positions are those of tokens; the
    first row has position 0 unless the first `append` says otherwise. One object appends to a file,
    any number of processes read it and see what is committed.

    A row is one token: its values are those of head 0, then of head 1 and so on, quantised together
    as one array, so that blocks of 256 values may span heads. K that is kept before RoPE
    (``k_state == "pre"``) has its channels in coded order, ``rope.channel_order(head_dim)``: the
    two of each rotated pair half a head apart. Only for a RoPE of style "interleaved", or one of
    fewer channels than a head has, does that differ from the order they were given in.

    Attributes
    ----------
    header
        What never changes: geometry, schemes, `k_state`, `block_rows`, `max_rows`.

    Examples
    --------
    Rows to values by hand; what `read_rows` does for ``k_state=None``:

    >>> import numpy as np
    >>> from kvcodecs.ggml import dequantise
    >>> from kvstore import Rope
    >>> from kvstore.flat import FlatLayer
    >>> rope = Rope.from_theta(10_000.0, 32, style="interleaved")
    >>> layer = FlatLayer.anonymous(heads=2, head_dim=32, rope=rope)
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 32), np.float32)
    >>> layer.append(x, x)
    >>> rows = layer.stored_rows("k", 0, 5)
    >>> values = dequantise(rows, layer.scheme("k")).reshape(5, 2, 32)
    >>> k = np.empty_like(values)
    >>> k[..., rope.channel_order(32)] = values
    >>> k = k.transpose(1, 0, 2)
    >>> np.array_equal(k, layer.read_rows(0, 5)[0])
    True
    """

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        heads: int,
        head_dim: int,
        head_dim_v: int | Literal["same"] | None = "same",
        scheme: Schemes = "q8_0",
        rope: Rope | None = None,
        store_k: KState = "pre",
        capacity: int = 1024,
        max_rows: int | None = None,
        sparse: bool = False,
        pread: bool = False,
    ) -> FlatLayer:
        """Create a file for one layer.

        Parameters
        ----------
        heads, head_dim, head_dim_v
            KV heads and channels per head; `head_dim_v` None means no V.
        scheme
            A scheme of ggml, ``"q8_0"`` for example, or ``{"k": ..., "v": ...}``.
        rope
            Of K, so that it can be given and read in either state.
        store_k
            Whether K is kept before RoPE, as everywhere else, in coded channel order; or after
            it, in the order given: then `attend` need not rotate it, and a read before RoPE turns
            it back.
        capacity
            Rows that the file has room for at once. It grows by itself, and doubles each time;
            the length that is expected gives one segment, and `raw_rows` one view.
        max_rows
            The most rows there may be. The file then never grows, and rows that were dropped make
            room for new ones, as in a ring: for a window, since without it `drop_front` gives
            room back to the disk, and the file still gets longer.
        sparse
            Do not reserve room on the disk, where the file then takes what its rows take; a full
            disk is met when rows are appended, and not when the file grows.
        pread
            Read with ``pread`` instead of a map; there are no `raw_rows` then.

        Raises
        ------
        InvalidArgument
            Something of that name is there, nothing may be created, or rows that are not whole
            blocks of the scheme.
        NotFound
            No such folder.
        Full
            No room on the disk.
        """
        specs = make_specs(heads, head_dim, head_dim_v, rope)
        header = make_header(*specs, scheme, store_k, capacity, max_rows)
        return cls._from_header(check_path(path), header, sparse=sparse, pread=pread)

    @classmethod
    def anonymous(
        cls,
        *,
        heads: int,
        head_dim: int,
        head_dim_v: int | Literal["same"] | None = "same",
        scheme: Schemes = "q8_0",
        rope: Rope | None = None,
        store_k: KState = "pre",
        capacity: int = 1024,
        max_rows: int | None = None,
    ) -> FlatLayer:
        """Return a layer in memory that the kernel may swap, gone when it is closed."""
        specs = make_specs(heads, head_dim, head_dim_v, rope)
        header = make_header(*specs, scheme, store_k, capacity, max_rows)
        return cls._from_header(None, header, sparse=True, pread=False)

    @classmethod
    def _from_header(
        cls,
        path: str | None,
        header: Header,
        *,
        sparse: bool,
        pread: bool,
        where: str | None = None,
    ) -> FlatLayer:
        """Create a layer of which everything is settled.

        Parameters
        ----------
        path
            None: in memory.
        where
            The path that it will have, where that is another one.
        """
        packed = header.pack()

        def begin(file: LayerFile) -> None:
            segments = Segments(header, file)
            file.write(0, packed)
            segments.add(sparse=sparse)
            Commits(file, packed).store(State())

        if path is None:
            file = LayerFile.anonymous(begin)
        else:
            file = LayerFile.create(path, where or path, pread=pread, begin=begin)
        layer = cls(file, header, Commits(file, packed), writable=True)
        layer._sparse = sparse
        return layer

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "r",
        *,
        pread: bool = False,
        sparse: bool = False,
    ) -> FlatLayer:
        """Open a layer's file to read it, or to append to it.

        Raises
        ------
        NotFound, Truncated, Corrupt, Unsupported
            There is none, it was cut or damaged, or is of a newer release.
        Locked
            ``mode="a"``, and somebody else has it open for appending.
        """
        if mode not in _MODES:
            raise InvalidArgument(f"mode {mode!r}: 'r' to read, 'a' to append")
        file = LayerFile.open(check_path(path), write=mode == "a", pread=pread)
        try:
            layer = cls(file, *read_header(file), writable=mode == "a")
        except BaseException:
            file.close()
            raise
        layer._sparse = sparse
        return layer
