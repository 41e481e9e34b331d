"""Tokens at another place of a context: shared where blocks lie alike, with the error told."""

from __future__ import annotations

import numpy as np
import pytest
from kvcodecs.errors import IdentityMismatch, InvalidArgument, NotFound
from kvcodecs.rope import from_coded
from kvcodecs.spec import StreamSpec

import kvstore
from kvstore import relocation

ROPE = kvstore.Rope.from_theta(10_000.0, 16, scaling=1.25)
MODEL = kvstore.Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=16, rope=ROPE, dtype="float32"
)
B = 64


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def archive(request, tmp_path):
    places = {"memory": "memory:", "lmdb": tmp_path / "a.kv", "zarr": f"zarr:{tmp_path / 'a.kv'}"}
    with kvstore.open(places[request.param], "a") as opened:
        yield opened


def tensors(n, seed):
    return np.random.default_rng(seed).standard_normal((2, 2, 2, n, 16), dtype=np.float32)


def ids(n, seed):
    return np.random.default_rng(seed).integers(0, 1000, n)


def make(archive, name, n, seed=1, **options):
    options = {"block_tokens": B, "fit_tokens": 32, **options}
    session = archive.create_session(name, model=MODEL, **options)
    if n:
        session.append(*tensors(n, seed), token_ids=ids(n, seed))
        session.commit()
    return session


def check(archive):
    report = archive.verify(decode=True)
    assert report.ok, report.problems
    assert report.n_leftover == 0


