"""Sessions coded with ggml's schemes: a value that was committed once never changes."""

import subprocess
import sys

import numpy as np
import pytest
from kvcodecs.frame import ErrorStats, open_frame, pack_frame
from kvcodecs.ggml import dequantise, quantise, scheme_by_name
from kvcodecs.kvr1 import KVR1

import kvstore
from kvstore import GGML, Corrupt, InvalidArgument, Model, Raw, Rope, Truncated, keys
from kvstore.pieces import pieces


def is_coded(scheme):
    try:
        return quantise(np.zeros((1, 256), np.float32), scheme) is not None
    except InvalidArgument:
        return False


#: Coding decoded values again moves those of most of them.
SOME = [name for name in ("q8_0", "q4_0", "q4_k", "iq2_xxs") if is_coded(name)]
some = pytest.mark.parametrize("scheme", SOME)
MODEL = Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=128, rope=Rope.from_theta(1e4, 128)
)


def values(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 2, 2, n, 128), dtype=np.float32) * 3


def add(session, x, lo, hi):
    session.append(x[0][:, :, lo:hi], x[1][:, :, lo:hi])


def held(session, *args):
    return np.stack(session.read_all(*args, dtype="float32"))


def coded(x, scheme):
    """What values decode to that were coded once."""
    rows = np.ascontiguousarray(x.transpose(0, 1, 3, 2, 4)).reshape(*x.shape[:2], x.shape[3], -1)
    y = dequantise(quantise(rows, scheme), scheme)
    return y.reshape(*rows.shape[:3], x.shape[2], x.shape[4]).transpose(0, 1, 3, 2, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.kv"


@some
def test_values_stay_what_they_were_first(path, scheme):
    x = values(150)
    want = coded(x, scheme)
    ends = [1, 6, 16, 33, 34, 60, 97, 150]
    with kvstore.open(path, "a") as archive:
        archive.create_session("s", model=MODEL, codec=GGML(scheme), block_tokens=16).close()
    for n, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)):
        with kvstore.open(path, "a") as archive, archive.session("s") as session:
            add(session, x, lo, hi)
            if n % 2:
                session.commit()
                add(session, x, hi, hi)
            session.commit()
            np.testing.assert_array_equal(held(session), want[:, :, :, :hi])
    with kvstore.open(path, "a") as archive:
        session = archive.session("s")
        assert all(stream.n_head_tokens == 0 for stream in session.info().streams)
        # Forks in the middle of blocks, of the tail too, and forks of them.
        fork = archive.session("s").fork("f", at=41)
        add(fork, x, 41, 90)
        fork.commit()
        np.testing.assert_array_equal(held(fork), want[:, :, :, :90])
        again = fork.fork("g", at=85)
        again.fork("bare")
        again.truncate(45)
        add(again, x, 45, 47)
        again.commit()
        np.testing.assert_array_equal(held(again), want[:, :, :, :47])
        session.truncate(77)
        np.testing.assert_array_equal(held(session), want[:, :, :, :77])
        add(session, x, 77, 80)
        session.truncate(79)
        add(session, x, 79, 149)
        session.commit()
        session.trim_front(20)
        add(session, x, 149, 150)
        session.commit()
        np.testing.assert_array_equal(held(session, 20, 150), want[:, :, :, 20:])
        session.close()
        archive.seal(["s"])
        archive.gc()
        assert archive.verify(decode=True).ok
        np.testing.assert_array_equal(held(archive.session("s"), 20, 150), want[:, :, :, 20:])
        np.testing.assert_array_equal(held(archive.session("bare")), want[:, :, :, :85])


