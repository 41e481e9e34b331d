"""One suite for every backend; memory is the model that the others follow."""

import os
import threading
import time

import pytest
from kvcodecs.errors import Closed, Corrupt, Full, InvalidArgument, Locked, NotFound, Truncated

from kvstore.backends import memory
from kvstore.place import compact_backend, open_backend


class BackendSuite:
    """What the engine relies on. Subclasses say where archives go."""

    @pytest.fixture
    def place(self, tmp_path):
        raise NotImplementedError

    @pytest.fixture
    def backend(self, place):
        backend = open_backend(place, "a")
        yield backend
        backend.close()

    def put(self, backend, **values):
        with backend.write(1.0) as txn:
            for key, value in values.items():
                txn.put(key.encode(), value)

    def get(self, backend, key):
        with backend.read() as snapshot:
            value = snapshot.get(key.encode())
            return None if value is None else bytes(value)

    def test_put_get_delete(self, backend):
        self.put(backend, a=b"1", b=b"2")
        assert self.get(backend, "a") == b"1"
        assert self.get(backend, "c") is None
        with backend.write(1.0) as txn:
            txn.put(b"a", memoryview(b"xyz")[1:])
            txn.delete(b"b")
            txn.delete(b"never there")
            assert bytes(txn.get(b"a")) == b"yz"
            assert txn.get(b"b") is None
        assert self.get(backend, "a") == b"yz"
        assert self.get(backend, "b") is None

    def test_values_are_read_only_and_whole(self, backend):
        big = os.urandom(1 << 20)
        self.put(backend, big=big)
        with backend.read() as snapshot:
            view = snapshot.get(b"big")
            assert view.readonly
            assert view == big
            snapshot.release(view)
            assert view == big

    def test_scan_is_ordered_and_bounded(self, backend):
        names = [b"a", b"ab", b"b\x00", b"b\x01", b"b\xff", b"b\xff\xff", b"c"]
        with backend.write(1.0) as txn:
            for name in reversed(names):
                txn.put(name, name * 2)
        with backend.read() as snapshot:
            assert [key for key, _ in snapshot.scan(b"")] == names
            found = [(key, bytes(value)) for key, value in snapshot.scan(b"b")]
            assert found == [(name, name * 2) for name in names[2:6]]
            assert list(snapshot.scan(b"b\xff\xff\xff")) == []
            assert list(snapshot.scan(b"zz")) == []

    def test_neighbours_of_a_key(self, backend):
        with backend.read() as snapshot:
            assert snapshot.at_or_after(b"a") is None
            assert snapshot.before(b"a") is None
        names = [b"b", b"b\x00", b"d"]
        with backend.write(1.0) as txn:
            for name in names:
                txn.put(name, b"")
            assert txn.at_or_after(b"c") == b"d"
            assert txn.before(b"d") == b"b\x00"
        with backend.read() as snapshot:
            for key in [b"a", b"b", b"b\x00", b"b\x00\x00", b"c", b"d", b"e"]:
                after = [name for name in names if name >= key]
                before = [name for name in names if name < key]
                assert snapshot.at_or_after(key) == (after[0] if after else None)
                assert snapshot.before(key) == (before[-1] if before else None)

    def test_scan_inside_a_transaction_sees_its_changes(self, backend):
        self.put(backend, a=b"1", b=b"2")
        with backend.write(1.0) as txn:
            txn.put(b"c", b"3")
            txn.delete(b"a")
            assert [key for key, _ in txn.scan(b"")] == [b"b", b"c"]

    def test_rollback(self, backend):
        self.put(backend, a=b"1")

        def fail():
            with backend.write(1.0) as txn:
                txn.put(b"a", b"2")
                txn.put(b"b", b"2")
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert self.get(backend, "a") == b"1"
        assert self.get(backend, "b") is None
        self.put(backend, b=b"3")  # and the lock is free
        assert self.get(backend, "b") == b"3"

    def test_snapshots_do_not_move(self, backend):
        self.put(backend, a=b"1")
        with backend.read() as before:
            self.put(backend, a=b"2", b=b"2")
            assert bytes(before.get(b"a")) == b"1"
            assert before.get(b"b") is None
            assert [key for key, _ in before.scan(b"")] == [b"a"]
            with backend.read() as after:
                assert bytes(after.get(b"a")) == b"2"

    def test_one_writer_at_a_time(self, backend):
        with backend.write(1.0), pytest.raises(Locked, match="another writer"):
            backend.write(0.05).__enter__()
        self.put(backend, a=b"1")

    def test_a_waiting_writer_gets_its_turn(self, backend):
        entered = threading.Event()

        def other():
            entered.set()
            self.put(backend, b=b"2")

        thread = threading.Thread(target=other)
        with backend.write(1.0) as txn:
            thread.start()
            entered.wait()
            txn.put(b"a", b"1")
        thread.join()
        assert self.get(backend, "a") == b"1"
        assert self.get(backend, "b") == b"2"

    def test_many_threads(self, backend):
        def work(i):
            for j in range(10):
                with backend.write(10.0) as txn:
                    old = txn.get(b"sum")
                    txn.put(b"sum", str(int(bytes(old or b"0")) + 1).encode())
                    txn.put(f"{i}/{j}".encode(), bytes(100))
                with backend.read() as snapshot:
                    assert snapshot.get(f"{i}/{j}".encode()).nbytes == 100

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.get(backend, "sum") == b"40"

    def test_keys_that_do_not_fit(self, backend):
        with backend.write(1.0) as txn:
            txn.put(bytes([1]) * 511, b"x")
            for key in (b"", bytes(512)):
                with pytest.raises(InvalidArgument, match="key of"):
                    txn.put(key, b"x")

    def test_lease(self, backend, place):
        lease = backend.lease(7, "s")
        with pytest.raises(Locked, match="'s' already has an appender"):
            backend.lease(7, "s")
        other = open_backend(place, "a")
        with pytest.raises(Locked):
            other.lease(7, "s")
        other.lease(8, "t").release()
        lease.release()
        lease.release()
        again = other.lease(7, "s")
        again.release()
        other.close()

    def test_a_lease_that_expired_is_taken_over(self, backend, place):
        other = open_backend(place, "a")
        lease = backend.lease(7, "s", expires=0.1)
        with pytest.raises(Locked):
            other.lease(7, "s", expires=5.0)  # not expired yet
        time.sleep(0.15)
        with pytest.raises(Locked, match="already has an appender"):
            other.lease(7, "s")  # whoever has no expiry takes nothing over
        lease.check()
        with pytest.raises(Locked):
            other.lease(7, "s", expires=5.0)  # the check has renewed it
        time.sleep(0.15)
        taken = other.lease(7, "s", expires=5.0)
        for _ in range(2):
            with pytest.raises(Locked, match=r"lease of session 's' expired.*n_committed"):
                lease.check()
        lease.renew()
        lease.release()  # is not the other's
        with pytest.raises(Closed, match="given back"):
            lease.check()
        taken.check()
        with pytest.raises(Locked):
            backend.lease(7, "s", expires=5.0)
        taken.release()
        again = backend.lease(7, "s")
        again.check()
        again.renew()
        again.release()
        other.close()

    def test_a_lease_without_expiry_is_never_taken_over(self, backend):
        lease = backend.lease(7, "s")
        time.sleep(0.02)
        with pytest.raises(Locked):
            backend.lease(7, "s", expires=0.001)
        lease.check()
        lease.release()
        for seconds in (0, -1, "1", True, float("nan")):
            with pytest.raises(InvalidArgument, match="expires"):
                backend.lease(7, "s", expires=seconds)

    def test_taking_over_waits_for_the_holders_transaction(self, backend, place):
        other = open_backend(place, "a")
        lease, entered, done = (
            backend.lease(7, "s", expires=0.05),
            *(threading.Event() for _ in range(2)),
        )

        def hold():
            with backend.write(1.0) as txn:
                lease.check()
                entered.set()
                done.wait()
                txn.put(b"a", b"1")

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()
        time.sleep(0.1)
        with pytest.raises(Locked, match="another writer"):
            other.lease(7, "s", expires=0.05, timeout=0.02)
        threading.Timer(0.05, done.set).start()
        taken = other.lease(7, "s", expires=0.05, timeout=10.0)
        thread.join()
        assert self.get(other, "a") == b"1"
        # In the taker's own transaction it needs no other.
        time.sleep(0.1)
        with backend.write(1.0):
            again = backend.lease(7, "s", expires=0.05)
            with pytest.raises(Locked):
                taken.check()
            again.check()
        again.release()
        taken.release()
        lease.release()
        other.close()

    def test_reopen(self, backend, place):
        self.put(backend, a=b"1")
        backend.close()
        backend.close()
        for use in (backend.read, lambda: backend.write(1.0)):
            with pytest.raises(Closed), use():
                pass
        with pytest.raises(Closed):
            backend.info()
        again = open_backend(place, "r")
        assert self.get(again, "a") == b"1"
        again.close()

    def test_reading_cannot_write(self, backend, place):
        reader = open_backend(place, "r")
        with pytest.raises(InvalidArgument, match="mode='r'"), reader.write(1.0):
            pass
        reader.close()

    def test_two_objects_share_one_archive(self, backend, place):
        reader = open_backend(place, "r")
        self.put(backend, a=b"1")
        assert self.get(reader, "a") == b"1"
        backend.close()
        assert self.get(reader, "a") == b"1"
        reader.close()

    def test_info(self, backend):
        self.put(backend, a=bytes(10000))
        info = backend.info()
        assert info.n_entries == 1
        assert info.file_bytes >= info.used_bytes >= 10001
        assert 0 <= info.free_bytes < info.file_bytes

    def test_used_bytes_are_those_of_the_commit(self, backend, place):
        for n, key in ((10000, b"a"), (300, b"b"), (1 << 20, b"c"), (0, b"c"), (0, b"a")):
            with backend.write(1.0) as txn:
                assert txn.used_bytes() == backend.info().used_bytes
                txn.put(key, bytes(n)) if n else txn.delete(key)
                at_most = txn.used_bytes()
            used = backend.info().used_bytes
            assert 0 <= at_most - used <= 10 * 4096
        backend.close()
        again = open_backend(place, "r")
        assert again.info().used_bytes == used
        again.close()

    def test_map_size(self, place):
        backend = open_backend(place, "a", map_size=1 << 18)
        self.put(backend, a=bytes(1000))
        with pytest.raises(Full) as caught:
            self.put(backend, **{f"x{i}": bytes(10000) for i in range(100)})
        assert caught.value.is_limit
        assert self.get(backend, "a") == bytes(1000)
        self.put(backend, b=b"there is still room")
        backend.close()

    def fill(self, backend):
        """Put 10 KB values until there is no room; return their number."""
        n = 0

        def put_more():
            nonlocal n
            while True:
                self.put(backend, **{f"x{n:06}": bytes(10_000)})
                n += 1

        with pytest.raises(Full) as caught:
            put_more()
        assert caught.value.is_limit
        return n

    def test_limit(self, backend, place):
        self.put(backend, a=b"1")
        assert backend.limit is None
        backend.set_limit(400_000)
        assert 400_000 - 4096 < backend.limit <= 400_000
        n = self.fill(backend)
        assert 20 < n <= 40
        assert backend.info().file_bytes <= 400_000
        # One limit for all who have it open, whatever they would have.
        other = open_backend(place, "a", map_size=1 << 30)
        assert other.limit == backend.limit
        with pytest.raises(Full, match="limit"):
            self.put(other, more=bytes(100_000))
        other.set_limit(800_000)
        self.put(backend, more=bytes(100_000))
        backend.set_limit(100_000)  # shorter than it is
        with pytest.raises(Full):
            self.put(backend, more=bytes(500_000))
        assert self.get(backend, "more") == bytes(100_000)
        self.fill(backend)
        backend.set_limit(None)
        assert other.limit is None
        self.put(backend, more=bytes(2_000_000))
        other.close()

    def test_a_limit_holds_in_a_smaller_map(self, place):
        backend = open_backend(place, "a", map_size=1 << 18)
        backend.set_limit(1 << 30)
        with pytest.raises(Full, match="map"):
            self.put(backend, a=bytes(1 << 19))
        backend.set_limit(1 << 17)
        with pytest.raises(Full, match="limit"):
            self.put(backend, a=bytes(1 << 17))
        self.put(backend, a=b"1")
        backend.close()

    def test_limits_that_are_none(self, backend):
        for limit in (0, -1, True, 1.5, "1", 1 << 63):
            with pytest.raises(InvalidArgument, match="limit"):
                backend.set_limit(limit)
        self.put(backend, a=b"1")
        backend.set_limit(1)
        with pytest.raises(Full):
            self.put(backend, b=bytes(100_000))
        assert self.get(backend, "a") == b"1"

    def test_a_transaction_that_was_full_is_never_committed(self, backend):
        self.put(backend, a=b"1", b=b"1")
        backend.set_limit(200_000)

        def go_on():
            with backend.write(1.0) as txn:
                txn.put(b"a", b"2")
                for key, value in ((b"b", bytes(300_000)), (b"c", b"3")):
                    with pytest.raises(Full, match="limit"):
                        txn.put(key, value)

        with pytest.raises(Full, match="limit") as caught:
            go_on()
        assert caught.value.is_limit
        assert [self.get(backend, key) for key in "abc"] == [b"1", b"1", None]
        self.put(backend, c=b"3")

    def test_readers(self, backend):
        assert backend.readers() == []
        self.put(backend, a=b"1")
        with backend.read() as old:
            time.sleep(0.02)
            self.put(backend, a=b"2")
            self.put(backend, a=b"3")
            with backend.read():
                first, second = backend.readers()
                assert (first.pid, first.n_behind) == (os.getpid(), 2)
                assert second.n_behind == 0
                assert 60 > first.age_seconds >= 0.02
                assert first.age_seconds > second.age_seconds >= 0
            assert bytes(old.get(b"a")) == b"1"
        assert backend.readers() == []

    def test_freed_space_is_usable_after_reclaim(self, backend):
        self.put(backend, A=b"1")
        backend.set_limit(2_000_000)
        for i in range(5):
            self.put(backend, big=bytes(1_500_000))
            with backend.write(1.0) as txn:
                txn.delete(b"big")
            assert not backend.reclaim(1.0)
            assert not backend.reclaim(1.0)
            assert self.get(backend, "A") == b"1", i
        with backend.read():
            self.put(backend, big=bytes(1_500_000))
            with backend.write(1.0) as txn:
                txn.delete(b"big")
            assert backend.reclaim(1.0)
        assert not backend.reclaim(1.0)
        self.put(backend, big=bytes(1_500_000))

    def test_reclaim_waits_for_the_lock(self, backend, place):
        assert not backend.reclaim(1.0)  # nothing stored
        self.put(backend, A=b"1")
        reader = open_backend(place, "r")
        with pytest.raises(InvalidArgument, match="mode='r'"):
            reader.reclaim(1.0)
        reader.close()
        with backend.write(1.0), pytest.raises(Locked):
            backend.reclaim(0.01)

    def test_snapshots_expire(self, place):
        backend = open_backend(place, "a", snapshot_seconds=0.1)
        self.put(backend, a=b"1", b=b"2")
        with backend.read() as snapshot:
            view = snapshot.get(b"a")
            walk = snapshot.scan(b"")
            next(walk)
            time.sleep(0.15)
            for use in (
                lambda: snapshot.get(b"a"),
                lambda: next(walk),
                lambda: list(snapshot.scan(b"")),
                lambda: snapshot.at_or_after(b"a"),
                lambda: snapshot.before(b"b"),
            ):
                with pytest.raises(Closed, match=r"older than 0.1 s.*begin again"):
                    use()
            assert view == b"1"  # until it ends
            snapshot.release(view)
        with backend.write(1.0) as txn:
            time.sleep(0.15)
            assert txn.get(b"a") == b"1"
            assert [key for key, _ in txn.scan(b"")] == [b"a", b"b"]
        assert self.get(backend, "a") == b"1"
        backend.close()
        for seconds in (0, -1, "1", None, True, float("nan")):
            with pytest.raises(InvalidArgument, match="snapshot_seconds"):
                open_backend(place, "a", snapshot_seconds=seconds)
        open_backend(place, "r", snapshot_seconds=float("inf")).close()

    def test_absent(self, place):
        with pytest.raises(NotFound):
            open_backend(place, "r")

    def test_arguments(self, place):
        with pytest.raises(InvalidArgument, match="mode 'w'"):
            open_backend(place, "w")
        with pytest.raises(InvalidArgument, match="backend 'x'"):
            open_backend(place, "a", kind="x")
        for size in (0, True, 1.5, 1 << 64, 1 << 100):
            with pytest.raises(InvalidArgument, match="map_size"):
                open_backend(place, "a", map_size=size)
        with pytest.raises(InvalidArgument, match="expected a string or a path"):
            open_backend(b"bytes", "a")

    def test_last_uses(self, backend, place):
        assert backend.last_uses() == {}
        began = time.time_ns()
        reader = open_backend(place, "r")
        for use in (backend, reader):
            for session in (5, 1 << 63, 5):
                use.note_use(session)
        uses = reader.last_uses()
        assert uses == backend.last_uses()
        assert uses.keys() == {5, 1 << 63}
        assert began <= uses[1 << 63] <= uses[5] <= time.time_ns()
        reader.close()
        backend.note_use(1 << 63)
        assert backend.last_uses()[1 << 63] > uses[5]
        backend.close()
        backend.note_use(7)
        with pytest.raises(Closed):
            backend.last_uses()
        again = open_backend(place, "r")
        assert again.last_uses().keys() == {5, 1 << 63}
        again.close()


