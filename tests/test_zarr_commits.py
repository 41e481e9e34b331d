"""Commits on objects: whatever dies, and whenever, the archive is what it was before or after."""

import contextlib
import json
import os
import re
import threading
import warnings

import numpy as np
import pytest
from kvcodecs.errors import Closed, Corrupt, Full, Locked, NotFound, Truncated, Unsupported
from kvcodecs.raw import Raw

import kvstore
from kvstore import keys
from kvstore.archive import Archive
from kvstore.backends.zarr import shared, storing, view
from kvstore.backends.zarr.backend import ZarrBackend
from kvstore.backends.zarr.commits import (
    COMMITS,
    SEGMENTS,
    Commit,
    Listed,
    commit_key,
    last_commit,
    n_to_merge,
)
from kvstore.backends.zarr.in_use import referenced
from kvstore.backends.zarr.objects import Found, Objects
from kvstore.backends.zarr.placing import Sync
from kvstore.backends.zarr.segment import Segment, pack_segment, reader_of

ROOT = "_kvstore/"
MODEL = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4, dtype="float32")
BLOCK = 128


class Death(BaseException):
    """The process ends here."""


class Storage:
    """What a storage far away keeps; shared by all who have it open."""

    def __init__(self, is_remote=True):
        self.is_remote = is_remote
        self.data = {}
        self.leases = {}
        self.epoch = 0
        self.lock = threading.Lock()

    def copy(self):
        other = Storage(self.is_remote)
        other.data, other.epoch = dict(self.data), self.epoch
        return other


class FakeLease:
    def __init__(self, leases, session):
        self.leases, self.session = leases, session

    def check(self):
        pass

    def renew(self):
        pass

    def release(self):
        if self.leases.get(self.session) == id(self):
            del self.leases[self.session]

    __del__ = release


class FakeWriter:
    def __init__(self, epoch):
        self.epoch, self.lost = epoch, False

    def check(self):
        if self.lost:
            raise Locked("lost")


class FakeObjects(Objects):
    """One process's view of a `Storage`; dies at the `dies_at`-th change that it is to make."""

    def __init__(self, storage, dies_at=None):
        self.storage, self.dies_at, self.n_calls = storage, dies_at, 0
        self.reads = []
        self.writers = []

    where = "fake"
    closed = False

    @property
    def is_remote(self):
        return self.storage.is_remote

    def tick(self):
        self.n_calls += 1
        if self.dies_at is not None and self.n_calls > self.dies_at:
            raise Death

    def get(self, key, start=None, stop=None):
        self.reads.append((key, start, stop))
        data = self.storage.data.get(key)
        return None if data is None else data[start:stop]

    def get_many(self, requests):
        return [self.get(*request) for request in requests]

    def exists(self, key):
        self.reads.append((key, 0, 0))
        return key in self.storage.data

    def put_new(self, key, data):
        self.tick()
        return self.storage.data.setdefault(key, data) is data

    def put(self, key, data):
        self.tick()
        self.storage.data[key] = data

    def put_frames(self, items, still_mine):
        for key, data in items:
            self.tick()
            if self.storage.data.get(key) not in (None, data):
                still_mine()
            self.storage.data[key] = data

    def copy(self, pairs, still_mine):
        for source, target in pairs:
            self.tick()
            if source not in self.storage.data:
                raise NotFound(source)
            self.storage.data[target] = self.storage.data[source]

    def delete(self, keys):
        for key in keys:
            self.tick()
            self.storage.data.pop(key, None)

    def list(self, prefix, after=None):
        self.reads.append((prefix, None, None))
        for key in sorted(self.storage.data):
            if key.startswith(prefix) and key > (after or ""):
                yield Found(key, len(self.storage.data[key]))

    def flush(self):
        self.tick()

    @contextlib.contextmanager
    def writer(self, timeout):
        if not self.storage.lock.acquire(timeout=timeout):
            raise Locked("another writer")
        try:
            self.storage.epoch += 1
            self.writers.append(FakeWriter(self.storage.epoch))
            yield self.writers[-1]
        finally:
            self.storage.lock.release()

    def lease(self, session, name, expires, *, in_write):
        if session in self.storage.leases:
            raise Locked("already has an appender")
        lease = FakeLease(self.storage.leases, session)
        self.storage.leases[session] = id(lease)
        return lease

    def is_expired(self, session):
        return False

    def close(self):
        self.closed = True


@pytest.fixture(params=[True, False], ids=["far", "near"])
def storage(request):
    return Storage(request.param)


def open_objects(objects, mode="a", grace_seconds=0.0):
    return ZarrBackend("fake", mode, objects=objects, grace_seconds=grace_seconds)


def open_storage(storage, mode="a", grace_seconds=0.0):
    return open_objects(FakeObjects(storage), mode, grace_seconds)


def put(backend, **values):
    with backend.write(1.0) as txn:
        for key, value in values.items():
            txn.put(key.encode(), value)


