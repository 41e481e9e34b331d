"""Forks, rollback, trim and rename: what is shared, what is freed, and that nothing changes."""

import numpy as np
import pytest

import kvstore
import kvstore.writer
from kvstore import KVR1, LayerSpec, Model, Raw, Rope, keys

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=Rope.from_theta(1e4, 8))
WINDOWED = Model(
    "w", (LayerSpec(1, 4, 4), LayerSpec(1, 4, 4, window=20)), rope=Rope.from_theta(1e4, 4)
)
CODECS = {"raw": Raw(), "kvr1": KVR1(step=0.25)}
BLOCK, FIT = 16, 8


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def archive(request, tmp_path):
    place = str(tmp_path / "a.kv")
    with kvstore.open(
        {"memory": f"memory:{place}", "lmdb": place, "zarr": f"zarr:{place}"}[request.param], "a"
    ) as opened:
        yield opened
        assert_sound(opened)


@pytest.fixture
def memory():
    with kvstore.open("memory:", "a") as opened:
        yield opened
        assert_sound(opened)


def assert_sound(archive):
    report = archive.verify(decode=True)
    assert report.ok, report.problems


def assert_no_leftovers(archive):
    report = archive.verify()
    assert report.ok, report.problems
    assert report.n_leftover == 0
    assert archive.gc() == 0


def assert_no_leftovers_once_indexed(archive):
    """After the end of a damaged session, whose ids nobody could read, the index is made anew."""
    report = archive.verify()
    assert {problem.where for problem in report.problems} <= {"prefix index"}
    archive.reindex()
    assert_no_leftovers(archive)


def values(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 8), dtype=np.float32)


def ids_of(n, seed=0):
    return np.random.default_rng([seed, 1]).integers(0, 1000, n)


def add(session, n, seed, commit=True, with_ids=True):
    k, v = values(n, seed)
    session.append(k, v, token_ids=ids_of(n, seed) if with_ids else None)
    if commit:
        session.commit()
    return k, v


def make(archive, name="p", n=100, codec="raw", **options):
    options = {"block_tokens": BLOCK, "fit_tokens": FIT, **options}
    session = archive.create_session(name, model=MODEL, codec=CODECS[codec], **options)
    if n:
        add(session, n, seed=0)
    return session


def kept(session, start=0, stop=None):
    """All bytes of a session's values."""
    return tuple(x.tobytes() for x in session.read_all(start, stop))


def stored(archive, *prefixes):
    with archive._read() as snapshot:
        return {
            key: bytes(value)
            for key, value in snapshot.scan(b"")
            if not prefixes or key[:1] in prefixes
        }


def owned(archive):
    return stored(archive, *keys.OWNED)


# What a fork costs, and what it shares.


@pytest.mark.parametrize("codec", CODECS)
def test_a_fork_adds_a_record_and_who_uses_what(archive, codec):
    parent = make(archive, n=500, codec=codec)
    before = stored(archive)
    values_before = kept(parent)
    fork = parent.fork("f", at=250)
    after = stored(archive)
    added = {key: value for key, value in after.items() if key not in before}
    assert {key: after[key] for key in before} == before
    assert sorted(key[:1] for key in added) == [keys.SESSION, keys.USER, keys.USER]
    assert sum(len(key) + len(value) for key, value in added.items()) < 1000
    assert fork.n_committed == 250
    np.testing.assert_array_equal(fork.token_ids(), ids_of(500)[:250])
    assert kept(fork) == kept(parent, 0, 250)
    assert kept(parent) == values_before
    assert fork.info().frame_bytes > 0
    assert all(stream.shared_bytes == stream.frame_bytes for stream in fork.info().streams)
    # The first commit codes the cut block again, and no other.
    add(fork, 1, seed=1)
    new = [key for key in owned(archive) if key not in before]
    n_streams = 4
    assert len(new) == 2 * n_streams + 1  # header and tail of each stream, a chunk of ids
    assert_no_leftovers(archive)


