"""`kill -9` at any moment: the archive opens at its last commit and goes on."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvstore
from kvstore import KVR1, Model, Raw, Rope

MODEL = Model.uniform(name="m", n_layers=3, n_kv_heads=2, head_dim=8, rope=Rope.from_theta(1e4, 8))
STEP = 0.25
CODECS = {"raw": Raw(), "kvr1": KVR1(step=STEP)}

# Values are a function of position, so that any process can say what must be there.
COMMON = """
import sys, random
import numpy as np
import kvstore
from kvstore import KVR1, Model, Raw, Rope

MODEL = Model.uniform(name="m", n_layers=3, n_kv_heads=2, head_dim=8, rope=Rope.from_theta(1e4, 8))
CODECS = {"raw": Raw(), "kvr1": KVR1(step=0.25)}

def values(start, stop):
    t = np.arange(start, stop, dtype=np.float64)[None, None, :, None]
    base = np.arange(3 * 2 * 8, dtype=np.float64).reshape(3, 2, 1, 8)
    x = np.sin(t * 0.37 + base).astype(np.float32)
    return x, (2 * x).astype(np.float32)
"""

WRITER = (
    COMMON
    + """
path, codec, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
with kvstore.open(path, "a", lock_timeout=30) as archive:
    if "s" in archive:
        session = archive.session("s")
    else:
        session = archive.create_session(
            "s", model=MODEL, codec=CODECS[codec], block_tokens=32, fit_tokens=16
        )
    while True:
        n = session.n_tokens
        m = n + rng.choice([1, 1, 5, 33, 100])
        k, v = values(n, m)
        session.append(k, v, start=n, token_ids=np.arange(n, m))
        if rng.random() < 0.7:
            session.commit()
            print(session.n_tokens, flush=True)
"""
)

INGESTER = (
    COMMON
    + """
import kvstore.ingest
kvstore.ingest._FLUSH_BYTES = 20_000
path, codec = sys.argv[1], sys.argv[2]
K, V = values(0, 3000)

class Source:
    def n_tokens(self, layer, kind):
        return 3000
    def chunks(self, layer, kind):
        for at in range(0, 3000, 64):
            print("chunk", flush=True)
            yield (K if kind == "k" else V)[layer][:, at:at + 64]

with kvstore.open(path, "a", lock_timeout=30) as archive:
    archive.ingest("big", Source(), model=MODEL, codec=CODECS[codec], block_tokens=32)
    print("published", flush=True)
