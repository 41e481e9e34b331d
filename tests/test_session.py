"""Sessions from the outside: append, commit, read, reopen, what is refused and what it says."""

from itertools import pairwise

import numpy as np
import pytest
from kvcodecs.rope import from_coded, to_coded
from ml_dtypes import bfloat16

import kvstore
from kvstore import KVR1, TKV1, InvalidArgument, Locked, NotFound, Raw, Rope

ROPE = Rope.from_theta(1e4, 16)
MODEL = kvstore.Model.uniform(name="m", n_layers=3, n_kv_heads=2, head_dim=16, rope=ROPE)
STEP = 0.25


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def place(request, tmp_path):
    if request.param == "lmdb":
        yield str(tmp_path / "a.kv")
    elif request.param == "zarr":
        yield f"zarr:{tmp_path / 'a.kv'}"
    else:
        yield f"memory:{tmp_path}"
        from kvstore.backends import memory

        memory.discard(str(tmp_path))


@pytest.fixture
def archive(place):
    with kvstore.open(place, "a") as archive:
        yield archive


def tensors(n, seed=0, dtype=np.float32, model=MODEL):
    rng = np.random.default_rng(seed)
    shape = (model.n_layers, 2, n, 16)
    return tuple(rng.standard_normal(shape).astype(dtype) for _ in range(2))


def fill(session, k, v, *cuts, commit=True, **kwargs):
    edges = [0, *cuts, k.shape[2]]
    for lo, hi in pairwise(edges):
        session.append(k[:, :, lo:hi], v[:, :, lo:hi], **kwargs)
        if commit:
            session.commit()


def bits(x):
    return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])


def assert_same(x, y):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_raw_is_bit_exact(archive, dtype):
    k, v = tensors(300, dtype=dtype)
    k[0, 0, 0, :4] = [0.0, -0.0, 1e-8, -1e-8]
    session = archive.create_session("s", model=MODEL, codec=Raw(np.dtype(dtype).name))
    fill(session, k, v, 10, 150)
    got_k, got_v = session.read_all(dtype=dtype)
    assert_same(got_k, k)
    assert_same(got_v, v)


def test_the_contract(place):
    k, v = tensors(1300, dtype=np.float16)
    ids = np.arange(1300) * 3
    with kvstore.open(place, mode="a") as archive:
        session = archive.create_session("alice/42", model=MODEL, codec=KVR1(rel_step=0.25))
        session.append(k, v, k_state="pre", token_ids=ids)
        assert (session.n_tokens, session.n_committed) == (1300, 0)
        session.commit()
        assert (session.n_tokens, session.n_committed) == (1300, 1300)
    with kvstore.open(place) as archive:
        session = archive.session("alice/42", expect=MODEL)
        x = session.read(layer=1, kind="k", start=1000, stop=1200, k_state="post", dtype="float16")
        assert x.shape == (2, 200, 16)
        assert x.dtype == np.float16
        k2, _ = session.read_all(start=0, stop=512)
        assert k2.shape == (3, 2, 512, 16)
        assert k2.dtype == np.float32
        np.testing.assert_array_equal(session.token_ids(), ids)
        np.testing.assert_array_equal(session.token_ids(7, 9), ids[7:9])


def test_error_stays_within_the_bound_and_is_recorded(archive):
    k, v = tensors(700)
    session = archive.create_session("s", model=MODEL, codec=KVR1(step=STEP), block_tokens=128)
    fill(session, k, v, 200, 333)
    got_k, got_v = session.read_all()
    worst = max(np.abs(got_k - k).max(), np.abs(got_v - v).max())
    info = session.info()
    assert worst <= STEP / 2
    assert info.error.max_error == pytest.approx(worst, abs=1e-7)
    assert info.error.n_values == info.n_values == k.size + v.size
    both = np.concatenate([(got_k - k).ravel(), (got_v - v).ravel()]).astype(np.float64)
    assert info.error.rms == pytest.approx(np.sqrt(np.mean(both**2)), rel=1e-6)


@pytest.mark.parametrize("codec", [Raw(), KVR1(step=STEP), TKV1(step=STEP)])
def test_every_range_is_a_slice_of_the_whole(archive, codec):
    k, v = tensors(83)
    session = archive.create_session("s", model=MODEL, codec=codec, block_tokens=16, fit_tokens=20)
    fill(session, k, v, 9, 40)  # a raw head of 9, then blocks, then a tail
    whole_k, _ = session.read_all()
    post_k, _ = session.read_all(k_state="post")
    for start in (0, 1, 8, 9, 15, 16, 17, 47, 48, 80, 82, 83):
        for stop in (0, 1, 8, 9, 10, 16, 17, 32, 33, 48, 80, 82, 83):
            if start > stop:
                continue
            assert_same(session.read(2, "k", start, stop), whole_k[2][:, start:stop])
            got = session.read(2, "k", start, stop, k_state="post", n_threads=3)
            assert_same(got, post_k[2][:, start:stop])


