"""Attention metrics equal plain loops; a budget finds the limits that a report breaks."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.fibquant import quality
from kvcodecs.fibquant.quality import (
    QualityBudget,
    QualityReport,
    attention_quality,
    key_quality,
    own_probes,
    value_quality,
)

LIMITS = (
    "max_logit_mse",
    "max_attention_tv",
    "max_topk_disagreement",
    "max_value_aggregation_mse",
)


def naive(queries, keys, decoded, values, decoded_values, top_k):
    """Every metric in plain float arithmetic, one number at a time."""
    d, n = len(keys[0]), len(keys)

    def scores(q, side):
        return [sum(float(a) * float(b) for a, b in zip(q, k, strict=True)) / d**0.5 for k in side]

    def weights(logits):
        e = [math.exp(x - max(logits)) for x in logits]
        return [x / sum(e) for x in e]

    def largest(logits):
        return set(sorted(range(n), key=lambda i: (-logits[i], i))[:top_k])

    rows = []
    for q in queries:
        a, b = scores(q, keys), scores(q, decoded)
        p, r = weights(a), weights(b)
        x, y = (
            [sum(w[t] * float(v[t][c]) for t in range(n)) for c in range(len(v[0]))]
            for w, v in ((p, values), (r, decoded_values))
        )
        rows.append(
            (
                sum((s - t) ** 2 for s, t in zip(a, b, strict=True)) / n,
                sum(abs(s - t) for s, t in zip(p, r, strict=True)) / 2,
                sum(s * math.log(max(s, 1e-12) / max(t, 1e-12)) for s, t in zip(p, r, strict=True)),
                len(largest(a) & largest(b)) / min(top_k, n),
                sum((s - t) ** 2 for s, t in zip(x, y, strict=True)) / len(x),
            )
        )
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6),
    st.sampled_from([0.01, 1.0, 20.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_metrics_are_those_of_a_plain_loop(n, n_queries, d, top_k, scale, seed):
    rng = np.random.default_rng(seed)
    q, k, v = (
        np.round(scale * rng.standard_normal((rows, d)), 1).astype(np.float32)
        for rows in (n_queries, n, n)
    )
    k2, v2 = (np.round(x + 0.3 * rng.standard_normal(x.shape), 1) for x in (k, v))
    report = attention_quality(q, k, k2, v, v2, top_k=top_k)
    expected = naive(q, k, k2, v, v2, top_k)
    found = [
        report.logit_mse,
        report.total_variation,
        report.kl_divergence,
        report.top_k_overlap,
        report.value_aggregation_mse,
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    differences = np.array(k, float) - k2
    assert report.reconstruction_mse == pytest.approx((differences**2).mean(), rel=1e-12)
    assert 0 <= report.total_variation <= 1
    assert report.kl_divergence >= 0


def test_many_scores_are_summed_in_pieces(monkeypatch):
    q, k, k2 = np.random.default_rng(0).standard_normal((3, 30, 8))
    whole = key_quality(q, k, k2)
    monkeypatch.setattr(quality, "_SCORES_AT_ONCE", 70)
    pieces = key_quality(q, k, k2)
    for name in ("logit_mse", "total_variation", "kl_divergence", "top_k_overlap"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_what_decodes_exactly_is_perfect():
    x = np.random.default_rng(1).standard_normal((20, 8))
    assert key_quality(x, x, x) == QualityReport(0, 0, 0, 1, None, 0, pytest.approx(1))
    assert value_quality(x, x) == QualityReport(None, None, None, None, 0, 0, pytest.approx(1))


def test_equal_scores_rank_by_index():
    a, b = np.zeros((1, 4)), np.array([[0.0, 0, 0, 1]])
    assert quality.top_k_overlap(a, a, 2) == 1
    assert quality.top_k_overlap(a, b, 2) == 0.5  # {0, 1} and {3, 0}
    assert quality.top_k_overlap(a, b, 9) == 1


def test_divergence_where_a_weight_vanishes():
    p, q = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert quality.kl_divergence(p, q) == pytest.approx(-math.log(1e-12))
    assert quality.kl_divergence(p, p) == 0
    assert quality.total_variation(p, q) == 1


def test_cosine_of_zeros():
    zero, one = np.zeros(3), np.ones(3)
    assert quality.cosine(zero, zero) == 1
    assert quality.cosine(zero, one) == 0
    assert quality.cosine(one, -one) == pytest.approx(-1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_no_weights_aggregate_more_error_than_the_worst_token(n, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, n, 4))
    weights = rng.dirichlet(np.ones(n))
    error = np.square(weights @ x - weights @ y).mean()
    assert error <= value_quality(x, y).value_aggregation_mse * (1 + 1e-12)


def test_probes_are_spread_over_all_keys():
    keys = np.arange(1000, dtype=np.float32).reshape(-1, 1)
    assert own_probes(keys[:256]) is not None
    assert len(own_probes(keys[:256])) == 256
    probes = own_probes(keys)[:, 0]
    assert len(probes) == 256
    assert probes[0] == 0
    assert set(np.diff(probes)) == {3, 4}


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("max_logit_mse", QualityReport(0.2, 0, 0, 1, None, 0, 1)),
        ("max_attention_tv", QualityReport(0, 0.2, 0, 1, None, 0, 1)),
        ("max_topk_disagreement", QualityReport(0, 0, 0, 0.8, None, 0, 1)),
        ("max_value_aggregation_mse", QualityReport(None, None, None, None, 0.2, 0, 1)),
    ],
)
def test_each_limit_is_broken_by_its_metric_alone(limit, value):
    all_limits = QualityBudget(**dict.fromkeys(LIMITS, 0.1))
    assert all_limits.is_limited
    assert all_limits.broken(value) == (limit,)
    assert QualityBudget(**{limit: 0.1}).broken(value) == (limit,)
    assert QualityBudget(**{limit: 0.3}).broken(value) == ()
    assert QualityBudget().broken(value) == ()
    assert not QualityBudget().is_limited


def test_what_is_no_number_breaks_every_limit():
    report = QualityReport(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan)
    assert QualityBudget(**dict.fromkeys(LIMITS, 1e9)).broken(report) == LIMITS


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf, "1", True, [1.0], 1j])
def test_limits_are_finite_and_not_negative(limit, value):
    with pytest.raises(InvalidArgument, match=limit):
        QualityBudget(**{limit: value})


def test_budget_in_json():
    budget = QualityBudget(max_logit_mse=1, max_attention_tv=0.5, fallback_on_violation=False)
    assert QualityBudget.from_json(budget.to_json()) == budget
    for data in ({"max_mse": 1}, 5, budget.to_json() | {"max_logit_mse": -1}):
        with pytest.raises(Corrupt, match="QualityBudget"):
            QualityBudget.from_json(data)
    with pytest.raises(InvalidArgument, match="fallback_on_violation"):
        QualityBudget(fallback_on_violation=1)


GOOD = np.ones((3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GOOD, GOOD, GOOD[:2]), "decoded"),
        ((GOOD[:, :3], GOOD, GOOD), "channels"),
        ((GOOD[:0], GOOD, GOOD), "queries"),
        ((GOOD[0], GOOD, GOOD), "queries"),
        ((GOOD, GOOD, GOOD * math.nan), "finite"),
        ((GOOD, GOOD, GOOD, GOOD), "both or neither"),
        ((GOOD, GOOD, GOOD, GOOD[:2], GOOD[:2]), "2 values, 3 keys"),
        ((GOOD, [["x"] * 4] * 3, GOOD), "numbers"),
        ((GOOD, [[1], [1, 2]], GOOD), "array"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        attention_quality(*arguments)


def test_top_k_is_at_least_one():
    with pytest.raises(InvalidArgument, match="top_k"):
        key_quality(GOOD, GOOD, GOOD, top_k=0)


def test_examples():
    assert doctest.testmod(quality) == (0, 4)
