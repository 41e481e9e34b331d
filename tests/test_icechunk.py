"""An archive in an Icechunk repository: versions for zarr's tools and for us, and two writers."""

import contextlib
import json
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zarr

import kvstore
from kvstore import KVR1, InvalidArgument, Locked, Model, NotFound, Raw, keys

icechunk = pytest.importorskip("icechunk")

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, dtype="float16")
BLOCK = 16


@pytest.fixture(autouse=True)
def _quiet():
    icechunk.set_logs_filter("error")


@pytest.fixture
def repository(tmp_path):
    return icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repo")))


@pytest.fixture(params=["path", "repository"])
def place(request, tmp_path):
    """A repository on this machine, and one that we know nothing of but what it can do."""
    if request.param == "path":
        return f"icechunk:{tmp_path / 'repo'}"
    return icechunk.Repository.create(icechunk.in_memory_storage())


def kv(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 8)).astype(np.float16)


def create(archive, name, codec=None, **more):
    return archive.create_session(
        name, model=MODEL, codec=codec or Raw(), block_tokens=BLOCK, fit_tokens=BLOCK, **more
    )


def add(session, n, seed=0):
    k, v = kv(n, seed)
    session.append(k, v, token_ids=np.arange(n))
    session.commit()
    return k, v


def repository_of(archive):
    return archive._backend._shared.objects._repository


def arrays(session):
    """Return what plain zarr sees in a session of Icechunk: {path: values}."""
    group = zarr.open_group(session.store, mode="r")
    members = dict(group.members(max_depth=2))
    return {
        path: member[:]
        for path, member in members.items()
        if isinstance(member, zarr.Array) and not path.startswith("_kvstore")
    }


# The documented example.


def test_plain_zarr_reads_versions_of_an_archive(repository):
    with kvstore.open(repository, "a") as archive:
        session = create(archive, "chat")
        k1, v1 = add(session, 40)
        repository.create_tag("morning", snapshot_id=repository.lookup_branch("main"))
        k2, _ = add(session, 40, seed=1)
        archive.session("chat").fork("other", at=33).close()
        session.close()

    now = arrays(repository.readonly_session("main"))
    then = arrays(repository.readonly_session(tag="morning"))
    assert set(then) == {f"chat/{kind}_{layer:03d}" for kind in "kv" for layer in (0, 1)}
    assert set(now) == set(then) | {path.replace("chat", "other") for path in then}
    # Whole blocks, as the archive has them.
    assert (then["chat/k_001"] == k1[1, :, :32]).all()
    assert (then["chat/v_000"] == v1[0, :, :32]).all()
    assert (now["chat/k_001"] == np.concatenate([k1, k2], axis=2)[1]).all()
    assert (now["other/k_001"] == k1[1, :, :32]).all()

    with kvstore.open(repository) as archive:
        assert archive.names() == ["chat", "other"]
        assert archive.session("chat").n_tokens == 80
        assert archive.verify(decode=True).ok
    with kvstore.open(repository, storage_options={"tag": "morning"}) as archive:
        assert archive.names() == ["chat"]
        session = archive.session("chat")
        assert (session.read_all()[0] == k1).all()  # with what is in no whole block yet
        assert archive.verify(decode=True).ok


def test_a_repository_in_a_bucket(s3_server):
    bucket = s3_server.bucket().removeprefix("s3://")
    storage = icechunk.s3_storage(
        bucket=bucket,
        prefix="kv",
        region="us-east-1",
        endpoint_url=s3_server.endpoint,
        access_key_id="x",
        secret_access_key="y",
        allow_http=True,
        force_path_style=True,
    )
    repository = icechunk.Repository.create(storage)
    with kvstore.open(repository, "a") as archive:
        session = create(archive, "chat")
        k, _ = add(session, 40)
        session.close()
        assert archive.verify(decode=True).ok
    again = icechunk.Repository.open(storage)
    assert (arrays(again.readonly_session("main"))["chat/k_001"] == k[1, :, :32]).all()
    with kvstore.open(again) as archive:
        assert (archive.session("chat").read_all()[0] == k).all()


# All of an archive's life.


