"""What stream headers share: stored once in an archive, and with them wherever they go."""

import numpy as np
import pytest
import zarr
from kvcodecs import zarr_codec
from kvcodecs.raw import Raw
from kvcodecs.shared import pack_shared, shared_digest
from sharing_codec import Sharing, packed, registered

import kvstore
from kvstore import Model, keys

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8)
BLOCK = 16
TABLE = keys.shared_key(shared_digest(packed("a")))


@pytest.fixture(scope="module", autouse=True)
def _codec():
    with registered():
        yield


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def place(request, tmp_path):
    path = tmp_path / "a.kv"
    return {"memory": f"memory:{path}", "lmdb": str(path), "zarr": f"zarr:{path}"}[request.param]


@pytest.fixture
def archive(place):
    with kvstore.open(place, "a", **options_of(place)) as opened:
        yield opened


def options_of(place):
    return {"grace_seconds": 0} if place.startswith("zarr") else {}


def values(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 8), dtype=np.float32) * 4


def add(session, x):
    session.append(x[0], x[1])
    session.commit()


def make(archive, name="s", n=50, config=None, seed=0, **options):
    options = {"block_tokens": BLOCK, "fit_tokens": 1, **options}
    session = archive.create_session(name, model=MODEL, codec=config or Sharing(), **options)
    if n:
        add(session, values(n, seed))
    return session


def held(session, *args):
    return np.stack(session.read_all(*args, dtype="float32"))


def objects(archive):
    with archive._read() as snapshot:
        return {key: bytes(value) for key, value in snapshot.scan(keys.SHARED)}


def put(archive, key, value):
    def work(transaction):
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)

    archive._room.write(work)


def test_an_object_is_stored_once_and_goes_when_no_header_needs_it(archive):
    session = make(archive)
    assert objects(archive) == {TABLE: pack_shared(packed("a"))}
    np.testing.assert_array_equal(held(session), np.rint(values(50)))
    fork = session.fork("f", at=20)
    make(archive, "other", config=Sharing("b")).close()
    like = archive.create_session("like", model=MODEL, stats_from="s", block_tokens=BLOCK)
    add(like, values(3, 1))
    ranged = make(archive, "ranged", n=0)
    ranged.append_range(session, 0, 32)
    add(fork, values(3, 2))
    assert len(objects(archive)) == 2
    assert archive.verify(decode=True).ok
    for name in ("s", "f", "like"):
        for opened in (session, fork, like):
            opened.close()
        archive.delete_session(name)
        archive.gc()
        assert len(objects(archive)) == 2
        assert archive.verify().ok
    np.testing.assert_array_equal(held(ranged), np.rint(values(50))[:, :, :, :32])
    ranged.close()
    archive.delete_session("ranged")
    assert TABLE in objects(archive)
    assert archive.verify().n_leftover == 1
    assert archive.gc() >= len(pack_shared(packed("a")))
    assert list(objects(archive)) == [keys.shared_key(shared_digest(packed("b")))]
    report = archive.verify()
    assert report.ok
    assert report.n_leftover == 0


def test_what_is_gone_meanwhile_is_stored_again(archive):
    make(archive).close()
    archive.delete_session("s")
    archive.gc()
    assert not objects(archive)
    np.testing.assert_array_equal(held(make(archive, "t")), np.rint(values(50)))
    put(archive, TABLE, pack_shared(packed("b")))  # damage: the next who needs it puts it right
    make(archive, "u").close()
    assert archive.verify(decode=True).ok


def test_all_stay_while_a_header_cannot_be_read(archive):
    make(archive).close()
    make(archive, "b", config=Sharing("b")).close()
    with archive._read() as snapshot:
        owner = archive._catalog.record(snapshot, "s").owner
    put(archive, keys.stream_key(keys.HEADER, owner, 0, "k"), b"no header")
    archive.delete_session("b")
    archive.gc()
    assert len(objects(archive)) == 2
    archive.delete_session("s")
    archive.gc()
    assert not objects(archive)


@pytest.mark.parametrize("damage", ["missing", "other", "flipped", "short"])
def test_damage_names_the_sessions(place, damage):
    with kvstore.open(place, "a") as archive:
        make(archive, "one").close()
        make(archive, "two").close()
        make(archive, "sound", config=Sharing("b")).close()
        record = objects(archive)[TABLE]
        bad = {
            "missing": None,
            "other": pack_shared(packed("c")),
            "flipped": record[:99] + bytes([record[99] ^ 1]) + record[100:],
            "short": record[:-1],
        }
        put(archive, TABLE, bad[damage])
        archive._codings._owners.clear()
        session = archive.session("one")
        with pytest.raises(kvstore.KvError, match="session 'one' layer 0 k") as caught:
            session.read_all()
        assert damage != "missing" or "restore a copy" in str(caught.value)
        report = archive.verify(decode=True)
        assert [problem.where for problem in report.problems] == [
            f"shared object {TABLE[1:].hex()[:12]}"
        ]
        assert "'one', 'two'" in report.problems[0].message
        assert np.isfinite(held(archive.session("sound"))).all()


def test_bytes_are_counted(archive):
    session = make(archive)
    info = session.info()
    n_bytes = len(TABLE) + len(pack_shared(packed("a")))
    assert info.object_bytes == n_bytes == archive.info().object_bytes
    parts = sum(stream.total_bytes for stream in info.streams)
    assert info.total_bytes == info.record_bytes + parts + n_bytes


def test_layers_can_be_apart(archive):
    x = values(50)
    session = make(archive, config=Sharing(raw_layers=(1,)))
    got = held(session)
    np.testing.assert_array_equal(got[:, 1], x[:, 1])
    np.testing.assert_array_equal(got[:, 0], np.rint(x[:, 0]))
    assert [stream.codec for stream in session.info().streams] == ["sharing"] * 2 + ["raw"] * 2


