"""A session as flat layers: one for each layer of a model, with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.plan import available_cpus, check_threads
from kvcodecs.spec import Kind, KState
from kvcodecs.tensor import as_array

from ..identity import Model
from .asking import check_whole
from .coding import Tensor
from .header import MAX_POSITION
from .layer import FlatLayer


class FlatSession:
    """K and V of one token sequence in flat layers; made by `create`, `open` or `anonymous`.

    A session has the tokens that all of its layers have. A commit makes the layers durable one
    after the other: first what was appended to each, then what was dropped. After a crash in the
    middle the session has the tokens of before, or all of the new ones, and the next writer takes
    back, or drops, what some layers have more. Commits are counted, so that an older copy of one
    layer's file is found, and no layer gives up more than the last commit for it.

    Attributes
    ----------
    where
        Its folder, as it was given.
    model
        What it is of.
    layers
        All of them, in order; also for `FlatLayer.append`, layer by layer. What is committed in one
        of them alone belongs to the session only after the next commit of all.
    """

    def __init__(self, where: str, model: Model, layers: Sequence[FlatLayer]) -> None:
        self.where, self.model = where, model
        self.layers = tuple(layers)

    @property
    def start(self) -> int:
        """Position of the first token that no layer has dropped."""
        starts = [layer.start for layer in self.layers]
        # A crash in the first commit of all leaves layers that never had any.
        return max(starts) if all(layer.stop for layer in self.layers) else 0

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

    def seen(self, layer: int) -> tuple[int, int]:
        """Return what `attend` sees of a layer: its first position, and one past the last.

        Where the session is open for appending, all that the layer has now, also what others do not
        have yet: a model gives K and V layer by layer. Otherwise what all layers have committed.
        """
        one = self.layer(layer)
        return (one.start, one.stop) if one.is_appendable else (self.start, self.stop)

    def append(
        self,
        k: npt.ArrayLike | Sequence[npt.ArrayLike],
        v: npt.ArrayLike | Sequence[npt.ArrayLike | None] | None = None,
        *,
        k_state: KState | None = None,
        start: int | None = None,
    ) -> None:
        """Append tokens to all layers; `commit` makes them durable.

        A model that gives K and V layer by layer appends to each, ``session.layer(i).append``;
        then all of them have to get the same tokens before this can go on.

        Where they need the room of dropped tokens in a ring, all that was appended and dropped
        before is committed first.

        Parameters
        ----------
        k, v : (layers, heads, n, head_dim), or a list of (heads, n, head_dim) per layer
            None where a layer has no V.
        k_state
            Whether `k` was taken before RoPE (``"pre"``) or after it (``"post"``); None: as the
            files keep it (`store_k`), so that nothing is rotated.
        start
            Guards against appending twice: the position of the first new token.

        Raises
        ------
        InvalidArgument, Full
            As `FlatLayer.append`, or some layers have more tokens than others; nothing is appended.
        """
        n_layers = len(self.layers)
        ks = self._of_layers("k", k)
        vs = self._of_layers("v", [None] * n_layers if v is None else v)
        n_tokens = {x.shape[1] for x in (*ks, *vs) if x is not None and x.ndim == 3}
        if len(n_tokens) > 1:
            raise InvalidArgument(f"{self.where}: layers with {sorted(n_tokens)} tokens")
        stop = self.stop
        if any(layer.stop != stop for layer in self.layers):
            ends = [layer.stop for layer in self.layers]
            ahead, behind = max(ends), min(ends)
            raise InvalidArgument(
                f"{self.where}: layer {ends.index(ahead)} has tokens up to {ahead}, layer "
                f"{ends.index(behind)} up to {behind}; append to the layers that have fewer, "
                "`session.layer(...).append`, before all of them together"
            )
        at = stop if start is None else start
        if at != stop and stop:
            raise InvalidArgument(f"{self.where}: append at start={at}, but {stop} are there")
        n = n_tokens.pop() if n_tokens else 0
        if any(layer._must_commit(n) for layer in self.layers):
            self.commit()
        before = [layer.stop for layer in self.layers]
        try:
            for layer, k_layer, v_layer in zip(self.layers, ks, vs, strict=True):
                layer.append(k_layer, v_layer, k_state=k_state, start=at)
        except BaseException:
            for layer, stop in zip(self.layers, before, strict=True):
                layer._forget(stop)
            raise

    def commit(self) -> None:
        """Make what was appended and dropped durable, in all layers."""
        # A layer that dropped tokens which others do not have yet would leave none in common.
        if any(layer._has_appended for layer in self.layers):
            number = self._next_commit()
            for layer in self.layers:
                layer._commit_appended(number)
        for layer in self.layers:
            layer.commit()

    def take_back(self, stop: int) -> None:
        """Take the newest tokens of all layers back, so that `stop` is one past the last.

        Durable at once, after all that was appended and dropped before. 0 takes all tokens back,
        and leaves a session that never had any, unless some were dropped.

        Raises
        ------
        InvalidArgument
            There are no tokens up to `stop`; nothing is taken back.
        """
        is_whole = all(layer.start == layer.origin for layer in self.layers)
        if not (stop == 0 and is_whole):
            start = max(layer.start for layer in self.layers)
            check_whole(stop, f"{self.where}: take_back", start, self.stop)
        self.commit()
        number = self._next_commit()
        for layer in self.layers:
            layer._take_back(stop, number)

    def _next_commit(self) -> int:
        """Return the number of the next commit: of that which failed in some layers, if one did."""
        return min(layer._session_commit for layer in self.layers) + 1

    def flush(self) -> None:
        """Commit; it returns when the disk has it."""
        self.commit()

    def drop_front(self, n_tokens: int) -> None:
        """Drop the oldest tokens of all layers; see `FlatLayer.drop_front`."""
        n_tokens = check_whole(n_tokens, f"{self.where}: drop_front", 0, MAX_POSITION)
        start = self.start
        for layer in self.layers:
            layer.drop_front(start - layer.start + n_tokens)

    def read(
        self,
        layer: int,
        kind: Kind,
        start: int | None = None,
        stop: int | None = None,
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        n_threads: int | None = None,
    ) -> Tensor:
        """Return tokens ``[start, stop)`` of one stream, checked.

        `k_state` is that of `FlatLayer.read_rows`; see `Session.read` for the others.
        """
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
            raise InvalidArgument(f"{self.where} layer {layer}: has no V")
        return result

    def read_all(
        self,
        start: int | None = None,
        stop: int | None = None,
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        n_threads: int | None = None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return K and V of every layer, ``(heads, n, head_dim)`` each."""
        lo, hi = self._range(start, stop)
        n = check_threads(n_threads) or available_cpus()
        of_layer = max(1, n // len(self.layers))

        def read(layer: FlatLayer) -> tuple[Tensor | None, Tensor | None]:
            wanted = dtype or self.model.dtype or "float32"
            return layer.read_rows(lo, hi, k_state=k_state, dtype=wanted, n_threads=of_layer)

        with ThreadPoolExecutor(min(n, len(self.layers))) as pool:
            pairs = list(pool.map(read, self.layers))
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
        return f"<FlatSession {self.where!r}, {len(self.layers)} layers>"

    def _of_layers(self, kind: Kind, x: Any) -> list[Any]:
        """Return what is given for each layer as arrays."""
        try:
            given = list(x)
        except TypeError:
            raise InvalidArgument(
                f"{self.where}: {kind} {type(x).__name__}: expected an array for each layer"
            ) from None
        if len(given) != len(self.layers):
            raise InvalidArgument(
                f"{self.where}: {kind} has {len(given)} layers, the model {len(self.layers)}"
            )
        return [
            None if each is None else as_array(each, f"{self.where} layer {index} {kind}")
            for index, each in enumerate(given)
        ]

    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        first, end = self.start, self.stop
        lo, hi = -MAX_POSITION, MAX_POSITION
        start = first if start is None else check_whole(start, f"{self.where}: start", lo, hi)
        stop = end if stop is None else check_whole(stop, f"{self.where}: stop", lo, hi)
        if stop > end:
            raise InvalidArgument(f"{self.where}: tokens [{start}, {stop}): there are {end}")
        return start, stop
