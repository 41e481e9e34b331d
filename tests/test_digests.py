"""Digests are those of canonical JSON and of values, in their domains."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from kvcodecs.digests import (
    bytes_digest,
    canonical_json,
    document_digest,
    is_digest,
    raw_digest,
    tensor_digest,
    vector_digest,
)
from kvcodecs.errors import InvalidArgument

VECTOR = np.array([0.25, -0.5, 0.75, 1, -1.25, 0.5, 0.125, -0.875], np.float32)
#: A shape as other implementations of the same documents hash it.
SHAPE = {
    "schema_version": "fib_quant_kv_tensor_shape_v1",
    "role": "value",
    "attention_kind": "mha",
    "batch": 1,
    "layers": 1,
    "kv_heads": 1,
    "query_heads": 1,
    "tokens": 4,
    "head_dim": 8,
    "dtype": "f32",
    "rope_state": "not_applicable",
}


def test_known_digests():
    of_tensor = "1df212836a3f5e46ef5f0069c8a8edbc9e6c49f47818167a311a0ffa82fe8542"
    of_vector = "875d1983de9b8fc7dd5926bcc031af74aee65489011647cb33889b488d169cab"
    assert tensor_digest(VECTOR.reshape(2, 4)) == f"blake3:{of_tensor}"
    assert vector_digest(VECTOR) == f"blake3:{of_vector}"
    assert document_digest("fib_quant_kv_tensor_shape_v1", SHAPE) == (
        "blake3:e95777483c6dd1260d0a9d4c562fb8864fb34ffc6bbb8dfe76db4ea22d09190d"
    )


def test_bytes_are_hashed_in_their_domain():
    expected = blake3(b"a domain\0some bytes").hexdigest()
    assert bytes_digest("a domain", b"some ", memoryview(b"bytes")) == f"blake3:{expected}"
    assert raw_digest("a domain", b"some bytes").hex() == expected
    assert is_digest(f"blake3:{expected}")
    assert not is_digest(expected)
    assert not is_digest(f"blake3:{expected.upper()}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"), (1.5, "1.5"), (-0.0, "-0.0"), (0.1, "0.1"), (1e-5, "0.00001"),
        (1e-6, "1e-6"), (1e-7, "1e-7"), (1.25e-9, "1.25e-9"), (1e15, "1000000000000000.0"),
        (1e16, "1e16"), (1.5e300, "1.5e300"), (123456.75, "123456.75"), (-2.5e-10, "-2.5e-10"),
        (np.float32(0.1), "0.1"), (0.10000000149011612, "0.10000000149011612"),
        (np.uint8(7), "7"), (True, "true"), (None, "null"), ("é\n", '"é\\n"'),
        ([1, (2.0,)], "[1,[2.0]]"), ({"b": 1, "a": {}}, '{"b":1,"a":{}}'),
    ],
)  # fmt: skip
def test_forms(value, text):
    assert canonical_json(value).decode() == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back(x):
    back = json.loads(canonical_json(x))
    assert back == x
    assert math.copysign(1.0, back) == math.copysign(1.0, x)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_float32_read_back(x):
    assert np.float32(json.loads(canonical_json(np.float32(x)))) == np.float32(x)


@pytest.mark.parametrize("value", [math.nan, math.inf, b"bytes", {1: 2}, object(), "\ud800"])
def test_what_has_no_form_is_refused(value):
    with pytest.raises(InvalidArgument, match="canonical JSON"):
        canonical_json({"field": value})