def content(backend):
    with backend.read() as snapshot:
        return {key: bytes(value) for key, value in snapshot.scan(b"")}


def names(storage, prefix):
    return [key for key in sorted(storage.data) if key.startswith(prefix)]


# Commit records


def commit(**changes):
    fields = {
        "number": 7,
        "epoch": 3,
        "nonce": "0123456789abcdef",
        "previous": "f123456789abcdef",
        "tables": (
            Listed("commits/0000000000000006", 100, 1),
            Listed("commits/0000000000000005", 100, 1),
            Listed("segments/0000000000000005-0123abcd", 100, 1),
        ),
        "n_entries": 1,
        "used_bytes": 2,
        "table_bytes": 1,
        "sync": Sync(["a"], ["b"], ["c"]),
        "time": 12,
    }
    return Commit(**fields | changes)


def test_a_commit_comes_back():
    table = pack_segment([(b"a", b"1")])
    data = commit().pack(table.data)
    assert Commit.unpack(data, 7, "here") == (commit(), len(data))
    assert Segment(reader_of(data), len(data), "here", crc=table.crc).get(b"a") == b"1"


def test_every_byte_and_length_of_a_commit_counts():
    table = pack_segment([(b"a", b"1"), (b"b", bytes(1000))])
    data = commit().pack(table.data)

    def read(data):
        Commit.unpack(data, 7, "here")
        segment = Segment(reader_of(data), len(data), "here")
        return [segment.get(b"a"), segment.get(b"b").read()]

    assert read(data) == [b"1", bytes(1000)]
    for i in range(len(data)):
        wrong = bytearray(data)
        wrong[i] ^= 1 << i % 8
        with pytest.raises((Corrupt, Truncated), match="here: "):
            read(bytes(wrong))
        with pytest.raises((Corrupt, Truncated), match="here: "):
            read(data[:i])
    with pytest.raises(Corrupt):
        read(data + b"\0")


def test_a_commit_of_another_number_is_refused():
    with pytest.raises(Corrupt, match="number 7"):
        Commit.unpack(commit().pack(pack_segment([]).data), 8, "here")


def packed_json(text):
    from kvstore.backends.zarr import commits

    head = commits._HEAD.pack(commits.MAGIC, len(text), 0)
    return head + commits._CRC.pack(commits.crc32c(head, text)) + text


LISTED = ["segments/0000000000000005-0123abcd", 100, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"number": True},
        {"number": 8},
        {"epoch": -1},
        {"epoch": None},
        {"nonce": "0123456789ABCDEF"},
        {"nonce": 3},
        {"previous": ""},
        {"previous": None},
        {"n_entries": 1.0},
        {"used_bytes": 1 << 63},
        {"table_bytes": "1"},
        {"sync": None},
        {"sync": {"sessions": [1]}},
        {"time": "now"},
        {"format": 0},
        {"format": "1"},
        {"tables": None},
        {"tables": "abc"},
        {"tables": [1]},
        {"tables": [["a"]]},
        {"tables": [[LISTED[0], 100]]},
        {"tables": [[1, 100, 1]]},
        {"tables": [["../secret", 100, 1]]},
        {"tables": [["segments/../../../etc/passwd", 100, 1]]},
        {"tables": [["commits/0000000000000007", 100, 1]]},
        {"tables": [["commits/0000000000000005", 100, 1]]},
        {"tables": [["commits/000000000000006", 100, 1]]},
        {"tables": [LISTED, ["commits/0000000000000006", 100, 1]]},
        {"tables": [LISTED, LISTED]},
        {"tables": [["segments/0000000000000008-0123abcd", 100, 1]]},
        {"tables": [["segments/0000000000000005-0123abcd\n", 100, 1]]},
        {"tables": [[LISTED[0], 10, 1]]},
        {"tables": [[LISTED[0], 1 << 63, 1]]},
        {"tables": [[LISTED[0], 100, 1 << 32]]},
        {"tables": [[LISTED[0], 100, -1]]},
        {"tables": [[f"segments/0000000000000005-{i:08x}", 100, 1] for i in range(1025)]},
    ],
)
def test_hostile_commits_are_refused(changes):
    good = json.loads(re.search(rb"\{.*\}", commit().pack(b""), re.DOTALL)[0])
    Commit.unpack(packed_json(json.dumps(good).encode()), 7, "here")
    with pytest.raises(Corrupt, match="not a commit"):
        Commit.unpack(packed_json(json.dumps(good | changes).encode()), 7, "here")
    for name in changes:
        if name != "format":
            less = {key: value for key, value in good.items() if key != name}
            with pytest.raises(Corrupt):
                Commit.unpack(packed_json(json.dumps(less).encode()), 7, "here")


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_commits_that_are_no_json(text):
    with pytest.raises(Corrupt, match="not a commit"):
        Commit.unpack(packed_json(text), 7, "here")


def test_a_commit_of_a_newer_release():
    with pytest.raises(Unsupported, match="install a newer"):
        Commit.unpack(packed_json(b'{"format": 2}'), 7, "here")


