"""Moving sessions between archives: every byte, forks stay forks, all of a session or nothing."""

import shutil
import threading

import numpy as np
import pytest

import kvstore
import kvstore.migration.moving
from kvstore import Model, Raw, Rope, keys

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=Rope.from_theta(1e4, 8))
KINDS = ("lmdb", "memory", "zarr")


def values(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 8), dtype=np.float32)


def add(session, n, seed, *, with_ids=True):
    k, v = values(n, seed)
    ids = np.random.default_rng([seed, 1]).integers(0, 1000, n) if with_ids else None
    session.append(k, v, token_ids=ids)
    session.commit()


def assert_sound(archive, *, leftovers=0):
    report = archive.verify(decode=True)
    assert report.ok, report.problems
    assert report.n_leftover == leftovers


def stored(path):
    """All keys and values but the archive record, which says when the archive began."""
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def place(tmp_path, kind, name):
    return {
        "lmdb": str(tmp_path / name),
        "memory": f"memory:{tmp_path / name}",
        "zarr": f"zarr:{tmp_path / name}",
    }[kind]


@pytest.fixture
def source(sessions_of_every_kind, tmp_path):
    shutil.copytree(sessions_of_every_kind, tmp_path / "src.kv")
    return str(tmp_path / "src.kv")


# -- every byte


@pytest.mark.parametrize("kind", KINDS)
def test_all_sessions_move_byte_for_byte_there_and_back(source, tmp_path, kind):
    there, back = place(tmp_path, kind, "there"), place(tmp_path, "lmdb", "back")
    seen = []
    done = kvstore.migrate(source, there, progress=lambda n, total: seen.append((n, total)))
    with kvstore.open(source) as archive:
        assert done.names == sorted(archive.names()) == sorted(done.moved)
    assert done.verified
    assert done.recoded == done.skipped == done.flattened == []
    assert stored(there) == stored(source)
    assert seen == sorted(seen, key=lambda pair: pair[0])
    assert seen[-1][0] == seen[-1][1] > 0
    kvstore.migrate(there, back, verify=False)
    assert stored(back) == stored(source)
    with kvstore.open(there) as archive:
        assert_sound(archive)
    assert not list(tmp_path.glob("*.partial"))


def test_values_are_written_once_however_many_share_them(source, tmp_path):
    done = kvstore.migrate(source, tmp_path / "b.kv")
    kinds = (keys.FRAME, keys.TAIL, keys.HEAD, keys.HEADER, keys.TOKENS)
    sizes = [len(value) for key, value in stored(source).items() if key[:1] in kinds]
    assert done.n_bytes == sum(sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [("fork", "parent"), ("bare", "fork of a fork"), ("ranges",)])
def test_sessions_one_after_the_other_into_an_archive_that_is_there(source, tmp_path, kind, order):
    """Forks without their parents, parents after forks: in the end all is as in the source."""
    there = place(tmp_path, kind, "b")
    for name in order:
        kvstore.migrate(source, there, sessions=name)
        with kvstore.open(there) as archive:
            assert_sound(archive)
            assert name in archive
    kvstore.migrate(source, there, resume=True)
    assert stored(there) == stored(source)
    with kvstore.open(there, "a") as archive:
        assert_sound(archive)
        assert archive.gc() == 0


def test_patterns_choose_sessions(source, tmp_path):
    with kvstore.open(source, "a") as archive:
        archive.session("raw").rename("[1]*")
    done = kvstore.migrate(source, tmp_path / "b.kv", sessions=["fork*", "tkv1/?*", "[1]*"])
    assert sorted(done.moved) == ["[1]*", "fork", "fork of a fork", "tkv1/ü 1"]
    with pytest.raises(kvstore.NotFound, match=r"no session 'x\*'; there are '\[1\]\*'"):
        kvstore.migrate(source, tmp_path / "c.kv", sessions=["fork", "x*"])
    assert not (tmp_path / "c.kv").exists()


