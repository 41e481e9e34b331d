"""Errors travel between processes, as those of a pool's workers do."""

from __future__ import annotations

import pickle

import pytest

import kvstore

KINDS = [
    kvstore.InvalidArgument,
    kvstore.Unsupported,
    kvstore.Truncated,
    kvstore.Corrupt,
    kvstore.NotFound,
    kvstore.Locked,
    kvstore.Closed,
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_pickles(kind):
    error = pickle.loads(pickle.dumps(kind("what, where")))
    assert type(error) is kind
    assert str(error) == "what, where"


@pytest.mark.parametrize("kind", [*KINDS, kvstore.Full])
def test_long_messages_keep_their_ends(kind):
    text = f"{'w' * 1000} {'x' * 10**6} {'y' * 400}"
    error = pickle.loads(pickle.dumps(kind(text)))
    assert len(str(error)) < 2100
    assert str(error).startswith("w" * 1000)
    assert str(error).endswith("y" * 400)
    with pytest.raises(kvstore.InvalidArgument) as found:
        kvstore.GGML("x" * 10**6)
    assert len(str(found.value)) < 2100
    assert "q8_0" in str(found.value)


def test_errors_with_fields_pickle():
    full = pickle.loads(pickle.dumps(kvstore.Full("x", is_limit=True)))
    assert (type(full), str(full), full.is_limit) == (kvstore.Full, "x", True)
    mismatch = kvstore.IdentityMismatch("x", field="rope.style", expected="half", found=None)
    again = pickle.loads(pickle.dumps(mismatch))
    assert (type(again), str(again)) == (kvstore.IdentityMismatch, "x")
    assert (again.field, again.expected, again.found) == ("rope.style", "half", None)