@some
def test_ranges_of_other_sessions(path, scheme):
    x = values(100)
    want = coded(x, scheme)
    with kvstore.open(path, "a") as archive:
        options = {"model": MODEL, "codec": GGML(scheme), "block_tokens": 16}
        source = archive.create_session("source", **options)
        add(source, x, 0, 100)
        source.commit()
        session = archive.create_session("s", **options)
        add(session, x, 0, 32)
        session.commit()
        done = session.append_range(source, 16, 70)
        assert (done.n_tokens, done.n_shared) == (54, 48)
        np.testing.assert_array_equal(held(session, 32, 86), want[:, :, :, 16:70])
        assert done.max_error == 0
        before = held(session)
        add(session, x, 86, 90)
        session.commit()
        np.testing.assert_array_equal(held(session, 0, 86), before)
        assert archive.verify(decode=True).ok


def rows_of(session, layer, kind):
    """The stored rows of a stream, and the error that its frames say."""
    found, errors = [], ErrorStats.none()
    with session._archive._read() as snapshot:
        record = session._record(snapshot)
        for piece in pieces(record, layer, kind, record.first, record.n_tokens):
            _, header, payload = session._reader.open(snapshot, piece, layer, kind)
            rows = np.frombuffer(payload, np.uint8).reshape(header.n_tokens, -1)
            lo = piece.start - piece.first_token
            found.append(rows[lo : lo + piece.stop - piece.start].copy())
            errors = errors.merge(header.error)
    return np.concatenate(found), errors


@some
@pytest.mark.parametrize(("at", "block_tokens"), [(0, 16), (1, 16), (32, 48), (7, 100)])
def test_ranges_are_copied_row_by_row_wherever_they_lie(path, scheme, at, block_tokens):
    x = values(200)
    codec = {"k": GGML(scheme), "v": GGML("q8_0")}
    with kvstore.open(path, "a") as archive:
        source = archive.create_session("source", model=MODEL, codec=codec, block_tokens=16)
        add(source, x, 0, 200)
        source.commit()
        session = archive.create_session("s", model=MODEL, codec=codec, block_tokens=block_tokens)
        add(session, x, 100, 100 + at)
        for start, stop in ((21, 150), (3, 3), (190, 200), (0, 17)):
            n = session.n_tokens
            done = session.append_range(source, start, stop)
            assert (done.n_tokens, done.max_error) == (stop - start, 0)
            for layer in (0, 1):
                for kind in ("k", "v"):
                    mine, theirs = (rows_of(s, layer, kind)[0] for s in (session, source))
                    np.testing.assert_array_equal(mine[n:], theirs[start:stop])
        # Errors go along: they are no larger than before, and there for every value.
        for kind in ("k", "v"):
            error, first = (rows_of(s, 0, kind)[1] for s in (session, source))
            assert error.n_values == session.n_tokens * 256
            assert 0 < error.max_error <= first.max_error
            assert error.rms == pytest.approx(first.rms, rel=0.1)
        before = held(session)
        add(session, x, 0, 20)
        session.commit()
        np.testing.assert_array_equal(held(session, 0, before.shape[3]), before)
        at = session.n_tokens - 20
        np.testing.assert_array_equal(held(session, at)[0], coded(x[:1], scheme)[0][:, :, :20])
        assert archive.verify(decode=True).ok
        # With another scheme the values are coded anew.
        other = archive.create_session("o", model=MODEL, codec=GGML("q4_1"))
        assert other.append_range(source, 21, 150).max_error > 0