# (tokens there are, start, stop, shared)
CASES = {
    "into a new session": (0, 128, 300, 128),
    "blocks alike": (128, 64, 256, 192),
    "the last block is cut": (128, 64, 264, 192),
    "not on a block there": (128, 60, 250, 0),
    "not on a block here": (100, 64, 256, 0),
    "less than a block": (128, 64, 100, 0),
    "nothing": (128, 64, 64, 0),
    "from the start": (64, 0, 128, 128),
    "to the end": (64, 448, 500, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_values_positions_and_error(archive, case):
    at, start, stop, shared = CASES[case]
    source = make(archive, "source", 500)
    session = make(archive, "session", at, seed=2)
    k, v = source.read_all(start, stop)
    before = session.read_all()
    done = session.append_range(source, start, stop)
    assert (done.n_tokens, done.n_shared) == (stop - start, shared)
    assert session.n_committed == session.n_tokens == at + stop - start
    got = session.read_all(at)
    for x, y in zip(got, (k, v), strict=True):
        error = np.abs(x - y)
        assert error.max(initial=0.0) <= done.max_error
        assert (error[:, :, :shared] == 0).all()
    # About half a step: the step is a quarter of the RMS.
    assert done.max_error <= 0.2
    assert done.max_error > 0 or shared == stop - start or at == 0
    for x, y in zip(session.read_all(0, at), before, strict=True):
        assert (x == y).all()
    assert (session.token_ids(at) == ids(500, 1)[start:stop]).all()
    check(archive)
    # K comes back turned for where it is now, as if it had been rotated there for the first time.
    post = session.read(1, "k", at, k_state="post")
    expected = turned(got[0][1], at)
    assert (post == expected).all()


def turned(k, position):
    spec = StreamSpec("k", 2, 16, ROPE)
    return from_coded(k, spec, "post", position)


@pytest.mark.parametrize("offset", [-100, -1, 0, 1, 7, 5000])
def test_position_offset_is_a_fresh_rotation(archive, offset):
    source = make(archive, "source", 300)
    pre = source.read(0, "k", 100, 300)
    post = source.read(0, "k", 100, 300, k_state="post", position_offset=offset)
    assert (post == turned(pre, 100 + offset)).all()
    k, v = source.read_all(100, 300, k_state="post", position_offset=offset)
    assert (k[0] == post).all()
    assert (v == source.read_all(100, 300)[1]).all()
    same = source.read(0, "k", 100, 300, position_offset=offset)
    assert (same == pre).all()


def test_position_offset_before_the_first_position(archive):
    source = make(archive, "source", 300)
    with pytest.raises(InvalidArgument, match="position"):
        source.read(0, "k", 100, 300, k_state="post", position_offset=-101)
    for bad in (1.5, "1", None, True):
        with pytest.raises(InvalidArgument, match="position_offset"):
            source.read_all(position_offset=bad)


def test_prompts_match_only_what_came_before(archive):
    source = make(archive, "source", 500)
    session = make(archive, "session", 128, seed=2)
    prompt = np.concatenate([ids(128, 2), ids(500, 1)[64:256]])
    session.append_range(source, 64, 256)
    assert archive.match_prefix(prompt, MODEL).n_tokens == 128
    session.append(*tensors(100, 3), token_ids=ids(100, 3))
    session.commit()
    whole = np.concatenate([prompt, ids(100, 3)])
    assert archive.match_prefix(whole, MODEL).n_tokens == 128
    fork = session.fork("fork", at=300)
    session.close()
    archive.delete_session("session")
    assert archive.match_prefix(whole, MODEL).n_tokens == 128
    fork.truncate(128)
    fork.append(*tensors(10, 4), token_ids=ids(10, 4))
    fork.commit()
    assert archive.match_prefix(np.concatenate([ids(128, 2), ids(10, 4)]), MODEL).n_tokens == 138
    check(archive)


def test_a_copied_range_does_not_match_either(archive):
    source = make(archive, "source", 500)
    session = make(archive, "session", 100, seed=2)
    session.append_range(source, 10, 60)
    prompt = np.concatenate([ids(100, 2), ids(500, 1)[10:60]])
    assert archive.match_prefix(prompt, MODEL).n_tokens == 100
    check(archive)


def test_the_source_may_go(archive):
    source = make(archive, "source", 500)
    session = make(archive, "session", 128, seed=2)
    session.append_range(source, 64, 256)
    expected = session.read_all()
    source.close()
    archive.delete_session("source")
    for x, y in zip(session.read_all(), expected, strict=True):
        assert (x == y).all()
    check(archive)
    archive.delete_session("session")
    with archive._read() as snapshot:
        assert [key[:1] for key, _ in snapshot.scan(b"")] == [b"A", b"I"]


def test_a_range_of_itself_again_and_again(archive, monkeypatch):
    session = make(archive, "session", 64)
    expected = session.read_all()
    for _ in range(4):
        n = session.n_tokens
        session.append_range(session, 0, n)
        expected = [np.concatenate([x, x], axis=2) for x in expected]
        for x, y in zip(session.read_all(), expected, strict=True):
            assert (x == y).all()
        check(archive)
    monkeypatch.setattr("kvstore.sharing.MAX_PARTS", 10)
    with pytest.raises(InvalidArgument, match="parts"):
        session.append_range(session, 0, session.n_tokens)
    assert session.n_tokens == 1024
    check(archive)


def test_ranges_that_follow_each_other_are_one_part(archive):
    source = make(archive, "source", 500)
    session = make(archive, "session", 64, seed=2)
    for start in range(0, 448, 64):
        session.append_range(source, start, start + 64)
    with archive._read() as snapshot:
        record = archive._catalog.record(snapshot, "session")
    assert len(record.parts) == 2
    for x, y in zip(session.read_all(64), source.read_all(0, 448), strict=True):
        assert (x == y).all()
    check(archive)


def test_between_archives_values_are_copied(archive):
    with kvstore.open("memory:", "a") as elsewhere:
        source = make(elsewhere, "source", 300)
        session = make(archive, "session", 64, seed=2)
        done = session.append_range(source, 64, 256)
        assert (done.n_tokens, done.n_shared) == (192, 0)
        assert 0 < done.max_error < 0.2
        check(archive)


def test_what_is_refused(archive):
    source = make(archive, "source", 300)
    source.append(*tensors(10, 3), token_ids=ids(10, 3))  # not committed
    session = make(archive, "session", 64, seed=2)
    for start, stop in [(-1, 10), (10, 5), (0, 301), (0, 310), (1.5, 2), ("0", 1), (True, 1)]:
        with pytest.raises(InvalidArgument, match="range"):
            session.append_range(source, start, stop)
    other = archive.create_session("other", model=kvstore.Model("x", MODEL.layers, ROPE))
    with pytest.raises(IdentityMismatch, match="name"):
        other.append_range(source, 0, 10)
    bare = archive.create_session("bare", model=MODEL, block_tokens=B, fit_tokens=32)
    bare.append(*tensors(64, 1))
    bare.commit()
    with pytest.raises(InvalidArgument, match="token_ids"):
        bare.append_range(source, 0, 64)
    with pytest.raises(InvalidArgument, match="token_ids"):
        session.append_range(bare, 0, 64)
    source.close()
    archive.session("source").trim_front(100)
    with pytest.raises(InvalidArgument, match="begin at token 100"):
        session.append_range(archive.session("source"), 64, 128)
    archive.delete_session("source")
    with pytest.raises(NotFound):
        session.append_range(source, 128, 192)
    assert session.n_committed == 64
    check(archive)


def test_a_source_that_is_rolled_back_meanwhile(archive, monkeypatch):
    source = make(archive, "source", 500)
    session = make(archive, "session", 100, seed=2)
    copy = relocation._copy

    def rolls_back(writer, source, start, stop):
        copy(writer, source, start, stop)
        with archive.session("source") as other:
            other.truncate(50)
            other.append(*tensors(450, 9), token_ids=ids(450, 9))
            other.commit()

    source.close()
    monkeypatch.setattr(relocation, "_copy", rolls_back)
    with pytest.raises(NotFound, match="taken back"):
        session.append_range(archive.session("source"), 10, 60)
    monkeypatch.undo()
    assert session.n_tokens == session.n_committed == 100
    # It failed, so that prompts go on matching what is appended now.
    session.append(*tensors(50, 3), token_ids=ids(50, 3))
    session.commit()
    prompt = np.concatenate([ids(100, 2), ids(50, 3)])
    assert archive.match_prefix(prompt, MODEL).n_tokens == 150
    check(archive)


def test_a_source_that_goes_before_the_error_is_measured(archive, monkeypatch):
    source = make(archive, "source", 500)
    source.close()
    session = make(archive, "session", 100, seed=2)
    measure = relocation._largest_error

    def deletes(*args):
        archive.delete_session("source")
        return measure(*args)

    monkeypatch.setattr(relocation, "_largest_error", deletes)
    done = session.append_range(archive.session("source"), 10, 60)
    assert done.n_tokens == 50
    assert 0 < done.max_error < 0.2
    assert session.n_committed == 150
    check(archive)


@pytest.mark.parametrize("at", [96, 128, 192])
def test_a_cut_in_a_range_goes_on_with_the_session_s_own_step(archive, at):
    coarse = make(archive, "coarse", 300, codec=kvstore.KVR1(rel_step=0.25))
    fine = make(archive, "fine", 64, seed=2, codec=kvstore.KVR1(rel_step=0.25))
    steps = [stream.step for stream in fine.info().streams]
    fine.append_range(coarse, 64, 192)
    fork = fine.fork("fork", at=at)
    fine.truncate(at)
    for session in (fork, fine):
        session.append(*tensors(70, 3), token_ids=ids(70, 3))
        session.commit()
        assert [stream.step for stream in session.info().streams] == steps
    check(archive)


def test_a_closed_session_forks_and_is_pinned(archive):
    session = make(archive, "session", 100)
    session.close()
    fork = session.fork("fork", at=50)
    session.pin()
    session.set_metadata({"a": 1})
    assert archive.session("session").pinned
    assert fork.n_committed == 50


def test_what_a_match_found_may_be_taken_back_on_purpose(archive):
    make(archive, "session", 100).close()
    matched = archive.match_prefix(ids(100, 1), MODEL).session
    matched.truncate(40)
    matched.append(*tensors(10, 3), token_ids=ids(10, 3))
    matched.commit()
    assert matched.n_committed == 50
    matched.trim_front(20)
    assert matched.first_token == 20
    matched.close()


def test_a_match_whose_session_began_anew_without_ids(archive):
    make(archive, "session", 100).close()
    matched = archive.match_prefix(ids(100, 1), MODEL).session
    with archive.session("session") as session:
        session.truncate(0)
        session.append(*tensors(100, 4))
        session.commit()
    with pytest.raises(NotFound, match="match again"):
        matched.read_all()


def test_token_ids_of_another_place_are_refused(archive):
    one, two = make(archive, "one", 100), make(archive, "two", 100, seed=2)
    with archive._backend.write(1.0) as transaction:
        places = {key: bytes(value) for key, value in transaction.scan(b"K")}
        first, second = places
        transaction.put(first, places[second])
        transaction.put(second, places[first])
    for session in (one, two):
        with pytest.raises(kvstore.Corrupt, match="another place"):
            session.token_ids()
    assert not archive.match_prefix(ids(100, 1), MODEL)
    assert not archive.verify().ok