# Which is the last one


def with_commits(*numbers):
    storage = Storage()
    storage.data = {commit_key(number): b"" for number in numbers}
    storage.data[COMMITS + ".0123456789abcdef.tmp"] = b""
    return FakeObjects(storage)


def test_the_last_commit_is_found():
    assert last_commit(with_commits(), 0) == 0
    assert last_commit(with_commits(3, 4, 0x10), 0) == 0x10
    assert last_commit(with_commits(3, 4, 5), 4) == 5
    assert last_commit(with_commits(0x10), 4) == 0x10
    assert last_commit(with_commits(2), 4) == 2  # another archive is there now
    with pytest.raises(NotFound, match="gone"):
        last_commit(with_commits(), 4)
    objects = with_commits(3, 4)
    assert last_commit(objects, 4) == 4
    assert len(objects.reads) == 2


def test_a_reader_that_slept_finds_the_last_commit_among_leftovers(storage):
    """Writers die before they delete what they merged; others go on."""
    sleeper = open_storage(storage, grace_seconds=0.0)
    put(sleeper, a=b"0")
    heads = {}
    for round_ in range(12):
        objects = FakeObjects(storage, dies_at=[4, 9, 1000, 11, 13, 17][round_ % 6])
        with contextlib.suppress(Death):
            put(open_objects(objects), **{f"k{round_}": b"%d" % round_})
        # Every reader that has looked at some time finds the same commit as a new one.
        heads[round_] = open_storage(storage, "r")
        new = content(open_storage(storage, "r"))
        for backend in (sleeper, *heads.values()):
            assert content(backend) == new


# Merging


def listed(*sizes):
    return tuple(
        Listed(f"{'commits' if size < 0 else 'segments'}/{i}", abs(size), 0)
        for i, size in enumerate(sizes)
    )


@pytest.mark.parametrize(
    ("sizes", "n"),
    [
        ([], 0),
        ([-1, -1, -1], 0),
        ([-1, -1, -1, -1], 4),
        ([-1, -9, -1, -1], 4),
        ([-1, -1, -1, 5], 4),
        ([-1, -1, -1, 6], 0),
        ([-1, -1, -1, -1, 7, 14], 6),
        ([-1, -1, -1, -1, 8, 1], 4),
        ([-1, -1, 3, 9, 20], 5),
        ([-1, -1, 3, 10, 20], 0),
    ],
)
def test_what_is_merged(sizes, n):
    assert n_to_merge(listed(*sizes), 1 << 30) == n


def test_tables_that_are_mostly_out_of_date_are_merged():
    assert n_to_merge(listed(-1, 10**6, 10**7), 10**7) == 0
    assert n_to_merge(listed(-1, 10**6, 10**7), 10**6) == 3
    assert n_to_merge(listed(-1, 10**4, 10**5), 0) == 0


def test_lists_of_tables_stay_short(storage):
    backend = open_storage(storage)
    rng = np.random.default_rng(1)
    model, n_written, longest = {}, 0, 0
    for i in range(400):
        changes = {b"%06d" % rng.integers(3000): rng.bytes(rng.integers(400)) for _ in range(5)}
        gone = [key for key in model if rng.random() < 0.001]
        with backend.write(1.0) as txn:
            for key, value in changes.items():
                txn.put(key, value)
            for key in gone:
                txn.delete(key)
        model.update(changes)
        for key in gone:
            del model[key]
        head = backend._shared.head()
        longest = max(longest, len(head.tables))
        n_written += head.listed.n_bytes
        if i % 40 == 0:
            assert content(open_storage(storage, "r")) == content(backend) == model
    assert longest <= 4 + 10
    info = backend.info()
    assert info.n_entries == len(model)
    assert info.used_bytes == sum(len(key) + len(value) for key, value in model.items())
    backend.collect(1.0)
    # What is kept is not much more than what is there.
    kept = sum(len(storage.data[key]) for key in names(storage, ROOT))
    assert kept < 2 * info.used_bytes + 50_000
    assert len(names(storage, COMMITS)) + len(names(storage, SEGMENTS)) <= longest + 4
    with backend.write(1.0) as txn:
        for key in model:
            txn.delete(key)
    for _ in range(12):
        put(backend, z=b"")
    assert len(backend._shared.head().tables) < 8
    assert sum(table.n_entries for table in backend._shared.head().tables) < 100
    assert backend._shared.head().table_bytes == 1


def test_deleted_keys_are_not_seen_through(storage):
    backend = open_storage(storage)
    put(backend, **{f"k{i:03}": bytes(2000) for i in range(100)})
    put(backend, **{f"k{i:03}": b"new" for i in range(100)})
    with backend.write(1.0) as txn:
        for i in range(0, 100, 2):
            txn.delete(b"k%03d" % i)
        assert txn.at_or_after(b"k000") == b"k001"
        assert txn.before(b"k099") == b"k097"
    with backend.read() as snapshot:
        assert snapshot.at_or_after(b"k000") == b"k001"
        assert snapshot.before(b"k") is None
        assert snapshot.before(b"z") == b"k099"
        assert snapshot.before(b"k099") == b"k097"
        assert snapshot.at_or_after(b"k0991") is None
        assert [key for key, _ in snapshot.sizes(b"")] == [b"k%03d" % i for i in range(1, 100, 2)]
        assert {n for _, n in snapshot.sizes(b"k")} == {3}