def test_every_change_is_one_commit_and_every_version_stays(place, tmp_path):
    versions = []
    with kvstore.open(place, "a") as archive:
        repository = repository_of(archive)

        def note():
            names = {name: archive.session(name).read_all()[0] for name in archive.names()}
            found = arrays(repository.readonly_session("main"))
            versions.append((repository.lookup_branch("main"), names, found))

        session = create(archive, "a/b", codec=Raw())
        note()
        for n in (5, 30, 16, 1):
            add(session, n, seed=n)
            note()
        fork = session.fork("fork", at=40)
        note()
        add(fork, 20, seed=9)
        note()
        session.truncate(20)
        note()
        add(session, 50, seed=3)
        note()
        session.rename("new name")
        note()
        session.close()
        fork.trim_front(17)
        fork.close()
        note()
        archive.delete_session("new name")
        note()
        assert archive.verify(decode=True).problems == []
        archive.gc()
        assert archive.verify(decode=True).n_leftover == 0
        ids = archive.session("fork").token_ids(17)
        lossy = create(archive, "lossy", codec=KVR1(step=0.1))
        add(lossy, 64)
        lossy.close()
        archive.delete_session("fork")
    assert len(ids) == 43
    assert len({version for version, _, _ in versions}) == len(versions)
    for i, (version, names, found) in enumerate(versions):
        with kvstore.open(place, storage_options={"snapshot_id": version}) as archive:
            assert archive.names() == list(names)
            for name, k in names.items():
                assert (archive.session(name).read_all()[0] == k).all(), i
            assert archive.verify(decode=True).problems == []
        again = arrays(repository.readonly_session(snapshot_id=version))
        assert again.keys() == found.keys()
        assert all((again[path] == values).all() for path, values in found.items())
        assert not any(np.isnan(values).any() for values in found.values())
    messages = [entry.message for entry in repository.ancestry(branch="main")]
    assert messages[-1] == "Repository initialized"
    assert "kvstore commit 2: a=2Fb" in messages


def test_a_session_that_is_ingested_in_many_transactions(place, monkeypatch):
    """Its frames lie under no session before the last one, in no array's grid."""
    from kvstore import ingest

    monkeypatch.setattr(ingest, "_FLUSH_BYTES", 4000)
    k, v = kv(BLOCK * 40)

    class Source:
        def n_tokens(self, layer, kind):
            return k.shape[2]

        def chunks(self, layer, kind):
            return iter(np.split((k if kind == "k" else v)[layer], 10, axis=1))

    with kvstore.open(place, "a") as archive:
        archive.ingest("big", Source(), model=MODEL, codec=Raw(), block_tokens=BLOCK)
        assert (archive.session("big").read_all()[1] == v).all()
        repository = repository_of(archive)
        assert (arrays(repository.readonly_session("main"))["big/v_001"] == v[1]).all()
        archive.gc()
        assert archive.verify(decode=True).ok
        messages = [entry.message for entry in repository.ancestry(branch="main")]
        assert sum("no view" in message for message in messages) > 10


def test_a_transaction_that_fails_leaves_nothing(place):
    def fail():
        with archive._backend.write(1) as transaction:
            transaction.put(keys.frame_key(1, 0, "k", 0), b"frame" * 99)
            raise ZeroDivisionError

    with kvstore.open(place, "a") as archive:
        session = create(archive, "s")
        k, _ = add(session, 20)
        tip = repository_of(archive).lookup_branch("main")
        with pytest.raises(ZeroDivisionError):
            fail()
        assert repository_of(archive).lookup_branch("main") == tip
        assert (session.read_all()[0] == k).all()
        add(session, 20, seed=2)
        session.close()
        assert archive.verify(decode=True).ok


def test_reads_of_other_threads_see_what_is_committed(place):
    with kvstore.open(place, "a") as archive:
        session = create(archive, "s")
        k, _ = add(session, 20)
        seen = []

        def read():
            seen.append(archive.session("s").read_all()[0])
            seen.append([key for key, _ in archive._read().__enter__().scan(b"F")])

        with archive._backend.write(1) as transaction:
            transaction.put(keys.frame_key(1, 0, "k", 0), b"frame" * 99)
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        assert (seen[0] == k).all()
        assert keys.frame_key(1, 0, "k", 0) not in seen[1]
        session.close()


def test_branches_are_archives_of_their_own(place):
    with kvstore.open(place, "a") as archive:
        session = create(archive, "s")
        k, _ = add(session, 40)
        session.close()
        repository = repository_of(archive)
        repository.create_branch("dev", repository.lookup_branch("main"))
        with kvstore.open(place, "a", storage_options={"branch": "dev"}) as other:
            session = other.session("s")
            add(session, 40, seed=1)
            assert session.n_tokens == 80
            session.close()
        assert archive.session("s").n_tokens == 40
        assert (archive.session("s").read_all()[0] == k).all()


