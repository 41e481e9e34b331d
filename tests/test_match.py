"""`match_prefix`: the longest stored prefix, to the token, and never another prompt's KV."""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
from kvcodecs.frame import seal_record

import kvstore
from kvstore import LayerSpec, Model, Raw, Rope, Shard, keys
from kvstore.metadata import canonical_json
from kvstore.records import ARCHIVE_MAGIC, check_archive

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=4, rope=Rope.from_theta(1e4, 4))
BLOCK = 16
N = 14_900


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def archive(request, tmp_path):
    place = str(tmp_path / "a.kv")
    with kvstore.open(
        {"memory": f"memory:{place}", "lmdb": place, "zarr": f"zarr:{place}"}[request.param], "a"
    ) as opened:
        yield opened
        assert_sound(opened)


def assert_sound(archive):
    report = archive.verify()
    assert report.ok, report.problems


def kv_of(ids, model=MODEL, start=0):
    """Values that tell which token is where."""
    layers, dim = model.n_layers, 4
    x = np.empty((layers, 1, len(ids), dim), np.float32)
    x[..., 0] = np.asarray(ids, np.int64) % 100_003
    x[..., 1] = np.arange(start, start + len(ids))
    x[..., 2:] = np.arange(layers)[:, None, None, None]
    return x, -x


def add(session, ids):
    start = session.n_tokens
    session.append(*kv_of(ids, session.model, start), token_ids=ids)
    session.commit()


def store(archive, name, ids, model=MODEL, block_tokens=BLOCK, **options):
    session = archive.create_session(
        name, model=model, codec=Raw(), block_tokens=block_tokens, fit_tokens=8, **options
    )
    add(session, ids)
    session.close()
    return session


def random_ids(n, seed=0, high=50_000):
    return np.random.default_rng(seed).integers(0, high, n)


def assert_match(archive, prompt, n, model=MODEL, names=None):
    """`n` tokens match, and what is read through the match are theirs."""
    found = archive.match_prefix(prompt, model)
    assert found.n_tokens == n
    assert bool(found) == (n > 0)
    if not n:
        assert found.session is None
        assert found.n_sealed == 0
        return found
    if names is not None:
        assert found.session.name in names
    assert 0 <= found.n_sealed <= n
    k, v = found.session.read_all(0, n, dtype="float32")
    wanted_k, wanted_v = kv_of(prompt[:n], model)
    assert (k == wanted_k).all()
    assert (v == wanted_v).all()
    return found


# To the token.


@pytest.fixture(scope="module")
def long_archive(tmp_path_factory):
    ids = random_ids(N)
    with kvstore.open(tmp_path_factory.mktemp("match") / "a.kv", "a") as archive:
        store(archive, "long", ids, block_tokens="auto")
        for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 63, 64, 65, 4096, 4097):
            other = ids[: n + 40].copy()
            other[n:] += 1
            store(archive, f"diverges at {n}", other)
        yield archive, ids


@pytest.mark.parametrize(
    "n", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 4095, 4096, 4097, 14_820]
)
def test_every_length_of_prompt(long_archive, n):
    archive, ids = long_archive
    assert_match(archive, ids[:n], n)
    # And a hit in the middle of a block: the prompt goes on with other ids.
    for extra in (1, 100):
        prompt = np.concatenate([ids[:n], -1 - ids[n : n + extra]])
        assert_match(archive, prompt, n)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 4096, 4097])
def test_sessions_that_diverge_inside_a_block(long_archive, n):
    archive, ids = long_archive
    for more in (1, 13, 40):
        prompt = ids[: n + more].copy()
        prompt[n:] += 1
        assert_match(archive, prompt, n + more, names={f"diverges at {n}"})
        prompt = np.concatenate([prompt, [5, 5, 5]])
        assert_match(archive, prompt, n + more)


def test_sealed_tokens(archive):
    ids = random_ids(100)
    session = archive.create_session(
        "s", model=MODEL, codec=Raw(), block_tokens=BLOCK, fit_tokens=32
    )
    add(session, ids[:20])
    assert archive.match_prefix(ids, MODEL).n_sealed == 0  # all raw: there are no blocks yet
    add(session, ids[20:])
    for n, n_sealed in ((10, 10), (95, 95), (96, 96), (99, 96), (100, 96)):
        found = archive.match_prefix(ids[:n], MODEL)
        assert (found.n_tokens, found.n_sealed) == (n, n_sealed)