def test_the_first_commit_of_a_fork_does_not_depend_on_its_length(memory):
    parent = make(memory, n=5000)
    before = owned(memory)
    sizes = []
    for at in (200, 4008):  # 8 tokens into a block
        fork = parent.fork("f", at=at)
        add(fork, 1, seed=1)
        frames = {k: v for k, v in owned(memory).items() if k not in before and k[:1] != b"K"}
        sizes.append(sum(map(len, frames.values())))
        memory.delete_session("f")
    assert sizes[0] == sizes[1] < 5000
    assert_no_leftovers(memory)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [3, 7, 8, 40])
def test_fork_at_every_token(memory, codec, n):
    """Inside the raw head, at block edges, in a tail: any cut, and both sides go on."""
    parent = make(memory, n=0, codec=codec)
    # With 5 committed first, streams that get a header keep a raw head of 5.
    for i in range(0, n, 5):
        add(parent, min(5, n - i), seed=i)
    whole = parent.read_all()
    ids = parent.token_ids()
    for at in range(n + 1):
        fork = parent.fork(f"f{at}", at=at)
        assert fork.n_committed == at
        assert kept(fork) == tuple(x[:, :, :at].tobytes() for x in whole)
        if at:
            np.testing.assert_array_equal(fork.token_ids(), ids[:at])
        k, v = add(fork, 9, seed=1000 + at)
        got_k, got_v = fork.read_all()
        assert got_k[:, :, :at].tobytes() == whole[0][:, :, :at].tobytes()
        assert got_v[:, :, :at].tobytes() == whole[1][:, :, :at].tobytes()
        tolerance = 0 if codec == "raw" else 0.125
        assert np.abs(got_k[:, :, at:] - k).max() <= tolerance
        assert np.abs(got_v[:, :, at:] - v).max() <= tolerance
        fork.close()
    expected = {name: kept(memory.session(name)) for name in memory.names()}
    # The parent goes on, is closed, and goes: its forks stay as they are.
    add(parent, 50, seed=77)
    assert kept(parent, 0, n) == expected.pop("p")
    parent.close()
    for name, whole in expected.items():
        assert kept(memory.session(name)) == whole
    memory.delete_session("p")
    assert_no_leftovers(memory)
    for name, whole in expected.items():
        assert kept(memory.session(name)) == whole
        memory.delete_session(name)
    assert owned(memory) == {}


@pytest.mark.parametrize("codec", CODECS)
def test_forks_of_forks_outlive_those_in_between(archive, codec):
    session = make(archive, "s0", n=70, codec=codec)
    expected = {}
    for i in range(1, 7):
        at = 70 + 20 * (i - 1) - 5 * i  # cuts the block that the one before went on with
        child = session.fork(f"s{i}", at=at)
        add(child, 25, seed=i)
        expected[f"s{i}"] = kept(child)
        session.close()
        session = child
    for name in ("s0", "s3", "s1", "s5", "s2"):
        archive.delete_session(name)
        expected.pop(name, None)
        assert_no_leftovers(archive)
        for other, whole in expected.items():
            assert kept(archive.session(other)) == whole
    archive.delete_session("s4")
    session.close()
    last = archive.session("s6")
    assert kept(last) == expected["s6"]
    add(last, 10, seed=9)
    assert kept(last, 0, last.n_committed - 10) == expected["s6"]
    last.close()
    assert_no_leftovers(archive)
    archive.delete_session("s6")
    assert owned(archive) == {}
    assert stored(archive, keys.USER, keys.PREFIX) == {}


@pytest.mark.parametrize("codec", CODECS)
def test_both_go_on_from_the_cut(archive, codec):
    parent = make(archive, n=53, codec=codec)
    fork = parent.fork("f")
    expected = {"p": kept(parent), "f": kept(fork)}
    for i in range(8):
        for session in (parent, fork):
            n = session.n_committed
            add(session, 7 + i, seed=10 * i + (session is fork))
            assert kept(session, 0, n) == expected[session.name]
            expected[session.name] = kept(session)
            other = fork if session is parent else parent
            assert kept(other) == expected[other.name]
    assert expected["p"] != expected["f"]
    parent.close()
    fork.close()
    assert_no_leftovers(archive)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n_committed", [5, 20, 32])
