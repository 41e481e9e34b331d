"""What the zarr backend asks of storage holds for a directory and for a bucket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

import kvstore
from kvstore.backends.zarr import _requests, bucket_lease
from kvstore.backends.zarr._at_once import at_once
from kvstore.backends.zarr._keys import is_unfinished
from kvstore.backends.zarr.bucket import Bucket
from kvstore.backends.zarr.directory import Directory
from kvstore.backends.zarr.objects import Found

LEASE_SECONDS = 1.0


class Place:
    """Where objects lie; `open` returns them as one more process would see them."""

    def __init__(self, where, options=None):
        self.where, self.options = where, options

    def open(self, **keywords):
        if self.options is None:
            return Directory(self.where)
        return Bucket(self.where, self.options, **{"lease_seconds": LEASE_SECONDS} | keywords)


@pytest.fixture(params=["directory", "bucket"])
def place(request, tmp_path):
    if request.param == "directory":
        return Place(str(tmp_path / "a.kv"))
    server = request.getfixturevalue("s3_server")
    return Place(server.bucket() + "/deep/down", server.options)


@pytest.fixture
def in_bucket(s3_server):
    return Place(s3_server.bucket() + "/a", s3_server.options)


@pytest.fixture
def faulty(faulty_s3, monkeypatch):
    """A bucket with faults on the way; retries are quick, and few."""
    monkeypatch.setattr(_requests, "_FIRST_PAUSE", 0.01)
    place = Place(faulty_s3.bucket() + "/a", faulty_s3.options)
    place.objects = place.open(max_retries=3, retry_seconds=5.0)
    place.server = faulty_s3
    return place


def never():
    raise AssertionError("not asked")


def contents(objects, prefix=""):
    return {found.key: objects.get(found.key) for found in objects.list(prefix)}


CHILD = """
import sys, time
from kvstore.backends.zarr.bucket import Bucket
from kvstore.backends.zarr.directory import Directory
where, options, seconds, code = sys.argv[1], eval(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
objects = Directory(where) if options is None else Bucket(where, options, lease_seconds=seconds)
print("ready", flush=True)
sys.stdin.readline()
exec(code)
"""


@contextlib.contextmanager
def child(place, code):
    """A process that has opened a place and waits for a line before it runs `code`."""
    arguments = [place.where, repr(place.options), str(LEASE_SECONDS), code]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def begin(*processes):
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


class TestObjects:
    def test_what_is_put_is_read(self, place):
        objects = place.open()
        assert objects.get("a/b") is None
        assert not objects.exists("a/b")
        objects.put("a/b", b"0123456789")
        objects.put("empty", b"")
        objects.flush()
        again = place.open()
        assert again.get("a/b") == b"0123456789"
        assert again.get("a/b", 2, 5) == b"234"
        assert again.get("a/b", 7) == b"789"
        assert again.get("a/b", None, 3) == b"012"
        assert again.get("a/b", 8, 50) == b"89"
        assert again.get("a/b", 10, 50) == b""
        assert again.get("a/b", 50) == b""
        assert again.get("a/b", 3, 3) == b""
        assert again.get("no", 3, 3) is None
        assert again.get("no", 3, 5) is None
        assert again.get("empty") == b""
        assert again.exists("a/b")
        assert not again.exists("a")  # a prefix is no object
        assert again.get("a") is None
        again.put("a/b", b"new")
        assert objects.get("a/b") == b"new"
        again.delete(["a/b", "no/such/object", "a"])
        assert contents(objects) == {"empty": b""}
        again.close()
        again.close()

    def test_many_are_read_in_the_order_asked_for(self, place):
        objects = place.open()
        objects.put_frames([(f"c/{i}/0", bytes([i]) * 9) for i in range(40)], never)
        asked = [(f"c/{i}/0", 2, 5) if i % 2 else (f"c/{i}/0", None, None) for i in range(-1, 41)]
        expected = [None, *(bytes([i]) * (3 if i % 2 else 9) for i in range(40)), None]
        assert objects.get_many(asked) == expected
        assert objects.get_many([]) == []

    def test_listings_are_in_key_order(self, place):
        objects = place.open()
        keys = ["a-b", "a.b/c", "a/b", "a/c/d", "ab", "b/x", "ü ä/1"]
        for key in reversed(keys):
            objects.put(key, key.encode())
        assert [found.key for found in objects.list("")] == keys
        assert list(objects.list("a/")) == [Found("a/b", 3), Found("a/c/d", 5)]
        assert list(objects.list("no/")) == []
        for key in [*keys, "a", "a/", "a/c", "zz"]:
            assert [f.key for f in objects.list("", key)] == [k for k in keys if k > key]
        assert [f.key for f in objects.list("a/", "a/b")] == ["a/c/d"]

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/etc/x", "../x", "a/../../x", "a/./b", "a//b", "a/", ".", "a\0b", "\ud800"],
    )
    def test_keys_never_escape_the_root(self, place, key):
        objects = place.open()
        calls = [
            lambda: objects.get(key),
            lambda: objects.get_many([(key, None, None)]),
            lambda: objects.exists(key),
            lambda: objects.put_new(key, b""),
            lambda: objects.put(key, b""),
            lambda: objects.put_frames([(key, b"")], never),
            lambda: objects.copy([("a", key)], bool),
            lambda: objects.copy([(key, "a")], bool),
            lambda: objects.delete([key]),
            lambda: list(objects.list(key + "x")),
        ]
        for call in calls:
            with pytest.raises(kvstore.InvalidArgument):
                call()
        assert contents(objects) == {}

    def test_one_of_many_threads_puts_a_new_object(self, place):
        objects = place.open()
        for key in ("n/0", "n/1", "n/2"):
            won = at_once(lambda i, key=key: objects.put_new(key, b"%d" % i), range(8), 8)
            assert sum(won) == 1
            assert objects.get(key) == b"%d" % won.index(True)
        assert not objects.put_new("n/0", objects.get("n/0"))

    def test_one_of_many_processes_puts_a_new_object(self, place):
        code = """
for i in range(20):
    if objects.put_new(f"commits/{i:03d}", sys.stdin.name.encode() + b"PID" * 1000):
        print(i, flush=True)
"""
        with (
            child(place, code.replace("PID", "1")) as a,
            child(place, code.replace("PID", "2")) as b,
        ):
            begin(a, b)
            won = [list(map(int, process.stdout.read().split())) for process in (a, b)]
        assert sorted(won[0] + won[1]) == list(range(20))
        objects = place.open()
        for i in range(20):
            assert objects.get(f"commits/{i:03d}")[-1:] == (b"1" if i in won[0] else b"2")

    def test_frames_of_the_same_bytes_are_left_alone(self, place):
        objects = place.open()
        items = [(f"c/{i}/0", b"frame" * i) for i in range(5)]
        objects.put_frames(items, never)
        place.open().put_frames(items, never)
        assert contents(objects) == dict(items)

    def test_leftover_frames_are_replaced_by_who_may_write(self, place):
        objects = place.open()
        objects.put_frames([("c/0/0", b"leftover"), ("c/1/0", b"right")], never)
        asked = []
        items = [("c/0/0", b"new"), ("c/1/0", b"right"), ("c/2/0", b"more")]
        objects.put_frames(items, lambda: asked.append(1))
        assert contents(objects) == dict(items)
        assert asked == [1]

    def test_who_has_lost_the_right_replaces_nothing(self, place):
        objects = place.open()
        objects.put_frames([("c/0/0", b"another's")], never)

        def lost():
            raise kvstore.Locked("lost")

        with pytest.raises(kvstore.Locked, match=r"^lost$"):
            objects.put_frames([("c/0/0", b"mine")], lost)
        assert contents(objects) == {"c/0/0": b"another's"}

    def test_copies_do_not_change_with_what_was_copied(self, place):
        objects = place.open()
        objects.put("a/0", b"one")
        objects.put("b/0", b"two")
        objects.copy([("a/0", "copies/x/0"), ("a/0", "copies/y/0"), ("b/0", "copies/z/0")], bool)
        objects.copy([("b/0", "copies/y/0")], bool)  # replaces
        objects.flush()
        objects.put("a/0", b"changed")
        objects.put_frames([("b/0", b"changed too")], lambda: None)
        objects.put_frames([("copies/z/0", b"and this")], lambda: None)
        assert contents(objects, "copies/") == {
            "copies/x/0": b"one",
            "copies/y/0": b"two",
            "copies/z/0": b"and this",
        }
        objects.delete(["a/0", "b/0"])
        assert objects.get("copies/x/0") == b"one"
        with pytest.raises(kvstore.NotFound, match="no object 'a/0' to copy"):
            objects.copy([("a/0", "c")], bool)
        assert not objects.exists("c")

    def test_one_writer_at_a_time(self, place):
        objects, others = place.open(), place.open()
        with objects.writer(1.0) as writer:
            writer.check()
            for waiting in (objects, others):  # the same object, and another
                with (
                    pytest.raises(kvstore.Locked, match=r"held the lock for 0\.1 s.*lock_timeout"),
                    waiting.writer(0.1),
                ):
                    pass
        with pytest.raises(kvstore.Closed):
            writer.check()
        with pytest.raises(KeyError), others.writer(0.0):
            raise KeyError
        inside = []

        def write(objects):
            with objects.writer(10.0):
                inside.append(1)
                time.sleep(0.02)
                assert inside.pop() == 1
                assert inside == []

        at_once(write, [objects, others] * 3, 6)

    def test_a_lease_has_one_holder(self, place):
        objects, others = place.open(), place.open()
        lease = objects.lease(7, "chat", None, in_write=False)
        with pytest.raises(kvstore.Locked, match="session 'chat' already has an appender"):
            others.lease(7, "chat", None, in_write=False)
        assert not others.is_expired(7)
        other = others.lease(8, "other", 5.0, in_write=False)
        lease.check()
        lease.renew()
        lease.release()
        lease.release()
        with pytest.raises(kvstore.Closed, match="given back"):
            lease.check()
        other.check()
        assert not others.is_expired(7)
        again = others.lease(7, "chat", None, in_write=False)
        again.release()
        other.release()
        objects.lease(8, "other", 5.0, in_write=False).release()

    def test_an_expired_lease_is_taken_over_by_who_may_write(self, place):
        objects, others = place.open(), place.open()
        stale = objects.lease(7, "chat", 0.5, in_write=False)
        with pytest.raises(kvstore.Locked):
            others.lease(7, "chat", 0.5, in_write=True)
        time.sleep(0.55)
        assert others.is_expired(7)
        with pytest.raises(kvstore.Locked, match=place.where):
            others.lease(7, "chat", 5.0, in_write=False)
        lease = others.lease(7, "chat", 5.0, in_write=True)
        with pytest.raises(kvstore.Locked, match=r"expired and another appender took it"):
            stale.check()
        lease.check()
        stale.release()
        assert not objects.is_expired(7)
        lease.check()
        lease.release()

    def test_signs_of_life_keep_a_lease(self, place):
        objects, others = place.open(), place.open()
        lease = objects.lease(7, "chat", 0.8, in_write=False)
        for _ in range(14):
            time.sleep(0.07)
            lease.renew()
            assert not others.is_expired(7)
        lease.check()
        lease.release()

    def test_what_a_killed_process_held_is_free_soon(self, place):
        code = """
lease = objects.lease(7, "chat", None, in_write=False)
with objects.writer(5.0) as writer:
    print("held", flush=True)
    time.sleep(60)
"""
        with child(place, code) as process:
            begin(process)
            assert process.stdout.readline() == "held\n"
            objects = place.open()
            with pytest.raises(kvstore.Locked), objects.writer(0.05):
                pass
            with pytest.raises(kvstore.Locked):
                objects.lease(7, "chat", None, in_write=False)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with objects.writer(10.0):
            objects.lease(7, "chat", None, in_write=True).release()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "a.kv"


def tree(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def refuse(number):
    def fail(*args, **keywords):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def fsynced(monkeypatch, root):
    """What is fsynced, in order, relative to the root's parent."""
    paths, fsync = [], os.fsync

    def record(fd):
        paths.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root.parent))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    return paths


