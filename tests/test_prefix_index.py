"""The prefix index against brute force: what is longest, in which order, what collisions do."""

from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument

from kvstore import Model, Rope, Shard, prefix, prefix_keys
from kvstore.backend import MAX_KEY_BYTES
from kvstore.metadata import canonical_json
from kvstore.place import open_backend
from kvstore.prefix import (
    HASH_TOKENS,
    Chain,
    candidates,
    changes,
    common_tokens,
    entry_keys,
    longest,
    parse_entry,
)

MODEL = Model.uniform(
    name="m", n_layers=2, n_kv_heads=1, head_dim=4, rope=Rope.from_theta(1e4, 4), salt="tenant"
)
LOW, HIGH = -(2**63), 2**63 - 1
#: Both sides of every limit of the ids' codes.
EXTREMES = [0, 1, 2**31 - 1, 2**31, 0xFDFFFFFF, 0xFE000000, 0xFEFFFFFF, 0xFF000000, 2**32 - 1]
EXTREMES += [2**32, 2**32 + 1, -1, -(2**31), LOW, LOW + 1, HIGH, 2**40]
SETTINGS = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", params=["lmdb", "memory", "zarr"])
def backend(request, tmp_path_factory):
    place = str(tmp_path_factory.mktemp("prefix") / "a.kv")
    places = {"memory": f"memory:{place}", "lmdb": place, "zarr": f"zarr:{place}"}
    opened = open_backend(places[request.param], "a")
    yield opened
    opened.close()


class _RolledBack(Exception):
    pass


@contextmanager
def scratch(backend):
    """A transaction that leaves nothing behind."""
    try:
        with backend.write(10) as txn:
            yield txn
            raise _RolledBack
    except _RolledBack:
        pass


