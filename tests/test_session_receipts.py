"""Each commit of a session leaves a receipt, and what a receipt says is what is stored."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from kvcodecs.digests import bytes_digest
from kvcodecs.fibquant.book import book_for
from kvcodecs.frame import RECORD_HEAD_BYTES, seal_record
from kvcodecs.receipts import frame_digest

import kvstore
from kvstore import (
    KVR1,
    Corrupt,
    FibQuant,
    InvalidArgument,
    LayerSpec,
    Model,
    Raw,
    Rope,
    keys,
    source_digest,
)
from kvstore.backends import memory
from kvstore.receipts import RECEIPT_MAGIC, SessionReceipt, pack_receipt, unpack_receipt

MODEL = Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=32, rope=Rope.from_theta(1e4, 32)
)
CODECS = ["raw", "kvr1", "tkv1", "ggml.q8_0", "fibquant.4x16"]


def values(n, seed=0, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal((2, 2, 2, n, 32)).astype(dtype)


def append(session, n, seed=0, **options):
    k, v = x = values(n, seed)
    session.append(k, v, **options)
    session.commit()
    return x


def create(archive, name="s", codec="kvr1", **options):
    options = {"model": MODEL, "block_tokens": 16, "fit_tokens": 8, "receipts": True} | options
    return archive.create_session(name, codec=codec, **options)


@pytest.fixture
def archive():
    with kvstore.open("memory:receipts", "a") as archive:
        yield archive
    memory.discard("receipts")


def items():
    return memory._stores["receipts"].version.items


def problems(archive):
    return [problem.message for problem in archive.verify(receipts=True).problems]


def assert_sound(archive):
    report = archive.verify(receipts=True)
    assert report.ok, report.problems
    assert report.n_leftover == 0


def chain(session):
    return [(receipt.first_token, receipt.kept) for receipt in session.receipts()]


# -- digests of values


def test_the_digest_of_values_is_as_documented():
    x = values(5)[0, 0]
    heads = [
        blake3(b"kvstore_values_of_head_v1\0" + head.astype("<f4").tobytes()).digest() for head in x
    ]
    numbers = b"".join(n.to_bytes(8, "little") for n in (2, 5, 32))
    assert source_digest(x) == bytes_digest("kvstore_values_v1", numbers, *heads)
    assert source_digest(x) == source_digest(x.astype(np.float64))
    assert source_digest(x) != source_digest(x[:, :4])
    for wrong in (x[0], "text", np.zeros((2, 3, 4), int)):
        with pytest.raises(InvalidArgument):
            source_digest(wrong)


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 40], range(1, 60)])
def test_how_tokens_are_cut_into_appends_makes_no_difference(archive, cuts):
    k, v = values(60)
    with create(archive) as session:
        for lo, hi in zip([0, *cuts], [*cuts, 60], strict=True):
            session.append(k[:, :, lo:hi], v[:, :, lo:hi], k_state="post")
        session.commit()
    (receipt,) = session.receipts()
    for part in receipt.streams:
        given = {"k": k, "v": v}[part.kind][part.layer]
        assert part.receipt.source_digest == source_digest(given)


# -- commits


@pytest.mark.parametrize(
    ("codec", "backend"),
    [*((codec, "memory") for codec in CODECS), ("kvr1", "lmdb"), ("fibquant.4x16", "zarr")],
)
def test_receipts_of_commits(tmp_path, codec, backend):
    place = {"lmdb": f"{tmp_path}/a.kv", "zarr": f"zarr:{tmp_path}/a.zarr"}.get(backend, "memory:x")
    counts = (5, 30, 1, 60, 16)
    with kvstore.open(place, "a") as archive:
        with create(archive, codec=codec) as session:
            given = [append(session, n, seed) for seed, n in enumerate(counts)]
        assert_sound(archive)
        receipts, at, latest = archive.session("s").receipts(), 0, {}
        assert len(receipts) == len(counts)
        for receipt, (k, v), n in zip(receipts, given, counts, strict=True):
            assert (receipt.first_token, receipt.stop_token, receipt.kept) == (at, at + n, at + n)
            assert (receipt.session, receipt.model) == ("s", MODEL.digest.hex())
            at += n
            for part in receipt.streams:
                source = {"k": k, "v": v}[part.kind][part.layer]
                assert part.receipt.source_digest == source_digest(source)
                assert codec.startswith(part.receipt.codec["codec"])
                latest |= {
                    (part.layer, part.kind, page): digest
                    for page, digest in zip(part.pages, part.receipt.page_digests, strict=True)
                }
        with archive._read() as snapshot:
            owner = session._record(snapshot).owner
            for (layer, kind, page), digest in latest.items():
                if page is not None:
                    frame = snapshot.get(keys.frame_key(owner, layer, kind, page))
                    assert frame_digest(frame) == digest
        first = receipts[0].streams[0].receipt
        raw_head = codec != "ggml.q8_0"
        assert first.fallback_reasons == (("no_stream_header",) if raw_head else ())
        # A tail is part of what the next commit makes.
        assert receipts[2].streams[0].pages == (2,)
        assert receipts[3].streams[0].pages == (2, 3, 4, 5)
        if codec == "raw":
            assert all(p.receipt.max_error == 0 for r in receipts for p in r.streams)
        else:
            assert all(p.receipt.rms > 0 for r in receipts[1:] for p in r.streams)
    memory.discard("x")


FIB = FibQuant(4, 16, axis="role_aware", first_tokens=20, last_tokens=3, raw_layers=(1,))


def test_what_fibquant_keeps_raw_is_told(archive):
    with create(archive, codec=FIB) as session:
        k, v = values(50, dtype=np.float32)
        v[0, 1, 40] = 0
        session.append(k, v)
        session.commit()
        append(session, 30)
    coded, raw = (session.receipts()[0].streams[at].receipt for at in (1, 3))
    assert coded.n_pages == raw.n_pages == 4
    assert (coded.compressed_blocks, coded.raw_fallback_blocks) == (2, 4)
    assert coded.fallback_reasons == ("protected_region", "encode_fallback:zero norm")
    assert (raw.compressed_blocks, raw.raw_fallback_blocks) == (0, 4)
    assert raw.fallback_reasons == ("protected_region",)
    assert (raw.codebook_digest, raw.max_error) == (None, 0)
    book = book_for(FIB.profile(32))
    assert (coded.codebook_digest, coded.rotation_digest) == (
        book.codebook_digest, book.rotation_digest,
    )  # fmt: skip
    assert coded.rms > 0
    assert_sound(archive)
    change(0, receipt={"codebook_digest": DIGEST})
    change(1, receipt={"rotation_digest": DIGEST})
    assert any("rotation_digest" in text for text in problems(archive))


def test_receipts_go_on_where_a_session_is_opened_again(archive):
    create(archive).close()
    for n in (10, 20):
        with archive.session("s") as session:
            append(session, n)
    assert chain(archive.session("s")) == [(0, 10), (10, 30)]
    assert_sound(archive)


def test_no_receipts_unless_they_are_asked_for(archive):
    with create(archive, receipts=False) as session:
        append(session, 20)
    assert session.receipts() == []
    report = archive.verify(receipts=True)
    assert (report.ok, report.n_receipts, report.n_without) == (True, 0, 1)
    with pytest.raises(InvalidArgument, match="receipts"):
        create(archive, "t", receipts=1)


def test_spilled_frames_are_in_the_receipt(archive, monkeypatch):
    monkeypatch.setattr("kvstore.writer.SPILL_BYTES", 1000)
    with create(archive) as session:
        for seed in range(4):
            session.append(*values(40, seed))
        session.commit()
    (receipt,) = session.receipts()
    assert receipt.streams[0].pages == tuple(range(10))
    assert_sound(archive)


def test_a_window_that_begins_later(archive):
    model = Model("w", (LayerSpec(1, 32, 32), LayerSpec(1, 32, None, window=20)))
    x = np.random.default_rng(0).standard_normal((1, 100, 32), dtype=np.float32)
    with create(archive, model=model) as session:
        session.append([x, x[:, 80:]], [x, None])
        session.commit()
        session.append([x, x], [x, None])
        session.commit()
    first = session.receipts()[0].streams[-1]
    assert first.receipt.source_digest == source_digest(x[:, 80:])
    assert_sound(archive)


class FromArrays:
    def __init__(self, k, v):
        self.tensors = {"k": k, "v": v}

    def n_tokens(self, layer, kind):
        return self.tensors[kind].shape[2]

    def chunks(self, layer, kind):
        x = self.tensors[kind][layer]
        for at in range(0, x.shape[1], 7):
            yield x[:, at : at + 7]


@pytest.mark.parametrize(
    ("codec", "n"), [*((codec, 100) for codec in CODECS), ("kvr1", 0), ("raw", 5)]
)
def test_ingest_leaves_the_receipt_of_one_append(archive, n, codec):
    k, v = values(n, 1)
    options = {"model": MODEL, "codec": codec, "block_tokens": 16, "fit_tokens": 8}
    ingested = archive.ingest("i", FromArrays(k, v), receipts=True, **options)
    with create(archive, codec=codec) as session:
        append(session, n, 1)

    def said(receipt):
        return [(p.layer, p.kind, p.pages, p.receipt.values_digest) for p in receipt.streams]

    assert list(map(said, ingested.receipts())) == list(map(said, session.receipts()))
    assert_sound(archive)
    with archive.session("i") as session:
        append(session, 30)
    assert_sound(archive)


# -- what becomes of them


def test_a_rollback_marks_what_it_takes_back(archive):
    with create(archive) as session:
        for n in (20, 30, 40):
            append(session, n)
        session.truncate(47)
        # The frame of block 2 is that of the second commit.
        assert chain(session) == [(0, 20), (20, 47)]
        assert_sound(archive)
        session.truncate(20)
        # Of the second commit nothing is left but the frame that has tokens 16 to 20 now.
        assert chain(session) == [(0, 20), (20, 20)]
        assert_sound(archive)
        append(session, 5)
        assert chain(session)[2:] == [(20, 25)]
        assert_sound(archive)
        session.truncate(0)
        assert session.receipts() == []
        append(session, 9)
        assert chain(session) == [(0, 9)]
    assert_sound(archive)


def test_a_fork_begins_with_none_and_goes_on(archive):
    with create(archive) as session:
        append(session, 50)
    with session.fork("fork", at=37) as fork:
        assert fork.receipts() == []
        assert_sound(archive)
        append(fork, 20)
        assert chain(fork) == [(37, 57)]
        assert fork.receipts()[0].streams[0].pages == (2, 3)
        assert_sound(archive)
        fork.truncate(30)
        assert chain(fork) == []
        append(fork, 3)
    archive.delete_session("s")
    assert_sound(archive)


def test_a_trim_drops_what_is_of_trimmed_tokens_alone(archive):
    with create(archive) as session:
        for n in (40, 40, 40):
            append(session, n)
        session.trim_front(50)
        assert chain(session) == [(40, 80), (80, 120)]
        assert_sound(archive)
        session.trim_front(120)
        assert_sound(archive)
        append(session, 10)
    assert_sound(archive)


def test_a_trim_after_a_rollback_leaves_a_chain(archive):
    with create(archive) as session:
        append(session, 33)
        session.truncate(7)
        for n in (1, 60):
            append(session, n)
        session.trim_front(22)
        # Frames of the first commit may have had tokens up to 48.
        assert chain(session) == [(0, 7), (7, 8), (8, 68)]
        assert_sound(archive)
        session.trim_front(50)
        assert chain(session) == [(8, 68)]
    assert_sound(archive)


def test_a_range_of_another_session_is_said(archive):
    with create(archive, "source") as source:
        append(source, 70)
    with create(archive) as session:
        append(session, 32)
        session.append_range(source, 16, 60)
        origins = [receipt.origin for receipt in session.receipts()]
        assert origins == ["append", "range", "append"]
        assert chain(session) == [(0, 32), (32, 64), (64, 76)]
        assert_sound(archive)
        session.truncate(50)
        append(session, 3)
    assert chain(session) == [(0, 32), (32, 50), (50, 53)]
    assert_sound(archive)


def test_a_range_in_the_place_of_what_was_taken_back(archive):
    with create(archive, "source") as source:
        append(source, 70)
    with create(archive) as session:
        append(session, 100)
        session.truncate(32)
        session.append_range(source, 16, 64)
        assert [receipt.origin for receipt in session.receipts()] == ["append", "range"]
        assert_sound(archive)
        append(session, 20)
    assert_sound(archive)


def test_deletion_replacement_and_garbage(archive):
    for _ in range(2):
        with create(archive, replace=True) as session:
            append(session, 20)
    assert sum(key[:1] == keys.RECEIPT for key in items()) == 1
    items()[keys.receipt_key(7, 0)] = b"of nobody"
    assert archive.verify().n_leftover == 1
    assert archive.gc() > 0
    session.rename("other")
    assert len(archive.session("other").receipts()) == 1
    archive.delete_session("other")
    assert not any(key[:1] == keys.RECEIPT for key in items())


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_any_sequence_of_changes(archive, seed):
    rng = random.Random(seed)
    names = ["s0"]
    create(archive, "s0", codec=rng.choice(CODECS)).close()
    for step in range(20):
        name = rng.choice(names)
        with archive.session(name) as session:
            n, what = session.n_committed, rng.random()
            first = session.first_token
            if what < 0.5:
                append(session, rng.choice([1, 5, 16, 33]), step)
            elif what < 0.65:
                at = rng.choice([0, n, rng.randint(first, n)])
                session.truncate(at)
            elif what < 0.8:
                names.append(f"s{len(names)}")
                session.fork(names[-1], at=rng.randint(first, n)).close()
            elif what < 0.9:
                session.trim_front(rng.randint(first, n))
            else:
                source = archive.session(rng.choice(names))
                if source.name != name and source.n_committed > source.first_token:
                    session.append_range(source, source.first_token, source.n_committed)
        assert_sound(archive)


KILLED = """
import sys
import numpy as np
import kvstore
path = sys.argv[1]
model = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=32)
with kvstore.open(path, "a") as archive:
    session = archive.create_session(
        "s", model=model, block_tokens=16, fit_tokens=8, receipts=True
    )
    for n in (1, 20, 7, 60) * 50:
        x = np.random.default_rng(n).standard_normal((2, 2, n, 32))
        session.append(x, x)
        session.commit()
        print(session.n_tokens, flush=True)
