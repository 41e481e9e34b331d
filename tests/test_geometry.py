"""Every shape that models have: head sizes, absent V, ragged and windowed layers, odd counts."""

import numpy as np
import pytest

import kvstore
from kvstore import KVR1, LayerSpec, Model, Raw, Rope
from kvstore.layout import auto_block_tokens

STEP = 0.5


def tensor(spec, n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((spec.heads, n, spec.head_dim)).astype(np.float32)


def layers_of(model, n, seed=0):
    def of(kind):
        return [
            tensor(model.stream(i, kind), n, seed + i) if model.has_stream(i, kind) else None
            for i in range(model.n_layers)
        ]

    return of("k"), of("v")


def part(xs, lo, hi):
    return [None if x is None else x[:, lo:hi] for x in xs]


def check(session, k, v, n, start=0):
    for kind, given in (("k", k), ("v", v)):
        for layer, x in enumerate(given):
            if x is not None:
                got = session.read(layer, kind, start, n)
                assert got.shape == x[:, start:n].shape
                assert np.abs(got - x[:, start:n]).max(initial=0) <= STEP / 2


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [(2, 80), (2, 96), (1, 112), (3, 192), (1, 576), (1, 2), (8, 128), (1, 1024), (16, 64)],
)
def test_head_sizes(tmp_path, heads, head_dim):
    rope = Rope.from_theta(1e4, head_dim)
    model = Model.uniform(name="m", n_layers=1, n_kv_heads=heads, head_dim=head_dim, rope=rope)
    k, v = layers_of(model, 150)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        session = archive.create_session(
            "s", model=model, codec=KVR1(step=STEP), block_tokens=64, fit_tokens=32
        )
        session.append(k, v)
        session.commit()
    with kvstore.open(tmp_path / "a.kv") as archive:
        session = archive.session("s", expect=model)
        check(session, k, v, 150)
        got_k, got_v = session.read_all(60, 130)
        assert got_k.shape == got_v.shape == (1, heads, 70, head_dim)


def test_absent_v():
    model = Model.uniform(name="mla", n_layers=2, n_kv_heads=1, head_dim=576, head_dim_v=None)
    k, v = layers_of(model, 40)
    with kvstore.open("memory:", "a") as archive:
        session = archive.create_session("s", model=model, codec=KVR1(step=STEP), fit_tokens=10)
        session.append(np.stack(k))
        session.append([x[:, :0] for x in k], v)
        session.commit()
        check(session, k, v, 40)
        got_k, got_v = session.read_all()
        assert got_k.shape == (2, 1, 40, 576)
        assert got_v == [None, None]
        with pytest.raises(kvstore.InvalidArgument, match="layer 1 has no V"):
            session.read(1, "v")
        with pytest.raises(kvstore.InvalidArgument, match="layer 0 v: given"):
            session.append(k, k)


RAGGED = Model(
    "ragged",
    (
        LayerSpec(2, 16, 16),
        LayerSpec(1, 32, 8, rope=Rope.from_theta(1e5, 16)),
        LayerSpec(3, 6, None, rope=None),
    ),
    rope=Rope.from_theta(1e4, 16, style="interleaved"),
)


