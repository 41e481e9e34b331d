"""Archives that zarr opens, used by many processes, some of which are killed."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvstore
from kvstore.place import open_backend

COUNT = """
import sys
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], "a")
for i in range(int(sys.argv[3])):
    with backend.write(60.0) as txn:
        old = txn.get(b"sum")
        txn.put(b"sum", b"%d" % (int(bytes(old or b"0")) + 1))
        txn.put(b"%s/%d" % (sys.argv[2].encode(), i), bytes(300))
backend.close()
"""

CHANGE = """
import random, sys
import numpy as np
import kvstore
from kvcodecs.errors import KvError
from kvcodecs.raw import Raw

path, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4, dtype="float32")
archive = kvstore.open(path, "a", grace_seconds=rng.choice([0, 0, 0.3]))
print("ready", flush=True)

def grow(session, n):
    first = session.n_committed
    rows = np.arange(first, first + n, dtype=np.float32)
    x = np.broadcast_to(rows[:, None], (1, 1, n, 4))
    session.append(x, -x)
    session.commit()

while True:
    names = archive.names()
    name = rng.choice([f"s{rng.randrange(6)}", *names])
    what = rng.randrange(10)
    if name not in names:
        with archive.create_session(name, model=model, codec=Raw(), block_tokens=128) as session:
            grow(session, rng.randrange(1, 700))
        continue
    if what == 0:
        archive.delete_session(name)
    elif what == 1:
        archive.gc()
    else:
        with archive.session(name) as session:
            n = session.n_committed
            if what == 2 and n > 1:
                session.truncate(rng.randrange(1, n))
            elif what == 3 and n:
                other = f"f{rng.randrange(6)}"
                if other not in names:
                    session.fork(other, rng.randrange(1, n + 1)).close()
            else:
                grow(session, rng.randrange(1, 300))
"""


def run_python(code, *args, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **options)


@pytest.fixture(params=["directory", "bucket"])
def place(request, tmp_path, monkeypatch):
    if request.param == "directory":
        return f"zarr:{tmp_path / 'a'}"
    server = request.getfixturevalue("s3_server")
    for name, value in server.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    return server.bucket() + "/a"


def test_writers_of_many_processes_lose_nothing(place):
    n = 25 if place.startswith("zarr:") else 6
    writers = [run_python(COUNT, place, name, n) for name in "abc"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    backend = open_backend(place, "a")
    with backend.read() as snapshot:
        assert int(bytes(snapshot.get(b"sum"))) == 3 * n
        assert sum(1 for _ in snapshot.sizes(b"")) == 3 * n + 1
    backend.collect(10.0)
    backend.close()


def check(path):
    """Check that every session is a whole state that its writer has committed."""
    with kvstore.open(path) as archive:
        report = archive.verify(decode=True)
        assert report.problems == []
        found = 0
        for name in archive.names():
            session = archive.session(name)
            n = session.n_committed
            found += n
            if n:
                expected = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None], (1, n, 4))
                np.testing.assert_array_equal(session.read(0, "k"), expected)
                np.testing.assert_array_equal(session.read(0, "v"), -expected)
    return found


def check_killed(tmp_path, n_rounds):
    path, n_seen = f"zarr:{tmp_path / 'a'}", 0
    rng = random.Random(n_rounds)
    for seed in range(n_rounds):
        writer = run_python(CHANGE, path, seed, stdout=subprocess.PIPE)
        with writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 0.4))
            assert writer.poll() is None
            writer.send_signal(signal.SIGKILL)
        n_seen += check(path)
    assert n_seen
    time.sleep(0.35)  # until what the last ones deleted is due
    with kvstore.open(path, "a", grace_seconds=0) as archive:
        archive.gc()
        for name in archive.names():
            archive.delete_session(name)
        archive.gc()
        archive.gc()
    # Directories that are empty, and files of leases, may be left by the dead.
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*")]
    files = [str(path) for path in files if (tmp_path / "a" / path).is_file()]
    assert [path for path in files if not path.startswith("_kvstore/")] == ["zarr.json"]
    assert len([path for path in files if "/leases/" not in path]) < 12


def test_writers_that_are_killed(tmp_path):
    check_killed(tmp_path, 4)


@pytest.mark.slow
def test_many_writers_that_are_killed(tmp_path):
    check_killed(tmp_path, 40)