@some
def test_migrations_copy_the_rows_of_schemes_that_stay(path, scheme):
    x = values(120)
    with kvstore.open(path, "a") as archive:
        codec = {"k": GGML(scheme), "v": KVR1(step=0.25)}
        options = {"model": MODEL, "block_tokens": 16, "fit_tokens": 20}
        session = archive.create_session("s", codec=codec, **options)
        add(session, x, 0, 120)
        session.commit()
        fork = session.fork("fork", at=75)
        add(fork, x, 75, 100)
        fork.commit()
        session.fork("bare", at=53)
        fork.trim_front(20)
        ranges = archive.create_session("ranges", codec=GGML(scheme), **options)
        ranges.append_range(session, 7, 60)
    there = path.with_name("b.kv")
    done = kvstore.migrate(path, there, codec={"k": GGML(scheme), "v": GGML("q4_1")})
    assert done.recoded == ["bare", "fork", "ranges", "s"]
    with kvstore.open(path) as a, kvstore.open(there) as b:
        for name in b.names():
            for layer in (0, 1):
                (old, error), (new, now) = (rows_of(z.session(name), layer, "k") for z in (a, b))
                np.testing.assert_array_equal(new, old)
                assert now.max_error == error.max_error
            assert b.session(name).info().n_recoded == 1
        assert b.verify(decode=True).ok