class TestMemory(BackendSuite):
    @pytest.fixture
    def place(self, tmp_path):
        yield f"memory:{tmp_path}"
        memory.discard(str(tmp_path))


class TestZarr(BackendSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return f"zarr:{tmp_path / 'a.zarr'}"

    def test_reading_creates_nothing(self, place, tmp_path):
        with pytest.raises(NotFound, match="no such archive"):
            open_backend(place, "r")
        assert os.listdir(tmp_path) == []
        (tmp_path / "a.zarr").mkdir()
        with pytest.raises(NotFound, match="no such archive"):
            open_backend(place, "r")
        assert os.listdir(tmp_path / "a.zarr") == []
        with pytest.raises(NotFound, match="parent directory"):
            open_backend(f"zarr:{tmp_path / 'no' / 'a.kv'}", "a")

    def test_other_directories_and_files_are_left_alone(self, tmp_path):
        (tmp_path / "x").write_bytes(b"mine")
        with pytest.raises(InvalidArgument, match="neither an archive nor empty"):
            open_backend(f"zarr:{tmp_path}", "a")
        with pytest.raises(InvalidArgument, match="a file"):
            open_backend(f"zarr:{tmp_path / 'x'}", "a")
        assert os.listdir(tmp_path) == ["x"]
        open_backend(tmp_path / "lmdb", "a").close()
        before = sorted(os.listdir(tmp_path / "lmdb"))
        with pytest.raises(InvalidArgument, match="neither an archive nor empty"):
            open_backend(f"zarr:{tmp_path / 'lmdb'}", "a")
        assert sorted(os.listdir(tmp_path / "lmdb")) == before

    def test_one_archive_through_links_and_relative_paths(
        self, backend, place, tmp_path, monkeypatch
    ):
        self.put(backend, a=b"1")
        backend.set_limit(100_000)
        (tmp_path / "link").symlink_to(tmp_path / "a.zarr")
        monkeypatch.chdir(tmp_path)
        for path in (
            tmp_path / "link",
            "zarr:a.zarr",
            "./a.zarr",
            f"file://{tmp_path}/a.zarr",
        ):
            other = open_backend(path, "a")
            assert self.get(other, "a") == b"1"
            assert other.limit == 100_000
            other.close()
        other = open_backend("a.zarr", "a", kind="zarr")
        assert other.info().kind == "zarr"
        other.close()

    def test_options_of_others(self, place, tmp_path):
        for path in (str(tmp_path / "lmdb"), "memory:"):
            for options in ({"grace_seconds": 1.0}, {"storage_options": {}}):
                with pytest.raises(InvalidArgument, match="are of the zarr backend"):
                    open_backend(path, "a", **options)
        with pytest.raises(InvalidArgument, match="for buckets"):
            open_backend(place, "a", storage_options={"region": "x"})
        for seconds in (-1, "1", None, True, float("nan")):
            with pytest.raises(InvalidArgument, match="grace_seconds"):
                open_backend(place, "a", grace_seconds=seconds)
        assert os.listdir(tmp_path) == []
        open_backend(place, "a", grace_seconds=float("inf")).close()

    def test_there_is_nothing_to_compact(self, backend, place):
        self.put(backend, a=bytes(1000))
        assert compact_backend(place) == (1001, 1001)

    def test_closing_waits_for_nobody(self, backend, place):
        self.put(backend, a=b"1")
        with backend.read() as snapshot:
            backend.close()
            assert bytes(snapshot.get(b"a")) == b"1"
        with pytest.raises(Closed), backend.read():
            pass
        again = open_backend(place, "a")
        assert self.get(again, "a") == b"1"
        again.close()

    def test_where_one_may_not_write(self, backend, place, tmp_path):
        if os.geteuid() == 0:
            pytest.skip("root may always")
        self.put(backend, a=b"1")
        backend.close()
        os.chmod(tmp_path / "a.zarr", 0o500)
        with pytest.raises(InvalidArgument, match="not writable"):
            open_backend(place, "a")
        reader = open_backend(place, "r")
        assert self.get(reader, "a") == b"1"
        reader.close()
        os.chmod(tmp_path / "a.zarr", 0o700)


class TestZarrInBucket(BackendSuite):
    @pytest.fixture
    def place(self, s3_server, monkeypatch):
        for name, value in s3_server.options.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
        return s3_server.bucket() + "/a"

    def test_a_lease_that_expired_is_taken_over(self, backend, place):
        """Here by anybody, since nobody notices that a process has died."""
        other = open_backend(place, "a")
        lease = backend.lease(7, "s", expires=0.5)
        with pytest.raises(Locked):
            other.lease(7, "s")  # not expired yet
        time.sleep(0.6)
        lease.check()
        with pytest.raises(Locked):
            other.lease(7, "s")  # the check has renewed it
        time.sleep(0.6)
        taken = other.lease(7, "s")
        with pytest.raises(Locked, match=r"lease of session 's' expired.*n_committed"):
            lease.check()
        lease.release()  # is not the other's
        taken.check()
        taken.release()
        with pytest.raises(Closed, match="given back"):
            taken.check()
        other.close()

    def test_last_uses(self, backend, place):
        """Known to this process alone, as long as it has the archive open."""
        assert backend.last_uses() == {}
        reader = open_backend(place, "r")
        began = time.time_ns()
        for use in (backend, reader):
            use.note_use(5)
        uses = backend.last_uses()
        assert uses.keys() == {5}
        assert began <= uses[5] <= time.time_ns()
        assert reader.last_uses() == uses
        reader.close()
        backend.close()
        reader.note_use(6)
        with pytest.raises(Closed):
            backend.last_uses()
        again = open_backend(place, "r")
        assert again.last_uses() == {}
        again.close()


class TestLmdb(BackendSuite):
    @pytest.fixture
    def place(self, tmp_path):
        return str(tmp_path / "a.kv")

    def test_reading_creates_nothing(self, place, tmp_path):
        with pytest.raises(NotFound, match="no such archive"):
            open_backend(place, "r")
        os.mkdir(place)
        with pytest.raises(NotFound, match=r"data\.mdb is missing"):
            open_backend(place, "r")
        assert os.listdir(place) == []
        with pytest.raises(NotFound, match="parent directory"):
            open_backend(tmp_path / "no" / "a.kv", "a")

    def test_other_directories_and_files_are_left_alone(self, tmp_path):
        (tmp_path / "x").write_bytes(b"mine")
        with pytest.raises(InvalidArgument, match="neither an archive nor an empty"):
            open_backend(tmp_path, "a")
        with pytest.raises(InvalidArgument, match="a file"):
            open_backend(tmp_path / "x", "a")
        assert os.listdir(tmp_path) == ["x"]

    def test_one_environment_through_links_and_relative_paths(
        self, backend, place, tmp_path, monkeypatch
    ):
        self.put(backend, a=b"1")
        (tmp_path / "link").symlink_to(place)
        monkeypatch.chdir(tmp_path)
        for path in (tmp_path / "link", "a.kv", "./link"):
            other = open_backend(path, "a")
            assert self.get(other, "a") == b"1"
            other.close()

    def test_truncated_file_is_refused_before_and_after_opening(self, backend, place):
        self.put(backend, a=bytes(100_000), b=bytes(100_000))
        data = os.path.join(place, "data.mdb")
        size = os.stat(data).st_size
        for keep in (size - 1, size // 2, 4096, 100, 0):
            os.truncate(data, keep)
            for use in (backend.read, lambda: backend.write(1.0)):
                with pytest.raises(Truncated, match=rf"has {keep} of \d+ bytes"), use():
                    pass
        backend.close()
        with pytest.raises(Truncated):
            open_backend(place, "r")

    @pytest.mark.parametrize("keep", [1, 4095, 8192, 50_000])
    def test_truncated_file_is_refused_at_opening(self, backend, place, keep):
        self.put(backend, a=bytes(100_000))
        backend.close()
        os.truncate(os.path.join(place, "data.mdb"), keep)
        with pytest.raises(Truncated):
            open_backend(place, "r").read().__enter__()

    def test_file_that_lacks_only_free_pages_is_sound(self, backend, place):
        """LMDB leaves out last pages that a transaction took and gave back."""
        import random

        rng, n_short = random.Random(4), 0
        for _ in range(120):
            with backend.write(1.0) as txn:
                for _ in range(rng.randrange(1, 60)):
                    key = b"%d" % rng.randrange(300)
                    if rng.random() < 0.5:
                        txn.put(key, bytes(rng.choice([10, 500, 3000, 9000])))
                    else:
                        txn.delete(key)
            info = backend._environment.env.info()
            size = os.stat(os.path.join(place, "data.mdb")).st_size
            with backend.read() as snapshot:
                total = sum(value.nbytes for _, value in snapshot.scan(b""))
            if size >= (info["last_pgno"] + 1) * 4096:
                continue
            n_short += 1
            backend.close()
            backend = open_backend(place, "a")
            with backend.read() as snapshot:
                assert sum(value.nbytes for _, value in snapshot.scan(b"")) == total
            os.truncate(os.path.join(place, "data.mdb"), size // 2)
            with pytest.raises(Truncated):
                backend.read().__enter__()
            break
        assert n_short, "LMDB has changed its ways: the look at the free list may go"
        backend.close()

    def test_a_short_file_that_others_commit_to_meanwhile(self, backend, place, monkeypatch):
        """Two commits write over the head of the snapshot that is being looked at."""
        from kvstore.backends import _environment

        code = (
            "import sys; from kvstore.place import open_backend\n"
            "backend = open_backend(sys.argv[1], 'a')\n"
            "for i in range(2):\n"
            "    with backend.write(5.0) as txn: txn.put(b'%d' % i, bytes(40_000))\n"
        )
        looks = []

        def tail_is_free(*args):
            looks.append(args)
            if len(looks) == 1:
                run_python(code, place)
            return real(*args)

        self.put(backend, a=b"1")
        real = _environment.tail_is_free
        monkeypatch.setattr(_environment, "tail_is_free", tail_is_free)
        environment, length = backend._environment, os.stat(os.path.join(place, "data.mdb")).st_size
        environment.enter()
        try:
            assert environment._is_sound(length + 4096)
        finally:
            environment.leave()
        backend.close()

    @pytest.mark.parametrize("company", [["lock.mdb", "leases"], ["leases"], []])
    def test_an_empty_file_is_an_archive_that_lost_its_data(self, backend, place, company):
        self.put(backend, a=b"1")
        backend.close()
        os.truncate(os.path.join(place, "data.mdb"), 0)
        for name in {"lock.mdb", "leases"} - set(company):
            path = os.path.join(place, name)
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)
        for mode in ("r", "a"):
            with pytest.raises(Truncated, match="empty"):
                open_backend(place, mode)

    def test_a_writer_killed_at_the_very_start(self, place):
        """It has made its lock file and an empty data file."""
        os.mkdir(place)
        for name in ("data.mdb", "lock.mdb"):
            open(os.path.join(place, name), "wb").close()
        with pytest.raises(Truncated, match="empty"):
            open_backend(place, "r")
        backend = open_backend(place, "a")
        self.put(backend, a=b"1")
        backend.close()

    @pytest.mark.parametrize("bit", [20, 26, 31, 40, 52, 63])
    def test_a_wrong_last_page_costs_nothing(self, backend, place, bit):
        """The number is in LMDB's newer head page, which has no checksum."""
        import struct
        import tracemalloc

        self.put(backend, a=bytes(100_000))
        backend.close()
        data = os.path.join(place, "data.mdb")
        with open(data, "r+b") as file:
            heads = file.read(8192)
            newer = max((0, 4096), key=lambda at: struct.unpack_from("=Q", heads, at + 144)[0])
            (last,) = struct.unpack_from("=Q", heads, newer + 136)
            file.seek(newer + 136)
            file.write(struct.pack("=Q", last ^ 1 << bit))
        tracemalloc.start()
        try:
            with pytest.raises((Truncated, Full, Corrupt)):
                open_backend(place, "r").read().__enter__()
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()

    def test_a_damaged_free_list_costs_nothing(self, tmp_path):
        """Pages that point to themselves, out of the file, or are not there."""
        import struct

        from kvstore.backends._freelist import tail_is_free

        page = 4096

        def judge(body):
            head = struct.pack("=16xIIQQ", 0xBEEFC0DE, 1, 0, 1 << 30)
            head += struct.pack("=IHHQQQQQ", 0, 0, 1, 0, 1, 0, 0, 2) + bytes(48)
            head += struct.pack("=QQ", 9, 7)
            file = tmp_path / "data.mdb"
            file.write_bytes(b"".join(part.ljust(page, b"\0") for part in (head, b"", body, b"")))
            with open(file, "rb") as opened:
                return tail_is_free(opened.fileno(), page, 7, 4 * page)

        def tree(flags, *nodes):
            """A page of nodes without keys: (low, high, flags, body)."""
            at, pointers, bodies = 2000, b"", b""
            for low, high, more, content in nodes:
                pointers += struct.pack("=H", at + len(bodies))
                bodies += struct.pack("=HHHH", low, high, more, 0) + content
            head = struct.pack("=QHHHH", 2, 0, flags, 16 + len(pointers), 0)
            return (head + pointers).ljust(at, b"\0") + bodies

        def leaf(*pages):
            content = struct.pack(f"={1 + len(pages)}Q", len(pages), *pages)
            return tree(2, (len(content), 0, 0, content))

        assert judge(leaf(4, 5, 6, 7, 8, 9))
        assert not judge(leaf(4, 5, 6, 7, 8))
        assert not judge(tree(1, *[(2, 0, 0, b"")] * 500))  # its own parent
        assert not judge(tree(1, (0xFFFF, 0xFFFF, 0xFFFF, b"")))  # beyond any file
        assert not judge(tree(2, (0xFFFF, 0xFFFF, 1, struct.pack("=Q", 2**63))))  # 4 GB, nowhere
        assert not judge(tree(2, (0, 0, 0, b"")))  # an empty list

    def test_paths(self, tmp_path):
        for name in ("a\0b", "a\ud800b"):
            for mode in ("r", "a"):
                with pytest.raises(InvalidArgument, match="expected a string or a path"):
                    open_backend(os.path.join(tmp_path, name), mode)
        place = os.path.join(tmp_path, os.fsdecode(b"not \xff utf-8"))
        backend = open_backend(place, "a")
        self.put(backend, a=b"1")
        backend.close()
        assert self.get(open_backend(place, "r"), "a") == b"1"

    def test_closing_waits_for_readers(self, backend, place):
        self.put(backend, a=b"1")
        with backend.read() as snapshot:
            backend.close()
            assert bytes(snapshot.get(b"a")) == b"1"
        with pytest.raises(Closed), backend.read():
            pass
        again = open_backend(place, "a")
        assert self.get(again, "a") == b"1"
        again.close()

    def test_growing_of_another_process_is_adopted(self, backend, place):
        small = open_backend(place, "a", map_size=1 << 20)
        self.put(small, a=b"1")
        backend.close()
        small.close()
        small = open_backend(place, "a", map_size=1 << 18)
        code = (
            "import sys; from kvstore.place import open_backend\n"
            "b = open_backend(sys.argv[1], 'a')\n"
            "with b.write(5.0) as t: t.put(b'b', bytes(4 << 20))\n"
        )
        run_python(code, place)
        assert self.get(small, "b") == bytes(4 << 20)
        self.put(small, c=b"2")
        assert self.get(small, "c") == b"2"
        small.close()

    def test_fork(self, backend, place):
        self.put(backend, a=b"1")
        lease = backend.lease(5, "s")
        reading, done = threading.Event(), threading.Event()

        def read():
            with backend.read() as snapshot:
                reading.set()
                done.wait()
                assert bytes(snapshot.get(b"a")) == b"1"

        pid = fork(lambda: self.in_child(backend, place))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert self.get(backend, "child") == b"yes"
        # A child forked in the middle of a read must not end that read.
        thread = threading.Thread(target=read)
        thread.start()
        reading.wait()
        pid = fork(lambda: None)
        os.waitpid(pid, 0)
        self.put(backend, a=b"2")
        done.set()
        thread.join()
        with pytest.raises(Locked):
            backend.lease(5, "s")
        lease.release()

    def in_child(self, backend, place):
        with pytest.raises(Closed, match="fork"), backend.read():
            pass
        mine = open_backend(place, "a")
        assert self.get(mine, "a") == b"1"
        with pytest.raises(Locked):
            mine.lease(5, "s")
        self.put(mine, child=b"yes")
        mine.close()

    def test_other_lmdb_format_and_junk(self, tmp_path):
        import lmdb
        from kvcodecs.errors import Unsupported

        lmdb.open(str(tmp_path / "new"), lib_version=1).close()
        with pytest.raises((Corrupt, Unsupported)):
            open_backend(tmp_path / "new", "r")
        (tmp_path / "junk").mkdir()
        (tmp_path / "junk" / "data.mdb").write_bytes(b"junk" * 5000)
        for mode in ("r", "a"):
            with pytest.raises(Corrupt):
                open_backend(tmp_path / "junk", mode)


def fork(body):
    """Fork and run `body` in the child, which exits with 0 unless `body` raises."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads; that is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def run_python(code, *args):
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code, *args], check=True, timeout=60)