def test_fork_while_the_parent_appends(archive, monkeypatch, codec, n_committed):
    """Frames stored ahead of a commit are nobody's: not the fork's, and the fork's end spares
    them."""
    monkeypatch.setattr(kvstore.writer, "SPILL_BYTES", 1)
    for with_ids in (True, False):
        options = {"block_tokens": BLOCK, "fit_tokens": FIT}
        parent = archive.create_session("p", model=MODEL, codec=CODECS[codec], **options)
        add(parent, n_committed, seed=0, with_ids=with_ids)
        before = kept(parent)
        k, v = add(parent, 90, seed=1, commit=False, with_ids=with_ids)
        assert archive.verify().n_leftover > 0  # they are stored
        fork = parent.fork("f")
        with pytest.raises(kvstore.InvalidArgument, match="commit first"):
            parent.fork("g", at=n_committed + 1)
        assert kept(fork) == before
        add(fork, 3, seed=2, with_ids=with_ids)
        fork.close()
        other = parent.fork("g", at=n_committed - 2)
        archive.delete_session("f")
        assert archive.gc() == 0
        other.trim_front(n_committed - 2)
        archive.delete_session("g")
        parent.commit()
        assert kept(parent, 0, n_committed) == before
        got_k, got_v = parent.read_all(n_committed)
        tolerance = 0 if codec == "raw" else 0.125
        assert np.abs(got_k - k).max() <= tolerance
        assert np.abs(got_v - v).max() <= tolerance
        parent.close()
        assert_no_leftovers(archive)
        archive.delete_session("p")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n_committed", [5, 20, 32])
def test_a_fork_never_reads_what_an_appender_dropped(archive, monkeypatch, codec, n_committed):
    monkeypatch.setattr(kvstore.writer, "SPILL_BYTES", 1)
    parent = make(archive, n=n_committed, codec=codec)
    before = kept(parent)
    add(parent, 90, seed=1, commit=False)
    parent.close()  # as if it were killed
    parent = archive.session("p")
    early = parent.fork("early")
    add(parent, 5, seed=2)
    late = parent.fork("late")
    assert kept(early) == before
    assert kept(late, 0, n_committed) == before
    assert kept(late) == kept(parent)
    parent.truncate(n_committed + 3)
    assert kept(parent) == kept(late, 0, n_committed + 3)
    whole = kept(late)
    add(late, 30, seed=3)
    assert kept(late, 0, n_committed + 5) == whole
    assert kept(early) == before
    parent.close()
    late.close()
    assert archive.gc() >= 0
    assert_no_leftovers(archive)
    assert kept(early) == before
    assert kept(parent) == tuple(x.tobytes() for x in late.read_all(0, n_committed + 3))


def test_fork_inside_the_raw_head_and_headers_fixed_later(archive):
    parent = make(archive, n=6, codec="kvr1")
    before = kept(parent)
    fork, both = parent.fork("f", at=4), parent.fork("b", at=6)
    add(fork, 2, seed=1)  # 6 tokens: still no header
    six = kept(fork)
    add(parent, 40, seed=2)  # fixed with the parent's statistics
    add(fork, 40, seed=3)  # and here with its own
    add(both, 40, seed=4)
    assert kept(parent, 0, 6) == before
    assert kept(both, 0, 6) == before
    assert kept(fork, 0, 6) == six
    assert kept(fork, 0, 4) == kept(parent, 0, 4)
    steps = [[stream.step for stream in s.info().streams] for s in (parent, fork, both)]
    assert all(step for of_session in steps for step in of_session)
    parent.close()
    archive.delete_session("p")
    assert kept(both, 0, 6) == before
    for session in (fork, both):
        session.close()
    assert_no_leftovers(archive)