def test_prompts_as_lists_and_other_integers(archive):
    ids = random_ids(50)
    store(archive, "s", ids)
    for prompt in (ids.tolist(), tuple(ids.tolist()), ids.astype(np.int32), ids.astype(np.uint16)):
        assert archive.match_prefix(prompt, MODEL).n_tokens == 50
    assert not archive.match_prefix([], MODEL)
    for bad in ([1.5], [[1, 2]], ["a"], [True], 5, None, [2**63]):
        with pytest.raises(kvstore.InvalidArgument):
            archive.match_prefix(bad, MODEL)
    with pytest.raises(kvstore.InvalidArgument, match="Model"):
        archive.match_prefix(ids, "m")


def test_unusual_ids(archive):
    rng = np.random.default_rng(3)
    special = [-1, -(2**63), 2**63 - 1, 2**40, 2**40 + 1, 2**32, 2**32 - 1, 0xFE000000, 0xFF000000]
    ids = rng.choice(special, 300)
    store(archive, "a", ids)
    for n in (1, 2, 63, 64, 65, 130, 299):
        other = ids[: n + 5].copy()
        other[n:] = [7, -7, 2**41, -(2**41), 0xFE000001][: len(other) - n]
        assert_match(archive, other, n, names={"a"})
    assert_match(archive, ids, 300)
    # Ids that a narrower key would not tell apart.
    store(archive, "b", np.array([1 << 40, 5]))
    assert_match(archive, np.array([(1 << 40) + (1 << 32), 5]), 0)
    assert_match(archive, np.array([1 << 40, 6]), 1)


# Identity.

OTHERS = {
    "name": {"name": "n"},
    "revision": {"revision": "abc"},
    "weights": {"weights": "sha256:1"},
    "tokenizer": {"tokenizer": "sha256:1"},
    "adapter": {"adapter": "lora-1"},
    "dtype": {"dtype": "float16"},
    "layout": {"layout": "hnd"},
    "shard": {"shard": Shard(0, 2, (0, 1))},
    "other shard": {"shard": Shard(1, 2, (1, 2))},
    "salt": {"salt": "tenant"},
    "theta": {"rope": Rope.from_theta(1e5, 4)},
    "rope factor": {"rope": Rope.from_theta(1e4, 4, scaling=1.1)},
    "rope style": {"rope": Rope.from_theta(1e4, 4, style="interleaved")},
    "no rope": {"rope": None},
    "window": {"layers": (LayerSpec(1, 4, 4), LayerSpec(1, 4, 4, window=128))},
    "layer rope": {"layers": (LayerSpec(1, 4, 4), LayerSpec(1, 4, 4, rope=None))},
    "one layer": {"layers": (LayerSpec(1, 4, 4),)},
}


def test_equal_tokens_of_another_identity_never_match(archive):
    ids = random_ids(130)
    models = {"plain": MODEL} | {k: replace(MODEL, **v) for k, v in OTHERS.items()}
    for stored, model in models.items():
        store(archive, stored, ids, model)
        for asked, other in models.items():
            if asked == stored:
                assert_match(archive, ids, 130, other, {stored})
            else:
                assert not archive.match_prefix(ids, other), (stored, asked)
        archive.delete_session(stored)
    # All at once, each finds its own.
    for stored, model in models.items():
        store(archive, stored, ids, model)
    for stored, model in models.items():
        assert_match(archive, ids, 130, model, {stored})


def test_the_salt_of_the_call_is_that_of_the_model(archive):
    ids = random_ids(70)
    store(archive, "a", ids, replace(MODEL, salt="a"))
    assert archive.match_prefix(ids, MODEL, salt="a").n_tokens == 70
    assert archive.match_prefix(ids, replace(MODEL, salt="b"), salt="a").n_tokens == 70
    for salt in (None, "", "b", "A", "a "):
        assert not archive.match_prefix(ids, MODEL, salt=salt)
    store(archive, "plain", ids)
    assert archive.match_prefix(ids, MODEL).session.name == "plain"
    assert archive.match_prefix(ids, MODEL, salt="").session.name == "plain"
    assert archive.match_prefix(ids, MODEL, salt="a").session.name == "a"
    with pytest.raises(kvstore.InvalidArgument):
        archive.match_prefix(ids, MODEL, salt=5)


