"""A writer of a bucket that stands still in the middle of a request, while others go on."""

import re

import numpy as np
import pytest
from kvcodecs.errors import Locked
from kvcodecs.raw import Raw

import kvstore
from kvstore.archive import Archive
from kvstore.backends.zarr import bucket, bucket_lease
from kvstore.backends.zarr.backend import ZarrBackend
from kvstore.backends.zarr.bucket import Bucket

BLOCK = 16
MODEL = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4, dtype="float32")


@pytest.fixture
def open_archive(s3_server, monkeypatch):
    """Return a function that opens one archive as one more process would; each knows its time."""
    url = s3_server.bucket() + "/a"
    monkeypatch.setattr(bucket_lease._Renewer, "_wait", lambda renewer: False)
    # A process that stands still does nothing at the same time either.
    monkeypatch.setattr(bucket, "at_once", lambda act, items, most: [act(item) for item in items])

    def open_it(mode="a", grace_seconds=0.0):
        objects = Bucket(url, s3_server.options, lease_seconds=60.0)
        return Archive(ZarrBackend(url, mode, objects=objects, grace_seconds=grace_seconds), mode)

    return open_it


def create(archive, name):
    archive.create_session(
        name, model=MODEL, codec=Raw(), block_tokens=BLOCK, fit_tokens=4, replace=True
    ).close()


def grow(archive, name, n, seed, truncate=None):
    k, v = np.random.default_rng(seed).standard_normal((2, 1, 1, n, 4), dtype=np.float32)
    with archive.session(name) as session:
        if truncate is not None:
            session.truncate(truncate)
        session.append(k, v)
        session.commit()


def state(archive):
    sessions = {name: archive.session(name) for name in archive.names()}
    return {
        name: session.read_all(dtype="float32")[0].tobytes() for name, session in sessions.items()
    }


def stand_still(archive, method, pattern, meanwhile, monkeypatch):
    """Let others work, for longer than leases last, before the first request that matches."""
    requests = archive._backend._shared.objects._requests
    act, due = getattr(requests, method), [True]

    def late(*args, **options):
        key = args[1] if method == "copy_new" else args[0]
        if due and re.search(pattern, key):
            due.clear()
            clock = bucket_lease._clock
            monkeypatch.setattr(bucket_lease, "_clock", lambda: clock() + 100)
            now = bucket_lease.time.time
            with monkeypatch.context() as patch:
                patch.setattr(bucket_lease.time, "time", lambda: now() + 100)
                meanwhile()
        return act(*args, **options)

    monkeypatch.setattr(requests, method, late)
    return due


def many(archive):
    for seed in range(9):
        grow(archive, "other", 1, seed)


def fork(archive):
    archive.session("s").fork("new").close()


def new(archive):
    create(archive, "new")
    grow(archive, "new", 5 * BLOCK, 7)


def back(archive):
    grow(archive, "s", 3 * BLOCK, 5, truncate=BLOCK)


def seal(archive):
    archive.seal(["s"])


@pytest.mark.parametrize(
    ("act", "method", "pattern", "meanwhile"),
    [
        (fork, "copy_new", "new/k_000/c/", [new]),
        (back, "copy_new", "_kvstore/frames/", [back, many]),
        (back, "create", "s/k_000/c/", [back]),
        (back, "create", "_kvstore/commits/", [back, many, Archive.gc]),
        (fork, "create", "_kvstore/commits/", [many]),
        (seal, "create", "_kvstore/commits/", [many, Archive.gc]),
    ],
)
def test_a_writer_that_stood_still_changes_nothing(
    open_archive, monkeypatch, act, method, pattern, meanwhile
):
    slow, fast, reader = open_archive(), open_archive(), open_archive("r")
    create(slow, "s")
    grow(slow, "s", 4 * BLOCK, 1)
    slow.session("s").fork("fork").close()
    create(slow, "other")
    after = []

    def work():
        for step in meanwhile:
            step(fast)
        after.append(state(reader))

    due = stand_still(slow, method, pattern, work, monkeypatch)
    with pytest.raises(Locked):
        act(slow)
    assert not due
    assert state(open_archive("r")) == state(reader) == state(slow) == after[0]
    assert reader.verify(decode=True).ok
    grow(fast, "other", 1, 100)
    assert state(slow) == state(fast)
    fast.gc()
    assert reader.verify(decode=True).ok


def test_documents_of_a_writer_that_stood_still_do_not_replace_newer_ones(
    open_archive, monkeypatch
):
    slow, fast = open_archive(), open_archive()
    create(slow, "s")
    grow(slow, "s", 4 * BLOCK, 1)
    objects = fast._backend._shared.objects
    shown = []

    def work():
        grow(fast, "s", 4 * BLOCK, 5, truncate=BLOCK)
        shown.extend(objects.get(f"s/{stream}_000/zarr.json") for stream in "kv")

    due = stand_still(slow, "replace", "s/k_000/zarr.json", work, monkeypatch)
    grow(slow, "s", 2 * BLOCK, 2)  # committed before it stood still
    assert not due
    assert b"\n  80,\n" in shown[0]
    assert [objects.get(f"s/{stream}_000/zarr.json") for stream in "kv"] == shown


def test_a_commit_that_others_built_on_is_one(open_archive, monkeypatch):
    slow, fast = open_archive(), open_archive()
    create(slow, "s")
    objects = slow._backend._shared.objects
    put_new = objects.put_new

    def late(key, data):
        made = put_new(key, data)
        if key.startswith("_kvstore/commits/"):
            stand_still(slow, "replace", "_kvstore/writer", lambda: create(fast, "t"), monkeypatch)
            clock = bucket_lease._clock
            monkeypatch.setattr(bucket_lease, "_clock", lambda: clock() + 100)
        return made

    monkeypatch.setattr(objects, "put_new", late)
    create(slow, "u")
    assert slow.names() == fast.names() == ["s", "t", "u"]
