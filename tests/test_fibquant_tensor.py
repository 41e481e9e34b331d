"""Coded tensors: whole and vector by vector back; nothing missing, foreign or altered passes."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.digests import tensor_digest
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.fibquant import (
    CacheLayout,
    EncodedTensor,
    FallbackPolicy,
    KvProfile,
    Profile,
    ProtectedPolicy,
    QualityBudget,
    TensorShape,
    decode_tensor,
    encode_tensor,
    tensor,
    tensor_encoder,
)
from kvcodecs.fibquant.book import build_book
from kvcodecs.fibquant.codec import CODEC
from kvcodecs.fibquant.pages import Page
from kvcodecs.fibquant.params import FibParams
from kvcodecs.fibquant.reference.coding import decode_block
from kvcodecs.frame import open_record, seal_record
from kvcodecs.spec import StreamSpec

BOOK = build_book(Profile.paper_default(8, 2, 16, seed=7, rotation="hadamard"))
DENSE = build_book(Profile.paper_default(8, 4, 8, seed=7))
VALUES = TensorShape("value", "gqa", 2, 2, 2, 4, 10, 8, "f16", "not_applicable")
KEYS = replace(VALUES, role="key", rope_state="pre_rope")
NOW = {"now": lambda: 1700000000.5}


def random(shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    offsets = 5 * rng.standard_normal((shape.kv_heads, 1, shape.head_dim))
    x = rng.standard_normal(shape.array_shape) + (offsets if shape.role == "key" else 0)
    return x.astype(dtype).astype(np.float32)


def encoded_with(shape, x=None, book=BOOK, **options):
    x = random(shape) if x is None else x
    return encode_tensor(x, shape, KvProfile.of(shape, book, **options), book, **NOW)


def states_of(encoded):
    """Reason of each vector, `(batch * layers, heads, tokens)`; 0 if it is coded."""
    shape = encoded.shape
    states = np.full((shape.batch * shape.layers, shape.kv_heads, shape.tokens), 255, np.uint8)
    for page in encoded.pages:
        for stream in range(len(states)):
            part = encoded.vectors_of(page, stream).states.reshape(shape.kv_heads, -1)
            states[stream][:, page.first_token : page.first_token + page.n_tokens] = part
    return states


# -- round trips


@st.composite
def tensors(draw):
    role = draw(st.sampled_from(["key", "value"]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape = TensorShape(
        role, "gqa", draw(st.integers(1, 2)), draw(st.integers(1, 3)), kv_heads, kv_heads * group,
        draw(st.integers(1, 20)), 8, "f32", "post_rope" if role == "key" else "not_applicable",
    )  # fmt: skip
    protected = ProtectedPolicy(
        draw(st.integers(0, min(3, shape.tokens))),
        draw(st.integers(0, min(3, shape.tokens))),
        tuple(draw(st.sets(st.integers(0, shape.layers - 1), max_size=1))),
        tuple(draw(st.sets(st.integers(0, kv_heads - 1), max_size=1))),
    )
    options = {
        "axis": draw(st.sampled_from(["raw", "per_token", "per_channel", "role_aware"])),
        "tokens_per_page": draw(st.integers(1, 24)),
        "book": draw(st.sampled_from([BOOK, DENSE])),
        "protected": protected,
    }
    return shape, options, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=25, deadline=None)
@given(tensors())
def test_round_trips(made):
    shape, options, seed = made
    x = random(shape, seed)
    protected = options["protected"]
    encoded = encoded_with(shape, x, **options)
    data = encoded.pack()
    back = EncodedTensor.unpack(data)
    assert back.pack() == data
    assert back.receipt == encoded.receipt
    y = decode_tensor(back, n_threads=2).values
    np.testing.assert_array_equal(y, decode_tensor(encoded, n_threads=1).values)

    states = states_of(encoded).reshape(shape.array_shape[:4])
    kept = np.stack([protected.mask(shape, layer) for layer in range(shape.layers)])
    np.testing.assert_array_equal(states == 1, np.broadcast_to(kept, states.shape))
    raw = states != 0
    assert (raw == kept).all() or options["axis"] == "raw"
    np.testing.assert_array_equal(y[raw], x[raw])
    receipt = encoded.receipt
    assert (receipt.compressed_blocks, receipt.raw_fallback_blocks) == ((~raw).sum(), raw.sum())
    names = {1: "protected_region", 2: "raw_axis_policy"}
    assert set(receipt.fallback_reasons) == {names[s] for s in np.unique(states[raw])}
    error = x.astype(np.float64) - y
    assert receipt.max_error == pytest.approx(np.abs(error).max(), rel=1e-6)
    assert receipt.rms == pytest.approx(math.sqrt(np.square(error).mean()), rel=1e-6)

    index = tuple(np.random.default_rng(seed).integers(0, shape.array_shape[:4]).tolist())
    np.testing.assert_array_equal(back.vector(*index), y[index])


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["per_token", "per_channel"]))
def test_pages_do_not_change_values(a, b, axis):
    first, second = (encoded_with(KEYS, axis=axis, tokens_per_page=n) for n in (a, b))
    np.testing.assert_array_equal(decode_tensor(first).values, decode_tensor(second).values)
    assert len(first.pages) == -(-10 // min(a, 10))


@pytest.mark.parametrize("axis", ["raw", "per_token", "per_channel"])
def test_every_vector_alone_is_that_of_the_whole(axis):
    x = random(KEYS)
    x[0, 1, 0, 3] = 0  # kept raw between coded ones
    encoded = encoded_with(KEYS, x, axis=axis, tokens_per_page=4, protected=ProtectedPolicy(1, 1))
    whole = decode_tensor(encoded).values
    for index in np.ndindex(KEYS.array_shape[:4]):
        np.testing.assert_array_equal(encoded.vector(*index), whole[index])
    for index in ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (0, 0, 0, 10), (0, 0, 0, -1)):
        with pytest.raises(InvalidArgument, match="KV index"):
            encoded.vector(*index)


def test_role_aware_is_per_channel_of_keys_and_per_token_of_values():
    for shape, axis in ((KEYS, "per_channel"), (VALUES, "per_token")):
        aware, plain = encoded_with(shape), encoded_with(shape, axis=axis)
        assert (aware.channels is None) == (axis == "per_token")
        np.testing.assert_array_equal(decode_tensor(aware).values, decode_tensor(plain).values)


def test_heads_of_an_odd_size():
    book = build_book(Profile.paper_default(9, 3, 16, seed=7, rotation="hadamard"))
    encoded = encoded_with(replace(KEYS, head_dim=9), book=book)
    assert encoded.receipt.raw_fallback_blocks == 0
    decoded = decode_tensor(EncodedTensor.unpack(encoded.pack()))
    assert decoded.values.shape == (2, 2, 2, 10, 9)


def test_channel_statistics_help_keys_with_offsets():
    shape = replace(KEYS, tokens=200)
    rms = [encoded_with(shape, axis=axis).receipt.rms for axis in ("per_channel", "per_token")]
    assert rms[0] < 0.5 * rms[1]


def test_channel_statistics_are_those_of_the_coded_tokens():
    shape = replace(KEYS, tokens=100)
    x = random(shape)
    x[:, :, :, :4] = 1000  # protected: do not count
    channels = encoded_with(shape, x, protected=ProtectedPolicy(first_tokens_raw=4)).channels
    rest = x[:, :, :, 4:].astype(np.float64)
    np.testing.assert_allclose(channels[:, :, 0], rest.mean(axis=3), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(channels[:, :, 1], np.sqrt(rest.std(axis=3)), rtol=1e-3)


@pytest.mark.parametrize("axis", ["raw", "per_token", "per_channel"])
def test_payloads_are_those_of_sessions(axis):
    """The codec writes the same bytes, and the readable decoder reads the same values."""
    x = random(KEYS)
    x[0, 1, 0, 3] = 0
    encoded = encoded_with(KEYS, x, axis=axis, tokens_per_page=4, protected=ProtectedPolicy(5))
    values = decode_tensor(encoded).values
    for page in encoded.pages:
        tokens = slice(page.first_token, page.first_token + page.n_tokens)
        for stream, payload in enumerate(page.payloads):
            at = divmod(stream, KEYS.layers)
            statistics = encoded.statistics(stream)
            mean, scale = (None, None) if statistics is None else statistics.reshape(2, -1)
            params = FibParams(StreamSpec("k", 2, 8), BOOK, mean, scale, first_tokens=5)
            part = np.ascontiguousarray(x[at][:, tokens])
            np.testing.assert_array_equal(
                decode_block(params, payload, page.n_tokens), values[at][:, tokens]
            )
            if axis != "raw":
                encoder = CODEC.encoder(params, page.first_token)
                encoder.push(part)
                assert encoder.payload() == payload


def test_one_vector_decodes_from_its_page_alone():
    encoded = encoded_with(VALUES, tokens_per_page=5)
    whole = decode_tensor(encoded).values
    first, second = encoded.pages
    bad = replace(encoded, pages=(first, replace(second, payloads=(b"",) * 4)))
    np.testing.assert_array_equal(bad.vector(1, 0, 1, 2), whole[1, 0, 1, 2])
    with pytest.raises(Truncated):
        bad.vector(1, 0, 1, 7)


# -- receipts


def test_receipts_name_everything_by_digest():
    x = random(KEYS)
    encoded = encoded_with(KEYS, x, tokens_per_page=4)
    decoded = decode_tensor(encoded, **NOW)
    assert encoded.receipt.source_digest == tensor_digest(x)
    assert decoded.receipt.decoded_digest == tensor_digest(decoded.values)
    assert decoded.values.dtype == np.float32
    for receipt, operation in ((encoded.receipt, "compress"), (decoded.receipt, "decode")):
        assert receipt.operation == operation
        assert receipt.profile_digest == encoded.profile.digest()
        assert receipt.shape_digest == KEYS.digest()
        assert receipt.codebook_digest == BOOK.codebook_digest
        assert receipt.rotation_digest == BOOK.rotation_digest
        assert receipt.recorded_unix_seconds == 1700000000
        assert receipt.n_pages == 3
        assert receipt.codec["codec"] == "fibquant"
    assert decoded.receipt.page_digests == encoded.receipt.page_digests
    assert encoded_with(KEYS, x, tokens_per_page=4).pack() == encoded.pack()
    other = x.copy()
    other[1, 1, 1, 9, 7] += 1
    changed = encoded_with(KEYS, other, tokens_per_page=4).receipt
    assert not set(changed.page_digests) & set(encoded.receipt.page_digests)


# -- what cannot be coded


def awkward():
    x = random(VALUES)
    x[1, 0, 1, 2] = 0
    x[0, 1, 0, 7] *= 1e6
    return x


def test_what_cannot_be_coded_is_kept_raw_with_its_reason():
    x = awkward()
    encoded = encoded_with(VALUES, x)
    assert encoded.receipt.raw_fallback_blocks == 2
    assert encoded.receipt.fallback_reasons == (
        "encode_fallback:norm leaves float16",
        "encode_fallback:zero norm",
    )
    y = decode_tensor(encoded).values
    for index, state in (((1, 0, 1, 2), 3), ((0, 1, 0, 7), 4)):
        batch, layer, head, token = index
        np.testing.assert_array_equal(y[index], x[index])
        assert states_of(encoded)[batch * 2 + layer, head, token] == state


def test_what_cannot_be_coded_fails_closed():
    closed = FallbackPolicy("fail_closed")
    with pytest.raises(InvalidArgument, match=r"batch 0, layer 1, head 0, token 7: .*float16"):
        encoded_with(VALUES, awkward(), fallback=closed)
    protected = ProtectedPolicy(raw_layers=(1,))
    with pytest.raises(InvalidArgument, match=r"batch 1, layer 0, head 1, token 2: .*zero norm"):
        encoded_with(VALUES, awkward(), fallback=closed, protected=protected)
    protected = ProtectedPolicy(3, 3)
    assert encoded_with(VALUES, awkward(), fallback=closed, protected=protected)


def with_value(index, value):
    x = random(VALUES)
    x[index] = value
    return x


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (random(VALUES).astype(np.float64), "float64"),
        (random(VALUES)[:1], "shape"),
        (random(VALUES).transpose(0, 1, 3, 2, 4), "shape"),
        (np.asfortranarray(random(VALUES)), "contiguous"),
        (with_value((0, 1, 1, 3, 5), math.nan), "nan at batch 0, layer 1, head 1, token 3, chan"),
        (with_value((1, 1, 0, 0, 0), -math.inf), "-inf at batch 1, layer 1, head 0, token 0, chan"),
    ],
)
def test_values_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        encoded_with(VALUES, values)


def test_arguments_that_do_not_belong_together():
    x, profile = random(VALUES), KvProfile.of(VALUES, BOOK)
    with pytest.raises(InvalidArgument, match="shape_digest"):
        encode_tensor(random(KEYS), KEYS, profile, BOOK)
    with pytest.raises(InvalidArgument, match="fib_profile_digest"):
        encode_tensor(x, VALUES, profile, DENSE)
    with pytest.raises(InvalidArgument, match="token_stride"):
        encode_tensor(
            x, VALUES, profile, BOOK, layout=replace(CacheLayout.canonical(VALUES), token_stride=9)
        )
    with pytest.raises(InvalidArgument, match="n_threads"):
        encode_tensor(x, VALUES, profile, BOOK, n_threads=0)


def test_a_book_is_found_by_its_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path))
    x, profile = random(VALUES), KvProfile.of(VALUES, BOOK)
    assert encode_tensor(x, VALUES, profile, **NOW).pack() == encoded_with(VALUES).pack()


# -- the quality budget


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        (KEYS, QualityBudget(max_logit_mse=1e-9)),
        (KEYS, QualityBudget(max_attention_tv=1e-9)),
        (KEYS, QualityBudget(max_topk_disagreement=0)),
        (VALUES, QualityBudget(max_value_aggregation_mse=1e-9)),
    ],
)
def test_heads_that_break_the_budget_are_raw(shape, budget):
    shape = replace(shape, tokens=40)
    x = random(shape)
    x[:, :, 1] = random(shape, 1)[:, :, 1, :1]  # one vector again and again
    encoded = encoded_with(shape, x, axis="per_token", budget=budget)
    states = states_of(encoded)
    assert (states[:, 0] == 5).all()
    if budget.max_topk_disagreement == 0:
        assert (states[:, 1] == 0).all()
    y = decode_tensor(encoded).values
    np.testing.assert_array_equal(y[:, :, 0], x[:, :, 0])
    assert "quality_budget" in encoded.receipt.fallback_reasons


def test_a_loose_budget_changes_nothing():
    budget = QualityBudget(1e9, 1, 1, 1e9)
    for shape in (KEYS, VALUES):
        a, b = encoded_with(shape, budget=budget), encoded_with(shape)
        np.testing.assert_array_equal(decode_tensor(a).values, decode_tensor(b).values)
        assert "quality_budget" not in a.receipt.fallback_reasons


def test_a_broken_budget_fails_where_nothing_may_be_raw():
    budget = QualityBudget(max_logit_mse=1e-9, fallback_on_violation=False)
    with pytest.raises(InvalidArgument, match=r"batch 0, layer 0, head 0: breaks .* max_logit_mse"):
        encoded_with(KEYS, budget=budget)
    none_raw = FallbackPolicy("fail_closed", raw_fallback_available=False)
    with pytest.raises(InvalidArgument, match="batch 0, layer 0, head 0: breaks the quality"):
        encoded_with(KEYS, budget=replace(budget, fallback_on_violation=True), fallback=none_raw)
    with pytest.raises(InvalidArgument, match="layer 0, head 1: breaks"):
        encoded_with(KEYS, budget=budget, protected=ProtectedPolicy(raw_heads=(0,)))


def test_queries_are_those_of_the_query_heads():
    """Only a query head whose queries are large breaks the limit, and so its KV head alone."""
    queries = np.zeros((2, 2, 4, 3, 8), np.float32)
    queries[1, 0, 2] = 1000
    profile = KvProfile.of(KEYS, BOOK, budget=QualityBudget(max_logit_mse=1e-3))
    encoded = encode_tensor(random(KEYS), KEYS, profile, BOOK, queries=queries)
    raw = np.zeros((4, 2, 10), np.uint8)
    raw[2, 1] = 5
    np.testing.assert_array_equal(states_of(encoded), raw)


@pytest.mark.parametrize(
    ("shape", "queries", "message"),
    [
        (VALUES, np.zeros((2, 2, 4, 3, 8)), "belong to keys"),
        (KEYS, np.zeros((2, 2, 2, 3, 8)), "queries: shape"),
        (KEYS, np.zeros((2, 2, 4, 3, 4)), "queries: shape"),
        (KEYS, np.zeros((2, 2, 4, 8)), "queries: shape"),
        (KEYS, np.zeros((2, 2, 4, 0, 8)), "queries"),
        (KEYS, np.full((2, 2, 4, 3, 8), math.nan), "queries.*finite"),
    ],
)
def test_queries_refused(shape, queries, message):
    profile = KvProfile.of(shape, BOOK, budget=QualityBudget(max_logit_mse=1))
    with pytest.raises(InvalidArgument, match=message):
        encode_tensor(random(shape), shape, profile, BOOK, queries=queries)


# -- what is not as it was coded

GOOD = encoded_with(KEYS, tokens_per_page=4, protected=ProtectedPolicy(1))
FOREIGN = encoded_with(KEYS, random(KEYS, 9), tokens_per_page=4, protected=ProtectedPolicy(1))
ZERO = "blake3:" + "0" * 64


def flipped(page, payload, at):
    data = bytearray(page.payloads[payload])
    data[at] ^= 1
    payloads = list(page.payloads)
    payloads[payload] = bytes(data)
    return replace(page, payloads=tuple(payloads))


A, B, C = GOOD.pages
DAMAGED = [
    ({"pages": (A, C)}, "page 1 of 3 is missing"),
    ({"pages": (A, B)}, "page 2 of 3 is missing"),
    ({"pages": (B, C)}, "page 0 of 3 is missing"),
    ({"pages": ()}, "page 0 of 3 is missing"),
    ({"pages": (A, B, B)}, "page 1 is there twice"),
    ({"pages": (A, B, C, C)}, "page 2 is there twice"),
    ({"pages": (A, A, B, C)}, "page 0 is there twice"),
    ({"pages": (A, C, B)}, "page 2 of 3 where 1 should be"),
    ({"pages": (A, B, C, replace(C, number=3))}, "4 pages, expected 3"),
    ({"pages": (A, replace(B, first_token=5), C)}, "page 1 has 4 tokens from 5, expected 4 from 4"),
    ({"pages": (A, B, replace(C, n_tokens=3))}, "page 2 has 3 tokens from 8, expected 2 from 8"),
    ({"pages": (A, replace(B, payloads=B.payloads[1:]), C)}, "page 1 has 3 payloads for 2 x 2"),
    ({"pages": (A, FOREIGN.pages[1], C)}, "page 1 is not the one of the receipt"),
    ({"pages": FOREIGN.pages}, "page 0 is not the one of the receipt"),
    ({"pages": (A, B, flipped(C, 3, -1))}, "page 2 is not the one of the receipt"),
    ({"pages": (A, replace(B, payloads=B.payloads[::-1]), C)}, "page 1 is not the one"),
    ({"channels": FOREIGN.channels}, "page 0 is not the one of the receipt"),
    ({"channels": None}, "channel statistics"),
    ({"channels": GOOD.channels[:1]}, "channel statistics"),
    ({"book": DENSE}, "fib_profile_digest"),
    ({"book": replace(BOOK, codewords=-BOOK.codewords)}, "codebook_digest"),
    ({"book": replace(BOOK, rotation_data=-BOOK.rotation_data)}, "rotation_digest"),
    ({"shape": replace(KEYS, rope_state="post_rope")}, "shape_digest"),
    ({"shape": replace(KEYS, dtype="f32")}, "shape_digest"),
    ({"layout": replace(GOOD.layout, order="x")}, "order"),
    ({"layout": replace(GOOD.layout, dim_stride=2)}, "dim_stride"),
    ({"profile": replace(GOOD.profile, profile_id="other")}, "profile_digest of the receipt"),
    ({"profile": replace(GOOD.profile, axis_policy="per_token")}, "profile_digest of the receipt"),
    ({"profile": replace(GOOD.profile, codebook_digest=ZERO)}, "codebook_digest"),
    ({"profile": replace(GOOD.profile, rotation_digest=ZERO)}, "rotation_digest"),
    ({"profile": replace(GOOD.profile, shape_digest=ZERO)}, "shape_digest"),
    ({"receipt": FOREIGN.receipt}, "page 0 is not the one of the receipt"),
    ({"receipt": decode_tensor(GOOD).receipt}, "the receipt is of a decode"),
    ({"receipt": replace(GOOD.receipt, values_digest=ZERO)}, "page 0 is not the one"),
    ({"receipt": replace(GOOD.receipt, profile_digest=ZERO)}, "profile_digest of the receipt"),
    ({"receipt": replace(GOOD.receipt, shape_digest=ZERO)}, "shape_digest of the receipt"),
    ({"receipt": replace(GOOD.receipt, codebook_digest=ZERO)}, "codebook_digest of the receipt"),
    ({"receipt": replace(GOOD.receipt, rotation_digest=None)}, "rotation_digest of the receipt"),
    ({"receipt": replace(GOOD.receipt, page_digests=())}, "3 pages, the receipt has 0"),
    (
        {"receipt": replace(GOOD.receipt, page_digests=GOOD.receipt.page_digests[::-1])},
        "page 0 is not the one of the receipt",
    ),
    ({"receipt": replace(GOOD.receipt, compressed_blocks=71)}, "72 vectors coded and 8 raw"),
    ({"receipt": replace(GOOD.receipt, raw_fallback_blocks=9)}, "72 vectors coded and 8 raw"),
    ({"receipt": replace(GOOD.receipt, fallback_reasons=("x",))}, "protected_region"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED)
def test_parts_that_do_not_belong_together(changes, message):
    bad = replace(GOOD, **changes)
    with pytest.raises(Corrupt, match=message):
        decode_tensor(bad)
    with pytest.raises(KvError):
        decode_tensor(EncodedTensor.unpack(bad.pack()))


def test_every_flipped_payload_byte_is_found():
    for payload, data in enumerate(B.payloads):
        for at in range(len(data)):
            bad = replace(GOOD, pages=(A, flipped(B, payload, at), C))
            with pytest.raises(Corrupt, match="page 1 is not the one"):
                bad.validate()


PACKED = GOOD.pack()


def test_every_truncation_is_an_error():
    for n in range(len(PACKED)):
        with pytest.raises((Truncated, Corrupt)):
            EncodedTensor.unpack(PACKED[:n])
    with pytest.raises((Truncated, Corrupt)):
        EncodedTensor.unpack(PACKED + b"\0")
    with pytest.raises(Corrupt, match="page 0 is there twice"):
        EncodedTensor.unpack(PACKED + seal_record(b"KVFP", GOOD.pages[0].pack()))


def test_every_flipped_byte_is_an_error():
    for at in range(len(PACKED)):
        data = bytearray(PACKED)
        data[at] ^= 1 << at % 8
        with pytest.raises((Truncated, Corrupt, Unsupported)):
            EncodedTensor.unpack(data)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_under_a_right_checksum(data):
    """Either it is found, or it is in what does not decide what values are."""
    size = 20 + int.from_bytes(PACKED[8:16], "little")
    head = bytearray(open_record(b"KVFT", PACKED[:size]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(head) - 1))
        head[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del head[data.draw(st.integers(0, len(head) - 1)) :]
    try:
        decoded = decode_tensor(EncodedTensor.unpack(seal_record(b"KVFT", head) + PACKED[size:]))
    except KvError:
        return
    np.testing.assert_array_equal(decoded.values, decode_tensor(GOOD).values)


def forged(page):
    """GOOD with another first page that its receipt names."""
    digests = (page.digest(GOOD.tensor_id), *GOOD.receipt.page_digests[1:])
    receipt = replace(GOOD.receipt, page_digests=digests)
    return replace(GOOD, pages=(page, *GOOD.pages[1:]), receipt=receipt)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_payloads_under_a_right_digest(data):
    payload = bytearray(A.payloads[0])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(0, len(payload))) :]
    bad = forged(replace(A, payloads=(bytes(payload), *A.payloads[1:])))
    try:
        values = decode_tensor(bad).values
    except KvError:
        return
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(bad.vector(0, 0, 1, 2), values[0, 0, 1, 2])


def test_every_truncated_payload_under_a_right_digest():
    for n in range(len(A.payloads[0])):
        bad = forged(replace(A, payloads=(A.payloads[0][:n], *A.payloads[1:])))
        with pytest.raises(KvError):
            decode_tensor(bad)


def test_a_large_shape_needs_large_payloads():
    """Nothing is allocated for vectors that the bytes cannot be."""
    shape = replace(VALUES, tokens=1 << 24)
    profile = KvProfile.of(shape, BOOK, tokens_per_page=1 << 24)
    receipt = replace(
        encoded_with(VALUES).receipt, shape_digest=shape.digest(), profile_digest=profile.digest()
    )
    layout = CacheLayout.canonical(shape)
    page = Page(0, 0, 1 << 24, (b"\0",) * 4)
    big = EncodedTensor(shape, layout, profile, BOOK, None, (page,), receipt)
    big = replace(big, receipt=replace(receipt, page_digests=(page.digest(big.tensor_id),)))
    with pytest.raises(Truncated, match="4 bytes of payloads"):
        decode_tensor(big)


def test_newer_tensors_are_unsupported():
    size = 20 + int.from_bytes(PACKED[8:16], "little")
    head = bytes(open_record(b"KVFT", PACKED[:size]))
    newer = head.replace(b"kvstore_fibquant_tensor_v1", b"kvstore_fibquant_tensor_v2", 1)
    with pytest.raises(Unsupported, match="tensor_v2"):
        EncodedTensor.unpack(seal_record(b"KVFT", newer) + PACKED[size:])


@pytest.mark.parametrize("module", [tensor, tensor_encoder])
def test_examples(module, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path))
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@pytest.mark.parametrize("name", [rb'"\ud800a"', rb'"\u0064a"'])
def test_only_canonical_json_is_a_head(name):
    size = 20 + int.from_bytes(PACKED[8:16], "little")
    head = bytes(open_record(b"KVFT", PACKED[:size]))
    assert head.count(b'"default"') == 1
    assert len(name) == len(b'"default"')
    changed = seal_record(b"KVFT", head.replace(b'"default"', name)) + PACKED[size:]
    with pytest.raises(Corrupt, match=r"head is not (canonical )?JSON"):
        EncodedTensor.unpack(changed)
