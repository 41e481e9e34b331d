"""What zarr's own tools see of an archive is what the engine reads, whatever was done to it."""

import json
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.kvr1 import KVR1
from kvcodecs.raw import Raw
from kvcodecs.tkv1 import TKV1

import kvstore
from kvstore.backends.zarr.places import group_of

BLOCK = 128
MODEL = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, dtype="float32")
CODECS = {"kvr1": KVR1(rel_step=0.25), "tkv1": TKV1(rel_step=0.25), "raw": Raw()}


def values(n_tokens, seed=0, model=MODEL):
    rng = np.random.default_rng(seed)
    shape = (model.n_layers, model.layers[0].heads, n_tokens, model.layers[0].head_dim_k)
    x = rng.normal(size=shape).astype(np.float32)
    return x, x[:, :, :, ::-1] + 1


def add(archive, name, n_tokens, seed=0, codec="kvr1", model=MODEL, **options):
    """Store a session of random values, committed."""
    session = archive.create_session(
        name, model=model, codec=CODECS[codec], block_tokens=BLOCK, fit_tokens=64, **options
    )
    if n_tokens:
        session.append(*values(n_tokens, seed, model))
        session.commit()
    return session


def go_on(session, n_tokens, seed):
    session.append(*values(n_tokens, seed, session.model))
    session.commit()


def zarr_group_of(path, name):
    """Return the group of a session, found by its attribute as a user may."""
    root = zarr.open_group(str(path), mode="r")
    found = [
        group for _, group in root.groups() if group.attrs.get("kvstore", {}).get("session") == name
    ]
    assert len(found) == 1, (name, found)
    return found[0]