@contextmanager
def short_digest(n_values):
    """Hashes of which there are only a few."""

    def digest(person, data):
        return bytes([blake2b(data, person=person).digest()[0] % n_values]).ljust(32, b"\0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "_digest", digest)
        yield


def array(ids):
    return np.array(ids, np.int64)


def hashed(ids, model=MODEL):
    chain = Chain(model)
    chain.extend(ids)
    return chain.hashes


def store(txn, owner, ids, model=MODEL):
    for key in entry_keys(hashed(ids, model), ids, 0, len(ids), owner):
        txn.put(key, b"")


def found(snapshot, ids, model=MODEL):
    return list(candidates(snapshot, hashed(ids, model), ids))


def truth(stored, prompt):
    return max((common_tokens(ids, prompt) for ids in stored.values()), default=0)


def fresh(seed, n):
    """Ids of a small alphabet, so that sequences often agree for a while; some unusual."""
    choice = np.random.default_rng(seed)
    alphabet = array([0, 1] if seed % 3 else choice.choice(array(EXTREMES), 2))
    return alphabet[choice.integers(0, len(alphabet), n)]


lengths = st.one_of(
    st.integers(0, 3),
    st.builds(lambda k, d: max(64 * k + d, 0), st.integers(0, 3), st.integers(-2, 2)),
    st.integers(0, 200),
)
seeds = st.integers(0, 5)


@st.composite
def sequences(draw, max_size):
    """Token ids of several owners, each the beginning of an earlier one and then other ids."""
    made = [array([])]
    for _ in range(draw(st.integers(1, max_size))):
        parent = made[draw(st.integers(0, len(made) - 1))]
        cut = min(draw(lengths), len(parent))
        made.append(np.concatenate([parent[:cut], fresh(draw(seeds), draw(lengths))]))
    return made[1:]


@st.composite
def prompts(draw, stored):
    base = draw(st.sampled_from([array([]), *stored]))
    cut = min(draw(lengths), len(base))
    return np.concatenate([base[:cut], fresh(draw(seeds), draw(lengths))])


@SETTINGS
@given(data=st.data())
def test_the_first_candidate_is_the_longest(backend, data):
    made = data.draw(sequences(8))
    with scratch(backend) as txn:
        stored = dict(enumerate(made, 1))
        for owner, ids in stored.items():
            store(txn, owner, ids)
        for owner in data.draw(st.sets(st.sampled_from(sorted(stored)))):
            ids = stored.pop(owner)
            for key in entry_keys(hashed(ids), ids, 0, len(ids), owner):
                txn.delete(key)
        for _ in range(4):
            prompt = data.draw(prompts(made))
            expected = truth(stored, prompt)
            offers = found(txn, prompt)
            claims = [claimed for _, claimed in offers]
            assert claims == sorted(claims, reverse=True)
            assert (claims[0] if claims else 0) == expected
            # A claim may stop short at the end of a boundary's ids, but never promises too much.
            assert all(c <= common_tokens(stored[owner], prompt) for owner, c in offers)
            if expected:
                assert common_tokens(stored[offers[0][0]], prompt) == expected
                # Nobody who shares anything is left out among so few.
                sharing = {o for o, ids in stored.items() if common_tokens(ids, prompt)}
                assert {owner for owner, _ in offers} == sharing


@SETTINGS
@given(data=st.data(), seed=seeds, pieces=st.lists(lengths, max_size=6))
def test_growth_in_pieces_is_building_at_once(data, seed, pieces):
    ids = fresh(seed, sum(pieces))
    # A fork begins with ids that it has no keys for.
    begin = data.draw(st.sampled_from([0, *np.cumsum(pieces).tolist()])) if pieces else 0
    chain = Chain(MODEL)
    chain.extend(ids[:begin])
    keys, at = set(), begin
    for n in [p for p, end in zip(pieces, np.cumsum(pieces), strict=True) if end > begin]:
        removed, added = changes(chain, ids[at : at + n], 7)
        at += n
        if at - n > begin:
            assert set(removed) <= keys
        keys = (keys - set(removed)) | set(added)
        assert len(removed) <= 1
        assert keys == set(entry_keys(hashed(ids[:at]), ids[:at], begin, at, 7))
    assert chain.n_tokens == len(ids)
    assert chain.hashes == hashed(ids)
    assert np.array_equal(chain.pending, ids[len(ids) // HASH_TOKENS * HASH_TOKENS :])


def test_one_token_at_a_time():
    ids, chain, keys = fresh(0, 150), Chain(MODEL), set()
    for i in range(len(ids)):
        removed, added = changes(chain, ids[i : i + 1], 7)
        keys = (keys - set(removed)) | set(added)
    assert keys == set(entry_keys(hashed(ids), ids, 0, len(ids), 7))
    assert changes(chain, ids[:0], 7) == ([], [])


def test_keys_of_a_part():
    ids = fresh(1, 300)
    hashes = hashed(ids)
    every = list(entry_keys(hashes, ids, 0, 300, 7))
    assert len(every) == 5
    assert list(entry_keys(hashes, ids, 130, 300, 7)) == every[2:]
    assert list(entry_keys(hashes[2:], ids[128:], 130, 300, 7, first_boundary=2)) == every[2:]
    assert list(entry_keys(hashes, ids, 130, 130, 7)) == []
    assert list(entry_keys(hashes[:1], ids[:64], 0, 64, 7)) == every[:1]
    for bad in ((hashes, ids[:299], 0, 300, 7, 0), (hashes[:4], ids, 0, 300, 7, 0)):
        with pytest.raises(InvalidArgument):
            list(entry_keys(*bad))
    with pytest.raises(InvalidArgument):
        list(entry_keys(hashes[2:], ids[128:], 100, 300, 7, first_boundary=2))


def test_the_bytes_of_a_key():
    ids = array([*range(64), 5, -1])

    def h(person, data):
        return blake2b(data, digest_size=32, person=person).digest()

    first = h(b"kvs prefix model", canonical_json(MODEL.to_json()))
    second = h(b"kvs prefix block", first + ids[:64].astype(">i8").tobytes())
    hashed_id = blake2b(b"\xff" * 8, digest_size=6, person=b"kvs prefix token").digest()
    end = b"\xfe" + (2**64 - 2).to_bytes(8, "big")
    assert list(entry_keys(hashed(ids), ids, 0, 66, 2**64 - 2)) == [
        b"P" + first[:16] + b"".join(i.to_bytes(4, "big") for i in range(64)) + end,
        b"P" + second[:16] + b"\x00\x00\x00\x05" + b"\xff" + hashed_id + end,
    ]


extreme_ids = st.lists(
    st.sampled_from(EXTREMES) | st.sampled_from([0, -1]) | st.integers(LOW, HIGH), max_size=6
).map(array)


@settings(max_examples=200, deadline=None)
@given(stored=st.lists(extreme_ids, min_size=1, max_size=8), prompt=extreme_ids, data=st.data())
def test_the_longest_is_a_neighbour_in_key_order(stored, prompt, data):
    cut = data.draw(st.integers(0, 6))
    prompt = np.concatenate([data.draw(st.sampled_from(stored))[:cut], prompt])
    keys = sorted(
        b"".join(prefix_keys.code_ids(ids)) + b"\xfe" + bytes([owner])
        for owner, ids in enumerate(stored)
    )
    place = bisect_left(keys, b"".join(prefix_keys.code_ids(prompt)))
    beside = [stored[key[-1]] for key in keys[max(place - 1, 0) : place + 1]]
    shared = max(common_tokens(ids, prompt) for ids in beside)
    assert shared == truth(dict(enumerate(stored)), prompt)


@given(a=st.sampled_from(EXTREMES), b=st.sampled_from(EXTREMES))
def test_no_code_begins_another(a, b):
    first, second = prefix_keys.code_ids(array([a, b]))
    assert first[0] != 0xFE
    assert (a == b) == first.startswith(second)


@pytest.mark.parametrize("token", EXTREMES)
def test_keys_fit_and_parse(token):
    ids = np.full(130, token, np.int64)
    for owner in (1, 0xFE, 2**64 - 1):
        keys = list(entry_keys(hashed(ids), ids, 0, 130, owner))
        assert all(len(key) <= MAX_KEY_BYTES for key in keys)
        expected = [(h, n, owner) for h, n in zip(hashed(ids), (64, 64, 2), strict=True)]
        assert [parse_entry(key) for key in keys] == expected


@settings(max_examples=100, deadline=None)
@given(ids=extreme_ids.filter(len), owner=st.integers(0, 2**64 - 1))
def test_parse_entry_takes_what_was_written(ids, owner):
    (key,) = entry_keys(hashed(ids), ids, 0, len(ids), owner)
    assert parse_entry(key) == (hashed(ids)[0], len(ids), owner)


def damaged_keys(ids):
    head = b"P" + hashed(ids)[0]
    plain = ids[:64].astype(">u4").tobytes()
    yield from (b"", b"P", b"P" + bytes(15), head, head + b"\xfe" + bytes(8))
    yield head + plain + b"\xfe" + bytes(7)
    yield head + plain + b"\xfe" + bytes(9)
    yield head + plain + b"\xfd" + bytes(8)
    yield head + plain[:6] + b"\xfe" + bytes(8)
    yield head + plain[:4] + b"\xff" + bytes(5) + b"\xfe" + bytes(8)
    yield head + plain[:4] + b"\xfe" + bytes(3) + b"\xfe" + bytes(8)
    yield head + plain + bytes(4) + b"\xfe" + bytes(8)
    yield (head + plain).ljust(MAX_KEY_BYTES, b"\0")


def test_damaged_keys_are_passed_over(backend):
    ids = fresh(1, 100)
    for key in damaged_keys(ids):
        with pytest.raises(Corrupt):
            parse_entry(key)
    with pytest.raises(Corrupt):
        parse_entry(b"K" + next(entry_keys(hashed(ids), ids, 0, 100, 1))[1:])
    with scratch(backend) as txn:
        store(txn, 9, ids)
        for key in filter(None, damaged_keys(ids)):
            txn.put(key, b"")
        assert found(txn, ids)[0] == (9, 100)
        assert found(txn, ids[:64])[0] == (9, 64)
        assert found(txn, ids[:10]) == [(9, 10)]


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 127, 128, 129])
def test_every_length_of_prompt_and_session(backend, n):
    ids = fresh(1, 200)
    with scratch(backend) as txn:
        store(txn, 3, ids[:n])
        for m in (0, 1, 63, 64, 65, 128, 200):
            offers = found(txn, ids[:m])
            assert (offers[0] if offers else None) == ((3, min(n, m)) if min(n, m) else None)


def test_what_was_committed_is_found(tmp_path):
    ids = fresh(1, 100)
    opened = open_backend(str(tmp_path / "a.kv"), "a")
    with opened.write(10) as txn:
        store(txn, 3, ids)
    with opened.read() as snapshot:
        assert found(snapshot, ids) == [(3, 100), (3, 64)]
    opened.close()


OTHERS = [
    replace(MODEL, name="n"),
    replace(MODEL, revision="r"),
    replace(MODEL, weights="w"),
    replace(MODEL, tokenizer="t"),
    replace(MODEL, adapter="lora"),
    replace(MODEL, shard="0/2"),
    replace(MODEL, shard=Shard(0, 2, (0, 1))),
    replace(MODEL, shard=Shard(1, 2, (1, 2))),
    replace(MODEL, dtype="float16"),
    replace(MODEL, layout="paged"),
    replace(MODEL, salt="other"),
    replace(MODEL, salt=""),
    replace(MODEL, rope=None),
    replace(MODEL, rope=Rope.from_theta(1e4 + 1, 4)),
    replace(MODEL, layers=MODEL.layers[:1]),
    replace(MODEL, layers=(replace(MODEL.layers[0], window=8), MODEL.layers[1])),
]


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_is_no_candidate(backend, other):
    ids = fresh(1, 200)
    with scratch(backend) as txn:
        store(txn, 3, ids)
        assert found(txn, ids, other) == []
        store(txn, 4, ids, other)
        assert {owner for owner, _ in found(txn, ids)} == {3}
        assert {owner for owner, _ in found(txn, ids, other)} == {4}


def test_a_collision_is_settled_by_the_ids(backend):
    mine, other = fresh(1, 200), fresh(2, 200)
    mine[0], other[0] = 10, 11
    other[128:] = mine[128:]
    with short_digest(1), scratch(backend) as txn:
        store(txn, 3, mine)
        asked = []

        def usable(owner, claimed):
            asked.append((owner, claimed))
            return common_tokens(mine[:claimed], other)

        # All hashes are equal: the index claims all of it, the ids say nothing of it.
        assert longest(txn, hashed(other), other, usable) is None
        assert asked == [(3, 200)]


@SETTINGS
@given(data=st.data(), n_values=st.integers(1, 3))
def test_collisions_never_serve_a_wrong_length(backend, data, n_values):
    # So few keys that all are looked at, whatever collides: then nothing is hidden either.
    made = data.draw(sequences(3))
    with short_digest(n_values), scratch(backend) as txn:
        stored = dict(enumerate(made, 1))
        for owner, ids in stored.items():
            store(txn, owner, ids)
        n_keys = sum(1 for _ in txn.scan(b"P"))
        for _ in range(4):
            prompt = data.draw(prompts(made))
            hashes = hashed(prompt)
            result = longest(
                txn, hashes, prompt, lambda o, n, p=prompt: common_tokens(stored[o][:n], p)
            )
            n_found = 0 if result is None else common_tokens(stored[result[0]], prompt)
            assert (0 if result is None else result[1]) <= n_found <= truth(stored, prompt)
            if n_keys <= prefix.NEIGHBOURS:
                assert n_found == truth(stored, prompt)


@SETTINGS
@given(data=st.data())
def test_hashed_ids_that_collide_are_settled_by_the_ids(data):
    made = data.draw(sequences(5))
    backend = open_backend(f"memory:collide-{data.draw(st.integers())}", "a")
    with pytest.MonkeyPatch.context() as patch, scratch(backend) as txn:
        patch.setattr(prefix_keys, "_digest", lambda person, data: bytes(6))
        stored = dict(enumerate(made, 1))
        for owner, ids in stored.items():
            store(txn, owner, ids)
        prompt = data.draw(prompts(made))
        result = longest(
            txn, hashed(prompt), prompt, lambda o, n: common_tokens(stored[o][:n], prompt)
        )
        assert (0 if result is None else result[1]) == truth(stored, prompt)


def test_owners_that_cannot_be_used_make_way(backend):
    ids = fresh(1, 100)
    with scratch(backend) as txn:
        for owner in range(1, 11):
            store(txn, owner, ids[:90])
        store(txn, 20, ids[:70])
        store(txn, 21, ids[:50])
        hashes, asked = hashed(ids), []

        def usable_of(limits):
            def usable(owner, claimed):
                asked.append(owner)
                return min(claimed, limits.get(owner, 0))

            return usable

        assert longest(txn, hashes, ids, usable_of({4: 100})) == (4, 90)
        assert longest(txn, hashes, ids, usable_of({20: 100, 21: 100})) == (20, 70)
        assert longest(txn, hashes, ids, usable_of({4: 30, 21: 100})) == (21, 50)
        asked.clear()
        assert longest(txn, hashes, ids, usable_of({})) is None
        assert sorted(asked) == [*range(1, 11), 20, 21]  # each once


class Counted:
    """A snapshot that counts look-ups."""

    def __init__(self, snapshot):
        self.snapshot, self.n = snapshot, 0

    def at_or_after(self, key):
        self.n += 1
        return self.snapshot.at_or_after(key)

    def before(self, key):
        self.n += 1
        return self.snapshot.before(key)


def test_look_ups_grow_with_the_prompt_not_with_the_archive(tmp_path):
    half = np.random.default_rng(1).integers(0, 50_000, 4096)
    way = np.random.default_rng(2).integers(0, 50_000, 64)
    hashes = hashed(half)
    opened = open_backend(str(tmp_path / "a.kv"), "a")
    with opened.write(10) as txn:
        for owner in range(1, 501):
            other = array([*way[: owner % 60], -owner])
            ids = np.concatenate([half, other])
            for key in entry_keys(hashes, ids, 0, len(ids), owner):
                txn.put(key, b"")
    prompt = np.concatenate([half, way, half])
    hashes = hashed(prompt)
    with opened.read() as snapshot:
        counted = Counted(snapshot)
        owner, claimed = next(candidates(counted, hashes, prompt))
        assert (owner % 60, claimed) == (59, 4096 + 59)
        assert counted.n <= 12  # 8 to halve 130 boundaries, one each for two neighbours
        counted.n = 0
        miss = prompt[::-1]
        assert list(candidates(counted, hashed(miss), miss)) == []
        assert counted.n <= 12
    opened.close()


def test_common_tokens():
    a = array([1, 2, 3])
    assert common_tokens(a, a) == 3
    assert common_tokens(a, a[:2]) == common_tokens(a[:2], a) == 2
    assert common_tokens(a, array([1, 9, 3])) == 1
    assert common_tokens(a, array([9, 2, 3])) == common_tokens(a, array([])) == 0


def test_a_copy_of_a_chain_grows_apart():
    ids, chain = fresh(1, 200), Chain(MODEL)
    chain.extend(ids[:70])
    other = chain.copy()
    other.extend(ids[70:])
    assert other.hashes == hashed(ids)
    assert chain.hashes == hashed(ids[:70])
    assert np.array_equal(chain.pending, ids[64:70])