def test_a_fork_at_zero_keeps_the_statistics(archive):
    parent = make(archive, n=100, codec="kvr1")
    fork = parent.fork("f", at=0)
    assert fork.n_committed == 0
    assert fork.token_ids() is None
    parent.close()
    archive.delete_session("p")
    assert_no_leftovers(archive)
    add(fork, 2, seed=1)  # fewer than fit_tokens: coded all the same
    assert all(stream.step for stream in fork.info().streams)
    assert all(stream.n_head_tokens == 0 for stream in fork.info().streams)


def test_a_fork_has_its_own_life(archive):
    parent = make(archive, metadata={"a": [1]})
    parent.pin()
    fork = parent.fork("f", at=10)
    assert fork.metadata == {"a": [1]}
    assert not fork.pinned
    fork.set_metadata({"b": 2})
    assert parent.metadata == {"a": [1]}
    assert parent.fork("g", metadata={}).metadata == {}
    with pytest.raises(kvstore.InvalidArgument, match="'f' exists already"):
        parent.fork("f")
    again = parent.fork("f", at=20, replace=True)
    assert again.n_committed == 20
    with pytest.raises(kvstore.NotFound):
        fork.read(0, "k")
    with pytest.raises(kvstore.InvalidArgument, match="truncate"):
        parent.fork("p", at=10, replace=True)
    # A fork may take the place of one that it shares frames with.
    child = again.fork("child", at=15)
    parent.close()
    assert child.fork("p", replace=True).n_committed == 15
    assert kept(archive.session("p")) == kept(child)
    assert_no_leftovers(archive)


def test_forks_of_windowed_layers(archive):
    session = archive.create_session(
        "p", model=WINDOWED, codec=Raw(), block_tokens=BLOCK, fit_tokens=FIT
    )
    rng = np.random.default_rng(0)
    full = rng.standard_normal((1, 100, 4), dtype=np.float32)
    session.append([full, full[:, 70:]], [full, full[:, 70:]])
    session.commit()
    for at in (1, 69):
        with pytest.raises(kvstore.InvalidArgument, match="layers begin at token 70"):
            session.fork("f", at=at)
        with pytest.raises(kvstore.InvalidArgument, match="layers begin at token 70"):
            session.truncate(at)
    for at in (70, 75, 86, 87, 100):
        fork = session.fork("f", at=at, replace=True)
        assert fork.start_token(1) == 70
        new = rng.standard_normal((1, 20, 4), dtype=np.float32)
        fork.append([new, new], [new, new])
        fork.commit()
        assert (fork.read(0, "k", 0, at) == full[:, :at]).all()
        assert (fork.read(1, "v", 70, at) == full[:, 70:at]).all()
        assert (fork.read(1, "k", at) == new).all()
        assert (fork.read(0, "v", at) == new).all()
        fork.close()
        assert_no_leftovers(archive)
    session.truncate(0)  # anew: every layer begins with the next token
    session.append([full, full], [full, full])
    session.commit()
    assert (session.read(1, "k", 0) == full).all()


# Rollback.


@pytest.mark.parametrize("codec", CODECS)
def test_rollback_at_every_token_and_another_answer(memory, codec):
    session = make(memory, n=5, codec=codec)
    add(session, 45, seed=5)
    n_all = 50
    for n in range(n_all, -1, -1):
        before = session.read_all(0, n)
        session.truncate(n)
        assert session.n_committed == session.n_tokens == n
        add(session, n_all - n + 1, seed=100 + n)
        got = session.read_all(0, n)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, before, strict=True))
        wanted = values(n_all - n + 1, 100 + n)
        got = session.read_all(n)
        for a, b in zip(got, wanted, strict=True):
            assert np.abs(a - b).max() <= (0 if codec == "raw" else 0.125)
        np.testing.assert_array_equal(session.token_ids(n), ids_of(n_all - n + 1, 100 + n))
        session.close()
        assert_no_leftovers(memory)
        session = memory.session("p")


