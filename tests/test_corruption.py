"""Damage of stored bytes is detected and named: every byte of every kind of value."""

import numpy as np
import pytest
from kvcodecs.frame import open_frame, pack_frame, seal_record

import kvstore
from kvstore import KVR1, Corrupt, Model, Rope, Truncated, Unsupported, keys
from kvstore.backends import memory

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=4, rope=Rope.from_theta(1e4, 4))
DAMAGE = (Corrupt, Truncated, Unsupported)
N = 44
BLOCK = 16


def tensors(seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2, 1, N, 4)).astype(np.float32) for _ in range(2))


@pytest.fixture
def store():
    """Two sessions with a raw head, sealed blocks, a tail and token ids; the raw items."""
    with kvstore.open("memory:corruption", "a") as archive:
        for seed, name in enumerate(("s", "other")):
            k, v = tensors(seed)
            session = archive.create_session(
                name, model=MODEL, codec=KVR1(step=0.25), block_tokens=BLOCK, fit_tokens=8
            )
            for lo, hi in ((0, 3), (3, N)):
                ids = np.arange(lo, hi)
                session.append(k[:, :, lo:hi], v[:, :, lo:hi], token_ids=ids)
                session.commit()
    yield memory._stores["corruption"].version
    memory.discard("corruption")


def owner_of(name):
    with kvstore.open("memory:corruption") as archive, archive._read() as snapshot:
        return archive._catalog.id(snapshot, name)


def read_everything(out=None):
    with kvstore.open("memory:corruption") as archive:
        session = archive.session("s")
        session.token_ids()
        session.read_all()
        return session.read(1, "k", out=out)


def problems():
    with kvstore.open("memory:corruption") as archive:
        return archive.verify(decode=True).problems


def stream(prefix, name="s", layer=1, kind="k"):
    return keys.stream_key(prefix, owner_of(name), layer, kind)


def frame(block, name="s", layer=1, kind="k"):
    return keys.frame_key(owner_of(name), layer, kind, block)


VALUES = {
    "sealed frame": (lambda: frame(1), "layer 1 k block 1"),
    "tail": (lambda: stream(keys.TAIL), "layer 1 k tail"),
    "head": (lambda: stream(keys.HEAD), "layer 1 k head"),
    "header": (lambda: stream(keys.HEADER), "layer 1 k header"),
    "token ids": (lambda: keys.tokens_key(owner_of("s"), 0), "token ids chunk 0"),
    "session record": (lambda: keys.session_key("s"), "session 's'"),
    "identity": (lambda: keys.identity_key(MODEL.digest), f"model {MODEL.digest.hex()}"),
}


@pytest.mark.parametrize("what", VALUES)
def test_every_flipped_byte_is_found_and_named(store, what):
    make_key, name = VALUES[what]
    key = make_key()
    good = store.items[key]
    read_everything()
    for at in range(len(good)):
        for flip in (0x01, 0x80):
            bad = bytearray(good)
            bad[at] ^= flip
            store.items[key] = bytes(bad)
            out = np.full((1, N, 4), 7, np.float32)
            with pytest.raises(DAMAGE, match=name):
                read_everything(out)
            assert (out == 7).all()
    found = problems()
    assert found
    assert all(name.split(" (")[0] in p.where or "session" in p.where for p in found)


@pytest.mark.parametrize("what", VALUES)
def test_every_truncation_is_found(store, what):
    key = VALUES[what][0]()
    good = store.items[key]
    for n in range(len(good)):
        store.items[key] = good[:n]
        with pytest.raises(DAMAGE):
            read_everything()
    store.items[key] = good + b"\0"
    with pytest.raises(DAMAGE):
        read_everything()


@pytest.mark.parametrize("what", [w for w in VALUES if w != "session record"])
def test_every_loss_is_found(store, what):
    make_key, name = VALUES[what]
    del store.items[make_key()]
    store._keys = None
    with pytest.raises(Corrupt, match=rf"{name}.*missing"):
        read_everything()
    assert problems()


def test_archive_record(store):
    good = store.items[b"A"]
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x04
        store.items[b"A"] = bytes(bad)
        with pytest.raises(DAMAGE, match="memory:corruption"):
            kvstore.open("memory:corruption")
    del store.items[b"A"]
    with pytest.raises(Corrupt, match="not an archive"):
        kvstore.open("memory:corruption", "a")
    store.items[b"A"] = seal_record(b"KVA1", b'{"format":3}')
    with pytest.raises(Unsupported, match="format 3"):
        kvstore.open("memory:corruption")


SWAPS = {
    "two blocks": (lambda: (frame(0), frame(1)), "first token"),
    "two layers": (lambda: (frame(1), frame(1, layer=0)), "layer"),
    "k and v": (lambda: (frame(1), frame(1, kind="v")), "kind"),
    "two sessions": (lambda: (frame(1), frame(1, name="other")), "owner"),
    "block and tail": (lambda: (frame(1), stream(keys.TAIL)), "first token"),
    "head and tail": (lambda: (stream(keys.HEAD), stream(keys.TAIL)), "first token|codec"),
}


