"""What quantisation does to attention, and how much of it is tolerated.

All in float64: scores are ``q.k / sqrt(head_dim)``, weights their softmax over all keys, without a
causal mask. Numbers of a report are means over its queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from ..quantiser import check_integer
from ..tensor import as_array
from .documents import Document

F64 = npt.NDArray[np.float64]

TOP_K: Final = 8
MOST_PROBES: Final = 256
_EPSILON: Final = 1e-12  # probabilities below it count as it in the Kullback-Leibler divergence
_SCORES_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class QualityReport(Document):
    """How far decoded K or V are from the original. None: not measured.

    Attributes
    ----------
    logit_mse
        Mean squared error of attention scores.
    total_variation
        Half the sum of ``|p - q|`` of attention weights, 0 to 1.
    kl_divergence
        Of the weights from their decoded ones, in nats.
    top_k_overlap
        Share of the `TOP_K` keys of the largest scores that stay among them, 0 to 1.
    value_aggregation_mse
        Mean squared error of what attention gives, or a bound of it: see `value_quality`.
    reconstruction_mse, cosine
        Of the values themselves.
    """

    schema: ClassVar[str] = "fib_quant_kv_attention_quality_v1"

    logit_mse: float | None
    total_variation: float | None
    kl_divergence: float | None
    top_k_overlap: float | None
    value_aggregation_mse: float | None
    reconstruction_mse: float
    cosine: float


@dataclass(frozen=True, slots=True)
class QualityBudget(Document):
    """Limits of a `QualityReport`. None: no such limit.

    Attributes
    ----------
    max_logit_mse, max_attention_tv, max_topk_disagreement, max_value_aggregation_mse
        The largest `logit_mse`, `total_variation`, ``1 - top_k_overlap`` and
        `value_aggregation_mse`.
    fallback_on_violation
        Whether what breaks a limit is kept raw; else coding it fails.

    Raises
    ------
    InvalidArgument
        A limit that is negative, not finite or no number.

    Examples
    --------
    >>> import numpy as np
    >>> keys = np.eye(4, 8, dtype=np.float32)
    >>> report = key_quality(keys, keys, 0.5 * keys)
    >>> QualityBudget(max_logit_mse=1e-3).broken(report)
    ('max_logit_mse',)
    """

    max_logit_mse: float | None = None
    max_attention_tv: float | None = None
    max_topk_disagreement: float | None = None
    max_value_aggregation_mse: float | None = None
    fallback_on_violation: bool = True

    def __post_init__(self) -> None:
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(
                limit, int | float | np.integer | np.floating
            ):
                raise InvalidArgument(f"quality budget: {name} {limit!r}: expected a number")
            if not 0 <= limit < math.inf:
                raise InvalidArgument(f"quality budget: {name} {limit}: must be finite and >= 0")
            object.__setattr__(self, name, float(limit))
        if not isinstance(self.fallback_on_violation, bool):
            raise InvalidArgument(
                f"quality budget: fallback_on_violation {self.fallback_on_violation!r}: "
                "expected True or False"
            )

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return any(getattr(self, name) is not None for name in _LIMITS)

    def broken(self, report: QualityReport) -> tuple[str, ...]:
        """Return the names of the limits that `report` breaks; what it lacks breaks none."""
        found = {
            "max_logit_mse": report.logit_mse,
            "max_attention_tv": report.total_variation,
            "max_topk_disagreement": _disagreement(report.top_k_overlap),
            "max_value_aggregation_mse": report.value_aggregation_mse,
        }
        return tuple(n for n in _LIMITS if _is_above(found[n], getattr(self, n)))


_LIMITS: Final = (
    "max_logit_mse",
    "max_attention_tv",
    "max_topk_disagreement",
    "max_value_aggregation_mse",
)


def key_quality(
    queries: npt.ArrayLike, keys: npt.ArrayLike, decoded: npt.ArrayLike, *, top_k: int = TOP_K
) -> QualityReport:
    """Measure what decoded keys do to attention.

    Parameters
    ----------
    queries : (n_queries, head_dim)
        At least one. Without real ones, `own_probes` of the keys.
    keys, decoded : (n_tokens, head_dim)
        Of one head, before and after coding.
    top_k
        For `top_k_overlap`; of fewer keys, all of them.

    Raises
    ------
    InvalidArgument
        Shapes that do not fit, or values that are not finite.
    """
    return attention_quality(queries, keys, decoded, top_k=top_k)


def value_quality(values: npt.ArrayLike, decoded: npt.ArrayLike) -> QualityReport:
    """Measure decoded values whose attention weights are not known.

    `value_aggregation_mse` is the largest mean squared error of a token: whatever the weights, the
    error of the weighted sum is no larger.

    Parameters
    ----------
    values, decoded : (n_tokens, head_dim)
        Of one head, before and after coding.

    Raises
    ------
    InvalidArgument
        Shapes that do not fit, or values that are not finite.
    """
    x, y = _pair(values, decoded, "values")
    bound = float(np.square(x - y).mean(axis=1).max())
    return QualityReport(None, None, None, None, bound, *_reconstruction(x, y))


def attention_quality(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    decoded_keys: npt.ArrayLike,
    values: npt.ArrayLike | None = None,
    decoded_values: npt.ArrayLike | None = None,
    *,
    top_k: int = TOP_K,
) -> QualityReport:
    """Measure attention over decoded keys, and over decoded values where both are given.

    Parameters
    ----------
    queries : (n_queries, head_dim)
    keys, decoded_keys : (n_tokens, head_dim)
    values, decoded_values : (n_tokens, head_dim of V), optional
        What the weights of each side sum up.
    top_k
        For `top_k_overlap`, at least 1.

    Returns
    -------
    QualityReport
        `reconstruction_mse` and `cosine` are of the keys.

    Raises
    ------
    InvalidArgument
        Shapes that do not fit, or values that are not finite.
    """
    k, k_decoded = _pair(keys, decoded_keys, "keys")
    q = _matrix(queries, "queries")
    if q.shape[1] != k.shape[1]:
        raise InvalidArgument(f"queries of {q.shape[1]} channels, keys of {k.shape[1]}")
    if (values is None) != (decoded_values is None):
        raise InvalidArgument("values and decoded values: give both or neither")
    v = v_decoded = None
    if values is not None and decoded_values is not None:
        v, v_decoded = _pair(values, decoded_values, "values")
        if len(v) != len(k):
            raise InvalidArgument(f"{len(v)} values, {len(k)} keys")
    check_integer(top_k, "top_k")
    if top_k < 1:
        raise InvalidArgument(f"top_k {top_k}: must be at least 1")
    sums = np.zeros(5)
    step = max(1, _SCORES_AT_ONCE // len(k))
    for at in range(0, len(q), step):
        scores, scores_decoded = (_scores(q[at : at + step], side) for side in (k, k_decoded))
        p, p_decoded = softmax(scores), softmax(scores_decoded)
        sums[0] += np.square(scores - scores_decoded).mean(axis=1).sum()
        sums[1] += total_variation(p, p_decoded).sum()
        sums[2] += kl_divergence(p, p_decoded).sum()
        sums[3] += top_k_overlap(scores, scores_decoded, top_k).sum()
        if v is not None and v_decoded is not None:
            sums[4] += np.square(p @ v - p_decoded @ v_decoded).mean(axis=1).sum()
    logit, variation, divergence, overlap, aggregation = (float(s) / len(q) for s in sums)
    return QualityReport(
        logit,
        variation,
        divergence,
        overlap,
        None if v is None else aggregation,
        *_reconstruction(k, k_decoded),
    )


def own_probes(keys: npt.NDArray[np.float32], most: int = MOST_PROBES) -> npt.NDArray[np.float32]:
    """Return keys that stand in for queries: all of them, or `most` evenly spaced ones."""
    n = len(keys)
    return keys if n <= most else keys[np.arange(most) * n // most]


def softmax(scores: F64) -> F64:
    """Return the weights of scores along the last axis."""
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p


def total_variation(p: F64, q: F64) -> F64:
    """Return half the sum of ``|p - q|`` along the last axis."""
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


def kl_divergence(p: F64, q: F64) -> F64:
    """Return the Kullback-Leibler divergence of `q` from `p`, along the last axis, in nats."""
    log_ratio = np.log(np.maximum(p, _EPSILON)) - np.log(np.maximum(q, _EPSILON))
    return np.asarray(np.maximum((p * log_ratio).sum(axis=-1), 0.0))


def top_k_overlap(a: F64, b: F64, k: int) -> F64:
    """Return which share of the `k` largest of `a` are among those of `b`, along the last axis.

    Of equal scores those of lower index come first.
    """
    k = min(k, a.shape[-1])
    chosen = [np.zeros(a.shape, bool), np.zeros(a.shape, bool)]
    for scores, mask in zip((a, b), chosen, strict=True):
        first = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
        np.put_along_axis(mask, first, True, axis=-1)
    return np.asarray((chosen[0] & chosen[1]).sum(axis=-1) / k)


def cosine(x: F64, y: F64) -> float:
    """Return the cosine of two arrays as vectors; 1.0 if both are zero, 0.0 if one is."""
    norms = math.sqrt(float(np.vdot(x, x))) * math.sqrt(float(np.vdot(y, y)))
    if norms == 0:
        return float(not (x.any() or y.any()))
    return float(np.vdot(x, y)) / norms


def _scores(queries: F64, keys: F64) -> F64:
    return np.asarray(queries @ keys.T / math.sqrt(keys.shape[1]))


def _reconstruction(x: F64, y: F64) -> tuple[float, float]:
    return float(np.square(x - y).mean()), cosine(x, y)


def _pair(x: npt.ArrayLike, y: npt.ArrayLike, name: str) -> tuple[F64, F64]:
    a, b = _matrix(x, name), _matrix(y, f"decoded {name}")
    if a.shape != b.shape:
        raise InvalidArgument(f"{name} are {a.shape}, decoded ones {b.shape}")
    return a, b


def _matrix(x: npt.ArrayLike, name: str) -> F64:
    given = as_array(x, name)
    if given.ndim != 2 or not given.size:
        raise InvalidArgument(f"{name} are {given.shape}, expected (n, head_dim), none of them 0")
    try:
        matrix = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} are {given.dtype}, expected numbers") from error
    if not np.isfinite(matrix).all():
        raise InvalidArgument(f"{name}: a value is not finite")
    return matrix


def _disagreement(overlap: float | None) -> float | None:
    return None if overlap is None else 1.0 - overlap


def _is_above(found: float | None, limit: float | None) -> bool:
    return found is not None and limit is not None and not found <= limit  # NaN is above
