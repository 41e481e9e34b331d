"""Tensors to stored rows and back, rotated as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.ggml import quantise
from kvcodecs.ggml.codec import CODEC, GGMLParams
from kvcodecs.plan import Plan
from kvcodecs.rope import RopeTable, check_k_state, from_coded, to_coded
from kvcodecs.spec import Kind, KState, StreamSpec, float_dtype
from kvcodecs.tensor import as_array, as_float32, check_tensor

from .file import Bytes
from .header import Header

Tensor: TypeAlias = npt.NDArray[Any]

#: Values of K that are turned back at a time.
_TURNED_VALUES: Final = 1 << 20


class RowCoder:
    """Codes the rows of one layer."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._plain = StreamSpec("k", header.k.heads, header.k.head_dim)
        self._params: dict[Kind, GGMLParams] = {}
        for kind in header.kinds:
            # K after RoPE is stored in tensor order: to the codec it has none.
            after = kind == "k" and header.k_state == "post"
            spec = self._plain if after else header.spec(kind)
            self._params[kind] = GGMLParams(spec, header.scheme(kind))

    def decode(
        self,
        kind: Kind,
        parts: Sequence[Bytes],
        positions: int | npt.NDArray[np.int64],
        k_state: KState | None,
        dtype: str | np.dtype[Any] | type,
        n_threads: int | None,
        where: str,
    ) -> Tensor:
        """Return rows as ``(heads, n, head_dim)``.

        Parameters
        ----------
        parts
            Successive rows, ``(n, row_bytes)`` each, C-contiguous.
        positions
            Of the first row, or of each.
        where
            Prefix of error messages.

        Raises
        ------
        InvalidArgument
            A value that overflows `dtype`.
        Corrupt
            Rows that are none.
        """
        k_state = self._settled(k_state, where)
        header, n = self._header, sum(len(part) for part in parts)
        spec = header.spec(kind)
        out = np.empty((spec.heads, n, spec.head_dim), float_dtype(dtype))
        turned = kind == "k" and spec.rope is not None and k_state != header.k_state
        try:
            if not turned:
                self._run(kind, parts, out, None, n_threads)
            elif header.k_state == "pre":
                self._run(kind, parts, out, self._table(positions, n), n_threads)
            else:
                self._turn_back(parts, self._table(positions, n), out, n_threads)
        except (Corrupt, InvalidArgument) as error:
            raise type(error)(f"{where} {kind}: {error}") from error
        return out

    def encode(
        self, kind: Kind, x: object, k_state: KState | None, start: int, where: str
    ) -> Bytes:
        """Return ``(heads, n, head_dim)`` as rows, from position `start` on; `InvalidArgument`."""
        spec, where = self._header.spec(kind), f"{where} {kind}"
        k_state = self._settled(k_state, where)
        if x is None:
            raise InvalidArgument(f"{where}: missing")
        tensor = as_array(x, where)
        check_tensor(tensor, spec, where)
        if spec.rope is None:  # as a layer without one in a model that has it
            k_state = self._header.k_state
        if kind == "k" and spec.rope is not None:
            if k_state != self._header.k_state:
                coded = to_coded(tensor, spec, k_state, start)
                tensor = coded if k_state == "post" else from_coded(coded, spec, "post", start)
            elif k_state == "pre" and not spec.rope.keeps_order(spec.head_dim):
                tensor = to_coded(tensor, spec)
        if tensor.dtype == np.float64:
            tensor = as_float32(tensor)
        rows = np.ascontiguousarray(tensor.transpose(1, 0, 2))
        try:
            return quantise(rows.reshape(len(rows), spec.channels), self._header.scheme(kind))
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error

    def _settled(self, k_state: KState | None, where: str) -> KState:
        """Return which K is meant; None: as it is stored."""
        return self._header.k_state if k_state is None else check_k_state(k_state, where)

    def _run(
        self,
        kind: Kind,
        parts: Sequence[Bytes],
        out: Tensor,
        table: RopeTable | None,
        n_threads: int | None,
    ) -> None:
        plan, at = Plan(), 0
        for part in parts:
            n = len(part)
            plan.add(
                CODEC,
                self._params[kind],
                part.reshape(-1).data,
                first_token=at,
                n_tokens=n,
                start=at,
                stop=at + n,
                out=out[:, at : at + n],
                rope=table,
            )
            at += n
        plan.run(n_threads)

    def _table(self, positions: int | npt.NDArray[np.int64], n: int) -> RopeTable:
        """Return cosines and sines of the positions, as those of rows 0 to n."""
        rope = self._header.k.rope
        if rope is None:
            raise InvalidArgument("the layer has no RoPE")
        if isinstance(positions, int):
            return rope.table(positions, positions + n)._replace(first_token=0)
        return rope.table_at(positions)

    def _turn_back(
        self, parts: Sequence[Bytes], table: RopeTable, out: Tensor, n_threads: int | None
    ) -> None:
        """Write K before RoPE, of rows that are after it; some at a time, to keep memory small."""
        k, at = self._header.k, 0
        step = max(1, _TURNED_VALUES // k.channels)
        for part in parts:
            for lo in range(0, len(part), step):
                some = part[lo : lo + step]
                to = out[:, at : at + len(some)]
                values = np.empty(to.shape, np.float32)
                self._run("k", [some], values, None, n_threads)
                coded = to_coded(values, k, "post", at, table)
                with np.errstate(over="ignore"):
                    to[...] = from_coded(coded, k, "pre")
                if not np.isfinite(to.astype(np.float32)).all():
                    raise InvalidArgument(f"a value overflows {out.dtype.name}; ask for float32")
                at += len(some)
