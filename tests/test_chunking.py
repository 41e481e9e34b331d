"""Given the same stream header, sealed frames do not depend on how the tokens came in."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import KVR1, TKV1, Model, Raw, Rope, keys

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=Rope.from_theta(1e4, 8))
N = 150
BLOCK = 32
CODECS = [Raw(), KVR1(step=0.25), TKV1(step=0.25)]
RNG = np.random.default_rng(1)
K = RNG.standard_normal((2, 2, N, 8)).astype(np.float32)
V = RNG.standard_normal((2, 2, N, 8)).astype(np.float32)


def frames(archive, name, prefixes=(keys.FRAME, keys.TAIL)):
    """Frames by layer, kind and block, without what names the owner."""
    found = {}
    with archive._read() as snapshot:
        owner = archive._catalog.id(snapshot, name)
        for prefix in prefixes:
            for key, value in snapshot.scan(keys.owner_prefix(prefix, owner)):
                parsed = keys.parse(key)
                frame = bytes(value)
                place = (prefix, parsed.layer, parsed.kind, parsed.index)
                found[place] = frame[:8] + frame[16:72] + frame[76:]
    return found


def without_errors(found):
    # Sums of squares depend on the order of additions; everything else must be equal.
    return {key: frame[:40] + frame[64:] for key, frame in found.items()}


def largest_errors(found):
    return {key: frame[40:48] for key, frame in found.items()}


@pytest.fixture(scope="module", params=CODECS, ids=lambda c: c.codec)
def reference(request):
    archive = kvstore.open(f"memory:chunking-{request.param.codec}", "a")
    whole = archive.create_session("whole", model=MODEL, codec=request.param, block_tokens=BLOCK)
    whole.append(K, V)
    whole.commit()
    yield archive
    archive.close()


@given(
    cuts=st.lists(st.integers(0, N), max_size=12),
    commits=st.lists(st.booleans(), min_size=13, max_size=13),
    reopens=st.lists(st.booleans(), min_size=13, max_size=13),
)
@settings(max_examples=25, deadline=None)
def test_any_chunking_gives_the_same_frames(reference, cuts, commits, reopens):
    archive = reference
    session = archive.create_session("cut", model=MODEL, stats_from="whole", block_tokens=BLOCK)
    edges = [0, *sorted(cuts), N]
    for i, (lo, hi) in enumerate(pairwise(edges)):
        session.append(K[:, :, lo:hi], V[:, :, lo:hi], start=lo)
        if commits[i]:
            session.commit()
            if reopens[i]:
                session.close()
                session = archive.session("cut")
    session.commit()
    same(archive, "cut", "whole")
    archive.delete_session("cut")


def same(archive, name, other):
    got, expected = frames(archive, name), frames(archive, other)
    assert got.keys() == expected.keys()
    assert without_errors(got) == without_errors(expected)
    assert largest_errors(got) == largest_errors(expected)
    error, error_of_other = archive.session(name).info().error, archive.session(other).info().error
    assert error.sum_squares == pytest.approx(error_of_other.sum_squares, rel=1e-12)
    assert error.n_values == error_of_other.n_values


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_threads_do_not_matter(reference, monkeypatch, n_threads):
    monkeypatch.setattr("kvstore.writer._MANY_VALUES", 0)
    archive = reference
    session = archive.create_session("par", model=MODEL, stats_from="whole", block_tokens=BLOCK)
    session.append(K[:, :, :70], V[:, :, :70], n_threads=n_threads)
    session.append(K[:, :, 70:], V[:, :, 70:], n_threads=n_threads)
    session.commit()
    same(archive, "par", "whole")
    archive.delete_session("par")


def test_token_by_token(reference):
    archive = reference
    session = archive.create_session("one", model=MODEL, stats_from="whole", block_tokens=BLOCK)
    for t in range(N):
        session.append(K[:, :, t : t + 1], V[:, :, t : t + 1])
    session.commit()
    same(archive, "one", "whole")
    archive.delete_session("one")


def test_commits_before_the_header_do_not_touch_the_frames(reference):
    """The raw head is beside the blocks, which hold every token from the first."""
    archive = reference
    for codec in CODECS:
        names = []
        for cuts in ([], [3], [3, 50, 64]):
            name = f"{codec.codec} {cuts}"
            names.append(name)
            session = archive.create_session(
                name, model=MODEL, codec=codec, block_tokens=BLOCK, fit_tokens=100
            )
            edges = [0, *cuts, 110, N]
            for lo, hi in pairwise(edges):
                session.append(K[:, :, lo:hi], V[:, :, lo:hi])
                session.commit()
        for name in names[1:]:
            same(archive, name, names[0])
            assert frames(archive, name, [keys.HEAD])
        for name in names:
            archive.delete_session(name)


def test_ingest_equals_one_append(reference):
    archive = reference
    name = archive.session("whole").info().codecs["k"]["codec"]
    codec = next(c for c in CODECS if c.codec == name)

    class Source:
        def n_tokens(self, layer, kind):
            return N

        def chunks(self, layer, kind):
            x = (K if kind == "k" else V)[layer]
            for at in range(0, N, 7):
                yield x[:, at : at + 7]

    seen = []
    session = archive.ingest(
        "in",
        Source(),
        model=MODEL,
        codec=codec,
        block_tokens=BLOCK,
        token_ids=np.arange(N),
        metadata={"a": 1},
        progress=lambda done, of: seen.append((done, of)),
    )
    same(archive, "in", "whole")
    assert seen == sorted(seen)
    assert seen[-1] == (K.size + V.size,) * 2
    np.testing.assert_array_equal(session.token_ids(), np.arange(N))
    assert session.info().metadata == {"a": 1}
    session.append(K[:, :, :1], V[:, :, :1], token_ids=[7])
    session.commit()
    assert session.n_committed == N + 1
    archive.delete_session("in")
