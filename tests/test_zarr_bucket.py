"""Archives in a bucket: what is fetched, and that at the same time; storage that fails."""

import re
import threading

import numpy as np
import obstore
import pytest
import zarr
from kvcodecs.errors import Locked
from kvcodecs.kvr1 import KVR1

import kvstore
from kvstore.backends.zarr import bucket

BLOCK = 128
MODEL = kvstore.Model.uniform(name="m", n_layers=3, n_kv_heads=2, head_dim=8, dtype="float32")
CHUNK = re.compile(r"GET /bucket-\d+/a/(s/[kv]_\d+/c/0/\d+/0)$")


def values(n_tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((2, 3, 2, n_tokens, 8), dtype=np.float32)


def open_archive(server, url, mode="a", **options):
    return kvstore.open(url, mode, storage_options=server.options, **options)


@pytest.fixture
def place(faulty_s3):
    """A bucket with a session of eight blocks and a tail."""
    url = faulty_s3.bucket() + "/a"
    with open_archive(faulty_s3, url) as archive:
        session = archive.create_session(
            "s", model=MODEL, codec=KVR1(rel_step=0.25), block_tokens=BLOCK, fit_tokens=64
        )
        session.append(*values(8 * BLOCK + 9))
        session.commit()
        session.close()
    faulty_s3.seen.clear()
    return url


def fetched(server):
    return sorted(m[1] for seen in server.seen if (m := CHUNK.match(seen)))


def test_a_range_fetches_the_covering_chunks_and_no_others(faulty_s3, place):
    with open_archive(faulty_s3, place, "r") as archive:
        session = archive.session("s")
        faulty_s3.seen.clear()
        got = session.read(1, "v", 2 * BLOCK - 3, 4 * BLOCK + 1, dtype="float32")
        assert fetched(faulty_s3) == [f"s/v_001/c/0/{block}/0" for block in (1, 2, 3, 4)]
        expected = values(8 * BLOCK + 9)[1, 1][:, 2 * BLOCK - 3 : 4 * BLOCK + 1]
        assert np.abs(got - expected).max() < 0.2
        faulty_s3.seen.clear()
        session.read_all(5 * BLOCK, 6 * BLOCK)
        streams = [f"{kind}_{layer:03d}" for kind in "kv" for layer in range(3)]
        assert fetched(faulty_s3) == sorted(f"s/{stream}/c/0/5/0" for stream in streams)


def test_chunks_are_fetched_at_the_same_time(faulty_s3, place, monkeypatch):
    waiting, most = threading.Semaphore(0), [0, 0]
    lock = threading.Lock()
    with open_archive(faulty_s3, place, "r") as archive:
        session = archive.session("s")
        requests = archive._backend._shared.objects._requests
        get = requests.get

        def slow(key, *args):
            if "/c/" not in key:
                return get(key, *args)
            with lock:
                most[0] += 1
                most[1] = max(most)
                if most[0] >= 4:
                    waiting.release(1000)
            waiting.acquire(timeout=5)  # goes on as soon as four are waiting
            with lock:
                most[0] -= 1
            return get(key, *args)

        monkeypatch.setattr(requests, "get", slow)
        session.read(0, "k", 0, 8 * BLOCK)
    assert most[1] >= 4


def test_the_last_tokens_are_in_the_commit(faulty_s3, place):
    with open_archive(faulty_s3, place, "r") as archive:
        session = archive.session("s")
        faulty_s3.seen.clear()
        session.read(0, "k", 8 * BLOCK, 8 * BLOCK + 9)
        assert fetched(faulty_s3) == []


def test_zarr_reads_one_chunk_of_a_bucket(faulty_s3, place):
    store = zarr.storage.ObjectStore(
        obstore.store.from_url(
            place,
            config=faulty_s3.options,
            client_options={"allow_http": True},
        ),
        read_only=True,
    )
    array = zarr.open_group(store, mode="r")["s/k_002"]
    faulty_s3.seen.clear()
    got = array[:, 3 * BLOCK : 4 * BLOCK]
    assert fetched(faulty_s3) == ["s/k_002/c/0/3/0"]
    with open_archive(faulty_s3, place, "r") as archive:
        expected = archive.session("s").read(2, "k", 3 * BLOCK, 4 * BLOCK, dtype="float32")
    np.testing.assert_array_equal(got, expected)


def test_a_fork_copies_in_the_bucket(faulty_s3, place):
    with open_archive(faulty_s3, place) as archive:
        faulty_s3.seen.clear()
        fork = archive.session("s").fork("f", 4 * BLOCK)
        assert fetched(faulty_s3) == []  # no frame came here
        archive.delete_session("s")
        expected = values(8 * BLOCK + 9)[0, 0][:, : 4 * BLOCK]
        assert np.abs(fork.read(0, "k", dtype="float32") - expected).max() < 0.2
        assert archive.verify(decode=True).ok


@pytest.mark.parametrize("fault", ["503", "500", "drop before", "drop after"])
@pytest.mark.parametrize("what", ["_kvstore/commits/", "/c/0/9/0", "_kvstore/writer"])
def test_a_commit_survives_throttling_and_lost_answers(faulty_s3, place, fault, what):
    with open_archive(faulty_s3, place) as archive:
        with archive.session("s") as session:
            session.append(*values(2 * BLOCK, 1))
            faulty_s3.fail(fault, f"PUT .*{what}", times=2)
            session.commit()
        assert not any(left for *_, left in faulty_s3.faults)
        assert archive.verify(decode=True).ok
    with open_archive(faulty_s3, place, "r") as archive:
        assert archive.session("s").n_committed == 10 * BLOCK + 9


@pytest.mark.parametrize("what", ["PUT .*_kvstore/commits/", "PUT .*/c/0/9/0"])
def test_a_commit_that_fails_for_good_can_be_tried_again(faulty_s3, place, what, monkeypatch):
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.2, raising=False)
    with open_archive(faulty_s3, place) as archive, archive.session("s") as session:
        requests = archive._backend._shared.objects._requests
        requests._max_retries = 2
        session.append(*values(2 * BLOCK, 1))
        faulty_s3.fail("500", what, times=10_000)
        with pytest.raises(Locked, match="try again"):
            session.commit()
        with open_archive(faulty_s3, place, "r") as reader:
            assert reader.session("s").n_committed == 8 * BLOCK + 9
            assert reader.verify(decode=True).ok
        faulty_s3.faults.clear()
        session.commit()
        assert session.n_committed == 10 * BLOCK + 9
        assert archive.verify(decode=True).ok
