"""Attention over stored K and V, without ever holding more of them than a window in float."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.attention import Rows
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.ggml.arrays import dequantise
from kvcodecs.ggml.schemes import Scheme
from kvcodecs.plan import available_cpus, check_threads
from kvcodecs.rope import check_k_state
from kvcodecs.spec import F32, KINDS, Kind, KState, StreamSpec

from .attention_query import Asked, check_query
from .attention_walk import Walk
from .pieces import pieces
from .session import Session
from .token_range import check_range, check_token

#: How often an attention begins again when rows are dropped under it.
_TRIES: Final = 16


class RowLayer(Protocol):
    """One layer of block-quantised rows: what `attend` needs of a `FlatLayer`.

    Attributes
    ----------
    where
        What messages call it.
    start, stop
        The first position and one past the last.
    k_state
        Whether K is stored before RoPE, in coded channel order, or after it.
    """

    @property
    def where(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def k_state(self) -> KState: ...
    def spec(self, kind: Kind) -> StreamSpec: ...
    def scheme(self, kind: Kind) -> Scheme: ...
    def pieces(
        self, start: int, stop: int, n_threads: int = 1
    ) -> Iterable[tuple[int, int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield ``(start, stop, k_rows, v_rows)`` in order; rows are C-contiguous uint8.

        Going on raises unless the rows that were yielded last are still what they were.
        """


class RowSession(Protocol):
    """A session whose layers are `RowLayer` objects.

    Attributes
    ----------
    where
        What messages call it.
    """

    @property
    def where(self) -> str: ...
    def seen(self, layer: int) -> tuple[int, int]:
        """Return the first position to attend to in a layer, and one past the last."""

    def layer(self, layer: int) -> RowLayer: ...


Source: TypeAlias = Session | RowSession | RowLayer


def attend(
    q: npt.ArrayLike,
    source: Source,
    layer: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    first_query: int | None = None,
    start: int | None = None,
    stop: int | None = None,
    k_state: KState = "post",
    n_threads: int | None = None,
) -> F32:
    """Return the attention of queries over the stored K and V of one layer.

    Parameters
    ----------
    q : (n_heads, head_dim) or (n_heads, n_queries, head_dim) float16, bfloat16 or float32
        `n_heads` is a multiple of the KV heads; query head ``h`` uses KV head
        ``h // (n_heads // kv_heads)``. As the model takes them to its scores: after RoPE.
    source
        A session of an archive: what is committed is seen, as `Session.read` sees it. A flat
        session open for appending: the layer as it is now, also what is not committed and what
        other layers do not have yet. A flat session open for reading: what all layers have
        committed. A flat layer: as it is now, or as it is committed.
    layer
        Which layer of a session.
    scale
        Of the scores; None means ``1 / sqrt(head_dim)``.
    causal
        Whether a query sees no position after its own.
    window
        Whether, and how many positions before its own, itself counted, a query sees at most.
    first_query
        Position of the first query, the others follow; None: so that the last query is at the last
        stored position (before `stop`). It matters where `causal` or `window` is given.
    start, stop
        Positions to attend to; None: from the first that is stored, to the last.
    k_state
        ``"post"``: attention as models compute it, of queries after RoPE and K rotated for its
        stored position, however it is stored. ``"pre"``: scores of `q` and K as it was before
        RoPE, for research: no model's attention, and not a matter of how K is stored. Flat layers
        that keep K after RoPE refuse it. Layers without RoPE are the same either way.
    n_threads
        None: one per CPU this process may use. Changes the result by rounding alone.

    Returns
    -------
    out : (n_heads, head_dim_v) or (n_heads, n_queries, head_dim_v) float32
        Within 1e-5 of the largest V, about, of attention in float64 over the values that `read`
        returns as float32. Zeros for queries that see nothing, and for an empty session.

    Raises
    ------
    InvalidArgument
        Shapes that do not fit, queries or a scale that are not finite, no such layer or range, a
        layer without V, scores beyond float32, or K before RoPE where it is stored after it.
    Truncated, Corrupt, Unsupported
        Stored bytes are not what was written; names the block. Nothing is returned.
    NotFound
        The session has been deleted; or positions from `start` on have been dropped from a flat
        layer, before or meanwhile. Without `start`, an attention under which rows are dropped
        begins again at the first that is left, up to 16 times; then too it is `NotFound`.

    Notes
    -----
    Every frame of a session is checked against its checksum before it is seen. Memory is that of
    `q` and the output, and of one window in float where the codec is not a `ggml` scheme.
    """
    n_threads = check_threads(n_threads)
    check_k_state(k_state, "attend")
    if not isinstance(causal, bool | np.bool_):
        raise InvalidArgument(f"attend: causal {causal!r}: expected True or False")
    asked = Asked(q, scale, causal, window, first_query, start, stop, k_state)
    if isinstance(source, Session):
        return _attend_session(asked, source, _layer_number(layer), n_threads)
    return _attend_rows(asked, source, layer, n_threads)


def _layer_number(layer: int | None) -> int:
    if layer is None:
        raise InvalidArgument("attend: which layer of the session? give `layer`")
    return layer


