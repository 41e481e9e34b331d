"""What describes a tensor and its coding: every rule that it keeps, its digests, its policies."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.digests import canonical_json, document_digest, is_digest, tensor_digest
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.fibquant import (
    CacheLayout,
    CompressionPolicy,
    Decision,
    FallbackPolicy,
    KvProfile,
    PageGeometry,
    Profile,
    ProtectedPolicy,
    QualityBudget,
    QualityReport,
    TensorShape,
    calibrate,
    calibration,
    geometry,
    kvprofile,
    layout,
    policies,
    shape,
)
from kvcodecs.fibquant.book import build_book

SHAPE = TensorShape("value", "mha", 1, 1, 1, 1, 4, 8, "f32", "not_applicable")
KEYS = TensorShape("key", "gqa", 2, 3, 2, 4, 10, 8, "bf16", "post_rope")
LAYOUT = CacheLayout.canonical(KEYS)
PAGES = PageGeometry.of(KEYS, 4, block_dim=4, codebook_size=256)
VALUES = np.random.default_rng(0).standard_normal(KEYS.array_shape, dtype=np.float32)
SUMMARY = calibrate(VALUES, KEYS, outlier_threshold=3)
BOOK = build_book(Profile.paper_default(8, 2, 4, seed=7))
PROFILE = KvProfile.of(KEYS, BOOK, tokens_per_page=4, protected=ProtectedPolicy(1, 2, (0,), (1,)))


def test_known_digest():
    assert SHAPE.digest() == (
        "blake3:e95777483c6dd1260d0a9d4c562fb8864fb34ffc6bbb8dfe76db4ea22d09190d"
    )


U32 = [0, -1, 1 << 32, 1.0, True, None, "1"]
SIZES = ("batch", "layers", "kv_heads", "query_heads", "tokens", "head_dim")
#: What is changed, to what, and what the message says.
BROKEN_SHAPES = [
    (KEYS, {"role": "query"}, "role"),
    (KEYS, {"role": ["key"]}, "role"),
    (KEYS, {"attention_kind": "mla"}, "attention_kind"),
    (KEYS, {"dtype": "f64"}, "dtype"),
    (KEYS, {"rope_state": "rotated"}, "rope_state"),
    *((KEYS, {size: value}, size) for size in SIZES for value in U32),
    (KEYS, {"attention_kind": "mha"}, "mha with 2 KV heads and 4 query heads"),
    (KEYS, {"attention_kind": "mqa"}, "mqa with 2 KV heads"),
    (KEYS, {"query_heads": 5}, "5 query heads are not a multiple of 2"),
    (KEYS, {"query_heads": 1}, "1 query heads are not a multiple of 2"),
    (KEYS, {"rope_state": "not_applicable"}, "rope_state 'not_applicable' of a key"),
    (SHAPE, {"rope_state": "pre_rope"}, "rope_state 'pre_rope' of a value"),
    (SHAPE, {"rope_state": "post_rope"}, "rope_state 'post_rope' of a value"),
    (KEYS, {"tokens": 1 << 31}, "values, at most"),
]


@pytest.mark.parametrize(("shape", "changes", "message"), BROKEN_SHAPES)
def test_shapes_refused(shape, changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(shape, **changes)
    with pytest.raises((Corrupt, Unsupported), match="TensorShape.*" + message):
        TensorShape.from_json(shape.to_json() | changes)


@pytest.mark.parametrize(
    ("kind", "kv", "query"), [("mha", 3, 3), ("mqa", 1, 5), ("gqa", 2, 6), ("gqa", 1, 5)]
)
def test_shapes_of_every_attention(kind, kv, query):
    assert replace(KEYS, attention_kind=kind, kv_heads=kv, query_heads=query).kv_heads == kv


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "token_head_dim"}, "order"),
        ({"order": None}, "order"),
        ({"batch_stride": 481}, "batch_stride 481, contiguous is 480"),
        ({"layer_stride": 0}, "layer_stride 0, contiguous is 160"),
        ({"head_stride": -80}, "head_stride -80, contiguous is 80"),
        ({"token_stride": 16}, "token_stride 16, contiguous is 8"),
        ({"dim_stride": 2}, "dim_stride 2, contiguous is 1"),
        ({"dim_stride": True}, "dim_stride True"),
        ({"dim_stride": 1.0}, "dim_stride 1.0"),
    ],
)
def test_layouts_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(LAYOUT, **changes).validate(KEYS)


def test_the_canonical_layout_is_that_of_numpy():
    LAYOUT.validate(KEYS)
    assert tuple(LAYOUT.to_json().values())[2:] == tuple(s // 4 for s in VALUES.strides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"tokens_per_page": value}, "tokens_per_page") for value in U32),
        ({"tokens_per_page": 11}, "tokens_per_page 11, there are 10"),
        ({"vectors_per_block": 2}, "vectors_per_block 2"),
        ({"vectors_per_block": 0}, "vectors_per_block 0"),
        ({"head_dim": 16}, "head_dim 16, of the tensor 8"),
        *(({"encoded_block_bytes": value}, "encoded_block_bytes") for value in U32),
        ({"raw_vector_bytes": 16}, "raw_vector_bytes 16, expected 32"),
    ],
)
def test_pages_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(PAGES, **changes).validate(KEYS)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_pages_cover_the_tokens(tokens, tokens_per_page):
    shape = replace(KEYS, tokens=tokens)
    pages = PageGeometry.of(shape, tokens_per_page, block_dim=2, codebook_size=16)
    pages.validate(shape)
    spans = [pages.span(shape, page) for page in range(pages.page_count(shape))]
    covered = [t for first, n in spans for t in range(first, first + n)]
    assert covered == list(range(tokens))
    assert all(1 <= n <= pages.tokens_per_page for _, n in spans)
    assert pages.encoded_block_bytes == 4


BROKEN_REGIONS = [
    ({"first_tokens_raw": 11}, "first_tokens_raw 11, there are 10 tokens"),
    ({"last_tokens_raw": 11}, "last_tokens_raw 11, there are 10 tokens"),
    ({"raw_layers": (0, 3)}, "raw_layers 3, there are 3"),
    ({"raw_heads": (2,)}, "raw_heads 2, there are 2"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN_REGIONS)
def test_regions_outside_the_shape_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        ProtectedPolicy(**fields).validate(KEYS)


@pytest.mark.parametrize(
    "fields",
    [
        {"first_tokens_raw": -1},
        {"last_tokens_raw": 1.0},
        {"raw_layers": 1},
        {"raw_layers": [1]},
        {"raw_layers": (-1,)},
        {"raw_heads": ("0",)},
        {"raw_heads": (1 << 32,)},
    ],
)
def test_regions_are_counts_and_indices(fields):
    with pytest.raises(InvalidArgument, match=next(iter(fields))):
        ProtectedPolicy(**fields)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 6), st.integers(0, 6),
    st.sets(st.integers(0, 2)), st.sets(st.integers(0, 3)),
)  # fmt: skip
def test_a_vector_is_protected_if_any_region_has_it(first, last, layers, heads):
    shape = replace(KEYS, tokens=6, kv_heads=4)
    policy = ProtectedPolicy(first, last, tuple(layers), tuple(heads))
    policy.validate(shape)
    for layer in range(shape.layers):
        mask = policy.mask(shape, layer)
        for head in range(4):
            for token in range(6):
                expected = token < first or token >= 6 - last or layer in layers or head in heads
                assert policy.is_protected(shape, layer, head, token) == expected
                assert mask[head, token] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "raw"}, "mode"),
        ({"mode": None}, "mode"),
        ({"raw_fallback_available": 1}, "raw_fallback_available"),
        ({"raw_fallback_available": False}, "keep_raw needs raw_fallback_available"),
    ],
)
def test_fallbacks_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        FallbackPolicy(**fields)


def test_fallback_without_raw_vectors_fails_closed():
    assert not FallbackPolicy("fail_closed", False).raw_fallback_available


# -- policies


def test_the_baseline_protects_the_last_token():
    policy = CompressionPolicy.role_aware_baseline()
    assert policy.protected == ProtectedPolicy(last_tokens_raw=1)
    assert policy.decide(KEYS, 0, 0, 9) == Decision("keep_raw", "raw", "protected_region")
    assert policy.decide(KEYS, 0, 0, 8) == Decision("compress", "per_channel", "key_role_axis")
    assert policy.decide(SHAPE, 0, 0, 2) == Decision("compress", "per_token", "value_role_axis")


@pytest.mark.parametrize(
    ("strategy", "of_key", "of_value"),
    [
        ("raw", ("keep_raw", "raw", "raw_strategy"), ("keep_raw", "raw", "raw_strategy")),
        (
            "fib_quant_per_token",
            ("compress", "per_token", "key_role_axis"),
            ("compress", "per_token", "value_role_axis"),
        ),
        (
            "fib_quant_per_channel",
            ("compress", "per_channel", "key_role_axis"),
            ("compress", "per_channel", "value_role_axis"),
        ),
        (
            "role_aware_kivi_style_baseline",
            ("compress", "per_channel", "key_role_axis"),
            ("compress", "per_token", "value_role_axis"),
        ),
        (
            "experimental_fib_quant_role_aware",
            ("compress", "per_channel", "experimental_role_aware"),
            ("compress", "per_token", "experimental_role_aware"),
        ),
    ],
)
def test_strategies(strategy, of_key, of_value):
    policy = CompressionPolicy(strategy)
    assert policy.decide(KEYS, 0, 0, 0) == Decision(*of_key)
    assert policy.decide(SHAPE, 0, 0, 0) == Decision(*of_value)


def test_order_of_a_decision():
    """Each case breaks or meets all that comes after it as well."""
    policy = CompressionPolicy("raw", ProtectedPolicy(first_tokens_raw=11), True, False)
    with pytest.raises(InvalidArgument, match="first_tokens_raw 11"):
        policy.decide(KEYS, 9, 9, 99)
    policy = replace(policy, protected=ProtectedPolicy(first_tokens_raw=1))
    for index in ((3, 0, 0), (0, 2, 0), (0, 0, 10), (-1, 0, 0)):
        with pytest.raises(InvalidArgument, match="KV index"):
            policy.decide(KEYS, *index)
    assert policy.decide(KEYS, 0, 0, 0).reason == "protected_region"
    missing = policy.decide(KEYS, 0, 0, 1)
    assert missing == Decision("need_calibration", "raw", "calibration_missing")
    kept = replace(policy, allow_raw_fallback=True).decide(KEYS, 0, 0, 1)
    assert kept == Decision("keep_raw", "raw", "calibration_missing")
    assert policy.decide(KEYS, 0, 0, 1, has_calibration=True).reason == "raw_strategy"
    with pytest.raises(InvalidArgument, match="strategy"):
        CompressionPolicy("per_token")


# -- calibration


def test_calibration_measures_norms():
    norms = [math.sqrt(sum(float(x) ** 2 for x in row)) for row in VALUES.reshape(-1, 8)]
    assert SUMMARY.mean_norm == pytest.approx(sum(norms) / len(norms), rel=1e-12)
    assert SUMMARY.max_norm == pytest.approx(max(norms), rel=1e-12)
    assert SUMMARY.outlier_count == sum(norm > 3 for norm in norms) > 0
    assert SUMMARY.vector_count == len(norms) == 120
    assert SUMMARY.source_digest == tensor_digest(VALUES)
    assert SUMMARY.recommended_axis == "per_channel"
    assert (SUMMARY.recommended_first_tokens_raw, SUMMARY.recommended_last_tokens_raw) == (0, 1)
    zeros = calibrate(np.zeros(SHAPE.array_shape, np.float32), SHAPE, outlier_threshold=0)
    assert (zeros.max_norm, zeros.outlier_count, zeros.recommended_axis) == (0, 0, "per_token")


@pytest.mark.parametrize("threshold", [-1, math.nan, math.inf, "3", True, None])
def test_thresholds_refused(threshold):
    with pytest.raises(InvalidArgument, match="outlier_threshold"):
        calibrate(VALUES, KEYS, outlier_threshold=threshold)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape_digest": "blake3:00"}, "shape_digest"),
        ({"source_digest": None}, "source_digest"),
        ({"role": "kv"}, "role"),
        ({"recommended_axis": "per_head"}, "recommended_axis"),
        ({"vector_count": 0}, "vector_count"),
        ({"outlier_count": -1}, "outlier_count"),
        ({"mean_norm": math.nan}, "mean_norm"),
        ({"mean_norm": -1.0}, "mean_norm"),
        ({"max_norm": math.inf}, "max_norm"),
        ({"recommended_bits_per_coord": 0.0}, "recommended_bits_per_coord"),
        ({"recommended_bits_per_coord": math.inf}, "recommended_bits_per_coord"),
        ({"recommended_last_tokens_raw": -1}, "recommended_last_tokens_raw"),
    ],
)
def test_summaries_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(SUMMARY, **changes)


# -- the profile of a tensor

OTHER = "blake3:" + "0" * 64
FIB = BOOK.profile
#: Each breaks all that comes after it as well.
BROKEN_PROFILES = [
    ({"profile_id": ""}, "profile_id"),
    ({"profile_id": 1}, "profile_id"),
    ({"fib_profile": replace(FIB, block_dim=3)}, "block_dim 3 does not divide head_dim 8"),
    ({"fib_profile": replace(FIB, block_dim=0)}, "block_dim 0 does not divide"),
    ({"shape_digest": OTHER}, "shape_digest"),
    ({"role_policy": "value"}, "role_policy 'value', the tensor is a key"),
    ({"fib_profile": replace(FIB, lloyd_restarts=0)}, "lloyd_restarts"),
    ({"fib_profile": replace(FIB, ambient_dim=16)}, "a book for 16 values, head_dim is 8"),
    ({"fib_profile_digest": OTHER}, "fib_profile_digest"),
    ({"fib_profile": replace(FIB, lloyd_restarts=1)}, "fib_profile_digest"),
    ({"rotation_digest": ""}, "rotation_digest"),
    ({"codebook_digest": ""}, "codebook_digest"),
    ({"axis_policy": "per_head"}, "axis_policy"),
    ({"page_geometry": replace(PAGES, tokens_per_page=11)}, "tokens_per_page 11"),
    ({"page_geometry": replace(PAGES, encoded_block_bytes=5)}, "encoded_block_bytes 5"),
    ({"protected_policy": ProtectedPolicy(11)}, "first_tokens_raw 11"),
    ({"calibration_digest": ""}, "calibration_digest"),
]


@pytest.mark.parametrize("at", range(len(BROKEN_PROFILES)))
def test_profiles_refused_in_order(at):
    changes, message = BROKEN_PROFILES[at]
    with pytest.raises(InvalidArgument, match=message):
        replace(PROFILE, **changes).validate(KEYS)
    everything = {}
    for fields, _ in reversed(BROKEN_PROFILES[at:]):
        everything |= fields
    with pytest.raises(InvalidArgument, match=message):
        replace(PROFILE, **everything).validate(KEYS)


def test_a_profile_with_a_broken_budget_cannot_be_read():
    data = PROFILE.to_json()
    for name, part in (
        ("quality_budget", {"max_logit_mse": -1.0}),
        ("fallback_policy", {"mode": "panic"}),
        ("protected_policy", {"first_tokens_raw": -1}),
    ):
        with pytest.raises(Corrupt, match=next(iter(part))):
            KvProfile.from_json(data | {name: data[name] | part})


def test_a_profile_follows_from_shape_and_book():
    PROFILE.validate(KEYS)
    PROFILE.check_book(BOOK)
    assert PROFILE.calibration_digest == "missing:calibration"
    assert PROFILE.page_geometry.encoded_block_bytes == 2 + 1
    calibrated = KvProfile.of(KEYS, BOOK, calibration=SUMMARY)
    assert calibrated.calibration_digest == SUMMARY.digest()
    assert calibrated.page_geometry.tokens_per_page == 10
    assert list(PROFILE.to_json()) == [
        "schema_version", "profile_id", "shape_digest", "fib_profile", "fib_profile_digest",
        "codebook_digest", "rotation_digest", "role_policy", "axis_policy", "page_geometry",
        "protected_policy", "fallback_policy", "quality_budget", "calibration_digest",
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="another shape"):
        KvProfile.of(SHAPE, BOOK, calibration=SUMMARY)
    with pytest.raises(InvalidArgument, match="divide"):
        KvProfile.of(replace(KEYS, head_dim=9), BOOK)


@pytest.mark.parametrize("name", ["fib_profile_digest", "rotation_digest", "codebook_digest"])
def test_another_book_is_refused(name):
    with pytest.raises(InvalidArgument, match=name):
        replace(PROFILE, **{name: OTHER}).check_book(BOOK)


# -- values


def with_value(index, value):
    values = VALUES.copy()
    values[index] = value
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VALUES.astype(np.float64), "float64"),
        (VALUES.tolist(), "list"),
        (VALUES[:1], r"shape \(1, 3, 2, 10, 8\)"),
        (VALUES.reshape(-1), r"shape \(960,\)"),
        (np.asfortranarray(VALUES), "not contiguous"),
        (with_value((1, 2, 0, 9, 7), math.nan), "nan at batch 1, layer 2, head 0, token 9, chan"),
        (with_value((0, 0, 1, 0, 3), math.inf), "inf at batch 0, layer 0, head 1, token 0, chan"),
    ],
)
def test_values_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        calibrate(values, KEYS, outlier_threshold=3)


# -- documents


DOCUMENTS = [
    SHAPE,
    KEYS,
    LAYOUT,
    PAGES,
    SUMMARY,
    PROFILE,
    ProtectedPolicy(1, 2, (0, 2), (1,)),
    FallbackPolicy("fail_closed"),
    QualityBudget(max_attention_tv=0.1),
    QualityReport(0.1, 0.2, 0.3, 0.5, None, 0.1, 0.9),
    CompressionPolicy.role_aware_baseline(),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_survive_json(document):
    data = json.loads(canonical_json(document.to_json()))
    back = type(document).from_json(data)
    assert back == document
    assert back.to_json() == document.to_json()
    assert hash(back) == hash(document)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_have_their_fields(document):
    data, kind = document.to_json(), type(document)
    for name in data:
        with pytest.raises(Corrupt, match=kind.__name__):
            kind.from_json({n: v for n, v in data.items() if n != name})
    for bad in (data | {"more": 1}, list(data), None, "{}"):
        with pytest.raises(Corrupt, match=kind.__name__):
            kind.from_json(bad)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.schema])
def test_schemas(document):
    data, kind = document.to_json(), type(document)
    assert document.digest() == document_digest(data["schema_version"], data)
    assert is_digest(document.digest())
    newer = document.schema.removesuffix("1") + "2"
    with pytest.raises(Unsupported, match=newer):
        kind.from_json(data | {"schema_version": newer})
    for other in ("fib_quant_profile_v1", None, 1):
        with pytest.raises(Corrupt, match="schema"):
            kind.from_json(data | {"schema_version": other})


@pytest.mark.parametrize("name", [n for n in KEYS.to_json() if n != "schema_version"])
def test_every_field_changes_the_digest(name):
    other = {"role": "value", "attention_kind": "mqa", "dtype": "f16", "rope_state": "pre_rope"}
    changed = KEYS.to_json()
    changed[name] = other.get(name, 7)
    assert document_digest(KEYS.schema, changed) != KEYS.digest()


@pytest.mark.parametrize("module", [calibration, geometry, kvprofile, layout, policies, shape])
def test_examples(module, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path))
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@pytest.mark.parametrize(
    "changes",
    [
        {"protected": FallbackPolicy()},
        {"fallback": "keep_raw"},
        {"budget": 0.5},
        {"calibration": "blake3:"},
        {"tokens_per_page": None},
        {"tokens_per_page": 1.5},
    ],
)
def test_parts_of_other_types_are_refused(changes):
    with pytest.raises(InvalidArgument, match=r"give a |must be an integer"):
        KvProfile.of(KEYS, BOOK, **changes)
    with pytest.raises(InvalidArgument, match="book is a Profile: give a Book"):
        KvProfile.of(KEYS, BOOK.profile)
    with pytest.raises(InvalidArgument, match="shape is a tuple: give a TensorShape"):
        PROFILE.validate(KEYS.array_shape)
