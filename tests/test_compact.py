"""Compaction: the old archive or the new one, whatever happens, and never under anybody's feet."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from kvcodecs.errors import Corrupt, Full, InvalidArgument, Locked, NotFound, Truncated

from kvstore.backends import _compact, _environment, _open_lock, memory
from kvstore.place import compact_backend, open_backend


@pytest.fixture
def place(tmp_path):
    """An archive of 6 MB whose half is free."""
    path = str(tmp_path / "a.kv")
    backend = open_backend(path, "a")
    rng = random.Random(1)
    for i in range(6):
        with backend.write(10.0) as txn:
            for j in range(50):
                txn.put(b"%d/%d" % (j, i), rng.randbytes(rng.choice([30, 3000, 40_000])))
    with backend.write(10.0) as txn:
        for key in [key for key, _ in txn.scan(b"")]:
            if key[:1] in b"2468":
                txn.delete(key)
        txn.put(b"A", b"archive")
    backend.close()
    return path


def content(place):
    backend = open_backend(place, "r")
    with backend.read() as snapshot:
        found = {key: bytes(value) for key, value in snapshot.scan(b"")}
    backend.close()
    return found


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which are idle
        return os.fork()


def in_child(body):
    """Fork, run `body`, and return the child's exit status (negative: the signal)."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def data_file(place):
    return os.path.join(place, "data.mdb")


def leftovers(place):
    return sorted(name for name in os.listdir(place) if name.endswith(".new"))


def test_space_goes_back_to_the_file_system(place):
    before, size = content(place), os.stat(data_file(place)).st_size
    os.chmod(data_file(place), 0o640)
    steps = []
    result = compact_backend(place, progress=lambda done, total: steps.append((done, total)))
    assert result == (size, os.stat(data_file(place)).st_size)
    assert result[1] < 0.6 * size
    assert steps == sorted(steps)
    assert steps[-1] == (result[1], result[1])
    assert os.stat(data_file(place)).st_mode & 0o777 == 0o640
    assert content(place) == before
    assert sorted(os.listdir(place)) == ["data.mdb", "leases", "lock.mdb", "open.lock"]
    backend = open_backend(place, "a")
    info = backend.info()
    assert (info.free_bytes, info.file_bytes) == (0, info.used_bytes)
    for i in range(3):  # and it goes on from there
        with backend.write(1.0) as txn:
            txn.put(b"more", bytes([i]) * 100_000)
        with backend.read() as snapshot:
            assert snapshot.get(b"more") == bytes([i]) * 100_000
    backend.close()
    assert compact_backend(place)[1] > result[1]
    assert content(place) == {**before, b"more": b"\2" * 100_000}


def test_an_empty_archive(tmp_path):
    place = str(tmp_path / "a.kv")
    open_backend(place, "a").close()
    assert compact_backend(place)[1] == 8192
    backend = open_backend(place, "a")
    with backend.write(1.0) as txn:
        txn.put(b"a", b"1")
    with backend.write(1.0) as txn:
        txn.delete(b"a")
    backend.close()
    compact_backend(place)
    assert content(place) == {}


def test_memory_has_nothing_to_give_back(tmp_path):
    name = f"memory:{tmp_path}"
    with pytest.raises(NotFound):
        compact_backend(name)
    backend = open_backend(name, "a")
    with backend.write(1.0) as txn:
        txn.put(b"a", b"12")
    assert compact_backend(name) == (3, 3)
    memory.discard(str(tmp_path))


def test_what_is_no_archive(tmp_path, place):
    with pytest.raises(NotFound):
        compact_backend(tmp_path / "no.kv")
    with pytest.raises(InvalidArgument, match="backend 'x'"):
        compact_backend(place, kind="x")
    with pytest.raises(InvalidArgument, match="expected a string or a path"):
        compact_backend(b"x")
    os.rename(data_file(place), tmp_path / "data.mdb")
    os.symlink(tmp_path / "data.mdb", data_file(place))
    with pytest.raises(InvalidArgument, match="a link"):
        compact_backend(place)


@pytest.mark.parametrize("keep", [0, 4095, 8192, 1 << 20])
def test_a_truncated_archive_stays_as_it_is(place, keep):
    os.truncate(data_file(place), keep)
    with pytest.raises(Truncated):
        compact_backend(place)
    assert os.stat(data_file(place)).st_size == keep
    assert leftovers(place) == []