def test_what_never_matches(archive):
    ids = random_ids(130)
    session = archive.create_session("no ids", model=MODEL, codec=Raw(), block_tokens=BLOCK)
    session.append(*kv_of(ids))
    session.commit()
    session.close()
    pending = archive.create_session("not committed", model=MODEL, codec=Raw())
    pending.append(*kv_of(ids), token_ids=ids)
    archive.create_session("empty", model=MODEL).close()
    assert not archive.match_prefix(ids, MODEL)
    pending.commit()
    assert_match(archive, ids, 130, names={"not committed"})
    pending.trim_front(1)
    assert not archive.match_prefix(ids, MODEL)
    pending.close()
    # A fork of a trimmed session is as trimmed.
    archive.session("not committed").fork("f")
    assert not archive.match_prefix(ids, MODEL)


def test_layers_that_came_late_must_reach_the_window(archive):
    model = Model("w", (LayerSpec(1, 4, 4), LayerSpec(1, 4, 4, window=20)), dtype="float32")
    ids = random_ids(200)
    session = archive.create_session("s", model=model, codec=Raw(), block_tokens=BLOCK)
    k, v = kv_of(ids, model)
    session.append([k[0], k[1][:, 100:]], [v[0], v[1][:, 100:]], token_ids=ids)
    session.commit()
    session.close()
    for n in (50, 100, 119):
        assert not archive.match_prefix(ids[:n], model)
    for n in (120, 150, 200):
        found = archive.match_prefix(ids[:n], model)
        assert found.n_tokens == n
        assert (found.session.read(1, "k", n - 20, n) == k[1][:, n - 20 : n]).all()
    # Another one that has all of it serves what this one cannot.
    whole = archive.create_session("whole", model=model, codec=Raw(), block_tokens=BLOCK)
    whole.append(k[:, :, :110], v[:, :, :110], token_ids=ids[:110])
    whole.commit()
    whole.close()
    for n, name in ((50, "whole"), (110, "whole"), (119, "whole"), (120, "s"), (200, "s")):
        found = archive.match_prefix(ids[:n], model)
        assert (found.session.name, found.n_tokens) == (name, min(n, 110) if n < 120 else n)


# Collisions.


@pytest.mark.parametrize("n_values", [1, 2, 256])
def test_planted_collisions_are_caught(tmp_path, monkeypatch, n_values):
    """With hashes of one byte or less, every key of the index may be another prompt's."""
    digest = kvstore.prefix._digest

    def short(person, data):
        return bytes([digest(person, data)[0] % n_values]) * 32

    monkeypatch.setattr("kvstore.prefix._digest", short)
    rng = np.random.default_rng(1)
    other = replace(MODEL, salt="other")
    with kvstore.open(f"memory:collide {n_values}", "a") as archive:
        stored = {}
        for i in range(40):
            model = MODEL if i % 2 else other
            ids = rng.integers(0, 2, int(rng.integers(1, 300)))
            if i > 10:
                base = stored[f"{i - 2}"][0]
                cut = int(rng.integers(0, len(base) + 1))
                ids = np.concatenate([base[:cut], ids])
            store(archive, f"{i}", ids, model)
            stored[f"{i}"] = ids, model
        for _ in range(100):
            ids, model = stored[f"{rng.integers(0, 40)}"]
            cut = int(rng.integers(0, len(ids) + 1))
            prompt = np.concatenate([ids[:cut], rng.integers(0, 2, int(rng.integers(0, 200)))])
            for asked in (MODEL, other):
                found = archive.match_prefix(prompt, asked)
                if found:  # shorter than the longest perhaps, never wrong
                    ids, model = stored[found.session.name]
                    assert model == asked
                    assert (ids[: found.n_tokens] == prompt[: found.n_tokens]).all()
                    assert_match(archive, prompt, found.n_tokens, asked)
        assert_sound(archive)


