"""Writers wait for each other with a time-out, whoever they are and however they end."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Model, Raw
from kvstore.place import open_backend

MODEL = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4)

# Holds LMDB's write lock with LMDB alone, as any other program might.
HOLDER = """
import sys, time, lmdb
env = lmdb.open(sys.argv[1], lib_version=0, map_size=1 << 30)
txn = env.begin(write=True)
print("held", flush=True)
sys.stdin.readline()
txn.abort()
"""

APPENDER = """
import sys, numpy as np, kvstore
with kvstore.open(sys.argv[1], "a") as archive:
    session = archive.session("s")
    session.append(np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1, 4), np.float32))
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "a.kv")
    with kvstore.open(path, "a") as archive:
        for name in ("s", "t"):
            archive.create_session(name, model=MODEL, codec=Raw())
    return path


@pytest.fixture
def other_process():
    started = []

    def run(code, *args):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
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


def let_go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def append(session, n=1):
    x = np.ones((1, 1, n, 4), np.float32)
    session.append(x, x)


def test_lock_held_by_another_process(path, other_process):
    holder = other_process(HOLDER, path)
    with kvstore.open(path, "a", lock_timeout=0.2) as archive:
        session = archive.session("s")
        append(session)
        for _ in range(3):  # a waiting writer that gave up does not stand in the way
            began = time.monotonic()
            with pytest.raises(
                kvstore.Locked, match=r"a\.kv: another writer held the lock for 0.2"
            ):
                session.commit()
            assert 0.15 < time.monotonic() - began < 5
        assert (session.n_tokens, session.n_committed) == (1, 0)
        assert session.read_all()[0].shape[2] == 0  # readers are never blocked
        with pytest.raises(kvstore.Locked):
            archive.create_session("u", model=MODEL)
        with pytest.raises(kvstore.Locked):
            archive.delete_session("t")
        let_go(holder)
        session.commit()
        assert session.n_committed == 1
        assert len([t for t in threading.enumerate() if t.name == "kvstore-writer"]) == 0


def test_lock_holder_is_killed(path, other_process):
    holder = other_process(HOLDER, path)
    with kvstore.open(path, "a", lock_timeout=30) as archive:
        session = archive.session("s")
        append(session)
        threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
        session.commit()
        assert session.n_committed == 1
        assert archive.verify().ok