def test_shards_are_refused(place):
    with kvstore.open(place, "a") as archive:
        session = create(archive, "s")
        k, _ = add(session, 40)
        session.close()
        with pytest.raises(InvalidArgument, match="shards"):
            archive.seal(shard_bytes=1 << 20)
        assert (archive.session("s").read_all()[0] == k).all()
        assert archive.verify(decode=True).ok


# Two writers.


def test_of_two_writers_that_commit_at_the_same_time_one_is_told(repository):
    """Two that know of each other only what the branch says, as on two machines."""
    with kvstore.open(repository, "a") as archive:
        create(archive, "s").close()
        create(archive, "t").close()
    one, two = (icechunk.Repository.open(repository.storage) for _ in range(2))
    with kvstore.open(one, "a") as first, kvstore.open(two, "a") as second:
        a, b = first.session("s"), second.session("t")
        k1, _ = add(a, 20)
        with pytest.raises(Locked, match="committed to the branch meanwhile"):
            between(second, lambda: add(a, 5, seed=1))
        # It sees what the other one has committed, and nothing of its own.
        assert second.session("s").n_tokens == 25
        assert (second.session("s").read_all()[0][:, :, :20] == k1).all()
        assert second.verify(decode=True).ok
        k2, _ = add(b, 30, seed=2)
        # The first one is told in turn: its session may have been appended to.
        k, v = kv(1)
        a.append(k, v, token_ids=[1])
        with pytest.raises(Locked, match="another appender"):
            a.commit()
        a.close()
        a = first.session("s")
        add(a, 7, seed=3)
        assert a.n_tokens == 32
        assert (first.session("t").read_all()[0] == k2).all()
        with pytest.raises(Locked, match="already has an appender"):
            first.session("s").append(k, v, token_ids=[1])
        a.close()
        b.close()
        assert first.verify(decode=True).ok


def between(archive, act):
    """Let something happen between the beginning of a transaction and its commit."""
    with archive._backend.write(1) as transaction:
        transaction.put(keys.tokens_key(5, 0), b"x")
        act()


def test_writers_in_other_processes_wait_for_each_other(tmp_path):
    place = f"icechunk:{tmp_path / 'repo'}"
    kvstore.open(place, "a").close()
    code = """
import sys
import numpy as np, kvstore
model = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, dtype="float16")
with kvstore.open(sys.argv[1], "a", lock_timeout=60) as archive:
    session = archive.create_session(sys.argv[2], model=model, block_tokens=16, fit_tokens=16)
    for i in range(5):
        rows = np.full((2, 2, 9, 8), float(sys.argv[2]), np.float16)
        session.append(rows, rows)
        session.commit()
    try:
        archive.session("locked").append(rows, rows)
        sys.exit("took the lease of another process")
    except kvstore.Locked:
        pass
"""
    with kvstore.open(place, "a") as archive:
        mine = create(archive, "locked")
        add(mine, 20)
        children = [subprocess.Popen([sys.executable, "-c", code, place, str(i)]) for i in range(2)]
        assert [child.wait() for child in children] == [0] * 2
        add(mine, 20)
        assert archive.names() == ["0", "1", "locked"]
        assert [archive.session(name).n_tokens for name in archive.names()] == [45, 45, 40]
        assert archive.verify(decode=True).ok
        mine.close()


def test_an_appender_that_is_idle_may_be_replaced(place):
    with kvstore.open(place, "a", lease_seconds=0.05) as archive:
        one = create(archive, "s")
        add(one, 20)
        time.sleep(0.1)
        two = archive.session("s")
        add(two, 20)
        k, v = kv(1)
        one.append(k, v, token_ids=[1])
        with pytest.raises(Locked, match="another appender"):
            one.commit()
        one.close()
        two.close()


# The map of objects, against a dictionary.


def document(shape):
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 4, 1]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
        }
    ).encode()


