"""The advisory file of last uses: torn, garbled, folded, forked, and where it cannot be written."""

import os
import random
import subprocess
import sys
import threading
import time
import warnings

import pytest

from kvstore import last_use
from kvstore.last_use import UseLog, parse


@pytest.fixture
def log(tmp_path):
    log = UseLog(str(tmp_path))
    yield log
    log.close()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "uses"


def note_many(log, ids):
    for session_id in ids:
        log.note(session_id)


def test_a_use_is_24_bytes(log, file):
    note_many(log, [1, 2, 2, 2, 1])
    assert file.stat().st_size == 3 * 24
    data = file.read_bytes()
    assert int.from_bytes(data[:8], "little") == 1
    assert abs(int.from_bytes(data[8:16], "little") - time.time_ns()) < 60e9
    assert data[20:24] == bytes(4)


def test_torn_and_garbled_records_are_passed_over(log, file):
    note_many(log, range(1, 101))
    data, rng = file.read_bytes(), random.Random(1)
    expected = set(range(1, 101))
    for cut in range(24):
        assert parse(data[: 24 * 50 + cut] + data[24 * 51 :]).keys() == expected - {51}
        assert parse(data[cut:]).keys() >= expected - {1}
        assert parse(data[:-24] + data[-24 : -24 + cut]).keys() == expected - {100}
        assert parse(data + bytes(cut) + data).keys() == expected
        noise = rng.randbytes(1000 + cut)
        assert parse(data[:240] + noise + data[240:]).keys() == expected
    for bit in range(24 * 8):
        flipped = bytearray(data)
        flipped[24 * 7 + bit // 8] ^= 1 << bit % 8
        assert parse(bytes(flipped)).keys() == expected - {8}


@pytest.mark.parametrize(
    "piece", [b"\0", b"\1", b"\1\0\0\0\0", b"\1" * 20 + bytes(4), b"\0\0\0\0\1" + bytes(30)]
)
def test_junk_costs_little(file, log, piece):
    file.write_bytes(piece * (last_use.FOLD_BYTES // len(piece)))
    began = time.monotonic()
    log.note(5)
    assert log.latest().keys() == {5}
    assert time.monotonic() - began < 5
    assert file.stat().st_size <= last_use.FOLD_BYTES + 24


def test_the_latest_counts_whatever_the_order(log, file):
    note_many(log, [1, 2])
    data = file.read_bytes()
    late = parse(data)
    note_many(log, [1, 2])
    latest = log.latest()
    file.write_bytes(file.read_bytes()[48:] + data)
    assert parse(file.read_bytes()) == latest != late


def test_folding(log, file, tmp_path, monkeypatch):
    monkeypatch.setattr(last_use, "FOLD_BYTES", 4800)
    monkeypatch.setattr(last_use, "MOST_KEPT", 50)
    other = UseLog(str(tmp_path))
    log = UseLog(str(tmp_path))
    file.touch(mode=0o640)
    file.chmod(0o640)
    other.note(1)
    for i in range(1000):
        log.note(2 + i % 100)
        other.note(500 + i % 3)  # the file it has open is replaced now and then
        assert file.stat().st_size <= 4800 + 24
    uses = log.latest()
    assert {500, 501, 502, 101} <= uses.keys()
    assert 1 not in uses
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["uses"]
    other.close()
    log.close()


def test_who_finds_it_being_folded_leaves_it(file, tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(last_use, "FOLD_BYTES", 480)
    log = UseLog(str(tmp_path))
    log.note(1)
    with open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        note_many(log, range(1, 101))
        assert file.stat().st_size == 24 * 101 - 24
    note_many(log, range(1, 101))
    assert file.stat().st_size <= 24 * 101 + 480
    assert log.latest().keys() == set(range(1, 101))
    log.close()


def test_many_processes(tmp_path, file):
    code = """
import sys
from kvstore import last_use
last_use.FOLD_BYTES = 10_000
log = last_use.UseLog(sys.argv[1])
first = int(sys.argv[2])
for i in range(4000):
    log.note(first + i % 50)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(1000 * (i + 1))])
        for i in range(3)
    ]
    assert [child.wait() for child in children] == [0] * 3
    log = UseLog(str(tmp_path))
    assert len(log.latest()) >= 50
    assert all(1000 <= i < 3050 and i % 1000 < 50 for i in log.latest())
    assert file.stat().st_size < 20_000
    assert file.stat().st_size % 24 == 0
    log.close()


def test_threads(log):
    threads = [
        threading.Thread(target=note_many, args=(log, range(1 + 1000 * i, 501 + 1000 * i)))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.latest()) == 2000


def test_where_it_cannot_be_written(tmp_path, file):
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink(tmp_path / "no" / "no", path)):
        make(file)
        log = UseLog(str(tmp_path))
        note_many(log, [1, 2, 3])
        assert log.latest() == {}
        log.close()
        os.rmdir(file) if file.is_dir() else os.unlink(file)
    gone = UseLog(str(tmp_path / "gone"))
    note_many(gone, [1, -1, 1 << 64, "x", None])
    assert gone.latest() == {}
    gone.close()


def test_a_full_disk_tears_a_record(tmp_path, file):
    code = """
import resource, sys
from kvstore.last_use import UseLog
log = UseLog(sys.argv[1])
log.note(1)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (24 + 7, hard))
log.note(2)
log.note(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.note(4)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert file.stat().st_size == 24 + 7 + 24
    log = UseLog(str(tmp_path))
    assert log.latest().keys() == {1, 4}
    log.close()


def test_a_forked_child_has_a_descriptor_of_its_own(log, tmp_path):
    log.note(1)
    fd = log._fd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            log.note(2)
            assert log._pid == os.getpid()
            log.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    log.note(3)
    assert log._fd == fd
    assert log.latest().keys() == {1, 2, 3}