# What happens to the session after it was matched.


@pytest.fixture
def matched(archive):
    ids = random_ids(100)
    session = store(archive, "s", ids)
    return archive, ids, archive.session("s"), archive.match_prefix(ids[:80], MODEL), session


def uses(found):
    held = found.session
    return [
        lambda: held.read(0, "k", 0, 80),
        lambda: held.read(1, "v", 0, 5),
        lambda: held.read_all(0, 80),
        lambda: held.token_ids(0, 80),
        lambda: held.fork("from the match", at=80),
        lambda: held.info(),
        lambda: held.metadata,
        lambda: held.append(*kv_of([1], start=held.n_tokens), token_ids=[1]),
        lambda: held.truncate(80),
        lambda: held.trim_front(5),
    ]


def assert_gone(archive, found):
    names = archive.names()
    for use in uses(found):
        # `Locked` where somebody appends: what changes the session is not for this one to do.
        with pytest.raises((kvstore.NotFound, kvstore.Locked)):
            use()
    assert archive.names() == names


def test_matched_then_deleted(matched):
    archive, ids, _, found, _ = matched
    archive.delete_session("s")
    with pytest.raises(kvstore.NotFound):
        found.session.read(0, "k", 0, 80)
    assert not archive.match_prefix(ids, MODEL)


@pytest.mark.parametrize("same", [True, False])
def test_matched_then_replaced(matched, same):
    archive, ids, _, found, _ = matched
    store(archive, "s", ids if same else ids + 1, replace=True)
    with pytest.raises(kvstore.NotFound):
        found.session.read(0, "k", 0, 80)
    assert_match(archive, ids, 100 if same else 0)


def test_matched_then_deleted_by_another_process_and_made_anew(tmp_path):
    ids = random_ids(100)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        store(archive, "s", ids)
    with kvstore.open(tmp_path / "a.kv", "a") as archive, kvstore.open(tmp_path / "a.kv") as other:
        found = other.match_prefix(ids, MODEL)
        archive.delete_session("s")
        store(archive, "s", ids + 1)
        for use in uses(found)[:4]:
            with pytest.raises(kvstore.NotFound, match="another one was created"):
                use()


@pytest.mark.parametrize("n", [0, 10, 40, 79])
def test_matched_then_rolled_back(matched, n):
    archive, ids, session, found, _ = matched
    session.truncate(n)
    assert_gone(archive, found)
    add(session, ids[n:] + 1)  # another answer, as long
    session.close()
    assert_gone(archive, found)
    assert_match(archive, ids, n)
    assert_match(archive, np.concatenate([ids[:n], ids[n:] + 1]), 100)


@pytest.mark.parametrize("n", [0, 40, 79])
def test_matched_then_rolled_back_to_the_same_tokens(matched, n):
    _, ids, session, found, _ = matched
    session.truncate(n)
    with pytest.raises(kvstore.NotFound, match="match again"):
        found.session.read(0, "k", 0, 80)
    add(session, ids[n:90])
    k, _ = kv_of(ids)
    assert (found.session.read(0, "k", 0, 80) == k[0][:, :80]).all()
    session.truncate(80)
    add(session, ids[:5])
    assert (found.session.read(0, "k", 0, 80) == k[0][:, :80]).all()
    session.close()
    assert found.session.fork("f", at=80).n_committed == 80


def test_matched_then_trimmed(matched):
    archive, _, session, found, _ = matched
    session.trim_front(1)
    assert_gone(archive, found)


def test_matched_then_grown_renamed_pinned(matched):
    _, ids, session, found, _ = matched
    add(session, ids)
    session.pin()
    session.rename("t")
    session.close()
    k, _ = kv_of(ids)
    assert (found.session.read(0, "k", 0, 80) == k[0][:, :80]).all()
    assert found.session.name == "t"
    fork = found.session.fork("f", at=80)
    assert (fork.read(0, "k") == k[0][:, :80]).all()