@pytest.mark.parametrize("seed", range(2))
def test_objects_are_a_map_that_is_committed_as_a_whole(seed):
    from kvstore.backends.zarr.icechunk import IcechunkObjects

    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    objects = IcechunkObjects(repository, where="here")
    rng = random.Random(seed)
    chunks = [f"{g}/k_000/c/0/{i}/0" for g in ("a", "b=2F") for i in range(6)]
    others = [
        *(f"_kvstore/commits/{n:016x}" for n in (1, 2, 0x123456)),
        *(f"_kvstore/segments/{n:016x}-0123abc{n}" for n in (1, 7)),
        *(f"_kvstore/frames/{o}/{s}/{n}" for o in ("f" * 16, "0123456789abcdef")
          for s in ("k_000", "v_017") for n in (0, 99)),
    ]  # fmt: skip
    arrays_, groups = ["a/k_000/zarr.json", "b=2F/k_000/zarr.json"], ["zarr.json", "a/zarr.json"]
    group = b'{"zarr_format":3,"node_type":"group","attributes":{"n":%d}}'
    model = {}
    for _ in range(30):
        after = dict(model)

        def step(after=after):
            what = rng.random()
            key = rng.choice(chunks if rng.random() < 0.7 else others)
            if what < 0.3:
                items = {rng.choice(chunks): rng.randbytes(rng.randint(1, 700)) for _ in range(3)}
                objects.put_frames(list(items.items()), lambda: None)
                after.update(items)
            elif what < 0.45:
                data = rng.randbytes(rng.randint(1, 700))
                assert objects.put_new(key, data) == (key not in after)
                after.setdefault(key, data)
            elif what < 0.55:
                gone = rng.sample([*chunks, *others], 3)
                objects.delete(gone)
                for name in gone:
                    after.pop(name, None)
            elif what < 0.65:
                source, target = rng.choice([*chunks, *others]), rng.choice(chunks)
                if source in after:
                    objects.copy([(source, target)], bool)
                    after[target] = after[source]
                else:
                    with pytest.raises(NotFound):
                        objects.copy([(source, target)], bool)
            elif what < 0.9:
                after[name := rng.choice(arrays_)] = data = document([1, rng.randint(0, 20), 1])
                objects.put(name, data)
            elif what < 0.95:
                objects.delete([name := rng.choice(arrays_)])
                after.pop(name, None)
            else:
                after[name := rng.choice(groups)] = data = group % rng.randint(0, 9)
                objects.put_all([(name, data)], bool)

        def check(held):
            assert {found.key: found.n_bytes for found in objects.list("")} == {
                key: len(data) for key, data in held.items()
            }
            for prefix in ("a/", "b=2F/k_000/", "_kvstore/", "_kvstore/commits/", "no/"):
                listed = [found.key for found in objects.list(prefix)]
                assert listed == sorted(key for key in held if key.startswith(prefix))
            asked = [*chunks, *others, *arrays_, *groups]
            assert objects.get_many([(key, None, None) for key in asked]) == [
                held.get(key) for key in asked
            ]
            for key in rng.sample(asked, 5):
                assert objects.exists(key) == (key in held)
                lo, hi = sorted(rng.randint(0, 900) for _ in range(2))
                data = held.get(key)
                assert objects.get(key, lo, hi) == (None if data is None else data[lo:hi])

        fails = rng.random() < 0.2
        with contextlib.suppress(ZeroDivisionError), objects.writer(1):
            for _ in range(rng.randint(1, 6)):
                step()
            check(after)
            if fails:
                raise ZeroDivisionError
        if not fails:
            model = after
        check(model)


# What cannot be opened.


def test_options_and_places_that_there_are_not(tmp_path, repository):
    path = f"icechunk:{tmp_path / 'repo'}"
    kvstore.open(path, "a").close()
    with pytest.raises(NotFound, match="no branch 'dev'"):
        kvstore.open(path, "a", storage_options={"branch": "dev"})
    with pytest.raises(NotFound, match="no tag 'x'"):
        kvstore.open(path, storage_options={"tag": "x"})
    with pytest.raises(NotFound, match="no snapshot 'x'"):
        kvstore.open(path, storage_options={"snapshot_id": "x"})
    with pytest.raises(InvalidArgument, match="branch and tag exclude each other"):
        kvstore.open(path, storage_options={"tag": "x", "branch": "main"})
    with pytest.raises(InvalidArgument, match="there are branch, tag, snapshot_id"):
        kvstore.open(path, storage_options={"region": "x"})
    with pytest.raises(NotFound, match="mode='a' to begin one"):
        kvstore.open(f"icechunk:{tmp_path / 'no'}")
    assert not (tmp_path / "no").exists()
    with pytest.raises(NotFound, match="parent"):
        kvstore.open(f"icechunk:{tmp_path / 'no' / 'no'}", "a")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="a file"):
        kvstore.open(f"icechunk:{tmp_path / 'file'}", "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(InvalidArgument, match="no Icechunk repository"):
        kvstore.open(f"icechunk:{tmp_path / 'other'}", "a")