@pytest.mark.parametrize("codec", [Raw(), KVR1(step=STEP)])
def test_ragged_layers(codec):
    k, v = layers_of(RAGGED, 100)
    with kvstore.open("memory:", "a") as archive:
        session = archive.create_session(
            "s", model=RAGGED, codec=codec, block_tokens=32, fit_tokens=10
        )
        for lo, hi in ((0, 4), (4, 30), (30, 64), (64, 100)):
            session.append(part(k, lo, hi), part(v, lo, hi))
            session.commit()
        check(session, k, v, 100)
        got_k, got_v = session.read_all(10, 20)
        assert [x.shape for x in got_k] == [(2, 10, 16), (1, 10, 32), (3, 10, 6)]
        assert [x is None for x in got_v] == [False, False, True]
        got_k, got_v = session.read_all(10, 20, layers=[1])
        assert got_k.shape == (1, 1, 10, 32)
        assert got_v.shape == (1, 1, 10, 8)
        got_k, _ = session.read_all(10, 20, layers=[2, 0])
        assert [x.shape for x in got_k] == [(3, 10, 6), (2, 10, 16)]
        assert archive.verify(decode=True).ok


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65, 96])
@pytest.mark.parametrize("codec", [Raw(), KVR1(step=STEP)])
def test_token_counts(n, codec):
    model = Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=4)
    k, v = layers_of(model, n)
    for cut in {0, 1, n // 2, n - 1} & set(range(n + 1)):
        with kvstore.open("memory:", "a") as archive:
            session = archive.create_session(
                "s", model=model, codec=codec, block_tokens=32, fit_tokens=8
            )
            for lo, hi in ((0, cut), (cut, n)):
                session.append(part(k, lo, hi), part(v, lo, hi))
                session.commit()
            check(session, k, v, n)
            report = archive.verify(decode=True)
            assert report.ok
            assert report.n_leftover == 0


def windowed(n):
    model = Model(
        "w",
        (LayerSpec(1, 8, 8), LayerSpec(1, 8, 8, window=20), LayerSpec(1, 8, 8, window=20)),
        rope=Rope.from_theta(1e4, 8),
    )
    k, v = layers_of(model, n)
    return model, k, v


@pytest.mark.parametrize("codec", [Raw(), KVR1(step=STEP)])
@pytest.mark.parametrize("k_state", ["pre", "post"])
def test_windowed_layers_start_late(tmp_path, codec, k_state):
    model, k, v = windowed(100)
    options = {"model": model, "codec": codec, "block_tokens": 16, "fit_tokens": 24}
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        session = archive.create_session("s", **options)
        first = [x[:, lo:60] for x, lo in zip(k, (0, 40, 60), strict=True)]
        second = [x[:, lo:60] for x, lo in zip(v, (0, 40, 60), strict=True)]
        bad = [first[0], first[1], first[2].copy()]
        bad[0] = bad[0].copy()
        bad[0][0, 3, 1] = np.nan
        with pytest.raises(kvstore.InvalidArgument, match="token 3"):
            session.append(bad, second, k_state=k_state)
        session.append(first, second, k_state=k_state)
        with pytest.raises(kvstore.InvalidArgument, match="only the first append may be shorter"):
            session.append([x[:, :5] for x in k[:2]] + [k[2][:, :4]], part(v, 0, 5))
        session.commit()
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        session = archive.session("s")
        assert [session.start_token(i) for i in range(3)] == [0, 40, 60]
        session.append(part(k, 60, 100), part(v, 60, 100), k_state=k_state)
        session.commit()
        for layer, start in enumerate((0, 40, 60)):
            for kind, x in (("k", k), ("v", v)):
                got = session.read(layer, kind, start, 100, k_state=k_state)
                tolerance = STEP / np.sqrt(2) if kind == "k" else STEP / 2
                assert np.abs(got - x[layer][:, start:]).max() <= tolerance + 1e-5
        with pytest.raises(kvstore.InvalidArgument, match="starts at token 40"):
            session.read(1, "k", 39, 50)
        with pytest.raises(kvstore.InvalidArgument, match="starts at token 60"):
            session.read_all(50, 70)
        assert session.read_all(60)[0].shape == (3, 1, 40, 8)
        assert archive.verify(decode=True).ok
        assert session.info().n_values == 2 * 8 * (100 + 60 + 40)


def test_only_windowed_layers_may_start_late():
    model = Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=4)
    k, v = layers_of(model, 10)
    with kvstore.open("memory:", "a") as archive:
        session = archive.create_session("s", model=model)
        with pytest.raises(kvstore.InvalidArgument, match="layer 1 k: 4 tokens, other layers"):
            session.append([k[0], k[1][:, 6:]], v)


@pytest.mark.parametrize(
    ("channels", "expected"), [(1024, 128), (640, 256), (576, 256), (192, 1024), (2, 1024)]
)
def test_auto_block_tokens(channels, expected):
    model = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=channels)
    assert auto_block_tokens(model.stream(0, "k")) == expected


def test_auto_chooses_for_each_stream():
    model = Model("m", (LayerSpec(8, 128, 24), LayerSpec(1, 64, 64)))
    with kvstore.open("memory:", "a") as archive:
        archive.create_session("s", model=model)
        streams = archive.session("s").info().streams
        assert [s.block_tokens for s in streams] == [128, 1024, 1024, 1024]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_strides_and_dtypes_of_input(order, dtype):
    model = Model.uniform(name="m", n_layers=2, n_kv_heads=3, head_dim=8)
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 3, 80, 16)).astype(dtype)
    x = np.asarray(wide[:, :, ::2, :8], order=order)
    x.flags.writeable = False
    with kvstore.open("memory:", "a") as archive:
        session = archive.create_session("s", model=model, codec=Raw())
        session.append(wide[:, :, ::2, :8], x)
        session.commit()
        for got in session.read_all():
            np.testing.assert_array_equal(got, x.astype(np.float32))