def test_matched_then_renamed_by_another_process(tmp_path):
    ids = random_ids(100)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        store(archive, "s", ids)
        with kvstore.open(tmp_path / "a.kv") as other:
            found = other.match_prefix(ids, MODEL)
            archive.session("s").rename("t")
            with pytest.raises(kvstore.NotFound):
                found.session.read(0, "k", 0, 80)
            assert other.match_prefix(ids, MODEL).session.name == "t"


def test_users_take_over_what_the_parent_served(archive):
    """Whoever goes, the longest prefix that is left is found."""
    ids = random_ids(300)
    parent = store(archive, "p", ids)
    session = archive.session("p")
    for at in (20, 64, 130, 200):
        fork = session.fork(f"f{at}", at=at)
        add(fork, ids[:10] + 1)
        fork.close()
    session.close()
    parent.close()
    longest = [300, 200, 130, 64, 20, 0]
    for i, name in enumerate(["p", "f200", "f130", "f64", "f20"]):
        assert_match(archive, ids, longest[i])
        archive.delete_session(name)
        assert_match(archive, ids, longest[i + 1])
        assert_sound(archive)
        assert archive.verify().n_leftover == 0


def test_trims_and_rollbacks_of_forks(archive):
    ids = random_ids(300)
    store(archive, "p", ids)
    parent = archive.session("p")
    fork = parent.fork("f", at=200)
    parent.trim_front(1)
    assert_match(archive, ids, 200, names={"f"})
    fork.truncate(150)
    assert_match(archive, ids, 150, names={"f"})
    add(fork, ids[150:170])
    assert_match(archive, ids, 170, names={"f"})
    fork.trim_front(100)
    assert not archive.match_prefix(ids, MODEL)
    parent.truncate(0)
    add(parent, ids[:64])
    assert_match(archive, ids, 64, names={"p"})
    parent.close()
    fork.close()
    assert archive.verify().n_leftover == 0


def test_a_damaged_session_is_a_miss(archive):
    ids = random_ids(300)
    store(archive, "p", ids)
    fork = archive.session("p").fork("f", at=200)
    fork.close()
    with archive._backend.write(1) as transaction:
        value = bytes(transaction.get(keys.session_key("p")))
        transaction.put(keys.session_key("p"), b"damaged")
    found = archive.match_prefix(ids, MODEL)
    assert found.n_tokens in (0, 200)
    if found:
        assert found.session.name == "f"
    with archive._backend.write(1) as transaction:
        transaction.put(keys.session_key("p"), value)
    assert_match(archive, ids, 300)


def test_damaged_ids_are_a_miss(archive):
    ids = random_ids(300)
    store(archive, "p", ids)
    store(archive, "q", ids[:100])
    with archive._backend.write(1) as transaction:
        record = archive._catalog.record(transaction, "p")
        key = keys.tokens_key(record.owner, 0)
        value = bytes(transaction.get(key))
        transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    assert_match(archive, ids, 100, names={"q"})
    with archive._backend.write(1) as transaction:
        transaction.put(key, value)
    assert_match(archive, ids, 300)


# Side by side.


