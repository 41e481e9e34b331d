"""Receipts of one tensor or stream read back as they were, and nothing else reads as one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.digests import bytes_digest, document_digest
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.frame import ErrorStats
from kvcodecs.receipts import SCHEMA, Receipt, frame_digest, known_error, stream_profile_digest

A, B, C, D = (bytes_digest("test", bytes([i])) for i in range(4))
RECEIPT = Receipt(
    operation="compress",
    values_digest=A,
    profile_digest=B,
    shape_digest=C,
    page_digests=(D, A),
    codec={"codec": "kvr1", "rel_step": 0.25, "sink": 4},
    compressed_blocks=2,
    raw_fallback_blocks=1,
    codebook_digest=D,
    rotation_digest=None,
    fallback_reasons=("protected_region",),
    max_error=0.125,
    rms=0.0625,
    recorded_unix_seconds=1_700_000_000,
)


def test_json_is_as_documented():
    text = RECEIPT.dumps().decode()
    assert text == (
        f'{{"schema_version":"kvstore_receipt_v1","operation_kind":"compress","source_digest":"{A}"'
        f',"profile_digest":"{B}","shape_digest":"{C}","page_digests":["{D}","{A}"],'
        f'"codebook_digest":"{D}","rotation_digest":null,"encoded_pages":2,"compressed_blocks":2,'
        '"raw_fallback_blocks":1,"fallback_reasons":["protected_region"],"max_error":0.125,'
        '"rms":0.0625,"codec":{"codec":"kvr1","rel_step":0.25,"sink":4},'
        '"recorded_unix_seconds":1700000000}'
    )
    assert RECEIPT.digest() == document_digest(SCHEMA, json.loads(text))
    assert RECEIPT.digest() == bytes_digest(SCHEMA, text.encode())


errors = st.floats(0, 1e30)
receipts = st.builds(
    Receipt,
    operation=st.sampled_from(["compress", "decode"]),
    values_digest=st.sampled_from([A, B]),
    profile_digest=st.just(B),
    shape_digest=st.just(C),
    page_digests=st.lists(st.sampled_from([A, B, C]), max_size=4).map(tuple),
    codec=st.fixed_dictionaries({"codec": st.text("aé\\", max_size=3)}, optional={"step": errors}),
    compressed_blocks=st.integers(0, 2**62),
    raw_fallback_blocks=st.just(3),
    codebook_digest=st.none() | st.just(A),
    rotation_digest=st.none() | st.just(A),
    fallback_reasons=st.lists(
        st.text('aé "\n\U0001f600', min_size=1, max_size=3), min_size=1, max_size=3, unique=True
    ).map(tuple),
    max_error=errors,
    rms=errors,
    recorded_unix_seconds=st.integers(0, 2**40),
)


@settings(max_examples=30)
@given(receipts)
def test_reads_back(receipt):
    again = Receipt.loads(receipt.dumps())
    assert again == receipt
    assert again.digest() == receipt.digest()
    assert (again.source_digest is None) == (receipt.operation == "decode")
    assert (again.decoded_digest is None) == (receipt.operation == "compress")


def test_the_digest_says_every_field():
    others = [
        replace(RECEIPT, **change)
        for change in (
            {"operation": "decode"}, {"values_digest": B}, {"profile_digest": A},
            {"shape_digest": A}, {"page_digests": (D, B)}, {"page_digests": (D,)},
            {"codebook_digest": None}, {"rotation_digest": A}, {"compressed_blocks": 1},
            {"raw_fallback_blocks": 2}, {"fallback_reasons": ("other",)}, {"max_error": 0.25},
            {"rms": 0.5}, {"max_error": None, "rms": None}, {"codec": {"codec": "raw"}},
            {"recorded_unix_seconds": 0},
        )
    ]  # fmt: skip
    assert len({RECEIPT.digest(), *(other.digest() for other in others)}) == len(others) + 1


BAD = [
    ("operation_kind", "encode"), ("operation_kind", None), ("source_digest", "blake3:00"),
    ("source_digest", None), ("profile_digest", 7), ("shape_digest", A.upper()),
    ("page_digests", A), ("page_digests", [A, None]), ("page_digests", [A]),
    ("codebook_digest", ""), ("rotation_digest", 1), ("encoded_pages", 3), ("encoded_pages", True),
    ("compressed_blocks", -1), ("compressed_blocks", 1.0), ("raw_fallback_blocks", 0),
    ("raw_fallback_blocks", 2**63), ("fallback_reasons", []), ("fallback_reasons", ["a", "a"]),
    ("fallback_reasons", [""]), ("fallback_reasons", "no"), ("fallback_reasons", [1]),
    ("max_error", None), ("max_error", -1.0), ("max_error", "0"), ("rms", float("nan")),
    ("rms", float("inf")), ("rms", None), ("codec", None), ("codec", {}), ("codec", {"codec": 3}),
    ("codec", {"codec": "raw", "x": float("nan")}), ("recorded_unix_seconds", -1),
    ("recorded_unix_seconds", True), ("schema_version", "fib_code_v1"), ("schema_version", 1),
    ("surplus", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_wrong_field_is_corrupt(name, value):
    with pytest.raises(Corrupt, match="receipt"):
        Receipt.loads(json.dumps({**RECEIPT.to_json(), name: value}))


def test_a_missing_field_is_corrupt():
    data = RECEIPT.to_json()
    for name in data:
        with pytest.raises(Corrupt, match="receipt"):
            Receipt.from_json({key: value for key, value in data.items() if key != name})


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_document_is_corrupt(text):
    with pytest.raises(Corrupt, match="receipt"):
        Receipt.loads(text)


def test_a_newer_version_is_unsupported():
    with pytest.raises(Unsupported, match="kvstore_receipt_v2"):
        Receipt.from_json({**RECEIPT.to_json(), "schema_version": "kvstore_receipt_v2"})


def test_arguments_are_checked():
    with pytest.raises(InvalidArgument, match="profile_digest"):
        replace(RECEIPT, profile_digest="blake3")
    with pytest.raises(InvalidArgument, match="raw blocks"):
        replace(RECEIPT, fallback_reasons=())
    with pytest.raises(InvalidArgument, match="JSON"):
        replace(RECEIPT, fallback_reasons=("\ud800",))


def test_numbers_that_other_writers_spell_as_integers():
    data = {**RECEIPT.to_json(), "max_error": 1, "rms": 0}
    assert Receipt.from_json(data) == replace(RECEIPT, max_error=1.0, rms=0.0)


def test_parts_of_receipts():
    assert frame_digest(b"ab", b"c") == bytes_digest("kvstore_frame_v1", b"abc")
    assert stream_profile_digest(3, b"x") == bytes_digest("kvstore_stream_profile_v1", b"\x03x")
    assert known_error(ErrorStats.unknown()) == (None, None)
    assert known_error(ErrorStats(0.5, 1.0, 4)) == (0.5, 0.5)