def test_forks_do_not_see_a_rollback(archive):
    parent = make(archive, n=90, codec="kvr1")
    fork = parent.fork("f", at=70)
    whole, early = kept(fork), kept(parent, 0, 40)
    parent.truncate(40)
    assert kept(parent) == early
    assert kept(fork) == whole
    add(parent, 60, seed=3)
    assert kept(fork) == whole
    parent.close()
    archive.delete_session("f")
    assert_no_leftovers(archive)
    assert kept(parent, 0, 40) == early


def test_rejected_speculations_keep_the_record_short(memory):
    archive, session = memory, make(memory, n=100)
    sizes = []
    for i in range(100):
        n = session.n_committed
        add(session, 8, seed=i)
        session.truncate(n + 1 + i % 4)
        with archive._read() as snapshot:
            record = archive._catalog.record(snapshot, "p")
            sizes.append(len(record.pack("p")))
        assert len(record.parts) <= session.n_committed // BLOCK + 2
    grown = session.n_committed - 100
    # A part for each block at most, not for each round.
    assert sizes[-1] - sizes[0] < 100 * (grown // BLOCK + 2)
    session.close()
    assert_no_leftovers(archive)


def test_rounds_in_one_block_leave_a_record_of_one_size(memory):
    archive = memory
    session = archive.create_session("p", model=MODEL, codec=Raw(), block_tokens=512, fit_tokens=8)
    add(session, 50, seed=0)
    for i in range(200):
        add(session, 8, seed=i)
        session.truncate(50 + i // 100)
    with archive._read() as snapshot:
        record = archive._catalog.record(snapshot, "p")
    assert len(record.parts) <= 2
    assert len(record.pack("p")) < 700
    session.close()
    assert_no_leftovers(archive)
    assert len(owned(archive)) <= 9 * 2


@pytest.mark.parametrize("n", [20, 32, 48, 52, 80])
def test_rollback_into_a_range_from_elsewhere_keeps_the_codec(archive, n):
    source = make(archive, "q", n=50, codec="kvr1")
    session = make(archive, n=32, codec="raw")
    session.append_range(source, 0, 48)
    whole = session.read_all()
    session.truncate(n)
    k, v = add(session, 30, seed=1)
    assert all(
        a[:, :, :n].tobytes() == b[:, :, :n].tobytes()
        for a, b in zip(session.read_all(), whole, strict=True)
    )
    assert (session.read_all(n)[0] == k).all()
    assert (session.read_all(n)[1] == v).all()
    assert {stream.codec for stream in session.info().streams} == {"raw"}
    for opened in (source, session):
        opened.close()
    assert_no_leftovers(archive)


def test_truncate_commits_what_stays(archive):
    session = make(archive, n=20)
    add(session, 10, seed=1, commit=False)
    session.truncate(30)
    assert session.n_committed == session.n_tokens == 30
    session.truncate(25)
    assert session.n_committed == session.n_tokens == 25
    assert kept(session, 20)[0] == values(10, 1)[0][:, :, :5].tobytes()
    add(session, 10, seed=2, commit=False)
    session.truncate(25)
    assert session.n_committed == session.n_tokens == 25
    session.commit()
    assert session.n_committed == 25
    session.close()
    archive.gc()
    assert_no_leftovers(archive)


# Trim.


def test_trims_drop_frames_and_keep_positions(archive):
    session = make(archive, n=208)
    k, v = values(208)
    n_before = len(owned(archive))
    for first in (1, 16, 17, 50, 160, 192, 207, 208):
        session.trim_front(first)
        assert session.first_token == session.start_token(0) == first
        assert (session.read(1, "k", first) == k[1][:, first:]).all()
        assert (session.read_all(first)[1] == v[:, :, first:]).all()
        assert session.read(0, "v", first, first).shape == (2, 0, 8)
        np.testing.assert_array_equal(session.token_ids(first), ids_of(208)[first:])
        frames = [keys.parse(key) for key in stored(archive, keys.FRAME)]
        assert all(frame.index >= first // BLOCK for frame in frames)
        for start in {0, first - 1}:
            with pytest.raises(kvstore.InvalidArgument, match=f"starts at token {first}"):
                session.read(0, "k", start)
            with pytest.raises(kvstore.InvalidArgument, match=f"starts at token {first}"):
                session.read_all(start)
            with pytest.raises(kvstore.InvalidArgument, match=f"token ids.*{first}"):
                session.token_ids(start)
        assert_sound(archive)
    session.trim_front(3)  # further back than it is already
    assert session.first_token == 208
    assert len(owned(archive)) < n_before / 3
    add(session, 40, seed=1)
    assert (session.read(0, "k", 208) == values(40, 1)[0][0]).all()
    with pytest.raises(kvstore.InvalidArgument, match="layers begin at token 208"):
        session.truncate(207)
    session.truncate(208)
    assert session.n_committed == 208
    session.close()
    assert_no_leftovers(archive)


def test_trims_leave_forks_whole(archive):
    parent = make(archive, n=200, codec="kvr1")
    fork = parent.fork("f", at=150)
    whole = kept(fork)
    parent.trim_front(180)
    assert kept(fork) == whole
    late = parent.fork("late", at=190)
    assert late.first_token == 180
    assert kept(late, 180) == kept(parent, 180, 190)
    fork.trim_front(100)
    assert_no_leftovers(archive)
    add(late, 30, seed=1)
    add(fork, 30, seed=2)
    parent.close()
    archive.delete_session("p")
    for session in (late, fork):
        session.close()
    assert_no_leftovers(archive)
    assert kept(fork, 100, 150) == tuple(
        np.frombuffer(x, np.float32).reshape(2, 2, 150, 8)[:, :, 100:].tobytes() for x in whole
    )


@pytest.mark.parametrize("spill", [1, 8 << 20])
@pytest.mark.parametrize("first", [3, 16, 24, 25])
def test_a_header_fixed_after_a_trim_leaves_no_trimmed_blocks(archive, monkeypatch, first, spill):
    monkeypatch.setattr(kvstore.writer, "SPILL_BYTES", spill)
    session = make(archive, n=25, fit_tokens=32)
    session.trim_front(first)
    add(session, 12, seed=1)
    assert (session.read_all(first, 25)[0] == values(25)[0][:, :, first:]).all()
    assert (session.read_all(25)[0] == values(12, 1)[0]).all()
    session.close()
    assert_no_leftovers(archive)


def test_a_range_goes_to_a_session_that_was_trimmed(archive):
    source = make(archive, "q", n=64)
    session = make(archive, n=4096 + 64)
    session.trim_front(4096 + 10)  # and with it a chunk of token ids
    done = session.append_range(source, 16, 64)
    assert done.n_shared == 48
    np.testing.assert_array_equal(session.token_ids(4096 + 64), ids_of(64)[16:])
    assert kept(session, 4096 + 64) == kept(source, 16)
    assert archive.match_prefix(ids_of(4096 + 64), MODEL).session.name == "q"
    source.close()
    session.close()
    assert_no_leftovers(archive)


def test_trim_while_appending(archive, monkeypatch):
    monkeypatch.setattr(kvstore.writer, "SPILL_BYTES", 1)
    session = make(archive, n=60)
    k, _ = add(session, 90, seed=1, commit=False)
    archive.session("p").trim_front(50)
    session.commit()
    assert session.first_token == 50
    assert (session.read_all(60)[0] == k).all()
    session.trim_front(120)
    assert (session.read_all(120)[0] == k[:, :, 60:]).all()
    session.close()
    assert_no_leftovers(archive)


# Names.


def test_rename(archive):
    session = make(archive, n=30)
    other = make(archive, "q", n=10)
    handle = archive.session("p")
    whole = kept(session)
    with pytest.raises(kvstore.InvalidArgument, match="'q' exists already"):
        session.rename("q")
    session.rename("r")
    assert archive.names() == ["q", "r"]
    assert session.name == handle.name == "r"
    assert kept(handle) == whole
    add(session, 5, seed=1)  # its appender goes on
    with pytest.raises(kvstore.NotFound):
        archive.session("p")
    other.close()
    session.rename("q", replace=True)
    assert archive.names() == ["q"]
    assert session.n_committed == 35
    with pytest.raises(kvstore.NotFound):
        other.read(0, "k")
    session.rename("q")
    for bad in ("", "a\n", "x" * 256):
        with pytest.raises(kvstore.InvalidArgument, match="session name"):
            session.rename(bad)
    session.close()
    assert_no_leftovers(archive)
    assert archive.match_prefix(ids_of(30), MODEL).session.name == "q"


def test_rename_waits_for_no_appender(tmp_path):
    path = tmp_path / "a.kv"
    with kvstore.open(path, "a") as one:
        held, mine = make(one), make(one, "q")
        add(held, 1, seed=1)
        mine.close()
        with kvstore.open(path, "a") as two:
            # Another archive object of this process shares nothing with the first but the file.
            with pytest.raises(kvstore.Locked):
                two.session("p").rename("x")
            with pytest.raises(kvstore.Locked):
                two.session("q").rename("p", replace=True)
            with pytest.raises(kvstore.Locked):
                two.session("p").truncate(1)
            with pytest.raises(kvstore.Locked):
                two.session("q").fork("p", replace=True)
            assert two.names() == ["p", "q"]
            two.session("p").trim_front(3)
            two.session("p").pin()
        add(held, 1, seed=2)
        assert held.first_token == 3
        assert held.pinned


# What is damaged, and what is wrong.


def test_a_damaged_parent_goes_and_its_forks_stay(archive):
    parent = make(archive, n=100)
    fork = parent.fork("f", at=70)
    sibling = parent.fork("g", at=30)
    add(fork, 20, seed=1)
    for session in (parent, fork):
        session.close()
    expected = {"f": kept(fork), "g": kept(sibling)}
    with archive._backend.write(1) as transaction:
        transaction.put(keys.session_key("p"), b"damaged")
    assert archive.gc() == 0  # whose it was nobody knows
    archive.delete_session("p")
    archive.gc()
    assert_no_leftovers_once_indexed(archive)
    for name, whole in expected.items():
        assert kept(archive.session(name)) == whole
    for name in ("f", "g"):
        archive.delete_session(name)
    assert owned(archive) == {}


def test_a_damaged_fork_keeps_what_it_might_need(archive):
    parent = make(archive, n=100)
    fork, sound = parent.fork("f", at=70), parent.fork("g", at=40)
    parent.close()
    with archive._backend.write(1) as transaction:
        key = keys.session_key("f")
        value = bytes(transaction.get(key))
        transaction.put(key, b"damaged")
    archive.delete_session("p")
    archive.gc()
    with archive._backend.write(1) as transaction:
        transaction.put(key, value)  # restored from a copy
    assert kept(fork)[0] == values(100)[0][:, :, :70].tobytes()
    with archive._backend.write(1) as transaction:
        transaction.put(key, b"damaged")
    archive.delete_session("f")
    archive.gc()
    assert kept(sound)[0] == values(100)[0][:, :, :40].tobytes()
    assert_no_leftovers_once_indexed(archive)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "5", np.float64(3), [1], 101])
def test_wrong_positions(archive, bad):
    session = make(archive, n=100)
    before = stored(archive)
    for use in (lambda: session.fork("f", at=bad), lambda: session.truncate(bad)):
        with pytest.raises(kvstore.InvalidArgument, match=r"session 'p'"):
            use()
    with pytest.raises(kvstore.InvalidArgument, match=r"session 'p'"):
        session.trim_front(bad)
    assert stored(archive) == before


def test_none_is_all_for_forks_alone(archive):
    session = make(archive, n=100)
    assert session.fork("f", at=None).n_committed == 100
    for use in (session.truncate, session.trim_front):
        with pytest.raises(kvstore.InvalidArgument):
            use(None)
    assert session.n_committed == 100


def test_numpy_integers_are_positions(archive):
    session = make(archive, n=100)
    assert session.fork("f", at=np.int64(40)).n_committed == 40
    session.truncate(np.int32(90))
    session.trim_front(np.uint8(20))
    assert (session.n_committed, session.first_token) == (90, 20)
    session.close()
    assert_no_leftovers(archive)


def test_messages_say_what_to_do(archive):
    session = make(archive, n=10)
    add(session, 5, seed=1, commit=False)
    for use, advice in (
        (lambda: session.fork("f", at=12), "commit first"),
        (lambda: session.fork("p"), "truncate"),
        (lambda: session.fork(""), "non-empty"),
        (lambda: session.fork("f", metadata=[1]), "a dict"),
        (lambda: session.truncate(16), "it has 15 tokens"),
        (lambda: session.trim_front(11), "10 tokens are committed"),
        (lambda: session.set_metadata("x"), "a dict"),
        (lambda: session.set_metadata({"x": object()}), "JSON"),
    ):
        with pytest.raises(kvstore.InvalidArgument, match=advice):
            use()
    archive.delete_session("p")
    for use in (lambda: session.fork("f"), lambda: session.truncate(1)):
        with pytest.raises((kvstore.NotFound, kvstore.Closed)):
            use()


def test_what_reads_alone_may_not_do(tmp_path):
    path = tmp_path / "a.kv"
    with kvstore.open(path, "a") as archive:
        make(archive).close()
    with kvstore.open(path) as archive:
        session = archive.session("p")
        for use in (
            lambda: session.fork("f"),
            lambda: session.truncate(5),
            lambda: session.trim_front(5),
            lambda: session.rename("q"),
            lambda: session.pin(),
            lambda: session.set_metadata({}),
            archive.gc,
            archive.reindex,
            lambda: archive.delete_session("p"),
        ):
            with pytest.raises(kvstore.InvalidArgument, match="mode='a'"):
                use()
        assert archive.names() == ["p"]


def test_pins_and_metadata_survive_appends(archive):
    session = make(archive, n=10)
    other = archive.session("p")
    other.pin()
    other.set_metadata({"turn": 1})
    add(session, 10, seed=1)
    assert session.pinned
    assert session.metadata == {"turn": 1}
    session.metadata["turn"] = 2  # a copy
    assert session.metadata == {"turn": 1}
    other.pin(False)
    session.truncate(15)
    assert not session.pinned
    assert session.metadata == {"turn": 1}


def test_reads_without_a_start_begin_with_the_first_token_there_is(archive):
    session = make(archive, "p", 100)
    session.trim_front(70)
    k, _v = session.read_all()
    assert k.shape[2] == 30
    assert (k == session.read_all(70)[0]).all()
    assert (session.read(1, "v") == session.read(1, "v", 70)).all()
    ids = session.token_ids()
    assert ids is None or len(ids) == 30
    for call in (
        lambda: session.read(0, "k", 1.5),
        lambda: session.read(0, "k", None, 3.0),
        lambda: session.read_all("0"),
        lambda: session.read_all(layers=True),
        lambda: session.token_ids(0, 3.0),
        lambda: session.read(0, "k", True),
    ):
        with pytest.raises(kvstore.InvalidArgument):
            call()


@pytest.mark.parametrize("codec", ["raw", "kvr1"])
@pytest.mark.parametrize("first", [11, 12, 13])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_taken_back_to_what_was_trimmed_around_the_end_of_the_raw_head(archive, codec, first, more):
    session = make(archive, n=0, codec=codec, fit_tokens=40)
    add(session, 12, 0)  # a raw head
    add(session, 60, 1)
    session.trim_front(first)
    fork = session.fork("f", first + more)
    expected = session.read(1, "v", first, first + more)
    for one in (session, fork):
        one.truncate(first + more)
        np.testing.assert_array_equal(one.read(1, "v", first, first + more), expected)
        add(one, 50, 2)
        np.testing.assert_array_equal(one.read(1, "v", first, first + more), expected)
        one.close()