@pytest.mark.parametrize("last", [1, 3, 16, 40])
def test_the_newest_tokens_of_each_commit_are_kept_for_good(archive, last):
    x, n = values(120), 0
    session = make(archive, n=0, config=Sharing(last_tokens=last))
    want = np.rint(x)
    committed = 0
    for stop in (5, 30, -31, 33, 34, -90, -97, 120):
        session.append(x[0][:, :, n : abs(stop)], x[1][:, :, n : abs(stop)])
        n = abs(stop)
        if stop < 0:
            continue
        session.commit()
        kept = slice(max(n - last, committed), n)
        want[:, :, :, kept] = x[:, :, :, kept]
        committed = n
        np.testing.assert_array_equal(held(session), want[:, :, :, :n])
        if n == 33:
            session.close()
            session = archive.session("s")
            fork = session.fork("f", at=25)
    add(fork, x[:, :, :, 25:60])
    want[:, :, :, 25:60] = np.rint(x[:, :, :, 25:60])
    want[:, :, :, max(60 - last, 25) : 60] = x[:, :, :, max(60 - last, 25) : 60]
    np.testing.assert_array_equal(held(fork), want[:, :, :, :60])


def test_the_end_of_an_ingest_is_kept(archive):
    x = values(100)

    class Source:
        def n_tokens(self, layer, kind):
            return 100

        def chunks(self, layer, kind):
            for at in range(0, 100, 30):
                yield x["kv".index(kind), layer, :, at : at + 30]

    config = Sharing(last_tokens=20)
    session = archive.ingest("s", Source(), model=MODEL, codec=config, fit_tokens=1)
    want = np.rint(x)
    want[:, :, :, 80:] = x[:, :, :, 80:]
    np.testing.assert_array_equal(held(session), want)
    assert len(objects(archive)) == 1


ENDS = [("lmdb", "zarr"), ("zarr", "lmdb"), ("lmdb", "lmdb"), ("zarr", "zarr")]


@pytest.mark.parametrize(("source", "target"), ENDS)
@pytest.mark.parametrize("there", [False, True])
def test_migration_takes_objects_along(tmp_path, source, target, there):
    ends = [f"{kind}:{tmp_path / name}.kv" for kind, name in ((source, "x"), (target, "y"))]
    ends = [end.removeprefix("lmdb:") for end in ends]
    with kvstore.open(ends[0], "a") as archive:
        session = make(archive)
        session.fork("f", at=20)
        make(archive, "b", config=Sharing("b"))
    if there:
        kvstore.open(ends[1], "a").close()
    done = kvstore.migrate(*ends, verify=True)
    assert done.names == ["b", "f", "s"]
    with kvstore.open(ends[1]) as archive:
        assert archive.verify(decode=True).ok
        assert len(objects(archive)) == 2
        np.testing.assert_array_equal(held(archive.session("s")), np.rint(values(50)))


def test_coding_anew_both_ways(tmp_path):
    x = values(50)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        make(archive, config=Raw())
    kvstore.migrate(tmp_path / "a.kv", tmp_path / "b.kv", codec=Sharing(), verify=True)
    kvstore.migrate(tmp_path / "b.kv", tmp_path / "c.kv", codec=Raw(), verify=True)
    for name, n in (("b", 1), ("c", 0)):
        with kvstore.open(tmp_path / f"{name}.kv") as archive:
            assert archive.verify(decode=True).ok
            assert len(objects(archive)) == n
            np.testing.assert_array_equal(held(archive.session("s")), np.rint(x))


@pytest.mark.parametrize("sharded", [False, True])
def test_zarr_reads_what_needs_objects(tmp_path, monkeypatch, sharded):
    x, place = values(64), str(tmp_path / "a.kv")
    with kvstore.open(f"zarr:{place}", "a") as archive:
        session = make(archive, n=0)
        add(session, x)
        session.close()
        if sharded:
            archive.seal(shard_bytes=1 << 20)
    monkeypatch.setattr(zarr_codec, "_objects", {})
    array = zarr.open_group(place, mode="r")["s/k_001"]
    np.testing.assert_array_equal(array[:], np.rint(x[0, 1]))
    np.testing.assert_array_equal(array[:, 17:40:3], np.rint(x[0, 1, :, 17:40:3]))
    monkeypatch.setattr(zarr_codec, "_objects", {})
    alone = zarr.open_group(f"{place}/s", mode="r")["v_000"]
    if sharded:
        np.testing.assert_array_equal(alone[:], np.rint(x[1, 0]))
    else:
        with pytest.raises(kvstore.Unsupported, match="open the archive itself, not one group"):
            alone[:]


def test_zarr_objects_go_with_the_key(tmp_path):
    with kvstore.open(f"zarr:{tmp_path / 'a.kv'}", "a", grace_seconds=0) as archive:
        make(archive).close()
        (book,) = (tmp_path / "a.kv" / "_kvstore" / "books").iterdir()
        archive.gc()
        assert (book / "c" / "0").read_bytes() == pack_shared(packed("a"))
        archive.delete_session("s")
        archive.gc()
        make(archive, "t").close()  # while what was deleted waits for its deletion
        archive.gc()
        archive.gc()
        assert (book / "c" / "0").exists()
        archive.delete_session("t")
        for _ in range(3):
            archive.gc()
        assert not (book / "c" / "0").exists()


def test_a_compacted_archive_has_its_objects(tmp_path):
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        make(archive).close()
    kvstore.compact(tmp_path / "a.kv")
    with kvstore.open(tmp_path / "a.kv") as archive:
        assert archive.verify(decode=True).ok
        np.testing.assert_array_equal(held(archive.session("s")), np.rint(values(50)))