def _attend_rows(
    asked: Asked, source: RowSession | RowLayer, number: int | None, n_threads: int | None
) -> F32:
    for _ in range(_TRIES - 1):
        try:
            return _attend_once(asked, source, number, n_threads)
        except NotFound:
            if asked.start is not None:
                raise
            # Rows were dropped, or taken back, meanwhile: now there is another first or last one.
    return _attend_once(asked, source, number, n_threads)


def _attend_once(
    asked: Asked, source: RowSession | RowLayer, number: int | None, n_threads: int | None
) -> F32:
    layer, where, first, end = _row_layer(source, number)
    try:
        k, v = layer.spec("k"), layer.spec("v")
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error} to attend to") from error
    start, stop = _inside(asked, first, end, where)
    query = check_query(asked, k, start, stop, where)
    rope = k.rope if layer.k_state == "pre" else None
    if k.rope is not None and asked.k_state == "pre" and layer.k_state == "post":
        raise InvalidArgument(
            f"{where}: k_state='pre' asks for scores of K before RoPE, but the layer keeps K after "
            "it; leave k_state out for attention as models compute it"
        )
    attention = query.begin(v.head_dim, None if rope is None else rope.channel_order(k.head_dim))
    turn = rope if asked.k_state == "post" else None
    k_scheme, v_scheme = layer.scheme("k"), layer.scheme("v")
    if query.start < query.stop:
        threads = n_threads or available_cpus()
        for at, _, k_rows, v_rows in layer.pieces(query.start, query.stop, threads):
            attention.add(
                Rows(k_rows.reshape(-1), k_scheme),
                Rows(v_rows.reshape(-1), v_scheme),
                at,
                rope=turn,
                n_threads=threads,
            )
    try:
        return query.finish(attention, where)
    except InvalidArgument:
        for at, end, *both in layer.pieces(query.start, query.stop):
            for kind, rows in zip(KINDS, both, strict=True):
                if not np.isfinite(dequantise(rows, layer.scheme(kind))).all():
                    raise Corrupt(
                        f"{where}: {kind} rows [{at}, {end}): a value is no number"
                    ) from None
        raise


def _row_layer(source: object, number: int | None) -> tuple[RowLayer, str, int, int]:
    """Return a layer, what messages call it, its first position and one past the last."""
    if hasattr(source, "pieces") and hasattr(source, "scheme"):
        if number is not None:
            raise InvalidArgument(f"attend: layer {number!r} of a layer; leave it out")
        layer: RowLayer = source  # type: ignore[assignment]
        return layer, f"attend: {layer.where}", layer.start, layer.stop
    if hasattr(source, "seen"):
        session: RowSession = source  # type: ignore[assignment]
        number = _layer_number(number)
        layer = session.layer(number)
        return layer, f"attend: {session.where} layer {number}", *session.seen(number)
    raise InvalidArgument(f"attend: source {source!r}: expected a session, or a flat layer")


def _inside(asked: Asked, first: int, end: int, where: str) -> tuple[int, int]:
    """Return the positions to attend to of ``[first, end)``."""
    stop = end if asked.stop is None else check_token(asked.stop, f"{where}: stop")
    start = min(first, stop) if asked.start is None else check_token(asked.start, f"{where}: start")
    what = f"{where}: positions [{start}, {stop})"
    if not 0 <= start <= stop:
        raise InvalidArgument(f"{what} are not a range; the layer has [{first}, {end})")
    if stop > end:
        raise InvalidArgument(f"{what}: the layer has [{first}, {end})")
    if start < min(first, stop) or stop < first:
        raise NotFound(f"{what}: dropped; the layer has [{first}, {end})")
    return start, stop


def _attend_session(asked: Asked, session: Session, layer: int, n_threads: int | None) -> F32:
    model, reader = session.model, session._reader
    where = f"{session._where} layer {layer}"
    k = model.stream(layer, "k")
    if not model.has_stream(layer, "v"):
        raise InvalidArgument(f"{where}: has no V to attend to")
    v = model.stream(layer, "v")
    rope = k.rope if asked.k_state == "post" else None
    with session._archive._read() as snapshot:
        record = session._record(snapshot)
        ranges = [
            check_range(
                record, layer, kind, asked.start, asked.stop, session._where, session._n_appended()
            )
            for kind in KINDS
        ]
        start = max(lo for lo, _ in ranges)
        query = check_query(asked, k, start, ranges[0][1], where)
        order = None if k.rope is None else k.rope.channel_order(k.head_dim)
        attention = query.begin(v.head_dim, order)
        if query.start < query.stop:
            walk = Walk(reader, snapshot, record, layer, rope, n_threads or available_cpus())
            walk.run(attention, query.start, query.stop)
        try:
            out = query.finish(attention, where)
        except InvalidArgument:
            # Rows go to the kernel unseen: those that are no numbers are named here.
            for kind in KINDS:
                for piece in pieces(record, layer, kind, query.start, query.stop):
                    reader.decode(snapshot, piece, layer, kind)
            raise
    session._archive._room.note_use(session._id)
    return out