def test_pre_and_post_rope(archive):
    k, v = tensors(200)
    rotated = np.stack([from_coded(x, MODEL.stream(0, "k"), "post") for x in k])
    session = archive.create_session("s", model=MODEL, codec=Raw())
    fill(session, rotated, v, 50, 70, k_state="post")
    np.testing.assert_allclose(session.read_all()[0], k, atol=1e-5)
    np.testing.assert_allclose(session.read_all(k_state="post")[0], rotated, atol=1e-5)
    assert session.info().k_state == "post"
    for at in (0, 50):  # what is stored is exactly the un-rotated input
        part = to_coded(rotated[0][:, at : at + 20], MODEL.stream(0, "k"), "post", at)
        assert_same(session.read(0, "k", at, at + 20), part)


def test_interleaved_and_partial_rope_keep_channel_order(archive):
    rope = Rope.from_theta(1e4, 8, style="interleaved")
    model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=2, head_dim=16, rope=rope)
    k, v = (x[:1] for x in tensors(150))
    session = archive.create_session("s", model=model, codec=Raw(), fit_tokens=40)
    fill(session, k, v, 30, 70, 149)
    assert_same(session.read_all()[0], k)


@pytest.mark.parametrize("codec", [Raw(), KVR1(rel_step=0.25), TKV1(rel_step=0.25)])
def test_the_tail_survives_a_restart_and_goes_on(place, codec):
    k, v = tensors(300)
    options = {"model": MODEL, "codec": codec, "block_tokens": 64, "fit_tokens": 32}
    with kvstore.open(place, "a") as archive:
        once = archive.create_session("once", **options)
        once.append(k[:, :, :40], v[:, :, :40])
        once.commit()
        once.append(k[:, :, 40:], v[:, :, 40:])
        once.commit()
        expected = once.read_all()
        session = archive.create_session("s", **options)
        session.append(k[:, :, :40], v[:, :, :40])
        session.commit()
    for lo, hi in ((40, 41), (41, 64), (64, 65), (65, 192), (192, 300)):
        with kvstore.open(place, "a") as archive:
            session = archive.session("s")
            before = session.read_all()
            assert session.n_tokens == lo
            session.append(k[:, :, lo:hi], v[:, :, lo:hi], start=lo)
            session.commit()
            after = session.read_all()
            for x, y in zip(before, after, strict=True):
                assert_same(x, y[:, :, :lo])  # what was committed never changes
    with kvstore.open(place) as archive:
        session, once = archive.session("s"), archive.session("once")
        for x, y in zip(session.read_all(), expected, strict=True):
            assert_same(x, y)
        assert session.info().error == once.info().error
        assert archive.verify(decode=True).ok


def test_committed_head_stays_bit_exact(archive):
    k, v = tensors(200, dtype=np.float16)
    session = archive.create_session("s", model=MODEL, codec=KVR1(rel_step=1.0))
    fill(session, k, v, 5, 100)
    got, _ = session.read_all(dtype="float16")
    assert_same(got[:, :, :100], k[:, :, :100])
    assert not np.array_equal(got[:, :, 100:], k[:, :, 100:])
    assert session.info().streams[0].n_head_tokens == 100


def test_head_keeps_the_widest_dtype(place):
    k, v = tensors(30)
    with kvstore.open(place, "a") as archive:
        session = archive.create_session("s", model=MODEL)
        session.append(k[:, :, :10].astype(np.float16), v[:, :, :10].astype(np.float16))
        session.commit()
        small = session.info().frame_bytes
    with kvstore.open(place, "a") as archive:
        session = archive.session("s")
        session.append(k[:, :, 10:20].astype(np.float16), v[:, :, 10:20].astype(np.float16))
        session.commit()
        assert session.info().frame_bytes < 2.2 * small
        session.append(k[:, :, 20:], v[:, :, 20:])
        session.commit()
        got, _ = session.read_all()
        assert_same(got[:, :, :20], k[:, :, :20].astype(np.float16).astype(np.float32))
        assert_same(got[:, :, 20:], k[:, :, 20:])


def test_stats_from(archive):
    k, v = tensors(400)
    full = archive.create_session("full", model=MODEL, codec=KVR1(step=STEP))
    with pytest.raises(kvstore.InvalidArgument, match="no stream header yet"):
        archive.create_session("short", model=MODEL, stats_from="full")
    fill(full, k, v)
    short = archive.create_session("short", model=MODEL, stats_from=full)
    fill(short, k[:, :, :7], v[:, :, :7], 3)
    assert np.abs(short.read_all()[0] - k[:, :, :7]).max() <= STEP / 2
    info = short.info()
    assert info.streams[0].n_head_tokens == 0
    assert info.streams[0].step == full.info().streams[0].step == STEP
    other = kvstore.Model.uniform(name="x", n_layers=3, n_kv_heads=2, head_dim=16, rope=ROPE)
    with pytest.raises(kvstore.IdentityMismatch):
        archive.create_session("other", model=other, stats_from="full")
    with pytest.raises(kvstore.InvalidArgument, match=r"coded with KVR1\(.*, not Raw\("):
        archive.create_session("raw", model=MODEL, stats_from="full", codec=Raw())
    assert archive.names() == ["full", "short"]