@pytest.mark.parametrize("what", SWAPS)
def test_frames_in_the_wrong_place(store, what):
    make_keys, field = SWAPS[what]
    a, b = make_keys()
    store.items[a], store.items[b] = store.items[b], store.items[a]
    with pytest.raises(Corrupt, match=rf"layer \d [kv].*another frame is stored here: ({field})"):
        read_everything()
    assert problems()


def test_a_frame_that_does_not_know_its_place(store):
    header, payload = open_frame(store.items[frame(1)])
    fields = header._asdict() | {"unplaced": True, "owner": 0, "layer": 0, "first_token": 0}
    del fields["payload_bytes"]
    store.items[frame(1)] = pack_frame(payload=payload, **fields)
    with pytest.raises(Corrupt, match="another frame is stored here: unplaced"):
        read_everything()
    assert problems()


def test_header_of_another_session(store):
    store.items[stream(keys.HEADER)] = store.items[stream(keys.HEADER, "other")]
    with pytest.raises(Corrupt, match=r"layer 1 k block 0.*stream header tag"):
        read_everything()


def test_record_of_another_session(store):
    store.items[keys.session_key("s")] = store.items[keys.session_key("other")]
    with pytest.raises(Corrupt, match="session 's': the record of session 'other'"):
        read_everything()
    assert problems()


def test_old_tail_under_a_new_record(store):
    old = store.items[stream(keys.TAIL)]
    with kvstore.open("memory:corruption", "a") as archive:
        session = archive.session("s")
        k, v = tensors(5)
        session.append(k[:, :, :1], v[:, :, :1], token_ids=[1])
        session.commit()
    memory._stores["corruption"].version.items[stream(keys.TAIL)] = old
    with pytest.raises(Corrupt, match="number of tokens 12, expected 13"):
        read_everything()


def test_right_checksum_around_wrong_payloads(store):
    """What no checksum can see: the decoder refuses it or decodes something, and never dies."""
    owner = owner_of("s")
    rng = np.random.default_rng(0)
    tag = int.from_bytes(store.items[frame(1)][40:48], "little")
    outcomes = set()
    for n in (0, 1, 2, 5, 50, 300):
        for _ in range(20):
            store.items[frame(1)] = pack_frame(
                codec=1,
                kind="k",
                owner=owner,
                layer=1,
                first_token=BLOCK,
                n_tokens=BLOCK,
                payload=rng.bytes(n),
                header_tag=tag,
            )
            try:
                read_everything()
                outcomes.add("decoded")
            except DAMAGE as error:
                assert "layer 1 k block 1" in str(error)  # noqa: PT017 - both outcomes are fine
                outcomes.add("refused")
    assert "refused" in outcomes


def test_records_that_contradict_themselves(store):
    import json

    key = keys.session_key("s")
    good = json.loads(store.items[key][20:])
    for change in (
        {"n_tokens": -1},
        {"n_tokens": "5"},
        {"n_tokens": 1 << 60},
        {"block_tokens": 0},
        {"n_head": 100},
        {"n_head": [1, 2]},
        {"header": 0},
        {"header": 7},
        {"codec": {"codec": "kvr1", "surprise": 1}},
        {"codec": 5},
        {"codec": {"codec": "zip"}},
        {"owner": "xyz"},
        {"model": "00"},
        {"model": 5},
        {"start": {"k": 1}},
        {"created": None},
    ):
        data = json.dumps({**good, **change}).encode()
        store.items[key] = seal_record(b"KVS1", data)
        with pytest.raises(DAMAGE, match=r"session 's'|model 00"):
            read_everything()
    for data in (b"", b"[]", b"{", b"\xff"):
        store.items[key] = seal_record(b"KVS1", data)
        with pytest.raises(DAMAGE, match="session 's'"):
            read_everything()


def test_verify_goes_on_after_a_problem(store):
    for key in (frame(0), frame(1), stream(keys.HEAD, layer=0, kind="v")):
        bad = bytearray(store.items[key])
        bad[80] ^= 1
        store.items[key] = bytes(bad)
    store.items[b"junk"] = b"?"
    store._keys = None
    with kvstore.open("memory:corruption") as archive:
        seen = []
        report = archive.verify(progress=lambda done, of: seen.append((done, of)))
    assert not report.ok
    assert [(p.where, p.kind) for p in report.problems] == [
        ("session 's' layer 0 v head", "Corrupt"),
        ("session 's' layer 1 k block 0", "Corrupt"),
        ("session 's' layer 1 k block 1", "Corrupt"),
        ("key b'junk'", "Corrupt"),
    ]
    assert report.n_sessions == 2
    assert report.n_frames == 2 * 4 * 4 - 3
    assert seen[-1] == (len(store.items),) * 2