def test_prompts_match_as_before(source, tmp_path):
    kvstore.migrate(source, tmp_path / "b.kv")
    kvstore.migrate(source, tmp_path / "c.kv", sessions="fork")
    with kvstore.open(source) as a, kvstore.open(tmp_path / "b.kv") as b:
        for name in a.names():
            session = a.session(name)
            ids = session.token_ids(0) if session.first_token == 0 else None
            if ids is not None:
                ours, theirs = (x.match_prefix(ids, session.model) for x in (a, b))
                assert ours.n_tokens == theirs.n_tokens
        ids = a.session("fork").token_ids()
    with kvstore.open(tmp_path / "c.kv") as c:
        match = c.match_prefix(ids, MODEL)
        assert (match.session.name, match.n_tokens) == ("fork", len(ids))


def test_what_was_moved_goes_on_as_it_would_have(source, tmp_path):
    kvstore.migrate(source, tmp_path / "b.kv")
    for path in (source, tmp_path / "b.kv"):
        with kvstore.open(path, "a") as archive:
            for seed, name in enumerate(archive.names()):
                session = archive.session(name)
                if session.model == MODEL:
                    add(session, 40, seed, with_ids=name != "without ids")
            assert_sound(archive)
    ours, theirs = stored(source), stored(tmp_path / "b.kv")
    frames = (keys.FRAME, keys.TAIL, keys.HEAD, keys.TOKENS)
    # Owners of forks that begin to append are random.
    assert sorted(len(v) for k, v in ours.items() if k[:1] in frames) == sorted(
        len(v) for k, v in theirs.items() if k[:1] in frames
    )


def test_archives_that_are_open_already(source, tmp_path):
    with kvstore.open(source) as a, kvstore.open(tmp_path / "b.kv", "a") as b:
        done = kvstore.migrate(a, b, sessions="raw")
        assert done.moved == ["raw"]
        assert b.names() == ["raw"]
        with pytest.raises(kvstore.InvalidArgument, match="mode='r'"):
            kvstore.migrate(b, a)


@pytest.mark.parametrize("version", [1, 2])
def test_old_archives_move(tmp_path, version):
    golden = __file__.rpartition("/")[0] + f"/golden/archives/format{version}.kv"
    old = shutil.copytree(golden, tmp_path / "old.kv")
    kvstore.migrate(old, tmp_path / "b.kv")
    before, after = stored(old), stored(tmp_path / "b.kv")
    lists = (keys.USER, keys.PREFIX)
    assert {k: v for k, v in before.items() if k[:1] not in lists} == {
        k: v for k, v in after.items() if k[:1] not in lists
    }
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert_sound(archive)


# -- refusals: nothing is changed