def test_keys_of_its_own_are_not_seen(storage):
    backend = open_storage(storage, grace_seconds=100.0)
    for i in range(6):
        put(backend, a=b"%d" % i)
    with backend.read() as snapshot:
        own = [key for key, _ in snapshot.raw_scan(b"\xff")]
        assert bool(own) == storage.is_remote
        assert list(snapshot.scan(b"\xff")) == []
        assert list(snapshot.sizes(b"\xff")) == []
        assert [key for key, _ in snapshot.scan(b"")] == [b"a"]
        assert snapshot.at_or_after(b"b") is None
        assert snapshot.before(b"\xff\xff") == b"a"
    with backend.write(1.0) as txn:
        for key in (b"\xff", b"\xffX", b"Fxyz"):
            with pytest.raises(kvstore.InvalidArgument, match="key of"):
                txn.put(key, b"")
        txn.delete(b"\xffX")
    assert backend.info().n_entries == 1


# What a snapshot costs


def test_a_snapshot_of_what_is_known_reads_nothing(storage):
    backend = open_storage(storage)
    put(backend, a=b"1")
    objects = backend._shared.objects
    with backend.read():
        pass
    objects.reads.clear()
    with backend.read() as snapshot:
        assert bytes(snapshot.get(b"a")) == b"1"
    assert len(objects.reads) == 2
    other = open_storage(storage)
    put(other, a=b"2")
    objects.reads.clear()
    with backend.read() as snapshot:
        assert bytes(snapshot.get(b"a")) == b"2"
    assert len(objects.reads) <= 4


def test_long_tables_are_not_read_whole(storage, monkeypatch):
    monkeypatch.setattr(shared, "_MOST_IN_MEMORY", 1 << 20)
    backend = open_storage(storage)
    values = {f"{i:06}": bytes([i % 256]) * 3000 for i in range(1000)}
    for i in range(5):
        put(backend, **dict(list(values.items())[i * 200 : i * 200 + 200]))
    put(backend, **{"x" + key: b"" for key in values}, **{"000003": b"y" * (1 << 20)})
    reader = open_storage(storage, "r")
    objects = reader._shared.objects
    with reader.read() as snapshot:
        assert bytes(snapshot.get(b"000500")) == values["000500"]
    read = sum(
        len(storage.data[key][start:stop]) for key, start, stop in objects.reads if key[-1] != "/"
    )
    assert read < 3 << 20
    assert content(reader) == content(backend)
    wanted = [b"000003", b"%06d" % 300, b"%06d" % 900, b"absent", b"x000001"]
    with reader.read() as snapshot:
        snapshot.prefetch(wanted)
        objects.reads.clear()
        for key in wanted:
            found = snapshot.get(key)
            assert found is None or bytes(found) == content(backend)[key]
        assert [key for key, _, _ in objects.reads] == [] or not storage.is_remote


# Two writers


def stalled(storage):
    """Begin a transaction of a writer whose right has expired, so that others may write."""
    backend = open_storage(storage)
    context = backend.write(1.0)
    txn = context.__enter__()
    storage.lock.release()
    return backend, context, txn


def test_two_writers_cannot_both_win(storage):
    put(open_storage(storage), a=b"1")
    slow, context, txn = stalled(storage)
    txn.put(b"a", b"slow")
    txn.put(b"b", b"slow")
    fast = open_storage(storage)
    put(fast, a=b"fast")
    storage.lock.acquire()
    with pytest.raises(Locked, match="another writer has taken over"):
        context.__exit__(None, None, None)
    for backend in (slow, fast, open_storage(storage)):
        assert content(backend) == {b"a": b"fast"}
    put(slow, b=b"2")
    assert content(fast) == {b"a": b"fast", b"b": b"2"}


def test_a_writer_that_has_lost_its_right_replaces_no_frame(storage):
    archive = Archive(open_storage(storage), "a")
    session = create(archive, "s")
    grow(session, 0, BLOCK)
    grow(session, BLOCK, 10)
    slow, context, txn = stalled(storage)
    slow._shared.objects.writers[-1].lost = True
    with archive._read() as snapshot:
        key, value = next(iter(snapshot.scan(keys.FRAME)))
        txn.put(key, bytes(value)[:-1])
    before = dict(storage.data)
    storage.lock.acquire()
    with pytest.raises(Locked, match="lost"):
        context.__exit__(None, None, None)
    assert storage.data == before