DAMAGED_ROWS = {
    "no number": lambda rows: b"\xff\x7f" + rows[2:],
    "bytes": lambda rows: rows + bytes(9),
    "a row": lambda rows: rows + bytes(rows[: len(rows) // 16]),
    "fewer bytes": lambda rows: rows[:-1],
    "a row less": lambda rows: rows[: len(rows) // 16 * 15],
}


@pytest.mark.parametrize("damage", DAMAGED_ROWS)
def test_damaged_rows_are_not_copied(path, run, damage):
    # Their checksums are right: only who decodes them can tell.
    x = values(40)
    options = {"model": MODEL, "block_tokens": 16}
    with kvstore.open(path, "a") as archive:
        with archive.create_session("s", codec=GGML("q8_0"), **options) as session:
            add(session, x, 0, 40)
            session.commit()
        with archive._backend.write(1) as transaction:
            owner = archive._catalog.id(transaction, "s")
            key = keys.frame_key(owner, 1, "v", 1)
            header, payload = open_frame(transaction.get(key))
            fields = header._asdict() | {"payload": DAMAGED_ROWS[damage](bytes(payload))}
            del fields["payload_bytes"]
            transaction.put(key, pack_frame(**fields))
        named = pytest.raises((Corrupt, Truncated), match=r"session 's' layer 1 v block 1: ")
        with named:
            archive.session("s").read(1, "v")
        with named:
            kvstore.migrate(archive, path.with_name("b.kv"), codec={"k": Raw(), "v": GGML("q8_0")})
        assert not path.with_name("b.kv").exists()
        with named:
            archive.create_session("other", codec=GGML("q8_0"), model=MODEL, block_tokens=10)
            archive.session("other").append_range(archive.session("s"), 0, 40)
        # What is not damaged is still to be had.
        with archive.create_session("part", codec=GGML("q8_0"), model=MODEL, block_tokens=10) as a:
            if damage == "no number":
                a.append_range(archive.session("s"), 17, 40)
                np.testing.assert_array_equal(
                    a.read(1, "v"), archive.session("s").read(1, "v", 17, 40)
                )
    code, _, err = run("migrate", path, f"flat:{path.parent / 'flat'}", "--sessions", "s")
    assert code
    assert "session 's' layer 1 v block 1: " in err


@some
def test_migrated_ranges_are_not_coded_anew(path, scheme):
    x = values(100)
    with kvstore.open(path, "a") as archive:
        options = {"model": MODEL, "codec": GGML(scheme), "block_tokens": 16}
        source = archive.create_session("source", **options)
        source.append(x[0], x[1], token_ids=np.arange(100))
        source.commit()
        archive.create_session("s", **options).append_range(source, 32, 83)
    there = path.with_name("b.kv")
    done = kvstore.migrate(path, there, codec=GGML(scheme), with_ranges=True)
    assert done.recoded == ["s"]
    with kvstore.open(path) as a, kvstore.open(there) as b:
        for kind in ("k", "v"):
            old, new = (rows_of(z.session("s"), 1, kind) for z in (a, b))
            np.testing.assert_array_equal(new[0], old[0])
        assert b.session("s").info().n_recoded == 0
        assert b.verify(decode=True).ok


def test_ranges_across_archives_and_kinds_of_codec(path):
    x = values(100)
    with kvstore.open(path, "a") as a, kvstore.open(path.with_name("b.kv"), "a") as b:
        codec = {"k": GGML("q4_0"), "v": KVR1(step=0.25)}
        source = a.create_session("s", model=MODEL, codec=codec, fit_tokens=10)
        add(source, x, 0, 100)
        source.commit()
        session = b.create_session("s", model=MODEL, codec=codec, fit_tokens=10)
        session.append_range(source, 13, 77)
        np.testing.assert_array_equal(
            rows_of(session, 1, "k")[0], rows_of(source, 1, "k")[0][13:77]
        )


def test_frames_do_not_depend_on_commits_or_threads(path):
    x = values(400)
    scheme = SOME[-1]
    with kvstore.open(path, "a") as archive:
        options = {"model": MODEL, "codec": {"k": GGML(scheme), "v": GGML("q8_0")}}
        a = archive.create_session("a", **options)
        a.append(*x, n_threads=4)
        a.commit()
        b = archive.create_session("b", **options)
        for lo in range(0, 400, 37):
            b.append(x[0][:, :, lo : lo + 37], x[1][:, :, lo : lo + 37], n_threads=1)
            b.commit()
        with archive._read() as snapshot:
            for prefix in (keys.FRAME, keys.TAIL):
                mine, theirs = (
                    [bytes(v)[32:68] + bytes(v)[76:] for k, v in snapshot.scan(prefix)
                     if k[1:9] == s._record(snapshot).owner.to_bytes(8, "big")]
                    for s in (a, b)
                )  # fmt: skip
                assert mine
                assert [v[4:] for v in mine] == [v[4:] for v in theirs]


def test_info_tells_schemes_and_errors_but_no_bound(path):
    x = values(300)
    with kvstore.open(path, "a") as archive:
        codec = {"k": GGML("Q8"), "v": KVR1(step=0.25)}
        session = archive.create_session("s", model=MODEL, codec=codec)
        add(session, x, 0, 300)
        session.commit()
        info = session.info()
        assert info.codecs["k"] == {"codec": "ggml.q8_0"}
        want = coded(x[:1], "q8_0")[0]
        for stream in info.streams:
            assert not stream.lossless
            if stream.kind == "v":
                assert (stream.codec, stream.step) == ("kvr1", pytest.approx(0.25, rel=0.01))
                continue
            assert (stream.codec, stream.step) == ("ggml.q8_0", None)
            assert stream.payload_bytes == 300 * 256 // 32 * 34
            errors = np.abs(x[0, stream.layer].astype(np.float64) - want[stream.layer])
            assert stream.error.max_error == errors.max()
            assert stream.error.rms == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-9)
            # Frames of about 32 KB at the scheme's own rate, not at a guess.
            assert stream.block_tokens == 128
        raw = archive.create_session("raw", model=MODEL, codec=kvstore.Raw())
        add(raw, x, 0, 300)
        raw.commit()
        assert all(stream.lossless and stream.step is None for stream in raw.info().streams)


def test_streams_that_are_not_whole_blocks_are_refused_before_any_token(path):
    layers = (kvstore.LayerSpec(2, 128, 128), kvstore.LayerSpec(3, 64, 64))
    model = Model("odd", layers)
    with kvstore.open(path, "a") as archive:
        for codec, where in (
            (GGML("q4_k"), "layer 1 k"),
            ({"k": GGML("q8_0"), "v": GGML("iq4_xs")}, "layer 1 v"),
        ):
            with pytest.raises(InvalidArgument, match=f"'s' {where}.*these fit: f16, q8_0") as e:
                archive.create_session("s", model=model, codec=codec)
            assert "q4_k" not in str(e.value).split("these fit")[1]
        assert archive.names() == []
        archive.create_session("s", model=model).close()
    with pytest.raises(InvalidArgument, match=r"'s' layer 1 k: ggml.q6_k: rows of 192"):
        kvstore.migrate(path, path.with_name("b.kv"), codec=GGML("q6_k"))
    assert [found.name for found in path.parent.iterdir()] == ["a.kv"]


def test_values_that_cannot_be_coded_change_nothing(path):
    x = values(40)
    with kvstore.open(path, "a") as archive:
        session = archive.create_session("s", model=MODEL, codec=GGML("q8_0"))
        add(session, x, 0, 20)
        for bad, what in ((1e12, "too large for ggml.q8_0"), (np.nan, "not finite")):
            broken = x.copy()
            broken[1, 1, 0, 33, 5] = bad
            with pytest.raises(InvalidArgument, match=f"layer 1 v: .*token 33, .*{what}"):
                add(session, broken, 20, 40)
        add(session, x, 20, 40)
        session.commit()
        np.testing.assert_array_equal(held(session), coded(x, "q8_0"))
        # What decodes beyond float16 is told where it is read.
        x[1, 0, 0, 3] = 65504
        wide = archive.create_session("wide", model=MODEL, codec=GGML("q8_0"))
        add(wide, x, 0, 40)
        wide.commit()
        with pytest.raises(InvalidArgument, match=r"layer 0 v.*overflows float16"):
            wide.read(0, "v", dtype="float16")


READ = """
import sys, zarr, numpy as np
group = zarr.open_group(sys.argv[1], mode="r")[sys.argv[2]]
for name in ("k_000", "v_001"):
    np.save(f"{sys.argv[3]}/{name}.npy", group[name][:])
"""


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def test_zarr_sees_sessions_and_archives_move_byte_for_byte(path, tmp_path):
    x = values(100)
    with kvstore.open(path, "a") as archive:
        for scheme in SOME:
            codec = {"k": GGML(scheme), "v": GGML("q8_0")}
            session = archive.create_session(scheme, model=MODEL, codec=codec, block_tokens=32)
            add(session, x, 0, 77)
            session.commit()
            fork = session.fork(f"fork of {scheme}", at=50)
            add(fork, x, 50, 99)
            fork.commit()
    folder = tmp_path / "zarr"
    kvstore.migrate(path, f"zarr:{folder}")
    kvstore.migrate(f"zarr:{folder}", tmp_path / "back.kv")
    assert stored(tmp_path / "back.kv") == stored(path)
    with kvstore.open(f"zarr:{folder}") as archive:
        group = archive.session(SOME[-1]).info().zarr_group
    subprocess.run([sys.executable, "-c", READ, folder, group, tmp_path], check=True)
    for kind, layer, scheme in ((0, 0, SOME[-1]), (1, 1, "q8_0")):
        found = np.load(tmp_path / f"{'kv'[kind]}_{layer:03d}.npy")
        assert found.shape == (2, 64, 128)
        want = coded(x[kind : kind + 1], scheme)[0, layer, :, :64]
        np.testing.assert_array_equal(found.astype(np.float32), want.astype(found.dtype))


def test_command_line(path, tmp_path, run):
    x = values(150)
    with kvstore.open(path, "a") as archive:
        for scheme in SOME:
            session = archive.create_session(scheme, model=MODEL, codec=GGML(scheme))
            add(session, x, 0, 150)
            session.commit()
            session.fork(f"{scheme} fork", at=50).close()

    def ok(*argv):
        code, out, err = run(*argv)
        assert code == 0, err
        return out

    # zarr format 2 pads the last block and cuts a fork's, and brings both back.
    ok("migrate", path, f"zarr2:{tmp_path}/z2")
    ok("migrate", f"zarr2:{tmp_path}/z2", tmp_path / "b.kv")
    with kvstore.open(path) as a, kvstore.open(tmp_path / "b.kv") as b:
        assert b.verify(decode=True).ok
        for name in a.names():
            np.testing.assert_array_equal(held(a.session(name)), held(b.session(name)))
    code, _, err = run("migrate", path, tmp_path / "t.tkvdir")
    assert code == 1
    assert "coded anew it fits: --codec tkv1" in err
    # To a file and back, and coded anew from and to ggml.
    ok("unpack", path, tmp_path / "o.safetensors", "--session", SOME[0], "--dtype", "float32")
    mixed = ("--k-codec", "GGML.Q8", "--v-codec", "kvr1", "--step", 0.25, "--session", "s")
    ok("pack", tmp_path / "o.safetensors", tmp_path / "c.kv", *mixed)
    text = ok("info", tmp_path / "c.kv", "--session", "s")
    assert "k: ggml.q8_0; v: kvr1" in text
    assert "where the codec states one" in text
    assert "measured; the codec states no bound" in ok("info", path, "--session", "q8_0")
    ok("migrate", tmp_path / "c.kv", tmp_path / "d.kv", "--codec", "ggml.q8_0")
    ok("migrate", tmp_path / "d.kv", tmp_path / "e.kv", "--k-codec", "raw", "--v-codec", "tkv1")
    with kvstore.open(tmp_path / "d.kv") as d, kvstore.open(tmp_path / "e.kv") as e:
        assert {s.codec for s in d.session("s").info().streams} == {"ggml.q8_0"}
        assert {s.codec for s in e.session("s").info().streams} == {"raw", "tkv1"}
        np.testing.assert_array_equal(held(d.session("s"))[0], held(e.session("s"))[0])
    for wrong, words in (
        (("--codec", "ggml.q8_0", "--rel-step", 0.5), "--rel-step does not go with --codec ggml"),
        (("--codec", "ggml.q9"), "scheme 'ggml.q9' is unknown"),
        (("--codec", "q8_0"), "such as ggml.q8_0"),
    ):
        code, _, err = run("pack", tmp_path / "o.safetensors", tmp_path / "x.kv", *wrong)
        assert code == 2
        assert words in err
    code, _, err = run("migrate", path, tmp_path / "x.kv", "--v-codec", "ggml.q8_0")
    assert code == 2
    assert "--v-codec goes with --codec" in err


def test_a_header_may_come_from_another_session(path):
    x = values(20)
    with kvstore.open(path, "a") as archive:
        first = archive.create_session("a", model=MODEL, codec=GGML("q8_0"))
        add(first, x, 0, 1)
        first.commit()
        second = archive.create_session("b", model=MODEL, stats_from="a")
        add(second, x, 0, 20)
        second.commit()
        np.testing.assert_array_equal(held(second), coded(x, "q8_0"))
        assert scheme_by_name("q8_0").name == second.info().streams[0].codec.removeprefix("ggml.")


def test_codecs_by_name(path, tmp_path):
    x = values(40)
    with kvstore.open(path, "a") as archive:
        for name, codec in (("s", "ggml.q8_0"), ("t", {"k": "ggml.q8_0", "v": GGML("q8_0")})):
            session = archive.create_session(name, model=MODEL, codec=codec)
            add(session, x, 0, 40)
            session.commit()
            np.testing.assert_array_equal(held(session), coded(x, "q8_0"))
        with pytest.raises(kvstore.InvalidArgument, match=r"did you mean ggml\.q8_0"):
            archive.create_session("u", model=MODEL, codec="q8_0")
        with pytest.raises(kvstore.InvalidArgument, match=r'such as .*GGML\("q8_0"\)'):
            archive.create_session("u", model=MODEL, codec={"k": GGML("q8_0"), "v": 8})
    kvstore.migrate(path, tmp_path / "other.kv", codec="ggml.q4_0")
    with kvstore.open(tmp_path / "other.kv") as archive:
        assert archive.session("s").info().streams[0].codec == "ggml.q4_0"