@pytest.mark.parametrize("codec", [TKV1(step=STEP), KVR1(step=STEP), Raw()])
def test_a_session_keeps_its_codec(tmp_path, codec):
    """Whatever is the default when it is opened again."""
    k, v = tensors(700)
    with kvstore.open(tmp_path / "a.kv", mode="a") as archive:
        fill(archive.create_session("s", model=MODEL, codec=codec), k[:, :, :300], v[:, :, :300])
        before = archive.session("s").read_all()
    with kvstore.open(tmp_path / "a.kv", mode="a") as archive:
        session = archive.session("s")
        fill(session, k[:, :, 300:], v[:, :, 300:])
        info = session.info()
        assert {kind: dict(c) for kind, c in info.codecs.items()} == {
            "k": codec.to_json(), "v": codec.to_json(),
        }  # fmt: skip
        assert {stream.codec for stream in info.streams} == {codec.codec}
        for found, first, given in zip(session.read_all(), before, (k, v), strict=True):
            assert found[:, :, :300].tobytes() == first.tobytes()
            assert np.abs(found - given).max() <= STEP / 2
        assert archive.verify(decode=True).ok


def test_the_default_codec(archive):
    k, v = tensors(200)
    session = archive.create_session("s", model=MODEL)
    fill(session, k, v)
    assert session.info().codecs["k"] == KVR1().to_json()
    assert {stream.codec for stream in session.info().streams} == {"kvr1"}
    later = archive.create_session("t", model=MODEL, stats_from="s")
    fill(later, k, v)
    assert later.info().codecs == session.info().codecs


def test_codec_per_kind(archive):
    k, v = tensors(300)
    codec = {"k": KVR1(step=STEP), "v": Raw()}
    session = archive.create_session("s", model=MODEL, codec=codec)
    fill(session, k, v)
    got_k, got_v = session.read_all()
    assert_same(got_v, v)
    assert 0 < np.abs(got_k - k).max() <= STEP / 2
    assert {s.codec for s in session.info().streams if s.kind == "v"} == {"raw"}
    with pytest.raises(kvstore.InvalidArgument, match="'k' and 'v'"):
        archive.create_session("t", model=MODEL, codec={"k": Raw()})


def test_append_is_all_or_nothing(archive):
    k, v = tensors(200)
    session = archive.create_session("s", model=MODEL, codec=KVR1(step=STEP))
    session.append(k, v)
    bad = v[:, :, :5].copy()
    bad[2, 1, 3, 7] = np.nan
    with pytest.raises(kvstore.InvalidArgument, match=r"layer 2 v.*head 1.*token 203.*channel 7"):
        session.append(k[:, :, :5], bad)
    assert session.n_tokens == 200
    session.commit()
    bad[2, 1, 3, 7] = 1e9
    with pytest.raises(kvstore.InvalidArgument, match=r"layer 2 v.*head 1.*token 203.*channel 7"):
        session.append(k[:, :, :5], bad)
    session.commit()
    assert session.n_committed == session.n_tokens == 200
    assert np.abs(session.read_all()[0] - k).max() <= STEP / 2


@pytest.mark.parametrize("n_threads", [1, 2])
def test_an_interrupted_append_is_not_committed(archive, monkeypatch, n_threads):
    monkeypatch.setattr("kvstore.writer._MANY_VALUES", 0)
    k, v = tensors(100)
    session = archive.create_session("s", model=MODEL, codec=Raw(), fit_tokens=10)
    fill(session, k[:, :, :20], v[:, :, :20])

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._writer._streams[1, "k"], "push", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.append(k[:, :, 20:], v[:, :, 20:], n_threads=n_threads)
    for use in (session.commit, lambda: session.append(k, v)):
        with pytest.raises(kvstore.Closed, match="interrupted half-way"):
            use()
    assert_same(session.read_all()[0], k[:, :, :20])
    session.close()
    session = archive.session("s")
    session.append(k[:, :, 20:], v[:, :, 20:], start=20)
    session.commit()
    assert_same(session.read_all()[1], v)


def test_bad_values_are_found_before_there_is_a_header(archive):
    k, v = tensors(20)
    k[1, 0, 4, 2] = np.inf
    session = archive.create_session("s", model=MODEL)
    with pytest.raises(kvstore.InvalidArgument, match=r"layer 1 k.*head 0.*token 4.*channel 2"):
        session.append(k, v)
    k[1, 0, 4, 2] = 0
    session.append(k, v)
    assert session.n_tokens == 20