def check_session(path, archive, name):
    """Every array has the session's whole blocks, equal to what the engine decodes."""
    session = archive.session(name)
    group = zarr_group_of(path, name)
    info = session.info()
    shown = {name: array for name, array in group.arrays() if array.shape != (0,)}
    for stream in info.streams:
        n_sealed = 0
        if stream.n_tokens - max(stream.n_head_tokens, 0) > 0 or stream.header_bytes:
            n_sealed = stream.n_tokens // stream.block_tokens
        array = shown.pop(f"{stream.kind}_{stream.layer:03d}", None)
        has_blocks = n_sealed or (session.finished and stream.header_bytes)
        if not has_blocks or not stream.n_tokens:
            assert array is None
            continue
        n_shown = stream.n_tokens if session.finished else n_sealed * stream.block_tokens
        assert array.shape == (stream.heads, n_shown, stream.head_dim)
        got = array[:]
        first = group.attrs["kvstore"]["first"]
        whole = -(-first // stream.block_tokens) * stream.block_tokens
        assert not np.isnan(got[:, whole:]).any()
        # The first tokens may be kept raw: zarr sees them as their block has them.
        begin = max(whole, stream.n_head_tokens)
        if begin < array.shape[1]:
            expected = session.read(
                stream.layer, stream.kind, begin, array.shape[1], k_state="pre", dtype="float32"
            )
            np.testing.assert_array_equal(got[:, begin:], expected)
    assert not [name for name in shown if not name.startswith("headers")]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a.kv"


@pytest.fixture
def archive(place):
    with kvstore.open(f"zarr:{place}", "a") as archive:
        yield archive


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_reads_what_the_engine_reads(place, archive, codec):
    session = add(archive, "chat/42 ü", 3 * BLOCK + 7, codec=codec)
    check_session(place, archive, "chat/42 ü")
    go_on(session, BLOCK, seed=1)
    check_session(place, archive, "chat/42 ü")
    assert (place / group_of("chat/42 ü") / "k_001" / "c" / "0" / "3" / "0").exists()


def test_the_archive_is_found_without_its_prefix(place, archive):
    add(archive, "a", BLOCK)
    with kvstore.open(place) as again:
        assert again.names() == ["a"]
        assert again.info().backend == "zarr"


def test_zarr_lists_sessions_and_nothing_else(place, archive, recwarn):
    add(archive, "a", BLOCK)
    add(archive, "b", 5)
    archive.delete_session("a")
    root = zarr.open_group(str(place), mode="r")
    assert [name for name, _ in root.groups()] == ["b"]
    assert not [w for w in recwarn if "Zarr hierarchy" in str(w.message)]


def test_a_fork_has_all_its_blocks_and_survives_its_parent(place, archive):
    parent = add(archive, "a", 4 * BLOCK + 9)
    fork = parent.fork("b", 2 * BLOCK + 50)
    check_session(place, archive, "b")
    before = fork.read_all(dtype="float32")
    chunk = "k_000/c/0/1/0"
    assert (place / "b" / chunk).stat().st_ino == (place / "a" / chunk).stat().st_ino
    parent.close()
    archive.delete_session("a")
    check_session(place, archive, "b")
    go_on(fork, 2 * BLOCK, seed=2)
    check_session(place, archive, "b")
    np.testing.assert_array_equal(fork.read_all(0, 2 * BLOCK + 50, dtype="float32")[0], before[0])
    assert archive.verify(decode=True).ok


def test_taking_back_and_going_on_shows_the_new_values_only(place, archive):
    session = add(archive, "a", 4 * BLOCK)
    fork = session.fork("b")
    old = fork.read_all(dtype="float32")
    session.truncate(BLOCK + 30)
    check_session(place, archive, "a")
    go_on(session, 3 * BLOCK, seed=5)
    check_session(place, archive, "a")
    check_session(place, archive, "b")
    np.testing.assert_array_equal(fork.read_all(dtype="float32")[1], old[1])
    assert archive.verify(decode=True).ok


def test_a_replaced_session_gets_another_group_until_the_old_one_is_collected(place):
    with kvstore.open(f"zarr:{place}", "a", grace_seconds=0) as archive:
        add(archive, "a", BLOCK).close()
        add(archive, "a", 2 * BLOCK, seed=1, replace=True).close()
        check_session(place, archive, "a")
        assert (place / "a.2" / "zarr.json").exists()
        archive.gc()
        assert not (place / "a").exists()
        add(archive, "a", 3 * BLOCK, seed=2, replace=True)
        check_session(place, archive, "a")
        assert (place / "a" / "v_000" / "zarr.json").exists()


def test_a_snapshot_reads_on_while_what_it_reads_is_deleted(place, archive):
    session = add(archive, "a", 3 * BLOCK)
    expected = session.read(1, "k", dtype="float32")
    with kvstore.open(place) as reader:
        stale = reader.session("a")
        with reader._read() as snapshot:
            record = stale._record(snapshot)
            session.truncate(10)
            go_on(session, 3 * BLOCK, seed=7)
            from kvstore.reader import Request

            out = np.empty_like(expected)
            stale._reader.read(snapshot, record, [Request(1, "k", 0, 3 * BLOCK, out)], "pre", 1)
            np.testing.assert_array_equal(out, expected)


def test_after_the_grace_period_a_snapshot_is_told(place):
    with kvstore.open(f"zarr:{place}", "a", grace_seconds=0) as archive:
        session = add(archive, "a", 3 * BLOCK)
        with kvstore.open(place) as reader, reader._read() as snapshot:
            stale = reader.session("a")
            record = stale._record(snapshot)
            session.close()
            archive.delete_session("a")
            archive.gc()
            from kvstore.reader import Request

            out = np.empty((2, 3 * BLOCK, 8), np.float32)
            with pytest.raises(NotFound, match="grace"):
                stale._reader.read(snapshot, record, [Request(1, "k", 0, 3 * BLOCK, out)], "pre", 1)


def chunk_path(place, stream, block, group="a"):
    return place / group / stream / "c" / "0" / str(block) / "0"


def test_a_lost_chunk_is_found_by_the_engine_and_is_nan_to_zarr(place, archive):
    session = add(archive, "a", 3 * BLOCK)
    chunk_path(place, "v_001", 1).unlink()
    with pytest.raises(Corrupt, match="missing"):
        session.read(1, "v")
    assert not archive.verify().ok
    got = zarr_group_of(place, "a")["v_001"][:]
    assert np.isnan(got[:, BLOCK : 2 * BLOCK]).all()
    assert not np.isnan(got[:, :BLOCK]).any()


@pytest.mark.parametrize("other", ["v_000", "k_001"])
def test_a_chunk_of_another_stream_is_refused_by_both(place, archive, other):
    session = add(archive, "a", 3 * BLOCK)
    shutil.copy(chunk_path(place, other, 1), chunk_path(place, "k_000", 1))
    with pytest.raises(Corrupt):
        session.read(0, "k")
    with pytest.raises(Corrupt):
        zarr_group_of(place, "a")["k_000"][:]


def test_two_chunks_of_a_stream_that_changed_places_are_found_by_the_engine(place, archive):
    session = add(archive, "a", 3 * BLOCK)
    one, two = (chunk_path(place, "k_000", block) for block in (0, 1))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    with pytest.raises(Corrupt):
        session.read(0, "k")


def test_writing_through_zarr_says_what_to_do_instead(place, archive):
    add(archive, "a", 3 * BLOCK)
    before = chunk_path(place, "k_000", 1).read_bytes()
    array = zarr.open_group(str(place), mode="r+")["a/k_000"]
    with pytest.raises(InvalidArgument, match=r"session\.append"):
        array[:, :BLOCK] = 1.0
    with pytest.raises(InvalidArgument, match=r"session\.append"):
        array[:, 5] = 1.0
    assert chunk_path(place, "k_000", 1).read_bytes() == before
    check_session(place, archive, "a")


def test_shards_read_as_the_chunks_did(place):
    with kvstore.open(f"zarr:{place}", "a", grace_seconds=0) as archive:
        session = add(archive, "a", 9 * BLOCK + 5)
        session.close()
        fork = archive.session("a").fork("b", 4 * BLOCK + 3)
        expected = archive.session("a").read_all(dtype="float32")
        n_bytes = sum(p.stat().st_size for p in (place / "a").rglob("c/0/*/0"))
        assert archive.seal(["a"], shard_bytes=n_bytes // 4 // 3) == ["a"]
        check_session(place, archive, "a")
        assert np.array_equal(archive.session("a").read_all(dtype="float32")[0], expected[0])
        archive.gc()
        assert not list((place / "a").rglob("c/0/*/0"))
        assert 8 <= len(list((place / "a").rglob("c.0.*.0"))) <= 20
        check_session(place, archive, "a")
        check_session(place, archive, "b")
        go_on(fork, BLOCK, seed=3)
        third = archive.session("a").fork("c", 3 * BLOCK)
        check_session(place, archive, "c")
        archive.delete_session("a")
        archive.gc()
        go_on(third, BLOCK, seed=4)
        check_session(place, archive, "b")
        check_session(place, archive, "c")
        assert archive.verify(decode=True).ok


def test_a_window_layer_begins_later(place, archive):
    layers = (
        kvstore.LayerSpec(2, 8, 8),
        kvstore.LayerSpec(2, 8, 8, window=64),
    )
    model = kvstore.Model(name="w", layers=layers, dtype="float16")
    rng = np.random.default_rng(0)
    session = archive.create_session("a", model=model, block_tokens=BLOCK, fit_tokens=64)
    long, short = (rng.normal(size=(2, n, 8)).astype(np.float16) for n in (300, 200))
    session.append([long, short], [long, short])
    session.commit()
    group = zarr_group_of(place, "a")
    assert group["k_000"].shape[1] == 256
    assert group["k_001"].shape[1] == 128
    assert group["k_001"].attrs["kvstore"]["start"] == 100
    assert group["k_001"].dtype == np.float16
    expected = session.read(1, "k", 100, 228, dtype="float16")
    np.testing.assert_array_equal(group["k_001"][:], expected)
    assert group["k_000"].metadata.dimension_names != group["k_001"].metadata.dimension_names


def test_interleaved_rope_shows_k_in_the_order_of_the_tensor(place, archive):
    rope = kvstore.Rope(np.array([1.0, 0.1, 0.01], np.float32), style="interleaved")
    model = kvstore.Model.uniform(
        name="g", n_layers=1, n_kv_heads=2, head_dim=8, rope=rope, dtype="float32"
    )
    session = add(archive, "a", 2 * BLOCK, model=model)
    got = zarr_group_of(place, "a")["k_000"][:]
    np.testing.assert_array_equal(got, session.read(0, "k", k_state="pre", dtype="float32"))


def test_info_tells_the_group(place, archive):
    add(archive, "a b", BLOCK)
    info = archive.session("a b").info()
    assert (info.zarr_group, info.finished) == ("a=20b", False)
    assert zarr.open_group(str(place), mode="r")[f"{info.zarr_group}/v_001"].shape[1] == BLOCK
    archive.seal()
    assert archive.session("a b").info().finished
    assert archive.sessions()[0].finished


def test_metadata_and_model_are_attributes(place, archive):
    add(archive, "a", BLOCK, metadata={"user": "x"})
    about = zarr_group_of(place, "a").attrs["kvstore"]
    assert about["metadata"] == {"user": "x"}
    assert kvstore.Model.from_json(about["model"]) == MODEL
    archive.session("a").set_metadata({"user": "y"})
    assert zarr_group_of(place, "a").attrs["kvstore"]["metadata"] == {"user": "y"}


def test_documents_are_plain_json(place, archive):
    add(archive, "a", BLOCK)
    for path in place.rglob("zarr.json"):
        document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
        assert document["zarr_format"] == 3


@pytest.mark.parametrize("n_tokens", [BLOCK - 20, BLOCK])
def test_a_finished_session_of_less_than_a_block_is_shown(place, archive, n_tokens):
    add(archive, "a", n_tokens).close()
    archive.seal(["a"], shard_bytes=1 << 14)
    check_session(place, archive, "a")
    array = zarr_group_of(place, "a")["k_001"]
    np.testing.assert_array_equal(array[:], archive.session("a").read(1, "k", dtype="float32"))
    archive.gc()
    check_session(place, archive, "a")


@pytest.mark.parametrize("n_bytes", [None, 1 << 14])
@pytest.mark.parametrize("cut", [None, 2 * BLOCK + 40])
def test_a_finished_session_shows_its_last_tokens_too(place, archive, n_bytes, cut):
    session = add(archive, "a", 3 * BLOCK + 45)
    session.close()
    if cut is not None:  # the last tokens are a part of another session's block
        archive.session("a").fork("b", cut)
        session = archive.session("b")
    archive.seal([session.name], shard_bytes=n_bytes)
    check_session(place, archive, session.name)
    array = zarr_group_of(place, session.name)["v_001"]
    assert array.shape[1] == session.n_committed
    expected = session.read(1, "v", dtype="float32")
    np.testing.assert_array_equal(array[:], expected)
    np.testing.assert_array_equal(array[:, -3], expected[:, -3])
    np.testing.assert_array_equal(array[0, -50:, 2], expected[0, -50:, 2])
    archive.gc()
    check_session(place, archive, session.name)
    if cut is not None:
        archive.delete_session("a")
        archive.gc()
        check_session(place, archive, session.name)
    assert archive.verify(decode=True).ok


class ZarrView(RuleBasedStateMachine):
    """Whatever is done, zarr sees the whole blocks of every session."""

    @initialize(grace=st.sampled_from([0, 3600]))
    def begin(self, grace):
        import tempfile

        self.folder = tempfile.mkdtemp()
        self.place = f"{self.folder}/a.kv"
        self.grace = grace
        self.archive = kvstore.open(f"zarr:{self.place}", "a", grace_seconds=grace)
        self.seed = 0

    def names(self, *, open_ended=False):
        names = self.archive.names()
        return [n for n in names if not (open_ended and self.archive.session(n).finished)]

    def choose(self, data, **how):
        return data.draw(st.sampled_from(self.names(**how)))

    @rule(name=st.sampled_from("abc"), n=st.sampled_from([0, 5, 130, 300]))
    def create(self, name, n):
        self.seed += 1
        replace = name in self.archive
        add(self.archive, name, n, seed=self.seed, replace=replace).close()

    @precondition(lambda self: self.names(open_ended=True))
    @rule(data=st.data(), n=st.sampled_from([1, 60, 128, 200]))
    def append(self, data, n):
        self.seed += 1
        with self.archive.session(self.choose(data, open_ended=True)) as session:
            go_on(session, n, self.seed)

    @precondition(lambda self: self.names())
    @rule(data=st.data(), name=st.sampled_from("def"), share=st.floats(0, 1))
    def fork(self, data, name, share):
        parent = self.archive.session(self.choose(data))
        at = max(int(parent.n_committed * share), min(parent.first_token, parent.n_committed))
        if name != parent.name:
            parent.fork(name, at, replace=name in self.archive)

    @precondition(lambda self: self.names(open_ended=True))
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data, share):
        with self.archive.session(self.choose(data, open_ended=True)) as session:
            session.truncate(max(int(session.n_committed * share), session.first_token))

    @precondition(lambda self: self.names(open_ended=True))
    @rule(data=st.data(), n=st.integers(1, 200))
    def trim(self, data, n):
        session = self.archive.session(self.choose(data, open_ended=True))
        session.trim_front(min(session.first_token + n, session.n_committed))

    @precondition(lambda self: self.names(open_ended=True))
    @rule(data=st.data())
    def append_range(self, data):
        source = self.archive.session(self.choose(data))
        start, stop = source.first_token, source.n_committed
        with self.archive.session(self.choose(data, open_ended=True)) as session:
            if stop - start > 0 and session.n_committed + stop - start < 2000:
                session.append_range(source, start, stop)

    @precondition(lambda self: self.names())
    @rule(data=st.data(), name=st.sampled_from("xyz"))
    def rename(self, data, name):
        self.archive.session(self.choose(data)).rename(name, replace=name in self.archive)

    @precondition(lambda self: self.names())
    @rule(data=st.data())
    def delete(self, data):
        self.archive.delete_session(self.choose(data))

    @precondition(lambda self: self.names())
    @rule(data=st.data(), n_bytes=st.sampled_from([1 << 10, 1 << 14, None]))
    def seal(self, data, n_bytes):
        self.archive.seal([self.choose(data)], shard_bytes=n_bytes)

    @rule()
    def gc(self):
        self.archive.gc()

    @rule()
    def reopen(self):
        self.archive.close()
        self.archive = kvstore.open(f"zarr:{self.place}", "a", grace_seconds=self.grace)

    @invariant()
    def zarr_sees_what_the_engine_reads(self):
        if hasattr(self, "archive"):
            for name in self.archive.names():
                check_session(self.place, self.archive, name)
            report = self.archive.verify()
            assert report.ok, report.problems

    def teardown(self):
        if hasattr(self, "archive"):
            self.archive.close()
            shutil.rmtree(self.folder)


TestZarrView = ZarrView.TestCase
TestZarrView.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_session_with_the_name_of_zarrs_documents(place, archive):
    add(archive, "zarr.json", BLOCK)
    add(archive, "a", BLOCK)
    check_session(place, archive, "zarr.json")
    check_session(place, archive, "a")


def test_shards_take_the_place_of_the_last_tokens_chunk_too(place):
    with kvstore.open(f"zarr:{place}", "a", grace_seconds=0) as archive:
        add(archive, "a", 2 * BLOCK + 7).close()
        archive.seal(["a"])
        assert (place / "a/k_000/c/0/2/0").exists()
        archive.seal(["a"], shard_bytes=1 << 20)
        archive.gc()
        assert sorted(path.name for path in (place / "a/k_000").iterdir()) == [
            "c.0.0.0",
            "zarr.json",
        ]
        check_session(place, archive, "a")


def shape_of(place, path):
    return zarr.open_array(str(place), path=path, mode="r").shape


def test_what_others_have_in_the_directory_is_left_alone(place, archive):
    own = zarr.open_group(str(place)).create_array("own/x", shape=(4,), chunks=(2,), dtype="f4")
    own[:] = 1
    (place / "file").write_text("not a directory")
    for name in ("own", "file", "own/x"):
        add(archive, name, BLOCK).close()
    for group in ("own.2", "file.2", "own=2Fx"):
        assert shape_of(place, f"{group}/k_000") == (2, BLOCK, 8)
    archive.gc()
    assert zarr.open_array(str(place), path="own/x", mode="r")[:].tolist() == [1] * 4
    assert (place / "file").read_text() == "not a directory"


def test_a_session_without_documents_does_not_keep_back_others(place):
    with kvstore.open(f"zarr:{place}", "a", grace_seconds=0) as archive:
        for name in "ab":
            add(archive, name, BLOCK).close()
        document = place / "a/k_000/zarr.json"
        document.unlink()
        document.mkdir()
        (document / "x").write_text("in the way")
        for name in "ab":
            with archive.session(name) as session:
                go_on(session, BLOCK, seed=1)
        assert shape_of(place, "b/k_000") == (2, 2 * BLOCK, 8)
        archive.delete_session("b")
        add(archive, "c", BLOCK).close()
        assert shape_of(place, "c/k_000") == (2, BLOCK, 8)
        archive.gc()
        assert not (place / "b").exists()
        shutil.rmtree(document)
        add(archive, "d", BLOCK).close()
        check_session(place, archive, "a")