class LosesReplies(FakeObjects):
    """Puts what is to be put, and then the answer gets lost."""

    def __init__(self, storage, how):
        super().__init__(storage)
        self.how = how

    def put_new(self, key, data):
        if key.startswith(COMMITS) and self.how != "refuse":
            found = super().put_new(key, data)
            if self.how == "retried":
                return super().put_new(key, bytes(data))
            if self.how == "lost":
                raise Locked("no answer")
            return found
        if key.startswith(COMMITS):
            raise Locked("no answer")
        return super().put_new(key, data)


@pytest.mark.parametrize("how", ["retried", "lost"])
def test_a_commit_whose_answer_was_lost_is_one(storage, how):
    backend = open_objects(LosesReplies(storage, how))
    put(backend, a=b"1")
    put(backend, b=b"2")
    assert content(backend) == content(open_storage(storage)) == {b"a": b"1", b"b": b"2"}


def test_a_commit_that_did_not_arrive_is_none(storage):
    backend = open_objects(LosesReplies(storage, "refuse"))
    with pytest.raises(Locked, match="no answer"):
        put(backend, a=b"1")
    assert content(backend) == content(open_storage(storage)) == {}
    backend._shared.objects.how = ""
    put(backend, a=b"1")
    assert content(open_storage(storage)) == {b"a": b"1"}


# Damage


def test_a_missing_table_is_told(storage):
    backend = open_storage(storage, grace_seconds=100.0)
    for i in range(3):
        put(backend, **{f"k{i}": b"1"})
    del storage.data[commit_key(2)]
    with pytest.raises(Corrupt, match="missing"):
        content(open_storage(storage))
    storage.data[commit_key(2)] = storage.data[commit_key(1)]
    with pytest.raises((Corrupt, Truncated)):
        content(open_storage(storage))
    storage.data[commit_key(3)] = b"KVZC"
    for mode in "ra":
        with pytest.raises(Truncated, match=commit_key(3)):
            content(open_storage(storage, mode))


def test_damaged_tables_do_not_stop_writers(storage):
    backend = open_storage(storage, grace_seconds=100.0)
    put(backend, a=bytes(5000), b=bytes(5000))
    key = commit_key(1)
    at = storage.data[key].rindex(bytes(4000))
    storage.data[key] = storage.data[key][:at] + b"\1" + storage.data[key][at + 1 :]
    for i in range(10):
        put(open_storage(storage), **{f"k{i}": b"1"})
    backend = open_storage(storage, "r")
    with backend.read() as snapshot:
        assert len(list(snapshot.sizes(b"k"))) == 10
        sound = 0
        for name in (b"a", b"b"):
            with contextlib.suppress(Corrupt):
                sound += bytes(snapshot.get(name)) == bytes(5000)
        assert sound == 1


def test_another_archive_in_the_same_place(tmp_path):
    import shutil

    place = f"zarr:{tmp_path / 'a'}"
    first = ZarrBackend(place[5:], "a")
    put(first, a=b"1")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(NotFound, match="gone"):
        content(first)
    second = ZarrBackend(place[5:], "a")
    put(second, a=b"2")
    assert content(second) == {b"a": b"2"} == content(first)
    first.close()
    second.close()


def test_places_that_hold_something_else():
    storage = Storage()
    storage.data["mine.txt"] = b"mine"
    with pytest.raises(kvstore.InvalidArgument, match=r"mine\.txt"):
        open_storage(storage)
    storage.data = {"zarr.json": b'{"zarr_format": 3}'}
    with pytest.raises(kvstore.InvalidArgument, match=r"zarr\.json"):
        open_storage(storage)
    with pytest.raises(NotFound):
        open_storage(storage, "r")
    assert list(storage.data) == ["zarr.json"]


def fork(body):
    """Fork and run `body` in the child, which exits with 0 unless `body` raises."""
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


# Sessions


def values(first, n):
    rows = np.arange(first, first + n, dtype=np.float32)
    x = np.broadcast_to(rows[:, None], (1, 1, n, 4))
    return x, -x


def create(archive, name):
    return archive.create_session(name, model=MODEL, codec=Raw(), block_tokens=BLOCK, fit_tokens=1)


def grow(session, first, n, ids=True):
    session.append(*values(first, n), token_ids=list(range(first, first + n)) if ids else None)
    session.commit()


def state(archive):
    """Return all that one can read in an archive."""
    found = {}
    for name in archive.names():
        session = archive.session(name)
        streams = {}
        if session.n_committed:
            streams = {kind: session.read(0, kind).tobytes() for kind in "kv"}
        found[name] = (session.n_committed, session.first_token, session.pinned, streams)
    return found


def a_session(archive):
    grow(create(archive, "s"), 0, 300)


def more(archive):
    grow(archive.session("s"), 300, 300)


def two_more(archive):
    for first in (600, 610):
        grow(archive.session("s"), first, 10)


def a_fork(archive):
    archive.session("s").fork("f", at=450)


def growing_fork(archive):
    grow(archive.session("f"), 450, 200)


def taken_back(archive):
    archive.session("s").truncate(200)