"""


def test_a_killed_writer_leaves_whole_receipts(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a.kv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        for _ in range(5):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        assert_sound(archive)
        session = archive.session("s")
        assert session.receipts()[-1].stop_token == session.n_committed >= 88
        append(session, 5)
        assert_sound(archive)


# -- decode receipts


@pytest.mark.parametrize("codec", CODECS)
def test_decode_receipts(archive, codec):
    with create(archive, codec=codec) as session:
        append(session, 6)
        append(session, 60)
    k, v = session.read_all(3, 40, k_state="post", dtype="float16")
    receipt = session.decode_receipt(k, v, start=3)
    assert (receipt.origin, receipt.operation) == ("read", "decode")
    assert (receipt.first_token, receipt.stop_token) == (3, 40)
    for part in receipt.streams:
        assert part.receipt.decoded_digest == source_digest({"k": k, "v": v}[part.kind][part.layer])
        assert part.receipt.source_digest is None
    raw_head = codec != "ggml.q8_0"
    assert receipt.streams[0].pages == ((None, 0, 1, 2) if raw_head else (0, 1, 2))
    stored = dict(zip(*_pages(session.receipts()[-1]), strict=True))
    pages, digests = _pages(receipt)
    assert [stored[page] for page in pages if page is not None] == [
        digest for page, digest in zip(pages, digests, strict=True) if page is not None
    ]
    again = SessionReceipt.from_json(json.loads(json.dumps(receipt.to_json())))
    assert again == receipt
    assert again.digest() == receipt.digest()
    one = session.decode_receipt([k[0], None], start=3)
    assert [(part.layer, part.kind) for part in one.streams] == [(0, "k")]
    for wrong in ([None, None], k[:1], np.zeros((2, 2, 70, 32)), np.zeros((2, 3, 4, 32))):
        with pytest.raises(InvalidArgument):
            session.decode_receipt(wrong)


def _pages(receipt):
    return receipt.streams[0].pages, receipt.streams[0].receipt.page_digests


# -- damage


@pytest.fixture
def receipted(archive):
    with create(archive) as session:
        append(session, 6)
        append(session, 50)
        append(session, 30)
    return archive


def receipt_keys():
    return sorted(key for key in items() if key[:1] == keys.RECEIPT)


def change(number, **changes):
    """Store a receipt with other fields; those of its first stream in `part` and `receipt`."""
    key = receipt_keys()[number]
    receipt = unpack_receipt(items()[key], "")
    part, *others = receipt.streams
    part = replace(part, receipt=replace(part.receipt, **changes.get("receipt", {})))
    part = replace(part, **changes.get("part", {}))
    fields = {k: v for k, v in changes.items() if k not in ("part", "receipt")}
    items()[key] = pack_receipt(replace(receipt, **{"streams": (part, *others)} | fields))


DIGEST = bytes_digest("another", b"")
WRONG = {
    "profile": {"receipt": {"profile_digest": DIGEST}},
    "shape": {"receipt": {"shape_digest": DIGEST}},
    "codebook": {"receipt": {"codebook_digest": DIGEST}},
    "rotation": {"receipt": {"rotation_digest": DIGEST}},
    "max_error": {"receipt": {"max_error": 0.5}},
    "rms": {"receipt": {"rms": 1e-9}},
    "unknown error": {"receipt": {"max_error": None, "rms": None}},
    "codec": {"receipt": {"codec": {"codec": "raw"}}},
    "counts": {"receipt": {"compressed_blocks": 9}},
    "raw blocks": {"receipt": {"raw_fallback_blocks": 1, "fallback_reasons": ("x",)}},
    "pages": {"part": {"pages": (4, 3, 5)}},
    "model": {"model": "00"},
    "tokens": {"first_token": 55},
    "end": {"stop_token": 80, "kept": 80},
    "taken back": {"kept": 70},
    "origin": {"origin": "range", "streams": ()},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_receipt_that_says_another_thing_is_found(receipted, what):
    change(2, **WRONG[what])
    assert receipted.verify().ok
    found = problems(receipted)
    assert found
    assert all("session 's' receipt" in text for text in found)


def test_a_digest_of_a_frame_that_is_wrong_is_found(receipted):
    part = unpack_receipt(items()[receipt_keys()[2]], "").streams[0]
    for at in range(len(part.pages)):
        digests = list(part.receipt.page_digests)
        digests[at] = DIGEST
        change(2, receipt={"page_digests": tuple(digests)})
        assert any("block" in text and DIGEST in text for text in problems(receipted))


def test_a_missing_receipt_is_found(receipted):
    for key in receipt_keys():
        with receipted._backend.write(1) as transaction:
            value = bytes(transaction.get(key))
            transaction.delete(key)
        assert problems(receipted)
        with receipted._backend.write(1) as transaction:
            transaction.put(key, value)
    assert problems(receipted) == []


@pytest.mark.slow
def test_every_flipped_byte_of_a_receipt_is_found(receipted):
    key = receipt_keys()[1]
    value = items()[key]
    for at in range(len(value)):
        items()[key] = value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]
        with pytest.raises(kvstore.KvError):
            unpack_receipt(items()[key], "receipt")
    for n in range(0, len(value), 7):
        with pytest.raises(kvstore.KvError):
            unpack_receipt(value[:n], "receipt")
    items()[key] = value[:-1] + bytes([value[-1] ^ 1])
    assert not receipted.verify().ok
    with pytest.raises(Corrupt, match="receipt 1"):
        receipted.session("s").receipts()


def test_a_flipped_frame_is_told_once_as_such(receipted):
    key = next(key for key in items() if key[:1] == keys.FRAME)
    value = items()[key]
    items()[key] = value[:-1] + bytes([value[-1] ^ 1])
    report = receipted.verify(receipts=True)
    assert len(report.problems) == 1
    assert "block" in report.problems[0].message


def test_a_frame_that_was_exchanged_with_its_checksum_is_found(receipted):
    # Sound by itself, and not what the receipt was made of.
    with create(receipted, "other") as session:
        append(session, 6)
        append(session, 50, seed=1)
    from kvcodecs.frame import open_frame, pack_frame

    owners = {}
    for key in items():
        if key[:1] == keys.FRAME:
            owners.setdefault(key[1:9], []).append(key)
    first, second = (sorted(found)[0] for found in owners.values())
    head, payload = open_frame(items()[first], "")
    items()[first] = pack_frame(
        codec=head.codec, kind=head.kind, owner=head.owner, layer=head.layer,
        first_token=head.first_token, n_tokens=head.n_tokens, payload=payload,
        header_tag=head.header_tag, error=head.error._replace(max_error=0.0, sum_squares=0.0),
    )  # fmt: skip
    assert receipted.verify().ok
    assert any("the receipt has" in text for text in problems(receipted))
    assert second


@pytest.mark.parametrize(
    "change",
    [
        {"origin": "hearsay"}, {"first_token": -1}, {"first_token": 60}, {"stop_token": "7"},
        {"session": None}, {"model": 3}, {"streams": {}}, {"streams": [{}]}, {"software": None},
        {"operation_kind": "decode"}, {"recorded_unix_seconds": True}, {"more": 1},
        {"schema_version": "x"}, {"origin": "range"}, {"origin": "read"},
    ],
)  # fmt: skip
def test_fields_of_a_document_are_checked(receipted, change):
    data = receipted.session("s").receipts()[1].to_json()
    with pytest.raises(Corrupt, match="receipt"):
        SessionReceipt.from_json({**data, **change})
    for name in data:
        with pytest.raises(Corrupt):
            SessionReceipt.from_json({k: v for k, v in data.items() if k != name})


def test_a_newer_document_is_unsupported(receipted):
    data = receipted.session("s").receipts()[1].to_json()
    with pytest.raises(kvstore.Unsupported, match="v9"):
        SessionReceipt.from_json({**data, "schema_version": "kvstore_session_receipt_v9"})


# -- migration


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.kv"
    with kvstore.open(path, "a") as archive:
        with create(archive) as session:
            append(session, 6)
            append(session, 50)
            append(session, 30)
        with create(archive, "rows", codec="ggml.q8_0") as session:
            append(session, 50)
            session.trim_front(20)
        with archive.session("s").fork("fork", at=40) as fork:
            append(fork, 9)
            fork.truncate(44)
        create(archive, "empty").close()
    return path


@pytest.mark.parametrize("into", ["new", "there", "zarr"])
def test_migration_byte_for_byte_carries_receipts(source, tmp_path, into):
    target = f"zarr:{tmp_path}/b.zarr" if into == "zarr" else str(tmp_path / "b.kv")
    if into == "there":
        kvstore.open(target, "a").close()
    kvstore.migrate(source, target)
    with kvstore.open(source) as a, kvstore.open(target, "a") as b:
        assert_sound(b)
        for name in a.names():
            assert b.session(name).receipts() == a.session(name).receipts()
        append(b.session("fork"), 5)
        assert_sound(b)


@pytest.mark.parametrize("into", ["new", "there"])
def test_migration_to_another_codec_says_so(source, tmp_path, into):
    target = str(tmp_path / "b.kv")
    if into == "there":
        kvstore.open(target, "a").close()
    kvstore.migrate(source, target, codec=Raw())
    with kvstore.open(source) as a, kvstore.open(target, "a") as b:
        assert_sound(b)
        assert b.session("empty").receipts() == []
        for name in ("s", "rows", "fork"):
            old, session = a.session(name), b.session(name)
            (receipt,) = session.receipts()
            assert receipt.origin == "recode"
            assert (receipt.first_token, receipt.stop_token) == (
                old.first_token, old.n_committed,
            )  # fmt: skip
            for part in receipt.streams:
                was = old.read(part.layer, part.kind, dtype="float32")
                assert part.receipt.source_digest == source_digest(was)
                assert part.receipt.codec == Raw().to_json()
            append(session, 20)
        assert_sound(b)


def test_compaction_carries_receipts(source):
    kvstore.compact(source)
    with kvstore.open(source, "a") as archive:
        assert_sound(archive)
        assert len(archive.session("s").receipts()) == 3
        archive.reindex()
        assert_sound(archive)


def test_headers_of_another_session(archive):
    with create(archive) as session:
        append(session, 50)
    with create(archive, "t", codec=None, stats_from="s") as other:
        append(other, 3)
        append(other, 20)
    assert other.receipts()[0].streams[0].pages == (0,)
    assert KVR1().codec == other.receipts()[0].streams[0].receipt.codec["codec"]
    assert_sound(archive)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"session":"', b'"session":"\\ud800'), (b'{"kept":', b'{"kept":9,"kept":'), (b":", b": ")],
)
def test_only_canonical_json_is_a_receipt(receipted, old, new):
    value = items()[receipt_keys()[0]]
    data = zlib.decompress(value[RECORD_HEAD_BYTES:])
    changed = seal_record(RECEIPT_MAGIC, zlib.compress(data.replace(old, new, 1)))
    with pytest.raises(Corrupt, match=r"session receipt: .*anonical JSON"):
        unpack_receipt(changed, "")