def test_matches_while_sessions_come_grow_and_go(archive):
    ids = random_ids(400)
    n_rounds = 25 if archive.path.startswith("memory:") else 5
    stop, errors = threading.Event(), []

    def work(i):
        rng = np.random.default_rng(i)
        try:
            for j in range(n_rounds):
                name = f"{i}-{j % 3}"
                store(archive, name, ids[: int(rng.integers(1, 400))], replace=True)
                with archive.session(name) as session:
                    n = session.n_committed
                    add(session, ids[n : n + 30])
                    session.truncate(n // 2)
                    add(session, ids[n // 2 :][:40] + i)
                if j % 5 == 4:
                    archive.delete_session(name)
        except BaseException as error:
            errors.append(error)
            raise

    def look():
        rng = np.random.default_rng(99)
        try:
            while not stop.is_set():
                cut = int(rng.integers(0, 400))
                prompt = np.concatenate([ids[:cut], ids[cut:] + int(rng.integers(0, 3))])
                found = archive.match_prefix(prompt, MODEL)
                if not found:
                    continue
                try:
                    k, v = found.session.read_all(0, found.n_tokens)
                except kvstore.NotFound:
                    continue
                wanted_k, wanted_v = kv_of(prompt[: found.n_tokens])
                assert (k == wanted_k).all()
                assert (v == wanted_v).all()
        except BaseException as error:
            errors.append(error)
            raise

    writers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    readers = [threading.Thread(target=look) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert archive.verify().n_leftover == 0
    before = lists(archive)
    archive.reindex()
    assert lists(archive) == before


def lists(archive):
    with archive._read() as snapshot:
        return [key for p in (keys.USER, keys.PREFIX) for key, _ in snapshot.scan(p)]


# Archives from before there was an index.


def make_old(path, ids):
    with kvstore.open(path, "a") as archive:
        store(archive, "s", ids)
        store(archive, "t", ids[:70])
        session = archive.create_session("no ids", model=MODEL, codec=Raw())
        session.append(*kv_of(ids))
        session.commit()
        session.close()
        with archive._backend.write(1) as transaction:
            about = check_archive(transaction.get(keys.ARCHIVE), "here")
            about["format"] = 1
            for key in lists(archive):
                transaction.delete(key)
            transaction.put(keys.ARCHIVE, seal_record(ARCHIVE_MAGIC, canonical_json(about)))


def test_an_old_archive_is_indexed_when_it_is_opened_to_append(tmp_path):
    ids = random_ids(150)
    make_old(tmp_path / "a.kv", ids)
    with kvstore.open(tmp_path / "a.kv") as archive:
        with pytest.raises(kvstore.Unsupported, match=r"mode='a' once, or run kvstore upgrade"):
            archive.match_prefix(ids, MODEL)
        k, _ = kv_of(ids)
        assert (archive.session("s").read_all()[0] == k).all()
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        assert_match(archive, ids, 150, names={"s"})
        assert archive.verify().n_leftover == 0
        assert_sound(archive)
        fork = archive.session("s").fork("f", at=100)
        archive.delete_session("s")
        assert_match(archive, ids, 100, names={"f"})
        fork.close()
        assert_sound(archive)
    with kvstore.open(tmp_path / "a.kv") as archive:
        assert_match(archive, ids, 100, names={"f"})


def test_an_old_archive_in_use_while_it_is_indexed(tmp_path):
    ids = random_ids(150)
    make_old(tmp_path / "a.kv", ids)
    with kvstore.open(tmp_path / "a.kv") as early:
        with kvstore.open(tmp_path / "a.kv", "a"):
            pass
        # Whether it notices by itself or asks to be opened again, nothing wrong comes back.
        with contextlib.suppress(kvstore.Unsupported):
            assert early.match_prefix(ids, MODEL).n_tokens == 150


def test_an_index_that_is_lost_is_made_anew(archive):
    ids = random_ids(150)
    store(archive, "s", ids)
    fork = archive.session("s").fork("f", at=100)
    add(fork, ids[:30])
    fork.close()
    before = lists(archive)
    with archive._backend.write(1) as transaction:
        for key in before:
            transaction.delete(key)
    assert not archive.match_prefix(ids, MODEL)
    report = archive.verify()
    assert [problem.where for problem in report.problems] == ["prefix index"]
    assert "kvstore reindex" in report.problems[0].message
    n_entries, errors = archive.reindex()
    assert errors == []
    assert n_entries == sum(key[:1] == keys.PREFIX for key in before)
    assert lists(archive) == before
    assert_match(archive, ids, 150)


def test_reindex_says_what_it_cannot_index(archive):
    ids = random_ids(150)
    store(archive, "s", ids)
    store(archive, "t", ids[:50])
    with archive._backend.write(1) as transaction:
        record = archive._catalog.record(transaction, "s")
        key = keys.tokens_key(record.owner, 0)
        value = bytes(transaction.get(key))
        transaction.put(key, b"damaged")
    _, errors = archive.reindex()
    assert len(errors) == 1
    assert "session 's'" in str(errors[0])
    assert_match(archive, ids, 50, names={"t"})
    with archive._backend.write(1) as transaction:
        transaction.put(key, value)
    archive.reindex()
    assert_match(archive, ids, 150)