def test_a_step_that_cannot_work_is_refused_and_leaves_the_rest(archive):
    k, v = tensors(400)
    session = archive.create_session("s", model=MODEL, codec=KVR1(step=1e-9), block_tokens=256)
    with pytest.raises(kvstore.InvalidArgument, match=r"layer 0 k.*step.*too small"):
        session.append(k, v)
    session.append(k[:, :, :200], v[:, :, :200])
    with pytest.raises(kvstore.InvalidArgument, match="too small"):
        session.commit()
    assert (session.n_tokens, session.n_committed) == (200, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[:2], v), "k has 2 layers, the model 3"),
        (lambda k, v: (k, v[:, :1]), "layer 0 v: shape"),
        (lambda k, v: (k, v[:, :, :3]), "layer 0 v: 3 tokens, other layers bring 5"),
        (lambda k, v: (k.astype(np.int32), v), "layer 0 k: dtype int32"),
        (lambda k, v: (k, None), "layer 0 v: missing"),
        (lambda k, v: ([k[0], None, k[2]], v), "layer 1 k: missing"),
    ],
)
def test_wrong_tensors(archive, change, message):
    session = archive.create_session("s", model=MODEL)
    with pytest.raises(kvstore.InvalidArgument, match=message):
        session.append(*change(*tensors(5)))
    assert session.n_tokens == 0


def test_wrong_arguments(archive):
    k, v = tensors(5)
    session = archive.create_session("s", model=MODEL, codec=Raw())
    with pytest.raises(kvstore.InvalidArgument, match="k_state 'x'"):
        session.append(k, v, k_state="x")
    session.append(k, v, start=0)
    with pytest.raises(kvstore.InvalidArgument, match="start=0, but n_tokens=5"):
        session.append(k, v, start=0)
    with pytest.raises(kvstore.InvalidArgument, match="earlier tokens have none"):
        session.append(k, v, token_ids=[1, 2, 3, 4, 5])
    with pytest.raises(kvstore.InvalidArgument, match=r"5\)?.* of 5 appended; commit first"):
        session.read(0, "k", 0, 5)
    session.commit()
    for layer, kind, start, stop, message in (
        (3, "k", 0, 5, "layers 0 to 2"),
        (-1, "k", 0, 5, "layers 0 to 2"),
        (0, "q", 0, 5, "kind 'q'"),
        (0, "k", 3, 2, "not a range"),
        (0, "k", -1, 2, "not a range"),
        (0, "k", 0, 6, "5 tokens are committed"),
    ):
        with pytest.raises(kvstore.InvalidArgument, match=message):
            session.read(layer, kind, start, stop)
    with pytest.raises(kvstore.InvalidArgument, match="dtype"):
        session.read(0, "k", dtype="int8")
    with pytest.raises(kvstore.InvalidArgument, match="k_state"):
        session.read(0, "k", k_state="mid")
    for name in ("", "a\x00b", "a\nb", "x" * 256, "\ud800"):
        with pytest.raises(kvstore.InvalidArgument, match="session name"):
            archive.create_session(name, model=MODEL)
    with pytest.raises(kvstore.InvalidArgument, match="exists already; open it with archive"):
        archive.create_session("s", model=MODEL)
    with pytest.raises(kvstore.InvalidArgument, match="block_tokens 0"):
        archive.create_session("t", model=MODEL, block_tokens=0)
    with pytest.raises(kvstore.InvalidArgument, match="fit_tokens 0"):
        archive.create_session("t", model=MODEL, fit_tokens=0)
    with pytest.raises(kvstore.InvalidArgument, match="not JSON"):
        archive.create_session("t", model=MODEL, metadata={"x": {1, 2}})
    with pytest.raises(kvstore.InvalidArgument, match="did you mean kvr1"):
        archive.create_session("t", model=MODEL, codec="kvr2")
    for kind in (KVR1, TKV1, Raw):
        for codec in (kind, {"k": Raw(), "v": kind}):
            with pytest.raises(kvstore.InvalidArgument, match=r"such as KVR1\(rel_step=0\.25\)"):
                archive.create_session("t", model=MODEL, codec=codec)
    with pytest.raises(kvstore.NotFound, match=r"'t': no such session; there are 's'$"):
        archive.session("t")


def test_a_session_that_is_not_found_tells_of_others(archive):
    with pytest.raises(NotFound, match=r"'x': no such session$"):
        archive.session("x")
    for name in "abcdefg":
        archive.create_session(name, model=MODEL)
    for action in (archive.session, archive.delete_session):
        with pytest.raises(NotFound, match=r"there are 'a', 'b', 'c', 'd', 'e' and 2 more$"):
            action("x")