def overwritten(archive):
    grow(archive.session("s"), 200, 400)


def trimmed(archive):
    archive.session("s").trim_front(256)


def renamed(archive):
    archive.session("s").rename("t/u")


def replaced(archive):
    archive.create_session(
        "t/u", model=MODEL, codec=Raw(), block_tokens=BLOCK, fit_tokens=1, replace=True
    )
    grow(archive.session("t/u"), 1000, 260)


def finished(archive):
    archive.seal(["f"], shard_bytes=1 << 16)


def deleted(archive):
    archive.delete_session("f")


def collected(archive):
    archive.gc()


STEPS = [
    a_session,
    more,
    two_more,
    a_fork,
    growing_fork,
    taken_back,
    overwritten,
    trimmed,
    renamed,
    replaced,
    finished,
    deleted,
    collected,
]


def run_steps(objects, steps, grace_seconds):
    archive = Archive(open_objects(objects, grace_seconds=grace_seconds), "a")
    for step in steps:
        step(archive)
    return archive


def unreferenced(storage, backend):
    """Return objects that belong to nothing."""
    head = backend._shared.head()
    used = set(referenced(backend._shared.newest()))
    trees = tuple(name for name in used if name.endswith("/"))
    used |= {item.key for item in head.below} | {"zarr.json", ROOT + "zarr.json"}
    return [key for key in storage.data if key not in used and not key.startswith(trees)]


def check_documents(storage, backend):
    """Check that zarr's documents are those of what is committed."""
    anew = storage.copy()
    with backend.read() as snapshot:
        every = [keys.name_of(key) for key, _ in snapshot.sizes(keys.SESSION)]
        view.sync(FakeObjects(anew), snapshot, Sync(every), bool)
    # What a deletion leaves is there until its time has come.
    for key, data in anew.data.items():
        if key.endswith("zarr.json"):
            assert storage.data.get(key) == data, key


