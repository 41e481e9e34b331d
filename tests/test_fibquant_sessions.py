"""Sessions coded with FibQuant: what is committed never changes, and the codebook goes with it."""

import subprocess
import sys

import numpy as np
import obstore
import pytest
import zarr
from kvcodecs import zarr_codec
from kvcodecs.codec import config_from_json
from kvcodecs.numcodecs_codecs import FibQuantCodec
from kvcodecs.shared import shared_digest

import kvstore
from kvstore import KVR1, FibQuant, InvalidArgument, Model, Raw, Rope, keys

MODEL = Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=32, rope=Rope.from_theta(1e4, 32)
)
BLOCK = 16
CONFIG = FibQuant(4, 16, axis="role_aware")
HAAR = FibQuant(2, 16, rotation="haar", axis="per_token", first_tokens=0)


def at(kind, path):
    return str(path) if kind == "lmdb" else f"{kind}:{path}"


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def archive(request, tmp_path):
    with kvstore.open(at(request.param, tmp_path / "a.kv"), "a") as opened:
        yield opened
        report = opened.verify(decode=True)
        assert report.ok, report.problems


def values(n, seed=0):
    """K, V of layers, heads, tokens, channels; one vector of zeros, and channels far apart."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, 2, n, 32), dtype=np.float32)
    x *= np.linspace(0.1, 5, 32, dtype=np.float32)
    x[:, :, 1, n // 2] = 0
    return x


def add(session, x, lo, hi):
    session.append(x[0][:, :, lo:hi], x[1][:, :, lo:hi])
    session.commit()


def held(session, *args):
    return np.stack(session.read_all(*args, dtype="float32"))


def make(archive, name="s", x=None, config=CONFIG, **options):
    options = {"block_tokens": BLOCK, "fit_tokens": 8, **options}
    session = archive.create_session(name, model=MODEL, codec=config, **options)
    if x is not None:
        add(session, x, 0, x.shape[3])
    return session


def objects(archive):
    with archive._read() as snapshot:
        return {key[1:]: bytes(value) for key, value in snapshot.scan(keys.SHARED)}


def is_coarse(got, x):
    """Whether values are about what they were, as far as few bits go."""
    return np.linalg.norm(got - x) < 0.75 * np.linalg.norm(x)


@pytest.mark.parametrize(
    "config", [CONFIG, HAAR, FibQuant(4, 16, axis="role_aware", last_tokens=3)]
)
def test_committed_values_stay_what_they_are(archive, config):
    x, ends = values(90), [3, 10, 11, 30, 33, 60, 90]
    session = make(archive, config=config)
    seen = np.zeros((2, 2, 2, 0, 32), np.float32)
    for n, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)):
        add(session, x, lo, hi)
        got = held(session)
        np.testing.assert_array_equal(got[:, :, :, :lo], seen)
        last = config.last_tokens
        if last and lo:
            np.testing.assert_array_equal(got[:, :, :, hi - 1 :], x[:, :, :, hi - 1 : hi])
        seen = got
        if n % 2:
            session.close()
            session = archive.session("s")
    np.testing.assert_array_equal(seen[:, :, :, :3], x[:, :, :, :3])
    assert is_coarse(seen, x)
    assert not np.array_equal(seen[:, :, :, 20], x[:, :, :, 20])
    # A vector of zeros cannot be coded; K is less its channels' means.
    np.testing.assert_array_equal(seen[1, :, 1, 45], 0)
    fork = session.fork("f", at=41)
    session.truncate(37)
    session.trim_front(20)
    add(fork, x, 41, 70)
    np.testing.assert_array_equal(held(fork)[:, :, :, :41], seen[:, :, :, :41])
    np.testing.assert_array_equal(held(session, 20, 37), seen[:, :, :, 20:37])
    add(session, x, 37, 50)
    np.testing.assert_array_equal(held(session, 20, 37), seen[:, :, :, 20:37])
    ranged = make(archive, "r", config=config)
    done = ranged.append_range(fork, 16, 60)
    assert done.n_tokens == 44
    shared = held(fork, 16, 16 + done.n_shared)
    np.testing.assert_array_equal(held(ranged)[:, :, :, : done.n_shared], shared)
    like = archive.create_session("l", model=MODEL, stats_from="f", block_tokens=BLOCK)
    add(like, x, 0, 20)
    assert is_coarse(held(like), x[:, :, :, :20])
    assert len(objects(archive)) == 1
    for opened in (session, fork, ranged, like):
        opened.close()
    for name in archive.names():
        archive.delete_session(name)
    archive.gc()
    assert not objects(archive)


def test_a_book_is_named_by_its_digest_and_shown(archive):
    x = values(40)
    session = make(archive, x=x)
    other = make(archive, "t", x, config={"k": CONFIG, "v": HAAR})
    stored = objects(archive)
    assert len(stored) == 2
    for digest, value in stored.items():
        assert shared_digest(value[20:]) == digest
    info = other.info()
    assert info.objects.keys() == stored.keys()
    assert info.object_bytes == archive.info().object_bytes > session.info().object_bytes
    assert {s.codec for s in info.streams} == {"fibquant.4x16", "fibquant.2x16"}
    assert all(not stream.lossless and stream.step is None for stream in info.streams)
    again = config_from_json(info.codecs["v"])
    assert again == HAAR


def test_layers_and_heads_that_are_kept_raw(archive):
    x = values(40)
    config = FibQuant(4, 16, axis="role_aware", raw_layers=(1,), raw_heads=(0,))
    got = held(make(archive, x=x, config=config))
    np.testing.assert_array_equal(got[:, 1], x[:, 1])
    np.testing.assert_array_equal(got[:, :, 0], x[:, :, 0])
    assert not np.array_equal(got[:, 0, 1], x[:, 0, 1])
    # Besides: the first tokens, and of V a vector of zeros.
    streams = archive.session("s").info().streams
    found = [(s.layer, s.kind, s.n_raw_vectors, s.n_vectors) for s in streams]
    assert found == [(0, "k", 44, 80), (0, "v", 45, 80), (1, "k", 80, 80), (1, "v", 80, 80)]
    with pytest.raises(InvalidArgument, match=r"session 'h' layer 0 k.*raw head 2"):
        make(archive, "h", config=FibQuant(4, 16, raw_heads=(2,)))
    with pytest.raises(InvalidArgument, match=r"session 'h' k: .*raw layer 2: .* layers 0 to 1"):
        make(archive, "h", config=FibQuant(4, 16, raw_layers=(1, 2)))


def test_fail_closed_names_the_vector_and_changes_nothing(archive):
    x = values(40)
    session = make(archive, config=FibQuant(4, 16, axis="role_aware", on_failure="fail_closed"))
    with pytest.raises(InvalidArgument, match=r"layer 0 v: .*head 1, token 20.*zero norm"):
        add(session, x, 0, 40)
    add(session, x, 0, 20)
    with pytest.raises(InvalidArgument, match="head 1, token 20"):
        add(session, x, 20, 40)
    assert session.n_tokens == 20


@pytest.mark.parametrize(("source", "target"), [("lmdb", "zarr"), ("zarr", "lmdb")])
def test_moved_and_coded_anew(tmp_path, source, target):
    x = values(60)
    one, two, three = (tmp_path / name for name in ("1.kv", "2.kv", "3.kv"))
    with kvstore.open(at(source, one), "a") as archive:
        make(archive, "kvr1", x, KVR1(step=0.01))
        want = held(make(archive, "fib", x))
    kvstore.migrate(at(source, one), at(target, two), verify=True)
    codecs = {"k": CONFIG, "v": HAAR}
    kvstore.migrate(at(target, two), at(source, three), codec=codecs, verify=True)
    back = tmp_path / "4.kv"
    kvstore.migrate(at(source, three), at(target, back), codec=Raw(), verify=True)
    found = {}
    for place, n in ((at(target, two), 1), (at(source, three), 2), (at(target, back), 0)):
        with kvstore.open(place) as archive:
            report = archive.verify(decode=True)
            assert report.ok, report.problems
            assert len(objects(archive)) == n
            found[place] = held(archive.session("kvr1"))
            if n == 1:
                np.testing.assert_array_equal(held(archive.session("fib")), want)
    assert is_coarse(found[at(source, three)], x)
    np.testing.assert_array_equal(found[at(target, back)], found[at(source, three)])


def test_arrays_of_zarr_format_2_and_back(run, tmp_path):
    x, there = values(60), tmp_path / "z2"
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        session = make(archive, "s", x, {"k": CONFIG, "v": HAAR})
        make(archive, "raw", x, FibQuant(4, 16, axis="raw")).close()
        archive.create_session("empty", model=MODEL, stats_from="s", block_tokens=BLOCK).close()
        want = held(session)
    assert run("migrate", tmp_path / "a.kv", f"zarr2:{there}", "--quiet")[0] == 0
    chunk = FibQuantCodec().decode((there / "s" / "v_001" / "0.1.0").read_bytes())
    np.testing.assert_array_equal(chunk, want[1, 1, :, BLOCK : 2 * BLOCK])
    assert run("migrate", f"zarr2:{there}", tmp_path / "b.kv", "--quiet")[0] == 0
    with kvstore.open(tmp_path / "a.kv") as one, kvstore.open(tmp_path / "b.kv") as two:
        assert two.verify(decode=True).ok
        assert objects(one) == objects(two)
        np.testing.assert_array_equal(held(two.session("s")), want)
    code, _, err = run("migrate", tmp_path / "a.kv", tmp_path / "c.tkvdir")
    assert (code, "coded with fibquant" in err) == (1, True)


READ = """
import sys
import numpy as np, zarr
np.save(sys.argv[2], zarr.open_group(sys.argv[1], mode="r")["s/v_001"][:])
"""


def test_plain_zarr_in_a_process_of_its_own(tmp_path):
    x, path, out = values(64), tmp_path / "a.kv", tmp_path / "out.npy"
    with kvstore.open(f"zarr:{path}", "a") as archive:
        want = held(make(archive, x=x))[1, 1]
    subprocess.run([sys.executable, "-c", READ, path, out], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(out), want)


@pytest.mark.slow
def test_plain_zarr_in_a_bucket(s3_server):
    x, url = values(40), s3_server.bucket() + "/a"
    with kvstore.open(url, "a", storage_options=s3_server.options, grace_seconds=0) as archive:
        make(archive, "gone", x, HAAR).close()
        archive.delete_session("gone")
        want = held(make(archive, x=x))[0, 1, :, :32]
        archive.gc()
        archive.gc()
        assert len(objects(archive)) == 1
        client = {"allow_http": True}
        store = obstore.store.from_url(url, config=s3_server.options, client_options=client)
        names = [item["path"] for batch in store.list("_kvstore/books/") for item in batch]
        assert len(names) == 1
    array = zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r")["s/k_001"]
    np.testing.assert_array_equal(array[:], want)


def test_plain_zarr_in_icechunk(monkeypatch):
    icechunk = pytest.importorskip("icechunk")
    monkeypatch.setattr(zarr_codec, "_objects", {})
    icechunk.set_logs_filter("error")
    x, repository = values(40), icechunk.Repository.create(icechunk.in_memory_storage())
    with kvstore.open(repository, "a", grace_seconds=0) as archive:
        with make(archive, x=x) as session:
            want = held(session)[0, 1, :, :32]
        group = zarr.open_group(repository.readonly_session("main").store, mode="r")
        np.testing.assert_array_equal(group["s/k_001"][:], want)
        archive.delete_session("s")
        archive.gc()
        archive.gc()
        assert not objects(archive)
        np.testing.assert_array_equal(held(make(archive, "t", x))[0, 1, :, :32], want)


KILLED = """
import os, sys
import numpy as np
import kvstore
from test_fibquant_sessions import MODEL, CONFIG, values

x = values(4000)
with kvstore.open(sys.argv[1], "a") as archive:
    session = archive.session("s") if "s" in archive else archive.create_session(
        "s", model=MODEL, codec=CONFIG, block_tokens=16, fit_tokens=8)
    while True:
        n = session.n_tokens
        session.append(x[0][:, :, n : n + 7], x[1][:, :, n : n + 7], start=n)
        session.commit()
        print(session.n_committed, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_killed_writers(tmp_path, kind):
    place, x = at(kind, tmp_path / "a.kv"), values(4000)
    seen = np.zeros((2, 2, 2, 0, 32), np.float32)
    for lines in (1, 2, 5):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED, place],
            stdout=subprocess.PIPE,
            cwd=__file__.rpartition("/")[0],
        )
        for _ in range(lines):
            told = int(writer.stdout.readline())
        writer.kill()
        writer.stdout.close()
        writer.wait()
        with kvstore.open(place, "a") as archive:
            archive.gc()
            session = archive.session("s")
            assert session.n_committed >= told
            got = held(session)
            np.testing.assert_array_equal(got[:, :, :, : seen.shape[3]], seen)
            seen = got
            assert archive.verify(decode=True).ok
    assert is_coarse(seen, x[:, :, :, : seen.shape[3]])