def test_a_damaged_archive_stays_as_it_is(place):
    with open(data_file(place), "r+b") as file:
        file.write(bytes(8192))
    with pytest.raises(Corrupt):
        compact_backend(place)
    assert leftovers(place) == []


def test_a_copy_that_differs_is_not_taken(place, monkeypatch):
    before = content(place)
    monkeypatch.setattr(_compact, "_is_same", lambda old, new: False)
    with pytest.raises(Corrupt, match="verify it"):
        compact_backend(place)
    monkeypatch.undo()
    assert leftovers(place) == []
    assert content(place) == before


def test_copies_are_compared(place, tmp_path):
    import lmdb

    def opened(path):
        return lmdb.open(str(path), subdir=False, lock=False, lib_version=0, map_size=1 << 30)

    def fresh(changes):
        copy = tmp_path / "copy.mdb"
        shutil.copy(data_file(place), copy)
        env = opened(copy)
        with env.begin(write=True) as txn:
            changes(txn)
        return env

    old = opened(data_file(place))
    with old.begin() as txn:
        small = next(key for key, value in txn.cursor() if len(value) == 30)
        large = next(key for key, value in txn.cursor() if len(value) == 40_000)
    for changes, same in (
        (lambda txn: None, True),
        (lambda txn: txn.put(b"zz", b""), False),
        (lambda txn: txn.delete(small), False),
        (lambda txn: txn.put(small, bytes(30)), False),
        (lambda txn: txn.put(large, bytes(39_999)), False),
    ):
        env = fresh(changes)
        assert _compact._is_same(old, env) == same
        env.close()
    old.close()


HOLDER = """
import sys
from kvstore.place import open_backend
backend = open_backend(sys.argv[1], sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
"""

FOREIGN_HOLDER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], lib_version=0)
print("held", flush=True)
sys.stdin.readline()
"""


WITHOUT_OPEN_LOCK = """
from kvstore.backends import _open_lock
_open_lock.OPEN_LOCK = "no/open.lock"
"""


@pytest.mark.parametrize(
    ("code", "mode"),
    [(HOLDER, "r"), (HOLDER, "a"), (WITHOUT_OPEN_LOCK + HOLDER, "r"), (FOREIGN_HOLDER, "")],
)
def test_refused_while_another_process_has_it_open(place, code, mode):
    holder = subprocess.Popen(
        [sys.executable, "-c", code, place, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        before = content(place)
        with pytest.raises(Locked, match="close it everywhere first"):
            compact_backend(place)
        assert leftovers(place) == []
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    compact_backend(place)  # what it held died with it
    assert content(place) == before


def test_refused_while_this_process_has_it_open(place):
    first, second = open_backend(place, "r"), open_backend(place, "a")
    first.close()
    with pytest.raises(Locked):
        compact_backend(place)
    with second.read():
        second.close()
        with pytest.raises(Locked):  # a reader is still there
            compact_backend(place)
    compact_backend(place)


def test_a_forked_child_does_not_hold_it_open(place):
    backend = open_backend(place, "a")

    def child():
        with pytest.raises(Locked):
            compact_backend(place)  # the parent has it open

    assert in_child(child) == 0
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    with pytest.raises(Locked):
        compact_backend(place)
    backend.close()
    compact_backend(place)
    os.close(writing)
    os.waitpid(pid, 0)


def test_opening_waits_for_a_compaction(place, monkeypatch):
    before = content(place)
    entered, done = threading.Event(), threading.Event()

    def progress(done_bytes, total):
        entered.set()
        done.wait(20)

    thread = threading.Thread(target=compact_backend, args=(place,), kwargs={"progress": progress})
    thread.start()
    entered.wait()
    monkeypatch.setattr(_environment, "_COMPACTION_TIMEOUT", 0.05)
    for mode in ("r", "a"):
        with pytest.raises(Locked, match="is being compacted"):
            open_backend(place, mode)
    with pytest.raises(Locked):
        compact_backend(place)
    monkeypatch.undo()
    threading.Timer(0.1, done.set).start()
    assert content(place) == before
    thread.join()
    assert leftovers(place) == []


def test_what_progress_raises_ends_it(place):
    before = content(place)
    for error in (KeyboardInterrupt, BrokenPipeError, BlockingIOError, KeyError):

        def progress(done, total, error=error):
            if done > total // 4:
                raise error

        with pytest.raises(error):
            compact_backend(place, progress=progress)
        assert leftovers(place) == []
        assert "kvstore-compact" not in [thread.name for thread in threading.enumerate()]
        assert content(place) == before


def test_a_full_disk(place):
    import resource

    before = content(place)
    for room in (0, 8192, 100_000, 1 << 20):

        def child(room=room):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            with pytest.raises(Full, match=r"no space for the copy.*as it was") as caught:
                compact_backend(place)
            assert not caught.value.is_limit

        assert in_child(child) == 0
        assert leftovers(place) == []
        assert content(place) == before


KILLED = ("open", "write", "fchmod", "fsync", "posix_fallocate", "close", "rename", "unlink")


def test_killed_between_any_two_steps(place, tmp_path):
    """Before and after each call that changes anything on the disk."""
    before, size = content(place), os.stat(data_file(place)).st_size
    master = tmp_path / "master.kv"
    os.rename(place, master)
    n_old = n_new = 0
    for step in range(1000):
        shutil.copytree(master, place)

        def child(kill_at=step):
            calls = writes = 0

            def killing(call):
                def wrapped(*args, **kwargs):
                    nonlocal calls, writes
                    writes += call is write
                    # How many pieces the copy comes in is chance; two are enough.
                    calls += call is not write or writes <= 2
                    if calls > kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return wrapped

            write = os.write
            for name in KILLED:
                setattr(os, name, killing(getattr(os, name)))
            compact_backend(place)

        status = in_child(child)
        new_size = os.stat(data_file(place)).st_size
        n_old += new_size == size
        n_new += new_size < size
        assert content(place) == before
        backend = open_backend(place, "a")
        with backend.write(1.0) as txn:
            txn.put(b"x", b"1")
            txn.delete(b"x")
        backend.close()
        compact_backend(place)
        assert leftovers(place) == []
        assert content(place) == before
        shutil.rmtree(place)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        pytest.fail("never ends")
    assert n_old > 10
    assert n_new > 2


def test_killed_at_any_time(place):
    before, rng = content(place), random.Random(5)
    statuses = []
    for _ in range(15):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                compact_backend(place)
                code = 0
            finally:
                os._exit(code)
        time.sleep(rng.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert content(place) == before
    assert -signal.SIGKILL in statuses
    compact_backend(place)
    assert leftovers(place) == []
    assert content(place) == before


def test_compacting_while_others_come_and_go(place):
    """Three processes open, add one and close; one compacts whenever it may."""
    code = """