@pytest.mark.parametrize(
    ("is_remote", "grace_seconds"), [(True, 0.0), (False, 1000.0)], ids=["far", "near"]
)
@pytest.mark.parametrize("number", range(len(STEPS)), ids=[step.__name__ for step in STEPS])
def test_death_at_any_change(number, is_remote, grace_seconds):
    check_deaths(Storage(is_remote), number, grace_seconds, range(0, 10_000, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("grace_seconds", "first"), [(0.0, 0), (1000.0, 1)])
@pytest.mark.parametrize("number", range(len(STEPS)), ids=[step.__name__ for step in STEPS])
def test_death_at_every_change(storage, number, grace_seconds, first):
    """At every one on each kind of storage: the even ones without grace, the odd ones with it."""
    check_deaths(storage, number, grace_seconds, range(first, 10_000, 2))


def check_deaths(storage, number, grace_seconds, changes):
    """Take a step that dies at its first change, at those of `changes`, and at none."""
    steps = STEPS[:number]
    run_steps(FakeObjects(storage), steps, grace_seconds)
    objects = FakeObjects(storage.copy())
    before = state(Archive(open_storage(storage.copy()), "a"))
    after = state(run_steps(objects, STEPS[number : number + 1], grace_seconds))
    n_calls, outcomes = objects.n_calls, []
    step = STEPS[number]
    for dies_at in sorted({0, *(n for n in changes if n < n_calls), n_calls}):
        left = storage.copy()
        with contextlib.suppress(Death):
            run_steps(FakeObjects(left, dies_at), [step], grace_seconds)
        left.leases.clear()
        reader = Archive(open_storage(left, "r"), "r")
        found = state(reader)
        assert reader.verify().problems == []
        outcomes.append(found)
        # The next writer goes on, and does what the dead one has left undone.
        archive = Archive(open_storage(left, grace_seconds=grace_seconds), "a")
        grow(create(archive, "next"), 0, 200)
        expected = found | {"next": state(archive)["next"]}
        assert state(archive) == state(reader) == expected
        assert archive.verify().problems == []
        if dies_at % 3 == 0 or dies_at == n_calls:
            check_documents(left, archive._backend)
            archive.gc()
            assert state(archive) == expected
            assert archive.verify().problems == []
            check_documents(left, archive._backend)
            assert unreferenced(left, archive._backend) == []
    assert outcomes[0] == before
    assert outcomes[-1] == after
    if step in (a_session, two_more, replaced):  # more than one commit
        return
    first_new = next((i for i, found in enumerate(outcomes) if found == after), len(outcomes))
    assert all(found == before for found in outcomes[:first_new])
    assert all(found == after for found in outcomes[first_new:])


def test_stale_readers_are_told():
    storage = Storage()
    archive = Archive(open_storage(storage, grace_seconds=0.0), "a")
    session = create(archive, "s")
    grow(session, 0, 600)
    backend = archive._backend
    with backend.read() as old:
        key = next(key for key, _ in old.sizes(keys.FRAME))
        frame = bytes(old.get(key))
        archive.delete_session("s")
        assert bytes(old.get(key)) == frame  # it is only due
        put(backend, zzz=b"")
        with pytest.raises(NotFound, match="older than the 0 s"):
            old.get(key)
    with backend.read() as new:
        assert new.get(key) is None


def test_a_lost_or_swapped_chunk_is_noticed(storage):
    archive = Archive(open_storage(storage), "a")
    for name in "st":
        grow(create(archive, name), 0, 600)
    chunk, other = "s/k_000/c/0/1/0", "t/k_000/c/0/1/0"
    assert len(storage.data[chunk]) == len(storage.data[other])
    kept = storage.data[chunk]
    storage.data[chunk] = storage.data[other]
    with pytest.raises(Corrupt, match="owner"):
        archive.session("s").read(0, "k")
    storage.data[chunk] = storage.data["s/v_000/c/0/1/0"]
    with pytest.raises(Corrupt, match="kind"):
        archive.session("s").read(0, "k")
    storage.data[chunk] = kept[:-1]
    with pytest.raises(Truncated):
        archive.session("s").read(0, "k")
    del storage.data[chunk]
    with pytest.raises(Corrupt, match="missing"):
        archive.session("s").read(0, "k")
    assert len(archive.verify().problems) == 1
    # It is in nobody's way.
    archive.session("s").fork("f").close()
    archive.session("s").truncate(300)
    archive.delete_session("s")
    archive.gc()
    assert archive.session("f").n_committed == 600


def test_frames_that_found_no_room_are_not_left(storage):
    archive = Archive(open_storage(storage), "a")
    create(archive, "s").close()

    class Small(FakeObjects):
        room = 3

        def put_frames(self, items, still_mine):
            for item in items:
                if not self.room:
                    raise Full("no room")
                self.room -= 1
                super().put_frames([item], still_mine)

    objects = Small(storage)
    archive = Archive(open_objects(objects), "a")
    before = dict(storage.data)
    with archive.session("s") as session:
        session.append(*values(0, 600))
        with pytest.raises(Full):
            session.commit()
        assert storage.data == before
        objects.room = 100
        session.commit()
    assert state(archive)["s"][0] == 600
    assert archive.verify().problems == []


def test_documents_that_could_not_be_put_are_put_later(storage):
    archive = Archive(open_storage(storage), "a")
    session = create(archive, "s")

    class NoDocuments(FakeObjects):
        broken = True

        def put_all(self, items, still_mine):
            if self.broken:
                raise Full("no room")
            super().put_all(items, still_mine)

    objects = NoDocuments(storage)
    session.close()
    other = Archive(open_objects(objects), "a")
    grow(other.session("s"), 0, 300)
    assert "s/k_000/zarr.json" not in storage.data
    grow(create(other, "t"), 0, 300)
    objects.broken = False
    put(other._backend, zzz=b"")
    check_documents(storage, other._backend)
    assert {"s/k_000/zarr.json", "t/k_000/zarr.json"} <= storage.data.keys()


def test_collecting_leaves_what_is_not_its_own():
    storage = Storage()
    archive = Archive(open_storage(storage), "a")
    grow(create(archive, "s"), 0, 300)
    strangers = {
        "notes.txt": b"mine",
        "mine/zarr.json": b"{}",
        "mine/k_000/zarr.json": b"{}",
        "mine/k_000/c/0/0/0": b"mine",
        "s/more/c/0/0/0": b"mine",
        ROOT + "other": b"?",
    }
    leftovers = {
        "s/k_000/c/0/9/0": b"1",
        "gone/v_001/c/0/0/0": b"22",
        ROOT + "frames/0123456789abcdef/k_000/3": b"333",
        SEGMENTS + "0000000000000001-01234567": b"4444",
        "s/k_000/c/0/.0123456789abcdef.tmp": b"55555",
    }
    storage.data.update(strangers | leftovers)
    before = dict(storage.data)
    assert archive.gc() == 15
    assert before.keys() - storage.data.keys() == leftovers.keys()
    assert state(archive)["s"][0] == 300


def test_a_directory_of_another_process(tmp_path):
    """Tables are merged and deleted under the eyes of a reader."""
    import subprocess
    import sys

    place = str(tmp_path / "a")
    backend = ZarrBackend(place, "a")
    put(backend, a=b"0")
    code = (
        "import sys; from kvstore.backends.zarr.backend import ZarrBackend\n"
        "b = ZarrBackend(sys.argv[1], 'a')\n"
        "for i in range(int(sys.argv[2])):\n"
        "    with b.write(5.0) as t: t.put(b'a', b'%d' % i); t.put(b'%d' % i, bytes(3000))\n"
    )
    with backend.read() as old:
        writer = subprocess.Popen([sys.executable, "-c", code, place, "60"])
        n_seen = set()
        while writer.poll() is None:
            with backend.read() as snapshot:
                last = int(bytes(snapshot.get(b"a")))
                n = sum(1 for key, _ in snapshot.sizes(b"") if key != b"a")
                assert n in ({0, last + 1} if not last else {last + 1})
                n_seen.add(n)
        assert writer.returncode == 0
        assert bytes(old.get(b"a")) == b"0"
    assert len(content(backend)) == 61
    assert len(n_seen) > 2
    backend.close()
    assert len(list((tmp_path / "a" / "_kvstore" / "commits").iterdir())) <= 5


def test_long_tables_of_a_directory_stay_readable(tmp_path):
    backend = ZarrBackend(str(tmp_path / "a"), "a")
    put(backend, **{f"{i}": bytes([i]) * 500_000 for i in range(5)})
    with backend.read() as old:
        for i in range(5):
            put(backend, **{f"{i}": b"new"})
        assert not (tmp_path / "a" / commit_key(1)).exists()
        assert [bytes(old.get(b"%d" % i)) for i in range(5)] == [
            bytes([i]) * 500_000 for i in range(5)
        ]
    assert set(content(backend).values()) == {b"new"}
    backend.close()


def test_fork(tmp_path):
    place = str(tmp_path / "a")
    backend = ZarrBackend(place, "a")
    put(backend, a=b"1")
    lease = backend.lease(5, "s")

    def in_child():
        with pytest.raises(Closed, match="fork"), backend.read():
            pass
        with pytest.raises(Closed, match="fork"), backend.write(1.0):
            pass
        mine = ZarrBackend(place, "a")
        assert content(mine) == {b"a": b"1"}
        with pytest.raises(Locked):
            mine.lease(5, "s")
        put(mine, child=b"yes")
        mine.close()

    pid = fork(in_child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert content(backend) == {b"a": b"1", b"child": b"yes"}
    with backend.write(1.0) as txn:
        txn.put(b"b", b"2")
        pid = fork(lambda: None)
        os.waitpid(pid, 0)
    put(backend, c=b"3")
    with pytest.raises(Locked):
        backend.lease(5, "s")
    lease.release()
    backend.close()


def test_what_was_saved_from_its_place_goes_back(storage):
    """A writer saves a frame, puts another one in its place, and dies."""
    archive = Archive(open_storage(storage, grace_seconds=100.0), "a")
    for name in "st":
        grow(create(archive, name), 0, 600)
    before = state(archive)
    with archive._read() as snapshot:
        key = next(
            key for key, _ in snapshot.sizes(keys.owner_prefix(keys.FRAME, owner_of(archive)))
        )
    aside = f"{ROOT}frames/{owner_of(archive):016x}/k_000/{keys.parse(key).index}"
    chunk = f"s/k_000/c/0/{keys.parse(key).index}/0"
    kept = storage.data[chunk]
    storage.data[aside], storage.data[chunk] = kept, storage.data["t/k_000/c/0/1/0"]
    assert state(archive) == before
    # Whoever tries again does not save what is in the place now.
    objects = archive._backend._shared.objects
    assert storing._to_rescue(objects, [(chunk, aside)]) == []
    assert storing._to_rescue(objects, [(aside, aside)]) == [(aside, aside)]
    assert archive.gc() == len(kept)
    assert storage.data[chunk] == kept
    assert aside not in storage.data
    assert state(archive) == before


def owner_of(archive):
    with archive._read() as snapshot:
        return archive._catalog.record(snapshot, "s").owner


@pytest.mark.parametrize("what", ["503", "500", "drop before", "drop after"])
@pytest.mark.parametrize("pattern", ["PUT .*/commits/", "GET .*/commits/", "PUT .*/c/0/", ""])
def test_faults_on_the_way_to_a_bucket(faulty_s3, monkeypatch, what, pattern):
    from kvstore.backends.zarr import _requests

    monkeypatch.setattr(_requests, "_FIRST_PAUSE", 0.01)
    backend = ZarrBackend(faulty_s3.bucket() + "/a", "a", storage_options=faulty_s3.options)
    archive = Archive(backend, "a")
    faulty_s3.fail(what, pattern, after=1, times=2)
    with create(archive, "s") as session:
        grow(session, 0, 300)
    other = ZarrBackend(backend.path, "r", storage_options=faulty_s3.options)
    again = Archive(other, "r")
    assert state(again) == state(archive)
    assert state(again)["s"][0] == 300
    assert again.verify().problems == []
    archive.close()
    again.close()


def test_a_storage_that_does_not_answer(faulty_s3, monkeypatch):
    from kvstore.backends.zarr import _requests

    monkeypatch.setattr(_requests, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(_requests, "_LONGEST_PAUSE", 0.01)
    backend = ZarrBackend(faulty_s3.bucket() + "/a", "a", storage_options=faulty_s3.options)
    put(backend, a=b"1")
    faulty_s3.fail("503", "PUT .*/commits/", times=1000)
    with pytest.raises(Locked, match="try again"):
        put(backend, a=b"2")
    assert content(backend) == {b"a": b"1"}
    faulty_s3.faults.clear()
    put(backend, a=b"3")
    assert content(backend) == {b"a": b"3"}
    backend.close()