def test_the_same_place_and_places_inside_are_refused(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    for target in (source, source + "/", tmp_path / "link", f"zarr:{source}"):
        with pytest.raises(kvstore.InvalidArgument, match="the same archive"):
            kvstore.migrate(source, target)
    with pytest.raises(kvstore.InvalidArgument, match="inside"):
        kvstore.migrate(source, f"{source}/b.kv")
    kvstore.migrate(source, f"memory:{tmp_path}")
    with pytest.raises(kvstore.InvalidArgument, match="the same archive"):
        kvstore.migrate(f"memory:{tmp_path}", f"memory:{tmp_path}")


def test_wrong_places(source, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    with pytest.raises(kvstore.NotFound, match="parent directory does not exist"):
        kvstore.migrate(source, tmp_path / "no" / "b.kv")
    with pytest.raises(kvstore.InvalidArgument, match="a file"):
        kvstore.migrate(source, tmp_path / "file")
    with pytest.raises(kvstore.KvError, match="no archive"):
        kvstore.migrate(source, tmp_path / "folder")
    with pytest.raises(kvstore.NotFound):
        kvstore.migrate(tmp_path / "none.kv", tmp_path / "b.kv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "src.kv"]
    (tmp_path / "empty").mkdir()
    kvstore.migrate(source, tmp_path / "empty")
    assert stored(tmp_path / "empty") == stored(source)


def test_sessions_that_are_there_are_never_replaced(source, tmp_path):
    there = tmp_path / "b.kv"
    with (
        kvstore.open(there, "a") as archive,
        archive.create_session("raw", model=MODEL) as session,
    ):
        add(session, 7, 0)
    before = stored(there)
    with pytest.raises(kvstore.InvalidArgument, match="'raw' exists, and is another one"):
        kvstore.migrate(source, there, resume=True)
    assert stored(there) == before
    kvstore.migrate(source, there, sessions="fork")
    with pytest.raises(kvstore.InvalidArgument, match="there already; resume=True passes over it"):
        kvstore.migrate(source, there, sessions=["fork", "bare"])
    assert kvstore.migrate(source, there, sessions="fork", resume=True).skipped == ["fork"]
    with kvstore.open(there, "a") as archive:
        archive.session("fork").rename("other")
    with pytest.raises(kvstore.InvalidArgument, match="'fork' already, as 'other'"):
        kvstore.migrate(source, there, sessions="fork")
    with kvstore.open(there, "a") as archive:
        assert_sound(archive)
        assert archive.names() == ["other", "raw"]


def test_owners_with_other_frames_are_refused(source, tmp_path):
    there = tmp_path / "b.kv"
    kvstore.migrate(source, there, sessions="tkv1/ü 1")
    with kvstore.open(source, "a") as archive, kvstore.open(there, "a") as other:
        # Both go on, and differently: the owner is not the same any more.
        add(archive.session("tkv1/ü 1"), 50, 11)
        add(other.session("tkv1/ü 1"), 50, 12)
        archive.session("tkv1/ü 1").fork("late", at=140)
        other.session("tkv1/ü 1").close()
    before = stored(there)
    with pytest.raises(kvstore.InvalidArgument, match="has other frames, for session 'tkv1/ü 1'"):
        kvstore.migrate(source, there, sessions="late")
    assert stored(there) == before
    with kvstore.open(there) as archive:
        assert_sound(archive)


def test_frames_that_an_appender_may_write_are_not_put_in_its_way(source, tmp_path):
    there = tmp_path / "b.kv"
    kvstore.migrate(source, there, sessions="tkv1/ü 1")
    with kvstore.open(source, "a") as archive:
        add(archive.session("tkv1/ü 1"), 60, 11)
        archive.session("tkv1/ü 1").fork("late", at=160)
    before = stored(there)
    with pytest.raises(kvstore.InvalidArgument, match=r"has (other|fewer) frames"):
        kvstore.migrate(source, there, sessions="late")
    assert stored(there) == before


def test_a_session_that_is_appended_to_there_is_left_alone(source, tmp_path):
    there = tmp_path / "b.kv"
    kvstore.migrate(source, there, sessions="parent")
    with kvstore.open(there, "a") as archive:
        session = archive.session("parent")
        session.append(*values(3), token_ids=[1, 2, 3])
        with pytest.raises(kvstore.Locked):
            kvstore.migrate(source, archive, sessions="bare")
        assert archive.names() == ["parent"]
        session.close()
        kvstore.migrate(source, archive, sessions="bare")
        assert_sound(archive)


# -- damage


def damage(path, prefix, at=-3):
    """Flip a bit of the first value under a prefix, the largest one; returns its key."""
    with kvstore.open(path, "a") as archive, archive._backend.write(1) as transaction:
        found = [(len(v), key, bytes(v)) for key, v in transaction.scan(prefix)]
        _, key, value = max(found)
        data = bytearray(value)
        data[at] ^= 1
        transaction.put(key, bytes(data))
    return key


@pytest.mark.parametrize("prefix", [keys.FRAME, keys.TAIL, keys.HEAD, keys.HEADER, keys.TOKENS])
@pytest.mark.parametrize("kind", ["new", "there"])
def test_damage_is_named_and_does_not_move(source, tmp_path, prefix, kind):
    there = tmp_path / "b.kv"
    if kind == "there":
        kvstore.migrate(source, there, sessions="empty")
        before = stored(there)
    key = damage(source, prefix)
    with pytest.raises((kvstore.Corrupt, kvstore.Truncated), match="session '") as caught:
        kvstore.migrate(source, there, resume=True)
    what = {keys.TAIL: "tail|cut block", keys.FRAME: "block", keys.TOKENS: "token ids chunk"}
    assert any(word in str(caught.value) for word in what.get(prefix, "hea").split("|")), key
    if kind == "new":
        assert not there.exists()
        return
    with kvstore.open(there) as archive:
        assert_sound(archive)  # whole sessions, and nothing of the damaged one
        assert "empty" in archive.names()
        assert before.items() <= stored(there).items()


def test_damage_that_is_not_asked_for_is_no_obstacle(source, tmp_path):
    with kvstore.open(source) as archive, archive._read() as snapshot:
        owner = archive._catalog.record(snapshot, "raw").owner
    damage(source, keys.owner_prefix(keys.FRAME, owner))
    names = [name for name in stored_names(source) if name != "raw"]
    kvstore.migrate(source, tmp_path / "b.kv", sessions=names)
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert_sound(archive)
    with pytest.raises(kvstore.Corrupt, match="session 'raw' layer"):
        kvstore.migrate(source, tmp_path / "c.kv")
    assert not (tmp_path / "c.kv").exists()


def stored_names(path):
    with kvstore.open(path) as archive:
        return archive.names()


def test_a_missing_frame_is_named(source, tmp_path):
    with kvstore.open(source, "a") as archive, archive._backend.write(1) as transaction:
        record = archive._catalog.record(transaction, "raw")
        transaction.delete(keys.frame_key(record.owner, 1, "v", 3))
    with pytest.raises(kvstore.Corrupt, match="session 'raw' layer 1 v block 3: missing"):
        kvstore.migrate(source, tmp_path / "b.kv", sessions="raw")
    assert list(tmp_path.glob("b.kv*")) == []


def test_a_record_that_cannot_be_read_is_refused_before_anything_is_made(source, tmp_path):
    damage(source, keys.session_key("raw"))
    with pytest.raises(kvstore.Corrupt, match="raw"):
        kvstore.migrate(source, tmp_path / "b.kv")
    assert list(tmp_path.glob("b.kv*")) == []


@pytest.mark.parametrize("kind", ["new", "there"])
def test_what_is_written_wrong_is_never_published(source, tmp_path, monkeypatch, kind):
    """A backend that stores another byte: found before the archive, or the session, appears."""
    from kvstore.backends._transactions import LmdbTransaction

    there = tmp_path / "b.kv"
    if kind == "there":
        kvstore.open(there, "a").close()
    put = LmdbTransaction.put
    wrong = [20]

    def putting(self, key, value):
        if key[:1] == keys.FRAME:
            wrong[0] -= 1
            if wrong[0] == 0:
                value = bytes(value)[:-1] + bytes([value[-1] ^ 1])
        put(self, key, value)

    monkeypatch.setattr(LmdbTransaction, "put", putting)
    with pytest.raises(kvstore.Corrupt, match=r"layer \d . block \d+ of .*'raw' differs after"):
        kvstore.migrate(source, there, sessions="raw")
    monkeypatch.undo()
    assert there.exists() == (kind == "there")
    if kind == "there":
        assert stored(there) == {}
    else:
        # What was written wrong is not taken for right by its length.
        with pytest.raises(kvstore.Corrupt, match="differs after"):
            kvstore.migrate(source, there, sessions="raw", resume=True)
        shutil.rmtree(tmp_path / "b.kv.partial")
        kvstore.migrate(source, there, sessions="raw")


# -- one snapshot, others at work


def test_only_what_was_committed_when_it_began_moves(source, tmp_path, monkeypatch):
    before = stored(source)
    with kvstore.open(source, "a") as archive:
        session = archive.session("raw")
        session.append(*values(30), token_ids=np.arange(30))  # not committed

        def meanwhile(n_bytes, total):
            if session.n_committed == 105:
                session.commit()
                archive.delete_session("tkv1/ü 1")

        kvstore.migrate(source, tmp_path / "b.kv", progress=meanwhile)
        assert session.n_committed == 135
    assert stored(tmp_path / "b.kv") == before


def test_gc_of_the_target_leaves_what_comes_in(source, tmp_path):
    with kvstore.open(tmp_path / "b.kv", "a") as archive:
        kvstore.migrate(source, archive, progress=lambda n, total: archive.gc())
        assert_sound(archive)
    assert stored(tmp_path / "b.kv") == stored(source)


def test_frames_that_are_deleted_meanwhile_are_missed(source, tmp_path, monkeypatch):
    """What is there of shared frames is not moved again; its last user may go in between."""
    from kvstore.migration import adding

    with kvstore.open(tmp_path / "b.kv", "a") as archive:
        kvstore.migrate(source, archive, sessions="bare")
        indexed = adding.indexed_ids

        def deleting(snapshot, item):
            archive.delete_session("bare")
            return indexed(snapshot, item)

        monkeypatch.setattr(adding, "indexed_ids", deleting)
        with pytest.raises(kvstore.Locked, match="were deleted meanwhile; try again"):
            kvstore.migrate(source, archive, sessions="fork")
        monkeypatch.undo()
        assert archive.names() == []
        assert archive.verify().n_leftover <= 1  # the model, which deleting leaves
        kvstore.migrate(source, archive, sessions=["bare", "fork"])
        assert_sound(archive)


def test_many_sessions_take_few_transactions_and_open_files(tmp_path):
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        parent = archive.create_session("0", model=MODEL, codec=Raw(), block_tokens=16)
        add(parent, 40, 0)
        for i in range(1, 600):
            parent.fork(f"{i}", at=17 + i % 20)
            if i % 3 == 0:
                with archive.session(f"{i}") as session:
                    add(session, 1, i)
        parent.close()
    kvstore.migrate(tmp_path / "a.kv", tmp_path / "b.kv")
    assert stored(tmp_path / "b.kv") == stored(tmp_path / "a.kv")


# -- no room


def test_quota_of_the_target(source, tmp_path):
    there = tmp_path / "b.kv"
    rng = np.random.default_rng(0)
    with kvstore.open(there, "a", quota_bytes=1 << 20) as archive:
        for i in range(6):
            with archive.create_session(f"old {i}", model=MODEL, codec=Raw()) as session:
                session.append(*rng.standard_normal((2, 2, 2, 500, 8), dtype=np.float32))
                session.commit()
        kvstore.migrate(source, archive)
        assert set(stored_names(source)) <= set(archive.names())
        assert_sound(archive)
    # A session that is larger than the quota leaves nothing behind.
    with (
        kvstore.open(source, "a") as archive,
        archive.create_session("large", model=MODEL, codec=Raw()) as session,
    ):
        session.append(*rng.standard_normal((2, 2, 2, 9000, 8), dtype=np.float32))
        session.commit()
    with kvstore.open(there, "a") as archive:
        names = archive.names()
        with pytest.raises(kvstore.Full, match="quota"):
            kvstore.migrate(source, archive, sessions="large")
        assert "large" not in archive.names()
        assert set(archive.names()) <= set(names)
        assert_sound(archive)


def test_a_map_that_is_full_leaves_the_rest_for_another_try(source, tmp_path, monkeypatch):
    monkeypatch.setattr(kvstore.migration.moving, "BATCH_BYTES", 1 << 20)
    with (
        kvstore.open(source, "a") as archive,
        archive.create_session("large", model=MODEL, codec=Raw()) as session,
    ):
        x = np.random.default_rng(0).standard_normal((2, 2, 2, 40_000, 8), dtype=np.float32)
        session.append(*x)
        session.commit()
    with pytest.raises(kvstore.Full, match="map is used up"):
        kvstore.migrate(source, tmp_path / "b.kv", dst_options={"map_size": 6 << 20})
    assert not (tmp_path / "b.kv").exists()
    with pytest.raises(kvstore.InvalidArgument, match="did not end; go on with resume=True"):
        kvstore.migrate(source, tmp_path / "b.kv")
    kvstore.migrate(source, tmp_path / "b.kv", resume=True)
    assert stored(tmp_path / "b.kv") == stored(source)


def test_two_migrations_to_one_place_do_not_meet(source, tmp_path):
    inside, results = threading.Event(), []

    def slow(n_bytes, total):
        inside.set()
        done.wait(20)

    done = threading.Event()
    first = threading.Thread(
        target=lambda: results.append(kvstore.migrate(source, tmp_path / "b.kv", progress=slow))
    )
    first.start()
    assert inside.wait(20)
    with pytest.raises(kvstore.Locked, match="another migration is at it"):
        kvstore.migrate(source, tmp_path / "b.kv", resume=True)
    done.set()
    first.join()
    assert results[0].verified
    assert stored(tmp_path / "b.kv") == stored(source)


def test_a_place_that_is_taken_meanwhile(source, tmp_path):
    def take(n_bytes, total):
        (tmp_path / "b.kv").mkdir(exist_ok=True)
        (tmp_path / "b.kv" / "x").touch()

    with pytest.raises(kvstore.InvalidArgument, match="is whole, rename it"):
        kvstore.migrate(source, tmp_path / "b.kv", progress=take)
    assert stored(tmp_path / "b.kv.partial") == stored(source)