"""
)


def values(start, stop):
    t = np.arange(start, stop, dtype=np.float64)[None, None, :, None]
    base = np.arange(3 * 2 * 8, dtype=np.float64).reshape(3, 2, 1, 8)
    x = np.sin(t * 0.37 + base).astype(np.float32)
    return x, (2 * x).astype(np.float32)


def start(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def kill(process):
    """Kill -9 and return the last whole line that was printed."""
    process.send_signal(signal.SIGKILL)
    out = process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    lines = out.split("\n")[:-1]
    return lines[-1] if lines else ""


def check(archive, n_expected, codec):
    report = archive.verify(decode=True)
    assert report.ok, report.problems
    session = archive.session("s", expect=MODEL)
    n = session.n_committed
    assert n >= n_expected
    got_k, got_v = session.read_all()
    k, v = values(0, n)
    tolerance = 0 if codec == "raw" else STEP / 2
    assert np.abs(got_k - k).max(initial=0) <= tolerance
    assert np.abs(got_v - v).max(initial=0) <= tolerance
    if n:
        np.testing.assert_array_equal(session.token_ids(), np.arange(n))
    return n, got_k


def run_crashes(path, codec, n_trials, seed):
    rng = random.Random(seed)
    n_before, kept = 0, None
    for trial in range(n_trials):
        process = start(WRITER, path, codec, str(trial))
        first = process.stdout.readline()
        assert first, "the writer did not start"
        time.sleep(rng.uniform(0, 0.15))
        last = int(kill(process) or first)
        with kvstore.open(path, "a") as archive:
            n, got = check(archive, last, codec)
            assert n > n_before or trial == 0
            if kept is not None:  # nothing committed has changed by a bit
                assert got[:, :, :n_before].tobytes() == kept.tobytes()
            if trial % 2:
                archive.gc()
                assert archive.verify().n_leftover == 0
            n_before, kept = n, got
    # And this process can go on where the killed ones stopped.
    with kvstore.open(path, "a") as archive:
        session = archive.session("s")
        ids = np.arange(n_before, n_before + 50)
        session.append(*values(n_before, n_before + 50), start=n_before, token_ids=ids)
        session.commit()
        check(archive, n_before + 50, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_killed_writers(tmp_path, codec):
    run_crashes(str(tmp_path / "a.kv"), codec, n_trials=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "seed"), [("raw", 0), ("kvr1", 1)])
def test_many_killed_writers(tmp_path, codec, seed):
    run_crashes(str(tmp_path / "a.kv"), codec, n_trials=15, seed=seed)


def run_ingest_crashes(path, codec, chunks):
    with kvstore.open(path, "a") as archive:
        session = archive.create_session("s", model=MODEL, codec=CODECS[codec], fit_tokens=16)
        session.append(*values(0, 40), token_ids=np.arange(40))
        session.commit()
    for n_chunks in chunks:
        process = start(INGESTER, path, codec)
        lines = [process.stdout.readline() for _ in range(n_chunks)]
        published = "published\n" in lines
        if published:
            process.communicate()
        else:
            published = kill(process) == "published"
        with kvstore.open(path, "a") as archive:
            check(archive, 40, codec)
            assert ("big" in archive) >= published
            if "big" in archive:
                archive.delete_session("big")
            archive.gc()
            report = archive.verify()
            assert report.ok
            assert report.n_leftover == 0
    with kvstore.open(path, "a") as archive:
        size = archive.info().file_bytes
        assert archive.names() == ["s"]
    process = start(INGESTER, path, codec)
    out = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    assert out.endswith("published\n")
    with kvstore.open(path) as archive:
        check(archive, 40, codec)
        session = archive.session("big")
        k, v = values(0, 3000)
        tolerance = 0 if codec == "raw" else STEP / 2
        got_k, got_v = session.read_all()
        assert np.abs(got_k - k).max() <= tolerance
        assert np.abs(got_v - v).max() <= tolerance
        # What the killed ones had written is used again.
        assert archive.info().file_bytes < size + 2 * session.info().total_bytes


@pytest.mark.parametrize("codec", CODECS)
def test_killed_ingests(tmp_path, codec):
    run_ingest_crashes(str(tmp_path / "a.kv"), codec, [1, 150, 550])


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_many_killed_ingests(tmp_path, codec):
    run_ingest_crashes(str(tmp_path / "a.kv"), codec, range(1, 1100, 91))


def test_failed_ingest_leaves_nothing(tmp_path, monkeypatch):
    import kvstore.ingest

    monkeypatch.setattr(kvstore.ingest, "_FLUSH_BYTES", 10_000)
    k, v = values(0, 2000)
    v[2, 1, 1500, 3] = np.inf

    class Source:
        def __init__(self, n=2000):
            self.n = n

        def n_tokens(self, layer, kind):
            return self.n

        def chunks(self, layer, kind):
            for at in range(0, 2000, 100):
                yield (k if kind == "k" else v)[layer][:, at : at + 100]

    options = {"model": MODEL, "codec": Raw(), "block_tokens": 32}
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        with pytest.raises(kvstore.InvalidArgument, match=r"layer 2 v.*head 1.*1500.*channel 3"):
            archive.ingest("x", Source(), **options)
        for n in (1999, 2001):
            with pytest.raises(kvstore.InvalidArgument, match="the source yields"):
                archive.ingest("x", Source(n), **options)
        assert archive.names() == []
        assert archive.verify().n_leftover == 0
        assert archive.gc() == 0
        v[2, 1, 1500, 3] = 0
        archive.ingest("x", Source(), **options)
        with pytest.raises(kvstore.InvalidArgument, match="exists already"):
            archive.ingest("x", Source(), **options)
        assert archive.names() == ["x"]


def test_leases_of_killed_ingests_are_free(tmp_path):
    path = str(tmp_path / "a.kv")
    process = start(INGESTER, path, "raw")
    for _ in range(200):
        process.stdout.readline()
    with kvstore.open(path, "a") as archive:
        # In the middle of an ingest its frames are left alone.
        leftover = archive.verify().n_leftover
        assert leftover > 0
        assert archive.gc() == 0
        kill(process)
        assert archive.gc() > 0