class TestDirectory:
    def test_a_flush_reaches_files_then_the_names_that_lead_to_them(self, root, fsynced):
        objects = Directory(root)
        objects.put_frames([("s/k_000/c/0/0/0", b"0"), ("s/k_000/c/0/1/0", b"1")], never)
        objects.put("s/zarr.json", b"{}")
        objects.copy([("s/k_000/c/0/0/0", "t/c")], bool)
        assert fsynced == []
        objects.flush()
        files = {"s/k_000/c/0/0/0", "s/k_000/c/0/1/0", "s/zarr.json", "t/c"}
        directories = {"s", "s/k_000", "s/k_000/c", "s/k_000/c/0", "s/k_000/c/0/0", "t"}
        directories |= {"s/k_000/c/0/1"}
        assert set(fsynced[: len(files)]) == {f"a.kv/{path}" for path in files}
        assert sorted(fsynced[len(files) :]) == sorted(
            [".", "a.kv", *(f"a.kv/{path}" for path in directories)]
        )
        fsynced.clear()
        objects.flush()
        assert fsynced == []
        # Names that are durable are not made so again.
        objects.put_frames([("s/k_000/c/0/2/0", b"2")], never)
        objects.flush()
        assert fsynced[0] == "a.kv/s/k_000/c/0/2/0"
        assert sorted(fsynced[1:]) == ["a.kv/s/k_000/c/0", "a.kv/s/k_000/c/0/2"]

    def test_a_frame_that_was_there_is_made_durable_too(self, root, fsynced):
        Directory(root).put_frames([("c/0", b"of one that died")], never)
        objects = Directory(root)
        objects.put_frames([("c/0", b"of one that died")], never)
        objects.flush()
        assert fsynced[0] == "a.kv/c/0"
        assert sorted(fsynced[1:]) == ["a.kv", "a.kv/c"]

    def test_a_new_object_is_durable_before_it_has_its_name(self, root, fsynced, monkeypatch):
        objects, link = Directory(root), os.link

        def check(old, new):
            assert [os.path.relpath(old, root.parent)] == fsynced
            link(old, new)

        monkeypatch.setattr(os, "link", check)
        assert objects.put_new("commits/1", b"commit")
        objects.flush()
        assert sorted(fsynced[1:]) == [".", "a.kv", "a.kv/commits"]
        assert tree(root) == ["commits", "commits/1"]

    def test_a_failed_flush_is_an_error_until_the_disk_has_all(self, root, monkeypatch):
        objects = Directory(root)
        objects.put_frames([("c/0", b"frame")], never)
        objects.put("d/0", b"other")
        inode = (root / "c/0").stat().st_ino
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse(errno.EIO))
            for _ in range(2):
                with pytest.raises(kvstore.Locked, match=r"a\.kv: ./0: Input/output error"):
                    objects.flush()
            # What can be read may be in memory alone: the frame is put anew.
            asked = []
            objects.put_frames([("c/0", b"frame")], lambda: asked.append(1))
            assert asked == [1]
            assert (root / "c/0").stat().st_ino != inode
            with pytest.raises(kvstore.Locked):
                objects.flush()
        paths, fsync = [], os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (paths.append(fd), fsync(fd)))
        objects.flush()
        assert len(paths) == 2 + 4
        objects.flush()
        assert len(paths) == 6

    def test_a_frame_is_never_written_into_a_linked_file(self, root):
        objects = Directory(root)
        objects.put_frames([("a/0", b"old")], never)
        objects.copy([("a/0", "b/0")], bool)
        assert (root / "a/0").stat().st_ino == (root / "b/0").stat().st_ino
        objects.put_frames([("a/0", b"new")], lambda: None)
        assert contents(objects) == {"a/0": b"new", "b/0": b"old"}

    @pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK])
    def test_file_systems_without_hard_links_do(self, root, monkeypatch, number):
        monkeypatch.setattr(os, "link", refuse(number))
        objects = Directory(root)
        won = at_once(lambda i: objects.put_new("commits/1", b"%d" % i), range(8), 8)
        assert sum(won) == 1
        assert objects.get("commits/1") == b"%d" % won.index(True)
        objects.copy([("commits/1", "x/y")], bool)
        objects.flush()
        assert tree(root) == ["commits", "commits/1", "x", "x/y"]
        assert objects.get("x/y") == objects.get("commits/1")
        with pytest.raises(kvstore.NotFound):
            objects.copy([("no", "x/z")], bool)

    def test_a_full_disk_leaves_nothing_torn(self, root, monkeypatch):
        objects = Directory(root)
        objects.put("kept/0", b"committed")
        write = os.write

        def full(fd, data):
            if len(data) > 50:
                return write(fd, data[:50])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            for put in (
                lambda: objects.put_frames([("kept/1", b"x" * 99), ("s/c/0", b"x" * 99)], never),
                lambda: objects.put_frames([("kept/0", b"x" * 99)], lambda: None),
                lambda: objects.put("s/zarr.json", b"x" * 99),
                lambda: objects.put_new("commits/1", b"x" * 99),
            ):
                with pytest.raises(kvstore.Full, match=r"a\.kv: .*: no space on the disk"):
                    put()
        assert tree(root) == ["kept", "kept/0"]
        assert objects.get("kept/0") == b"committed"
        objects.flush()

    def test_a_limit_on_files_is_a_full_disk(self, root):
        """As `test_full`: the system refuses to extend a file."""
        objects = Directory(root)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(kvstore.Full):
                objects.put_frames([("c/0", bytes(50_000)), ("c/1", bytes(200_000))], never)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert tree(root) == ["c", "c/0"]
        objects.put_frames([("c/0", bytes(50_000)), ("c/1", bytes(200_000))], never)

    def test_what_a_killed_writer_was_making_is_no_object(self, root):
        code = """
import os
os.link = lambda *names: os._exit(1)
os.replace = lambda *names: os._exit(1)
objects.{}
"""
        for call in ('put_new("commits/1", b"half")', 'put("commits/1", b"half")'):
            with child(Place(str(root)), code.format(call)) as process:
                begin(process)
                assert process.wait(10) == 1
        objects = Directory(root)
        assert objects.get("commits/1") is None
        left = [found.key for found in objects.list("commits/")]
        assert len(left) == 2
        assert all(map(is_unfinished, left))
        assert list(objects.list("commits/", "commits/0")) == []  # they come before all others
        assert objects.put_new("commits/1", b"whole")
        objects.delete(left)
        assert tree(root) == ["commits", "commits/1"]
        assert not is_unfinished("commits/1")

    def test_readers_need_no_right_to_write(self, root, monkeypatch):
        Directory(root).put("a/b", b"x")
        objects, opened = Directory(root), os.open

        def read_only(path, flags, *args, **keywords):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opened(path, flags, *args, **keywords)

        for name in ("mkdir", "unlink", "rename", "replace", "link"):
            monkeypatch.setattr(os, name, refuse(errno.EROFS))
        monkeypatch.setattr(os, "open", read_only)
        assert contents(objects) == {"a/b": b"x"}
        assert objects.exists("a/b")
        assert not objects.is_expired(7)
        objects.flush()
        objects.close()
        for call in (
            lambda: objects.put("a/b", b"y"),
            lambda: objects.put_new("a/c", b"y"),
            lambda: objects.put_frames([("a/c", b"y")], never),
            lambda: objects.copy([("a/b", "a/c")], bool),
            lambda: objects.delete(["a/b"]),
            lambda: objects.writer(0.1).__enter__(),
        ):
            with pytest.raises(kvstore.InvalidArgument, match=r"a\.kv: .*Read-only file system"):
                call()
        assert tree(root) == ["a", "a/b"]

    def test_nothing_there_is_an_empty_place(self, root):
        objects = Directory(root)
        assert objects.get("a") is None
        assert contents(objects) == {}
        assert not objects.is_expired(1)
        objects.delete(["a"])
        objects.flush()
        assert not root.exists()
        (root.parent / "file").write_bytes(b"")
        with pytest.raises(kvstore.NotFound, match="parent directory"):
            Directory(root / "deep" / "deeper").put("a", b"")
        with pytest.raises(kvstore.InvalidArgument):
            Directory(root.parent / "file").put("a", b"")

    def test_relative_paths_stay_where_they_were(self, root, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        objects = Directory("a.kv", shown="zarr:a.kv")
        monkeypatch.chdir("/")
        objects.put("a", b"x")
        assert (root / "a").read_bytes() == b"x"
        assert objects.root == str(root)
        assert objects.where == "zarr:a.kv"
        (root / "dir").mkdir()
        with pytest.raises(kvstore.InvalidArgument, match=r"^zarr:a\.kv: dir: "):
            objects.put("dir", b"x")
        assert tree(root) == ["a", "dir"]

    def test_empty_directories_go_but_never_the_root(self, root):
        objects = Directory(root)
        keys = ["a/b/c/0", "a/b/c/1", "a/d", "e/f/0"]
        for key in keys:
            objects.put(key, b"x")
        objects.delete(["a/b/c/0", "e/f/0"])
        assert tree(root) == ["a", "a/b", "a/b/c", "a/b/c/1", "a/d"]
        objects.delete(keys)
        assert tree(root) == []
        assert root.is_dir()
        objects.put("a/b/c/0", b"again")
        objects.flush()

    def test_who_creates_survives_who_empties_directories(self, root):
        objects, others = Directory(root), Directory(root)
        stop = time.monotonic() + 0.4

        def create_and_delete(i):
            n = 0
            while time.monotonic() < stop:
                key = f"a/b/c/{i}-{n}"
                if i % 2:
                    objects.put_frames([(key, b"x")], never)
                else:
                    assert others.put_new(key, b"x")
                others.delete([key])
                n += 1
            return n

        assert min(at_once(create_and_delete, range(4), 4)) > 0
        objects.flush()
        assert tree(root) == []

    def test_links_are_files_and_no_directories(self, root, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_bytes(b"x")
        objects = Directory(root)
        objects.put("a", b"x")
        (root / "link").symlink_to(outside)
        (root / "file").symlink_to(outside / "precious")
        (root / "lost").symlink_to(outside / "absent")
        (root / "loop").symlink_to("loop")
        os.mkfifo(root / "pipe")
        assert [tuple(found) for found in objects.list("")] == [("a", 1), ("file", 1)]
        assert objects.get("file") == b"x"
        objects.put("file", b"mine")
        assert (outside / "precious").read_bytes() == b"x"

    def test_a_fork_leaves_the_lock_with_the_parent(self, root):
        objects = Directory(root)

        def is_locked():
            with open(root / "_kvstore/writer") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            return True

        with objects.writer(1.0) as writer:
            pid = os.fork()
            if not pid:
                status = 1
                with contextlib.suppress(BaseException):
                    try:
                        writer.check()
                    except kvstore.Closed:
                        with contextlib.suppress(kvstore.Locked), objects.writer(0.0):
                            os._exit(2)
                        status = 0
                os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            assert is_locked()
            pid = os.fork()
            if not pid:
                signal.pause()
            writer.check()
        try:
            assert not is_locked()  # a child that lives on has no part in it
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def test_reads_cost_microseconds(self, root):
        objects = Directory(root)
        objects.put_frames([("s/k_000/c/0/0/0", os.urandom(24_000))], never)
        best = 1.0
        for _ in range(200):
            begun = time.perf_counter()
            objects.get("s/k_000/c/0/0/0")
            best = min(best, time.perf_counter() - begun)
        assert best < 100e-6


WRITER = "_kvstore/writer"


def stand_still(monkeypatch):
    """Let no lease of this process be renewed but by `check` and `renew`."""
    renewer = bucket_lease._Renewer()
    renewer._run = lambda: None
    monkeypatch.setattr(bucket_lease, "_renewer", renewer)


class TestBucket:
    def test_a_lease_is_what_it_is_documented_to_be(self, in_bucket):
        objects = in_bucket.open(lease_seconds=60.0)
        with objects.writer(1.0) as writer:
            assert writer.epoch == 1
            text = objects.get(WRITER).decode()
            state = bucket_lease.parse("here", WRITER, text.encode())
            assert text == (f'{{"epoch":1,"holder":"{state.holder}","expires":{state.expires!r}}}')
            assert len(state.holder) == 16
            assert 55 < state.expires - time.time() < 61
        assert objects.get(WRITER).decode() == (
            f'{{"epoch":1,"holder":"{state.holder}","expires":0}}'
        )
        lease = objects.lease(0x2A, "chat", 30.0, in_write=False)
        state = bucket_lease.parse("here", "", objects.get("_kvstore/leases/000000000000002a"))
        assert 25 < state.expires - time.time() < 31
        lease.release()

    def test_each_writer_has_a_higher_epoch(self, in_bucket):
        epochs = []
        for _ in range(3):
            with in_bucket.open().writer(1.0) as writer:
                epochs.append(writer.epoch)
        assert epochs == [1, 2, 3]

    def test_a_writer_at_work_keeps_its_lease(self, in_bucket):
        objects, others = in_bucket.open(lease_seconds=0.6), in_bucket.open(lease_seconds=0.6)
        with objects.writer(1.0) as writer:
            with pytest.raises(kvstore.Locked, match=r"if it died the lock is free in \d s"):
                others.writer(1.0).__enter__()
            writer.check()
        for _ in range(200):  # the thread ends with the last lease
            if not any(t.name == "kvstore-leases" for t in threading.enumerate()):
                break
            time.sleep(0.01)
        else:
            raise AssertionError("a thread without leases")

    def test_a_writer_that_stood_still_can_do_no_harm(self, in_bucket, monkeypatch):
        stand_still(monkeypatch)
        stalled, others = in_bucket.open(lease_seconds=0.2), in_bucket.open(lease_seconds=5.0)
        others.put_frames([("c/0/0", b"leftover of one that died")], never)
        with stalled.writer(1.0) as writer:
            time.sleep(0.3)
            with others.writer(1.0) as successor:
                assert (writer.epoch, successor.epoch) == (1, 2)
                others.put_frames([("c/0/0", b"successor's")], successor.check)
                with pytest.raises(kvstore.Locked, match="another writer took over"):
                    stalled.put_frames([("c/0/0", b"stalled's")], writer.check)
                assert others.put_new("commits/1", b"successor's")
                assert not stalled.put_new("commits/1", b"stalled's")
                with pytest.raises(kvstore.Locked, match="try again"):
                    writer.check()
            # What it gives back at its end is not the lease of another.
            third = others.writer(1.0)
            third.__enter__()
        with pytest.raises(kvstore.Locked), stalled.writer(0.1):
            pass
        third.__exit__(None, None, None)
        assert others.get("c/0/0") == b"successor's"
        assert others.get("commits/1") == b"successor's"

    def test_a_frame_that_changed_while_it_was_looked_at_stays(self, in_bucket):
        objects, others = in_bucket.open(), in_bucket.open()
        objects.put("c/0/0", b"leftover")
        with pytest.raises(kvstore.Locked, match="c/0/0: another writer has put it meanwhile"):
            objects.put_frames([("c/0/0", b"mine")], lambda: others.put("c/0/0", b"another's"))
        assert objects.get("c/0/0") == b"another's"
        # One that is deleted meanwhile is put where there is none.
        create, calls = objects._requests.create, []

        def create_late(key, data):
            made = create(key, data)
            if not calls:
                others.delete([key])
            calls.append(made)
            return made

        objects._requests.create = create_late
        objects.put_frames([("c/0/0", b"mine")], bool)
        assert calls[0] is None
        assert objects.get("c/0/0") == b"mine"

    def test_a_session_lease_lives_as_long_as_its_process(self, in_bucket, monkeypatch):
        objects = in_bucket.open(lease_seconds=0.6)
        lease = objects.lease(7, "chat", None, in_write=False)
        time.sleep(1.0)
        assert not objects.is_expired(7)
        lease.check()
        del lease  # never given back
        objects.lease(7, "chat", None, in_write=False).release()

    def test_a_damaged_lease_is_corrupt(self, in_bucket):
        objects = in_bucket.open()
        for data in (b"", b"[]", b"{}", b'{"epoch":0,"holder":"","expires":0}', b"\xff"):
            objects.put(WRITER, data)
            with pytest.raises(kvstore.Corrupt, match="_kvstore/writer: not a lease; delete it"):
                objects.writer(0.0).__enter__()

    def test_the_environment_says_what_is_missing(self, s3_server, monkeypatch):
        where = s3_server.bucket() + "/a"
        Bucket(where, s3_server.options).put("a", b"x")
        for name, value in s3_server.options.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
        assert Bucket(where).get("a") == b"x"
        assert Bucket(where, {"AWS_ALLOW_HTTP": "true", "timeout": "5s"}).get("a") == b"x"

    @pytest.mark.parametrize(
        ("url", "options", "message"),
        [
            ("s3://b/a", {"bogus": "1"}, "'bogus' is not valid"),
            ("s3://b/a", {"timeout": "soon"}, "storage_options"),
            ("s3://b/a", {"timeout": 5}, "expected a string, not 5"),
            ("nowhere://b/a", None, "nowhere://b/a"),
            ("s3://", None, "URL"),
            ("file:///tmp/a", None, "not a bucket"),
            ("memory:///", None, "not a bucket"),
        ],
    )
    def test_wrong_places_are_invalid_arguments(self, url, options, message):
        with pytest.raises(kvstore.InvalidArgument, match=message):
            Bucket(url, options)

    def test_a_bucket_that_is_not_there_is_not_found(self, s3_server):
        objects = Bucket("s3://no-such-bucket/a", s3_server.options)
        for call in (
            lambda: objects.get("a"),
            lambda: list(objects.list("")),
            lambda: objects.put("a", b""),
            lambda: objects.put_new("a", b""),
            lambda: objects.writer(1.0).__enter__(),
        ):
            with pytest.raises(kvstore.NotFound, match="no such bucket"):
                call()

    def test_without_the_library_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "obstore", None)
        with pytest.raises(kvstore.Unsupported, match=r"pip install 'kvstore\[s3\]'"):
            Bucket("s3://b/a")

    def test_closed_is_closed(self, in_bucket):
        objects = in_bucket.open()
        objects.close()
        with pytest.raises(kvstore.Closed):
            objects.get("a")

    def test_a_forked_child_is_told_to_spawn(self, in_bucket):
        objects = in_bucket.open()
        objects.put("a", b"x")
        lease = objects.lease(7, "chat", None, in_write=False)
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                closed = 0
                for call in (lambda: objects.get("a"), in_bucket.open, lease.check):
                    try:
                        call()
                    except kvstore.Closed as error:
                        closed += "fork" in str(error)
                lease.release()
                status = 0 if closed == 3 else 2
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        lease.check()
        assert objects.get("a") == b"x"
        lease.release()


#: Each operation, what it asks the server first, and what it returns.
OPERATIONS = {
    "get": (lambda o: o.get("a/b"), "GET .*a/b$", b"x"),
    "range": (lambda o: o.get("a/b", 0, 9), "GET .*a/b$", b"x"),
    "many": (lambda o: o.get_many([("a/b", None, None)] * 3), "GET .*a/b$", [b"x"] * 3),
    "exists": (lambda o: o.exists("a/b"), "HEAD .*a/b$", True),
    "put": (lambda o: o.put("a/b", b"x"), "PUT .*a/b$", None),
    "put_new": (lambda o: o.put_new("a/new", b"x"), "PUT .*a/new$", True),
    "frames": (lambda o: o.put_frames([("a/b", b"x")], never), "PUT .*a/b$", None),
    "replaced": (lambda o: o.put_frames([("a/b", b"y")], bool), "PUT .*a/b$", None),
    "copy": (lambda o: o.copy([("a/b", "a/c")], bool), r"(PUT|POST) .*a/c\?", None),
    "delete": (lambda o: o.delete(["a/b", "a/c"]), "POST .*delete", None),
    "list": (lambda o: [f.key for f in o.list("a/")], "GET .*list-type", ["a/b"]),
}


class TestFaults:
    @pytest.mark.parametrize("fault", ["503", "500", "429", "drop before", "drop after"])
    def test_requests_that_fail_are_repeated(self, faulty, fault):
        objects = faulty.objects
        for name, (call, request, result) in OPERATIONS.items():
            objects.put("a/b", b"x")
            objects.delete(["a/new", "a/c"])
            faulty.server.fail(fault, request, times=2 if fault == "503" else 1)
            assert call(objects) == result, name
            assert faulty.server.faults.pop()[3] == 0, name
        assert contents(objects, "a/") == {"a/b": b"x"}

    def test_a_put_of_which_the_answer_is_lost_is_ours(self, faulty):
        objects = faulty.objects
        faulty.server.fail("drop after", "PUT .*commits/1", times=3)
        assert objects.put_new("commits/1", b"mine")
        faulty.server.fail("500", "PUT .*commits/1")
        assert not objects.put_new("commits/1", b"another's")
        faulty.server.fail("drop after", "PUT .*c/0")
        objects.put_frames([("c/0", b"frame")], never)
        faulty.server.fail("drop after", "PUT .*c/0", after=1)
        objects.put_frames([("c/0", b"another frame")], lambda: None)
        assert contents(objects) == {"commits/1": b"mine", "c/0": b"another frame"}

    def test_a_lease_survives_answers_that_are_lost(self, faulty, monkeypatch):
        stand_still(monkeypatch)
        objects = faulty.objects
        faulty.server.fail("drop after", "PUT .*writer")
        with objects.writer(1.0) as writer:
            assert writer.epoch == 1
            for _ in range(2):
                time.sleep(0.3)  # `check` asks again after a quarter of the lease
                faulty.server.fail("drop after", "PUT .*writer")
                writer.check()
            # A renewal that failed for good, and happened.
            time.sleep(0.3)
            faulty.server.fail("drop after", "PUT .*writer")
            faulty.server.fail("500", ".*writer", times=100)
            with pytest.raises(kvstore.Locked, match="does not answer as it should"):
                writer.check()
            faulty.server.faults.clear()
            writer.check()
        with faulty.open().writer(1.0) as writer:
            assert writer.epoch == 2

    @pytest.mark.parametrize("fault", ["503", "drop before"])
    def test_a_failure_for_good_is_an_error_in_bounded_time(self, faulty, fault):
        objects = faulty.open(max_retries=2)
        faulty.server.fail(fault, "", times=1_000_000)
        for call, _, _ in OPERATIONS.values():
            begun = time.monotonic()
            with pytest.raises(kvstore.Locked, match=r"after 3 tries .*try again later"):
                call(objects)
            assert time.monotonic() - begun < 2
        faulty.server.faults.clear()
        assert contents(objects) == {}

    def test_a_server_that_says_nothing_is_given_up(self, faulty):
        objects = Bucket(faulty.where, faulty.options | {"timeout": "100ms"}, max_retries=1)
        faulty.server.fail("hang", "GET", times=2)
        with pytest.raises(kvstore.Locked, match="after 2 tries"):
            objects.get("a")

    @pytest.mark.parametrize("fault", ["403", "401", "400"])
    def test_a_refusal_is_not_repeated(self, faulty, fault):
        for call, _, _ in OPERATIONS.values():
            faulty.server.seen.clear()
            faulty.server.fail(fault, "", times=50)
            with pytest.raises(kvstore.InvalidArgument, match="the storage refuses it"):
                call(faulty.objects)
            faulty.server.faults.clear()
        assert len(faulty.server.seen) == 1

    def test_a_long_listing_goes_on_where_it_failed(self, faulty, monkeypatch):
        monkeypatch.setattr(_requests, "_LIST_CHUNK", 7)
        keys = [f"n/{i:02d}" for i in range(30)]
        faulty.objects.put_frames([(key, b"x") for key in keys], never)
        faulty.server.fail("503", "list-type", after=2, times=2)
        faulty.server.fail("drop after", "list-type", after=3)
        assert [found.key for found in faulty.objects.list("n/")] == keys
        assert [found.key for found in faulty.objects.list("n/", "n/13")] == keys[14:]