def test_output_arrays(archive):
    k, v = tensors(40)
    session = archive.create_session("s", model=MODEL, codec=Raw())
    fill(session, k, v)
    wide = np.zeros((2, 40, 40), np.float16)
    out = wide[:, :10, 4:20]
    assert session.read(1, "k", 5, 15, out=out) is out
    assert_same(np.ascontiguousarray(out), k[1][:, 5:15].astype(np.float16))
    assert not wide[:, 10:].any()
    for wrong in (np.zeros((2, 9, 16), np.float32), np.zeros((2, 10, 16), np.int16)):
        with pytest.raises(kvstore.InvalidArgument):
            session.read(1, "k", 5, 15, out=wrong)
    with pytest.raises(kvstore.InvalidArgument, match="out is float16"):
        session.read(1, "k", 5, 15, out=out, dtype="float32")


def test_overflow_of_float16_is_refused(archive):
    k, v = tensors(10)
    k[0, 0, 0, 0] = 1e5
    session = archive.create_session("s", model=MODEL, codec=Raw())
    fill(session, k, v)
    with pytest.raises(kvstore.InvalidArgument, match=r"layer 0 k.*overflows float16"):
        session.read(0, "k", dtype="float16")


def test_default_dtype_is_the_models(archive):
    model = kvstore.Model.uniform(
        name="m", n_layers=3, n_kv_heads=2, head_dim=16, rope=ROPE, dtype="bfloat16"
    )
    k, v = tensors(10)
    session = archive.create_session("s", model=model)
    fill(session, k, v)
    assert session.read(0, "k").dtype == bfloat16
    assert session.read_all()[1].dtype == bfloat16


