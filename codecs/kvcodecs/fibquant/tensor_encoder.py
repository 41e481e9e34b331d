"""Coding of K and V tensors: statistics, vectors, quality budget, pages, receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..digests import tensor_digest
from ..errors import InvalidArgument
from ..frame import ErrorStats
from ..plan import available_cpus, check_threads
from ..receipts import Receipt, known_error
from ..spec import F32
from ..tensor import as_array
from .book import Book, book_for
from .channels import channel_statistics
from .coded_vectors import Tally, decoded_rows
from .config import FibQuant
from .documents import check_type
from .kvprofile import KvProfile
from .layout import CacheLayout
from .pages import Page
from .payload import BUDGET, CODED, PROTECTED, RAW_AXIS, REASONS, U8, U16, Vectors, build_payload
from .quality import QualityReport, key_quality, own_probes, value_quality
from .shape import TensorShape
from .tensor import WHERE, EncodedTensor, channel_bytes, channel_sizes, tensor_id


def encode_tensor(
    values: npt.NDArray[np.float32],
    shape: TensorShape,
    profile: KvProfile,
    book: Book | None = None,
    *,
    layout: CacheLayout | None = None,
    queries: npt.ArrayLike | None = None,
    n_threads: int | None = None,
    now: Callable[[], float] = time.time,
) -> EncodedTensor:
    """Code a tensor.

    Parameters
    ----------
    values : (batch, layers, kv_heads, tokens, head_dim) float32
        Finite, in C order.
    shape, profile
        What the tensor is and how it is coded.
    book
        The profile's. None: `book_for` finds or builds it.
    layout
        Checked; None: the canonical one.
    queries : (batch, layers, query_heads, n_queries, head_dim), optional
        Of keys: what the quality budget is measured with, in the keys' state of RoPE. None: up to
        256 of each head's own keys.
    n_threads
        None: one per CPU. The result does not depend on it.
    now
        Returns the time that the receipt records, in seconds since 1970.

    Returns
    -------
    EncodedTensor
        Vectors that are kept raw decode exactly; there is no bound for the others.

    Raises
    ------
    InvalidArgument
        Values that are not as they should be, named by their index; a profile of another shape or
        book; a vector that cannot be coded, or a head that breaks the budget, where that is to
        fail.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodecs.fibquant import KvProfile, Profile, ProtectedPolicy, TensorShape, book_for
    >>> shape = TensorShape("value", "mha", 1, 1, 2, 2, 100, 8, "f32", "not_applicable")
    >>> x = np.random.default_rng(0).standard_normal(shape.array_shape, dtype=np.float32)
    >>> book = book_for(Profile.paper_default(8, 2, 16, seed=7))
    >>> profile = KvProfile.of(shape, book, protected=ProtectedPolicy(first_tokens_raw=4))
    >>> receipt = encode_tensor(x, shape, profile, book).receipt
    >>> receipt.compressed_blocks, receipt.raw_fallback_blocks, receipt.fallback_reasons
    (192, 8, ('protected_region',))
    """
    check_type(shape, TensorShape, "KV tensor: shape")
    check_type(profile, KvProfile, "KV tensor: profile")
    layout = CacheLayout.canonical(shape) if layout is None else layout
    check_type(layout, CacheLayout, "KV tensor: layout")
    layout.validate(shape)
    profile.validate(shape)
    x = shape.check_values(values, WHERE)
    book = book_for(profile.fib_profile) if book is None else book
    profile.check_book(book)
    threads = check_threads(n_threads) or available_cpus()
    probes = _grouped(queries, shape)
    streams = x.reshape(-1, *x.shape[2:])
    channels = _channels(streams, shape, profile)
    coded, error = [], ErrorStats.none()
    for stream, rows in enumerate(streams):
        statistics = None if channels is None else channels.reshape(-1, *channels.shape[2:])[stream]
        coder = _Coder(shape, profile, book, stream, rows, statistics, threads)
        coded.append(coder.code(None if probes is None else probes[stream]))
        error = error.merge(coder.error)
    digests = tensor_digest(x), profile.digest(), shape.digest()
    tensor = tensor_id(*digests, channel_bytes(channels))
    pages, tally = [], Tally()
    for number in range(profile.page_geometry.page_count(shape)):
        first, n = profile.page_geometry.span(shape, number)
        payloads = []
        for rows, whole in zip(streams, coded, strict=True):
            part = whole.tokens(first, first + n, rows)
            tally.add(part.states)
            payloads.append(build_payload(part))
        pages.append(Page(number, first, n, tuple(payloads)))
    max_error, rms = known_error(error)
    receipt = Receipt(
        "compress",
        *digests,
        page_digests=tuple(page.digest(tensor) for page in pages),
        codec=_config(profile).to_json(),
        compressed_blocks=tally.n_coded,
        raw_fallback_blocks=tally.n_raw,
        codebook_digest=book.codebook_digest,
        rotation_digest=book.rotation_digest,
        fallback_reasons=tuple(tally.reasons),
        max_error=max_error,
        rms=rms,
        recorded_unix_seconds=int(now()),
    )
    return EncodedTensor(shape, layout, profile, book, channels, tuple(pages), receipt)


class _Coded(NamedTuple):
    """One layer: states and norms ``(heads, tokens)``, indices ``(heads, tokens, bytes)``."""

    states: U8
    norms: U16
    indices: U8

    def tokens(self, start: int, stop: int, rows: F32) -> Vectors:
        """Return the vectors of some tokens."""
        states = self.states[:, start:stop]
        is_coded = states == CODED
        return Vectors(
            states.reshape(-1),
            self.norms[:, start:stop][is_coded],
            self.indices[:, start:stop][is_coded],
            rows[:, start:stop][~is_coded],
        )


class _Coder:
    """Codes one layer of one batch, `rows` ``(heads, tokens, head_dim)``."""

    def __init__(
        self,
        shape: TensorShape,
        profile: KvProfile,
        book: Book,
        stream: int,
        rows: F32,
        statistics: F32 | None,
        n_threads: int,
    ) -> None:
        self._shape, self._profile, self._book = shape, profile, book
        self._batch, self._layer = divmod(stream, shape.layers)
        self._rows, self._statistics, self._n_threads = rows, statistics, n_threads
        self.error = ErrorStats.none()

    def code(self, probes: F32 | None) -> _Coded:
        """Code it; `probes` ``(heads, n, head_dim)`` stand for queries."""
        protected = self._profile.protected_policy.mask(self._shape, self._layer)
        default = RAW_AXIS if self._profile.axis_policy == "raw" else CODED
        keep = np.where(protected, np.uint8(PROTECTED), np.uint8(default))
        coded = self._encode(keep)
        if self._profile.fallback_policy.mode == "fail_closed":
            self._check_coded(coded.states, keep)
        if self._profile.quality_budget.is_limited:
            broken = self._broken_heads(coded, probes)
            if broken:
                keep[broken] = np.where(keep[broken] == CODED, np.uint8(BUDGET), keep[broken])
                coded = self._encode(keep)
        return coded

    def _encode(self, keep: U8) -> _Coded:
        mean = scale = None
        if self._statistics is not None:
            mean, scale = (c.reshape(-1) for c in self._statistics)
        states, norms, indices, max_error, sum_squares = _core.fib_encode(
            self._book.core, self._rows, mean, scale, keep, self._n_threads
        )
        self.error = ErrorStats(max_error, sum_squares, self._rows.size)
        return _Coded(states, norms, indices)

    def _check_coded(self, states: U8, keep: U8) -> None:
        failed = np.argwhere(states != keep)
        if len(failed):
            head, token = failed[0]
            reason = REASONS[int(states[head, token])].removeprefix("encode_fallback:")
            raise InvalidArgument(
                f"{self._place(head)}, token {token}: cannot be coded: {reason}; the fallback "
                "'keep_raw' would keep it raw"
            )

    def _broken_heads(self, coded: _Coded, probes: F32 | None) -> list[int]:
        """Return the heads that break the budget, where it lets them be raw."""
        budget, fallback = self._profile.quality_budget, self._profile.fallback_policy
        statistics, n_threads = self._statistics, self._n_threads
        decoded = decoded_rows(
            self._book, self._rows, *coded, statistics, n_threads=n_threads, where=WHERE
        )
        broken = []
        for head, (x, y) in enumerate(zip(self._rows, decoded, strict=True)):
            if coded.states[head].all():
                continue
            limits = budget.broken(self._report(x, y, None if probes is None else probes[head]))
            if not limits:
                continue
            if not (budget.fallback_on_violation and fallback.raw_fallback_available):
                raise InvalidArgument(
                    f"{self._place(head)}: breaks the quality budget: {', '.join(limits)}; use "
                    "more bits, a looser budget, or let it be kept raw"
                )
            broken.append(head)
        return broken

    def _report(self, x: F32, y: F32, probes: F32 | None) -> QualityReport:
        if self._shape.role == "value":
            return value_quality(x, y)
        return key_quality(own_probes(x) if probes is None else probes, x, y)

    def _place(self, head: int) -> str:
        return f"{WHERE}: batch {self._batch}, layer {self._layer}, head {head}"


def _channels(streams: F32, shape: TensorShape, profile: KvProfile) -> F32 | None:
    """Return the statistics of all channels, as `EncodedTensor.channels`."""
    sizes = channel_sizes(shape, profile)
    if sizes is None:
        return None
    left_out = profile.protected_policy.first_tokens_raw
    both = [_statistics(rows, left_out) for rows in streams]
    return np.array(both, np.float32).reshape(sizes)


def _statistics(rows: F32, left_out: int) -> tuple[F32, F32]:
    heads, _, head_dim = rows.shape
    return channel_statistics(heads, head_dim, lambda: [rows], left_out)


def _grouped(queries: npt.ArrayLike | None, shape: TensorShape) -> F32 | None:
    """Return queries ``(batch * layers, kv_heads, n, head_dim)``: those that a KV head serves."""
    if queries is None:
        return None
    if shape.role == "value":
        raise InvalidArgument(f"{WHERE}: queries belong to keys; this is a tensor of values")
    given = as_array(queries, "queries")
    sizes = (shape.batch, shape.layers, shape.query_heads)
    if given.ndim != 5 or given.shape[:3] != sizes or given.shape[4] != shape.head_dim:
        raise InvalidArgument(
            f"queries: shape {given.shape}, expected {sizes} x n_queries x {shape.head_dim}"
        )
    return given.reshape(shape.batch * shape.layers, shape.kv_heads, -1, shape.head_dim)


def _config(profile: KvProfile) -> FibQuant:
    """Return what codes streams as `profile` codes tensors."""
    fib, protected = profile.fib_profile, profile.protected_policy
    return FibQuant(
        fib.block_dim,
        fib.codebook_size,
        rotation=fib.rotation,
        seed=fib.rotation_seed,
        axis=profile.axis_policy,
        first_tokens=protected.first_tokens_raw,
        last_tokens=protected.last_tokens_raw,
        raw_layers=protected.raw_layers,
        raw_heads=protected.raw_heads,
        on_failure=profile.fallback_policy.mode,
        budget=profile.quality_budget if profile.quality_budget.is_limited else None,
    )
