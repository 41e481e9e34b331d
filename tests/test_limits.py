"""What LMDB adds to limits: pages, processes that come and go, and maps of different sizes."""

import os
import random
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from kvcodecs.errors import Closed, Full, KvError, Locked

from kvstore.backends import _environment
from kvstore.place import open_backend

PAGE = 4096

READER = """
import sys
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], "r")
with backend.read() as snapshot:
    print("held", flush=True)
    sys.stdin.readline()
"""

WRITER = """
import sys
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], "a")
with backend.write(30.0) as txn:
    txn.put(b"big", bytes(int(sys.argv[2])))
"""


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "a.kv")


@pytest.fixture
def backend(place):
    backend = open_backend(place, "a")
    yield backend
    backend.close()


@pytest.fixture
def reader_process(place):
    started = []

    def run():
        process = subprocess.Popen(
            [sys.executable, "-c", READER, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def put(backend, **values):
    with backend.write(10.0) as txn:
        for key, value in values.items():
            txn.put(key.encode(), value)


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which are idle
        return os.fork()


def file_bytes(place):
    return os.stat(os.path.join(place, "data.mdb")).st_size


@pytest.mark.parametrize("sizes", [(10, 500, 3000), (10, 9000, 60_000, 300_000)])
def test_used_bytes_is_a_tight_bound(backend, place, sizes):
    """Of random transactions, with and without a reader in the way; and the cap holds."""
    rng, reader = random.Random(len(sizes)), None
    backend.set_limit(24 << 20)
    n_full = 0
    for _ in range(250):
        try:
            with backend.write(1.0) as txn:
                for _ in range(rng.randrange(1, 40)):
                    key = b"%d" % rng.randrange(1000)
                    if rng.random() < 0.55:
                        txn.put(key, bytes(rng.choice(sizes)))
                    else:
                        txn.delete(key)
                if rng.random() < 0.05:
                    for key in [key for key, _ in txn.scan(b"")][: rng.randrange(900)]:
                        txn.delete(key)
                at_most = txn.used_bytes()
            used = backend.info().used_bytes
            assert used <= at_most <= used + 16 * PAGE
        except Full:
            n_full += 1
        assert file_bytes(place) <= 24 << 20
        if rng.random() < 0.1:
            if reader is None:
                reader = backend.read()
                reader.__enter__()
            else:
                reader.__exit__(None, None, None)
                reader = None
    if reader is not None:
        reader.__exit__(None, None, None)
    assert (n_full > 0) == (max(sizes) > 100_000)
    # What is said to be used is what a compact copy has, but for the list of free pages.
    info = backend.info()
    copied = os.path.join(place, "..", "copy.mdb")
    with open(copied, "wb") as file:
        backend._environment.env.copyfd(file.fileno(), compact=True)
    assert 0 <= info.used_bytes - os.stat(copied).st_size <= 64 * PAGE
    assert info.n_entries == backend._environment.env.stat()["entries"]


def test_a_full_disk_is_no_limit(place):
    code = """
import resource, sys
from kvcodecs.errors import Full
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], "a")
backend.set_limit(1 << 30)
with backend.write(1.0) as txn:
    txn.put(b"a", bytes(10000))
n_bytes = backend.info().file_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes + 10000, resource.RLIM_INFINITY))
try:
    with backend.write(1.0) as txn:
        txn.put(b"b", bytes(1 << 20))
    sys.exit("no error")
except Full as error:
    assert not error.is_limit, error
"""
    subprocess.run([sys.executable, "-c", code, place], check=True, timeout=60)


def test_readers_of_other_processes_alive_and_dead(backend, place, reader_process):
    put(backend, a=b"1")
    first, second = reader_process(), reader_process()
    put(backend, a=b"2")
    found = backend.readers()
    assert {reader.pid for reader in found} == {first.pid, second.pid}
    assert {(reader.n_behind, reader.age_seconds) for reader in found} == {(1, None)}
    assert backend.reclaim(1.0)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert [reader.pid for reader in backend.readers()] == [second.pid]
    second.stdin.write("\n")
    second.stdin.flush()
    second.wait()
    assert not backend.reclaim(1.0)
    assert backend.readers() == []


def test_readers_where_there_is_no_lock_file(place, monkeypatch):
    """As for whoever may not write: LMDB keeps no table of readers then."""
    import lmdb

    put(open_backend(place, "a"), a=b"1")
    backend = open_backend(place, "r")
    backend.close()
    env = lmdb.open(place, readonly=True, lock=False, lib_version=0)
    monkeypatch.setattr(_environment, "open_environment", lambda *args: (env, False))
    backend = open_backend(place, "r")
    with backend.read():
        assert backend.readers() == []
    backend.close()


def test_a_limit_survives_the_growth_by_another_process(backend, place):
    put(backend, a=b"1")
    backend.set_limit(1 << 20)
    subprocess.run([sys.executable, "-c", WRITER, place, str(4 << 20)], check=True, timeout=60)
    with backend.read() as snapshot:
        assert snapshot.get(b"big").nbytes == 4 << 20
    assert backend.limit == 1 << 20
    size = file_bytes(place)
    with pytest.raises(Full, match="limit of 1048576") as caught:
        put(backend, more=bytes(1 << 20))
    assert caught.value.is_limit
    assert file_bytes(place) == size
    with backend.write(1.0) as txn:
        txn.delete(b"big")
    backend.reclaim(1.0)
    put(backend, more=bytes(1 << 20))
    assert file_bytes(place) <= size + (1 << 16)
    # It ends with the last of those who had the archive open.
    backend.close()
    again = open_backend(place, "a")
    assert again.limit is None
    again.close()


def test_a_limit_waits_for_transactions(backend, monkeypatch):
    put(backend, a=b"1")
    monkeypatch.setattr(_environment, "_RESIZE_TIMEOUT", 0.05)
    with backend.read(), pytest.raises(Locked, match="limit is being changed"):
        backend.set_limit(1 << 20)
    assert backend.limit is None
    monkeypatch.setattr(_environment, "_RESIZE_TIMEOUT", 10.0)
    begun, done = threading.Event(), threading.Event()

    def read():
        with backend.read() as snapshot:
            begun.set()
            done.wait(0.1)
            assert snapshot.get(b"a") == b"1"

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    backend.set_limit(1 << 20)
    assert backend.limit == 1 << 20
    with backend.read():
        backend.set_limit(1 << 20)  # no change needs no waiting
    done.set()
    thread.join()


def test_limits_change_under_many_threads(backend):
    put(backend, A=b"1")
    errors = []

    def work(i):
        for j in range(40):
            try:
                put(backend, **{f"{i}": bytes(1000 * j)})
                with backend.read() as snapshot:
                    assert snapshot.get(b"%d" % i).nbytes == 1000 * j
            except (KvError, AssertionError) as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(40):
        backend.set_limit((8 << 20) + (i << 16))
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_limit_beyond_what_can_be_mapped(place):
    code = """
import resource, sys
from kvstore.place import open_backend
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
backend = open_backend(sys.argv[1], "a")
for limit in (1 << 40, 1 << 62, 3 << 30, 1 << 20, None):
    backend.set_limit(limit)
    assert backend.limit == limit
    with backend.write(1.0) as txn:
        txn.put(b"a", bytes(100_000))
    mapped = backend._environment.env.info()["map_size"]
    expected = limit if limit in (3 << 30, 1 << 20) else 1 << 30
    assert mapped == expected, (limit, mapped)
"""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, place], check=True, timeout=60, env=env)


def test_limits_and_forks(backend, place):
    put(backend, a=b"1")
    pid = fork()
    if pid == 0:
        code = 1
        try:
            for use in (lambda: backend.set_limit(1 << 20), backend.readers, backend.info):
                with pytest.raises(Closed, match="fork"):
                    use()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