def test_input_is_copied(archive):
    k, v = tensors(10)
    session = archive.create_session("s", model=MODEL, codec=Raw())
    k2, v2 = k.copy(), v.copy()
    session.append(k2, v2)
    k2[:], v2[:] = 0, 0
    session.commit()
    assert_same(session.read_all()[0], k)


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("kind", ["small", "big", "negative"])
def test_token_ids(place, n, kind):
    rng = np.random.default_rng(n)
    ids = {
        "small": rng.integers(0, 50_000, n),
        "big": rng.integers(-(1 << 63), (1 << 63) - 1, n),
        "negative": rng.integers(-3, 3, n),
    }[kind]
    model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=2, head_dim_v=None)
    k = np.zeros((1, 1, n, 2), np.float32)
    with kvstore.open(place, "a") as archive:
        session = archive.create_session("s", model=model)
        cut = n // 3
        session.append(k[:, :, :cut], token_ids=ids[:cut])
        session.commit()
    with kvstore.open(place, "a") as archive:
        session = archive.session("s")
        session.append(k[:, :, cut:], token_ids=ids[cut:])
        session.commit()
        if n:
            np.testing.assert_array_equal(session.token_ids(), ids)
            np.testing.assert_array_equal(session.token_ids(n // 2, n), ids[n // 2 :])
            with pytest.raises(kvstore.InvalidArgument, match="earlier tokens have them"):
                session.append(k[:, :, :1])


def test_token_ids_are_checked(archive):
    k, v = tensors(3)
    session = archive.create_session("s", model=MODEL)
    for ids in ([1, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], ["a", "b", "c"], [1, 2, 1 << 63]):
        with pytest.raises(kvstore.InvalidArgument, match="token_ids"):
            session.append(k, v, token_ids=ids)
    session.append(k, v)
    session.commit()
    assert session.token_ids() is None


def test_sessions_do_not_mix_and_can_be_deleted(archive):
    names = ["a", "a/b", "../../etc", "ü", "a b"]
    data = {name: tensors(150, seed=i) for i, name in enumerate(names)}
    for name, (k, v) in data.items():
        fill(archive.create_session(name, model=MODEL, codec=Raw(), metadata={"n": name}), k, v)
    assert archive.names() == sorted(names, key=lambda s: s.encode())
    doomed, kept = archive.session("a"), archive.session("a/b")
    archive.delete_session("a")
    assert "a" not in archive
    for use in (doomed.read_all, doomed.info, lambda: doomed.n_committed):
        with pytest.raises(kvstore.NotFound):
            use()
    with pytest.raises(kvstore.NotFound):
        archive.delete_session("a")
    assert_same(kept.read_all()[0], data["a/b"][0])
    again = archive.create_session("a", model=MODEL, codec=Raw())
    fill(again, *data["ü"])
    with pytest.raises(kvstore.NotFound, match="another one was created"):
        doomed.read(0, "k")
    assert archive.session("ü").info().metadata == {"n": "ü"}
    assert archive.verify().ok
    for name in archive.names():
        archive.delete_session(name)
    assert archive.info().frame_bytes == 0
    assert archive.gc() > 0  # the model's identity
    assert archive.gc() == 0


def test_closed(place):
    k, v = tensors(5)
    archive = kvstore.open(place, "a")
    session = archive.create_session("s", model=MODEL)
    session.append(k, v)
    session.close()
    with pytest.raises(kvstore.Closed):
        session.append(k, v)
    assert session.n_tokens == session.n_committed == 0
    archive.close()
    for use in (session.read_all, archive.names, session.commit):
        with pytest.raises(kvstore.Closed):
            use()
    archive.close()


def test_reading_mode_cannot_write(place):
    k, v = tensors(5)
    with pytest.raises(kvstore.NotFound):
        kvstore.open(place)
    with kvstore.open(place, "a") as archive:
        fill(archive.create_session("s", model=MODEL), k, v)
    with kvstore.open(place) as archive:
        for use in (
            lambda: archive.session("s").append(k, v),
            lambda: archive.create_session("t", model=MODEL),
            lambda: archive.delete_session("s"),
            archive.gc,
        ):
            with pytest.raises(kvstore.InvalidArgument, match="mode='r'"):
                use()


def test_info_counts_every_byte(archive):
    k, v = tensors(700, dtype=np.float16)
    session = archive.create_session("s", model=MODEL, codec=KVR1(rel_step=0.25))
    fill(session, k, v, 100, 400, token_ids=None)
    info = session.info()
    with archive._read() as snapshot:
        stored = {key: value.nbytes for key, value in snapshot.scan(b"")}
    own = {key: n for key, n in stored.items() if key[:1] not in (b"A", b"I")}
    assert info.total_bytes == sum(n + len(key) for key, n in own.items())
    frames = sum(n for key, n in own.items() if key[:1] in (b"F", b"T", b"R"))
    assert info.frame_bytes == archive.info().frame_bytes == frames
    assert info.payload_bytes == frames - 76 * info.n_frames
    assert info.bits_per_value == pytest.approx(8 * info.total_bytes / (k.size + v.size))
    assert info.ratio_fp16 == pytest.approx(16 / info.bits_per_value)
    assert archive.survey().sessions == [info]


def test_empty_session(place):
    with kvstore.open(place, "a") as archive:
        session = archive.create_session("s", model=MODEL)
        session.commit()
        k, v = tensors(0)
        session.append(k, v)
        session.commit()
    with kvstore.open(place, "a") as archive:
        session = archive.session("s")
        k, v = session.read_all()
        assert k.shape == v.shape == (3, 2, 0, 16)
        info = session.info()
        assert np.isnan(info.bits_per_value)
        assert info.n_values == info.n_frames == 0
        assert archive.verify().ok


def test_reads_and_appends_from_many_threads(archive):
    from concurrent.futures import ThreadPoolExecutor

    k, v = tensors(400)
    session = archive.create_session("s", model=MODEL, codec=Raw(), block_tokens=32, fit_tokens=16)

    def write():
        for at in range(0, 400, 20):
            session.append(k[:, :, at : at + 20], v[:, :, at : at + 20], start=at)
            session.commit()

    def read(_):
        for _ in range(15):
            n = session.n_committed
            got_k, got_v = session.read_all(0, n)
            assert_same(got_k, k[:, :, :n])
            assert_same(got_v, v[:, :, :n])

    with ThreadPoolExecutor(4) as pool:
        writer = pool.submit(write)
        list(pool.map(read, range(3)))
        writer.result()
    assert session.n_committed == 400


def test_frames_stored_ahead_of_the_commit_are_invisible(place, monkeypatch):
    from kvstore import writer

    monkeypatch.setattr(writer, "SPILL_BYTES", 10_000)
    k, v = tensors(600)
    options = {"model": MODEL, "codec": Raw(), "block_tokens": 32, "fit_tokens": 16}
    with kvstore.open(place, "a") as archive:
        session = archive.create_session("s", **options)
        fill(session, k[:, :, :100], v[:, :, :100])
        session.append(k[:, :, 100:], v[:, :, 100:])
        assert session.n_committed == 100
        assert archive.verify().n_leftover > 10
        assert archive.gc() == 0  # it has an appender
        assert_same(session.read_all()[0], k[:, :, :100])
    with kvstore.open(place, "a") as archive:
        assert archive.verify().ok
        session = archive.session("s")
        session.append(k[:, :, 100:130], v[:, :, 100:130])
        session.commit()
        session.close()
        assert archive.gc() > 0
        report = archive.verify(decode=True)
        assert report.ok
        assert report.n_leftover == 0
        session = archive.session("s")
        session.append(k[:, :, 130:], v[:, :, 130:])
        session.commit()
        assert_same(session.read_all()[0], k)


class Tensors:
    """A source of `Archive.ingest`."""

    def __init__(self, k, v):
        self._tensors = {"k": k, "v": v}

    def n_tokens(self, layer, kind):
        return self._tensors[kind].shape[2]

    def chunks(self, layer, kind):
        return np.array_split(self._tensors[kind][layer], 3, axis=1)


def test_ingest_replaces_a_session_whole(place):
    old, new = tensors(200, 1), tensors(150, 2)
    with kvstore.open(place, "a") as archive:
        archive.ingest("s", Tensors(*old), model=MODEL, codec=Raw(), metadata={"turn": 1})
        before = archive.session("s")
        assert before.metadata == {"turn": 1}
        with pytest.raises(InvalidArgument, match="exists already; replace=True replaces it"):
            archive.ingest("s", Tensors(*new), model=MODEL, codec=Raw())
        bad = new[0] * np.where(np.arange(150) == 77, np.nan, 1)[:, None]
        with pytest.raises(InvalidArgument, match="not finite"):
            archive.ingest("s", Tensors(bad, new[1]), model=MODEL, codec=Raw(), replace=True)
        assert_same(before.read_all()[0], old[0])  # a failed replacement changes nothing
        session = archive.ingest("s", Tensors(*new), model=MODEL, codec=Raw(), replace=True)
        assert_same(session.read_all()[0], new[0])
        assert session.metadata == {}
        with pytest.raises(NotFound):
            before.read_all()
        assert archive.gc() == 0  # nothing of the old one is left
        with archive.session("s") as appender:
            appender.append(*new)
            # An appender of another process would hold the lease like this.
            lease = archive._backend
            with pytest.raises(Locked):
                lease.lease(session._id, "s")


@pytest.mark.parametrize("fit_tokens", [0, -5, True, 2.5, "x", 1 << 20])
def test_fit_tokens_are_checked(archive, fit_tokens):
    with pytest.raises(InvalidArgument, match="fit_tokens"):
        archive.create_session("s", model=MODEL, fit_tokens=fit_tokens)
    with pytest.raises(InvalidArgument, match="fit_tokens"):
        archive.ingest("s", Tensors(*tensors(9)), model=MODEL, fit_tokens=fit_tokens)
    assert archive.names() == []


def test_reads_count_the_frames_they_decode(archive):
    k, v = tensors(200)
    session = archive.create_session("s", model=MODEL, block_tokens=32, fit_tokens=32)
    fill(session, k, v)
    for start, stop, n_blocks in ((0, 200, 7), (31, 33, 2), (64, 96, 1), (5, 5, 0), (199, 200, 1)):
        before = session.n_frames_read
        session.read(1, "k", start, stop)
        assert session.n_frames_read - before == n_blocks
        session.read_all(start, stop)
        assert session.n_frames_read - before == n_blocks * 7


def test_a_long_read_is_done_in_pieces(archive, monkeypatch):
    """More payload and RoPE tables than are held at a time: the same values."""
    import kvstore.destination
    import kvstore.reader

    k, v = tensors(300)
    session = archive.create_session("s", model=MODEL, block_tokens=32, fit_tokens=32)
    fill(session, k, v)
    whole = [session.read_all(3, 299, k_state=state) for state in ("pre", "post")]
    for limit in (1, 1000, 5000, 20000):
        monkeypatch.setattr(kvstore.reader, "_CHECK_BYTES", limit)
        monkeypatch.setattr(kvstore.destination.Host, "batch_bytes", limit)
        monkeypatch.setattr(kvstore.reader.Passing, "LIMIT", limit)
        for state, expected in zip(("pre", "post"), whole, strict=True):
            for x, y in zip(session.read_all(3, 299, k_state=state), expected, strict=True):
                assert_same(x, y)
        assert archive.verify(decode=True).ok
        assert session.info().n_tokens == 300


def test_arrays_of_the_caller_for_every_layer(archive):
    k, v = tensors(100)
    session = archive.create_session("s", model=MODEL)
    fill(session, k, v)
    want = session.read_all(3, 90, k_state="post", dtype="float16")
    for as_lists in (False, True):
        out = tuple(np.zeros_like(x) for x in want)
        given = tuple(list(x) for x in out) if as_lists else out
        found = session.read_all(3, 90, k_state="post", out=given)
        assert found[0] is given[0]
        assert found[1] is given[1]
        for x, y in zip(out, want, strict=True):
            assert_same(x, y)
    k_out, v_out = out
    for given, message in (
        (k_out, "out ndarray: expected two"),
        ((k_out, v_out[1:]), "out of v: arrays of .* layers"),
        ((k_out, v_out[0]), r"out of v, ndarray of shape \(.*expected a list"),
        ((k_out, None), "layer 0 v: out of None: expected float32"),
        ((k_out[:, :, 1:], v_out), "layer 0 k: out is float16"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            session.read_all(3, 90, out=given)
    with pytest.raises(InvalidArgument, match="layer 0 k: out is float16"):
        session.read_all(3, 90, out=out, dtype="float32")
    with pytest.raises(InvalidArgument, match="stream"):
        session.read_all(stream=1)
    with pytest.raises(InvalidArgument, match="stream"):
        session.read(0, "k", out=k_out[0], start=3, stop=90, stream=1)


def test_layers_without_v_take_no_array(archive):
    model = kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=1, head_dim=2, head_dim_v=None, dtype="float32"
    )
    session = archive.create_session("s", model=model, codec=kvstore.Raw())
    session.append(np.arange(16, dtype=np.float32).reshape(2, 1, 4, 2), None)
    session.commit()
    want = session.read_all()[0]
    for v in (None, [None, None]):
        out = np.zeros_like(want)
        session.read_all(out=(out, v))
        assert_same(out, want)
    with pytest.raises(InvalidArgument, match="layer 0 v: there is none"):
        session.read_all(out=(out, out))


class OfAnotherLibrary:
    """A CPU array of a library that speaks DLPack."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_host_arrays_of_other_libraries_are_told_how(archive, device):
    session = archive.create_session("s", model=MODEL)
    fill(session, *tensors(40))
    want = session.read(0, "k")
    out = OfAnotherLibrary(np.zeros_like(want))
    with pytest.raises(InvalidArgument, match=r"NumPy arrays: give np\.from_dlpack\(out\)"):
        session.read(0, "k", out=out, device=device)
    assert_same(session.read(0, "k", out=np.from_dlpack(out)), want)


def test_wrong_arguments_are_told_before_a_missing_gpu(archive):
    session = archive.create_session("s", model=MODEL)
    fill(session, *tensors(40))
    for call in (
        lambda: session.read(99, "k", device="cuda"),
        lambda: session.read(0, "k", 0, 41, device="cuda"),
        lambda: session.read(0, "k", position_offset="x", device="cuda"),
        lambda: session.read_all(0, 41, device="cuda"),
        lambda: session.read_all(out=(None, None), device="cuda"),
    ):
        with pytest.raises(InvalidArgument):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.session("s").read(0.0, "k"), "layer 0.0"),
        (lambda a: a.session("s").read("0", "k"), "layer '0'"),
        (lambda a: a.create_session("t", model=None), "expected a kvstore.Model"),
        (lambda a: a.session("s", expect="m"), "expected a kvstore.Model"),
        (lambda a: a.create_session("t", model=MODEL, metadata=[1]), "JSON object"),
        (lambda a: kvstore.open(b"x.kv"), "path b'x.kv'"),
        (lambda a: kvstore.open("x.kv", map_size="1GB"), "map_size '1GB'"),
        (lambda a: kvstore.open("x.kv", lock_timeout="x"), "lock_timeout 'x'"),
        (lambda a: KVR1(sink=1.5), "sink 1.5"),
        (
            lambda a: MODEL.uniform(name="m", n_layers=1.5, n_kv_heads=2, head_dim=16),
            "n_layers 1.5",
        ),
        (lambda a: MODEL.uniform(name="m", n_layers=1, n_kv_heads=2.0, head_dim=16), "heads 2.0"),
        (
            lambda a: MODEL.uniform(name="m", n_layers=1, n_kv_heads=2, head_dim=16, rope=3),
            "rope 3: expected a Rope",
        ),
    ],
)
def test_arguments_of_wrong_types(archive, call, message):
    archive.create_session("s", model=MODEL)
    with pytest.raises(InvalidArgument, match=message):
        call(archive)


def test_raw_takes_any_spelling_of_a_dtype():
    assert Raw(np.float16) == Raw("float16") == Raw(np.dtype("<f2"))
    assert Raw(bfloat16).to_json()["dtype"] == "bfloat16"


def test_a_forked_child_cannot_append(tmp_path):
    import os

    k, v = tensors(5)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        session = archive.create_session("s", model=MODEL)
        session.append(k, v)
        child = os.fork()
        if child == 0:
            try:
                session.append(k, v)
            except kvstore.Closed as error:
                os._exit(0 if "before a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.commit()
        assert session.n_committed == 5


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert kvstore.__version__ == version("kvstore")
    with pytest.raises(AttributeError):
        kvstore.nothing  # noqa: B018


def test_times_and_threads(place):
    for seconds in (float("inf"), 1e10, 10**400, 0):
        with kvstore.open(place, "a", lock_timeout=seconds) as archive:
            assert archive.names() == []
    with kvstore.open(place, "a", lock_timeout=float("inf")) as archive:
        session = archive.create_session("s", model=MODEL)
        k, v = tensors(5)
        for n_threads in (0, -1, 1.5, True, "2", 4097, 1 << 32, 1 << 70):
            for use in (
                lambda n: session.append(k, v, n_threads=n),
                lambda n: session.read(0, "k", n_threads=n),
                lambda n: session.read_all(n_threads=n),
                lambda n: kvstore.attend(np.ones((2, 16), np.float32), session, 0, n_threads=n),
            ):
                with pytest.raises(InvalidArgument, match="n_threads"):
                    use(n_threads)
        session.append(k, v, n_threads=np.int64(2))
        session.commit()
    for seconds in (float("nan"), -1, "5", None):
        with pytest.raises(InvalidArgument, match="lock_timeout"):
            kvstore.open(place, lock_timeout=seconds)