import sys, time
from kvcodecs.errors import Locked
from kvstore.place import open_backend
for _ in range(12):
    backend = open_backend(sys.argv[1], "a")
    with backend.write(30.0) as txn:
        txn.put(b"sum", b"%d" % (int(bytes(txn.get(b"sum") or b"0")) + 1))
        txn.put(b"%s big" % sys.argv[2].encode(), bytes(200_000))
    backend.close()
    time.sleep(0.01)
"""
    children = [subprocess.Popen([sys.executable, "-c", code, place, str(i)]) for i in range(3)]
    n_compacted = 0
    while any(child.poll() is None for child in children):
        try:
            compact_backend(place)
            n_compacted += 1
        except Locked:
            pass
        time.sleep(0.005)
    assert [child.returncode for child in children] == [0] * 3
    assert content(place)[b"sum"] == b"36"
    assert n_compacted
    assert leftovers(place) == []


def test_where_open_lock_cannot_be_had(place, monkeypatch):
    """An archive opens without, and what is known otherwise keeps compaction away."""
    before = content(place)
    monkeypatch.setattr(_open_lock, "OPEN_LOCK", "no/open.lock")
    holder = open_backend(place, "a")
    monkeypatch.undo()
    with pytest.raises(Locked):
        compact_backend(place)
    holder.close()
    monkeypatch.setattr(_open_lock, "OPEN_LOCK", "no/open.lock")
    with pytest.raises(InvalidArgument, match="cannot be compacted"):
        compact_backend(place)
    monkeypatch.undo()
    compact_backend(place)
    assert content(place) == before


def test_what_lies_beside_stays(place):
    backend = open_backend(place, "a")
    backend.note_use(5)
    backend.close()
    compact_backend(place)
    backend = open_backend(place, "r")
    assert backend.last_uses().keys() == {5}
    backend.close()


def test_an_archive_may_begin_beside_an_open_lock(tmp_path):
    """As one that could not begin has left it."""
    place = tmp_path / "a.kv"
    place.mkdir()
    (place / "open.lock").touch()
    backend = open_backend(place, "a")
    with backend.write(1.0) as txn:
        txn.put(b"a", b"1")
    backend.close()
    assert content(str(place)) == {b"a": b"1"}