def test_closing_under_a_waiting_writer(path, other_process):
    holder = other_process(HOLDER, path)
    archive = kvstore.open(path, "a", lock_timeout=0.1)
    session = archive.session("s")
    append(session)
    with pytest.raises(kvstore.Locked):
        session.commit()
    archive.close()
    # The environment is still in use by the thread that waits; opening again takes it over.
    with kvstore.open(path, "a", lock_timeout=0.1) as archive:
        session = archive.session("s")
        append(session)
        with pytest.raises(kvstore.Locked):
            session.commit()
    let_go(holder)
    deadline = time.monotonic() + 10
    while any(t.name == "kvstore-writer" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    from kvstore.backends import _environment

    assert path not in [environment.path for environment in _environment._registry.values()]
    with kvstore.open(path, "a", lock_timeout=1) as archive:
        session = archive.session("s")
        append(session, 3)
        session.commit()
        assert session.n_committed == 3


def test_waiting_commit_gets_the_lock(path, other_process):
    holder = other_process(HOLDER, path)
    with kvstore.open(path, "a", lock_timeout=30) as archive:
        session = archive.session("s")
        append(session)
        threading.Timer(0.3, lambda: let_go(holder)).start()
        session.commit()
        assert session.n_committed == 1


def test_one_appender_in_a_process(path):
    with kvstore.open(path, "a") as one, kvstore.open(path, "a") as two:
        first, second, third = one.session("s"), one.session("s"), two.session("s")
        append(first)
        for session in (second, third):
            with pytest.raises(kvstore.Locked, match="session 's' already has an appender"):
                append(session)
        append(two.session("t"))  # another session is free
        with pytest.raises(kvstore.Locked):
            two.delete_session("s")
        first.commit()
        assert third.n_committed == third.n_tokens == 1
        first.close()
        append(third)
        third.commit()
        assert third.n_committed == 2
        third.close()
        del third
        one.delete_session("s")


def test_a_forgotten_session_gives_its_lease_back(path):
    with kvstore.open(path, "a") as archive:
        append(archive.session("s"))
        append(archive.session("s"))


def test_appender_in_another_process(path, other_process):
    holder = other_process(APPENDER, path)
    with kvstore.open(path, "a") as archive:
        session = archive.session("s")
        with pytest.raises(kvstore.Locked, match="'s' already has an appender"):
            append(session)
        with pytest.raises(kvstore.Locked):
            archive.delete_session("s")
        assert archive.gc() == 0
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        append(session)  # the lease died with its process
        session.commit()
        assert session.n_committed == 1
        session.close()
        assert os.listdir(os.path.join(path, "leases")) == []


def test_processes_append_to_sessions_of_their_own(path):
    code = """
import sys, numpy as np, kvstore
with kvstore.open(sys.argv[1], "a", lock_timeout=60) as archive:
    session = archive.session(sys.argv[2])
    for i in range(60):
        x = np.full((1, 1, 1, 4), i, np.float32)
        session.append(x, x, start=i)
        session.commit()
"""
    children = [subprocess.Popen([sys.executable, "-c", code, path, name]) for name in ("s", "t")]
    with kvstore.open(path) as archive:
        while any(child.poll() is None for child in children):
            for name in ("s", "t"):
                k, _ = archive.session(name).read_all()
                expected = np.arange(k.shape[2], dtype=np.float32)
                np.testing.assert_array_equal(k[0, 0, :, 0], expected)
        assert [child.returncode for child in children] == [0, 0]
        assert [archive.session(name).n_committed for name in ("s", "t")] == [60, 60]
        assert archive.verify().ok


HOLDER_OF_EXPIRING_LEASE = """
import sys
from kvcodecs.errors import Locked
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], "a")
lease = backend.lease(7, "s", expires=0.3)
with backend.write(1.0) as txn:
    lease.check()
    txn.put(b"a", b"mine")
print("held", flush=True)
sys.stdin.readline()
try:
    with backend.write(1.0) as txn:
        lease.check()
        txn.put(b"a", b"mine again")
except Locked as error:
    assert "expired and another appender took it" in str(error), error
    lease.release()
    print("lost", flush=True)
"""


def test_a_stopped_holder_loses_its_lease(path, other_process):
    holder = other_process(HOLDER_OF_EXPIRING_LEASE, path)
    os.kill(holder.pid, signal.SIGSTOP)
    backend = open_backend(path, "a")
    deadline, lease = time.monotonic() + 20, None
    while lease is None:
        assert time.monotonic() < deadline
        try:
            lease = backend.lease(7, "s", expires=60.0, timeout=1.0)
        except kvstore.Locked:
            time.sleep(0.02)
    with backend.write(1.0) as txn:
        lease.check()
        assert txn.get(b"a") == b"mine"
        txn.put(b"a", b"taken")
    os.kill(holder.pid, signal.SIGCONT)
    let_go(holder)
    assert holder.stdout.readline() == "lost\n"
    assert holder.wait() == 0
    lease.check()  # the old holder gave back what is not its own
    with pytest.raises(kvstore.Locked):
        backend.lease(7, "s", expires=60.0)
    with backend.read() as snapshot:
        assert snapshot.get(b"a") == b"taken"
    lease.release()
    assert os.listdir(os.path.join(path, "leases")) == []
    backend.close()


def test_processes_take_leases_from_each_other(path):
    """Whoever passes the check inside its transaction is the only holder."""
    code = """
import os, random, sys, time
from kvcodecs.errors import Locked
from kvstore.place import open_backend
backend, me, rng = open_backend(sys.argv[1], "a"), sys.argv[2].encode(), random.Random(sys.argv[2])
end, n_taken, n_lost = time.monotonic() + 1.5, 0, 0
while time.monotonic() < end:
    try:
        lease = backend.lease(7, "s", expires=0.03, timeout=10.0)
    except Locked:
        time.sleep(0.002)
        continue
    n_taken += 1
    me = b"%d %d" % (os.getpid(), n_taken)
    try:
        with backend.write(10.0) as txn:
            lease.check()
            txn.put(b"holder", me)
        for _ in range(rng.randrange(4)):
            time.sleep(rng.choice([0, 0.001, 0.06]))
            with backend.write(10.0) as txn:
                lease.check()
                assert txn.get(b"holder") == me, (bytes(txn.get(b"holder")), me)
                txn.put(b"n", b"%d" % (int(bytes(txn.get(b"n") or b"0")) + 1))
    except Locked as error:
        assert "took it" in str(error), error
        n_lost += 1
    if rng.random() < 0.8:
        lease.release()
    del lease
assert n_taken
print(n_lost)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, path, str(i)], stdout=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert sum(map(int, outputs)) > 0


def test_lease_files_that_are_not_what_they_should_be(path):
    """What no holder wrote never makes a lease expire; what cannot be written, neither."""
    backend, other = open_backend(path, "a"), open_backend(path, "a")
    lease = backend.lease(7, "s", expires=1.0)
    file = os.path.join(path, "leases", f"{7:016x}.lock")
    assert Path(file).read_text() == "1.0\n"
    for text in ("", "1.0", "1.0\n" * 100, "x\n", "nan\n", "-1\n", "inf\n"):
        Path(file).write_text(text)
        os.utime(file, (0, 0))
        with pytest.raises(kvstore.Locked):
            other.lease(7, "s", expires=0.01)
    Path(file).write_text("1.0\n")
    os.utime(file, (0, 0))
    taken = other.lease(7, "s", expires=0.01)
    with pytest.raises(kvstore.Locked):
        lease.check()
    lease.release()
    taken.release()
    # A file left by a holder that was killed is nobody's, and says nothing of the next one.
    Path(file).write_text("1.0\n")
    lease = backend.lease(7, "s")
    assert Path(file).read_text() == ""
    lease.release()
    backend.close()
    other.close()


def test_read_only_directory(path):
    """A directory that cannot be written is still read; where nobody can write, without locks."""
    if os.geteuid() != 0:
        pytest.skip("needs to become another user")
    code = """
import os, sys, tempfile, kvstore
# Everything is imported before the interpreter's files may be out of reach; some of it, lmdb's too,
# only with the first archive.
with tempfile.TemporaryDirectory() as own, kvstore.open(own, "a") as archive:
    archive.verify()
os.setgid(65534); os.setuid(65534)
try:
    kvstore.open(sys.argv[1], "a")
    sys.exit("opened for writing")
except kvstore.InvalidArgument as error:
    assert "mode='r'" in str(error), error
with kvstore.open(sys.argv[1]) as archive:
    assert archive.session("s").n_committed == 2
    assert archive.verify().ok
"""
    with kvstore.open(path, "a") as archive:
        session = archive.session("s")
        append(session, 2)
        session.commit()
    for parent in (Path(path), *Path(path).parents):
        if parent.stat().st_mode & 0o005 != 0o005:
            if not parent.is_relative_to(tempfile.gettempdir()):
                pytest.skip(f"{parent} is closed to other users")
            parent.chmod(0o755)
    before = sorted(os.listdir(path))
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    os.unlink(os.path.join(path, "lock.mdb"))
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    assert sorted(os.listdir(path)) == [name for name in before if name != "lock.mdb"]
