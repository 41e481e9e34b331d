"""`attend` against attention in float64 over what `read` returns."""

import numpy as np
import pytest
from kvcodecs.attention import SIMD_LEVELS, Attention, Rows
from kvcodecs.ggml import SCHEMES, dequantise, quantise, scheme_by_name
from kvcodecs.rope import from_coded
from kvcodecs.spec import StreamSpec, float_dtype
from kvtools.sample import load_sample

import kvstore
from kvstore import GGML, KVR1, TKV1, LayerSpec, Model, Raw, Rope, attend, keys
from kvstore.backends import memory

PATH = "memory:attention"
CODECS = {
    "kvr1": KVR1(rel_step=0.25),
    "tkv1": TKV1(rel_step=0.25),
    "raw": Raw(),
    "f16": GGML("f16"),
    "q8_0": GGML("q8_0"),
    "mixed": {"k": GGML("q8_0"), "v": KVR1(rel_step=0.25)},
    "mixed the other way": {"k": TKV1(rel_step=0.25), "v": GGML("f16")},
}


@pytest.fixture(scope="module")
def sample():
    return load_sample()


@pytest.fixture
def archive():
    memory.discard(PATH.removeprefix("memory:"))
    with kvstore.open(PATH, "a") as archive:
        yield archive


def session_of(archive, sample, codec, n=None, name="s", **options):
    options = {"block_tokens": 128} | options
    session = archive.create_session(name, model=sample.model, codec=codec, **options)
    session.append([x[:, :n] for x in sample.k], [x[:, :n] for x in sample.v])
    session.commit()
    return session


def queries(sample, layer, n_queries, group=3):
    """Queries that attend: K rows after RoPE with noise, `group` heads for each KV head."""
    k = sample.k[layer].astype(np.float32)
    heads, n, dim = k.shape
    rng = np.random.default_rng([layer, n_queries])
    rows = rng.integers(0, n, (heads, group, n_queries))
    q = k[np.arange(heads)[:, None, None], rows] + rng.standard_normal(
        (heads, group, n_queries, dim)
    )
    return q.reshape(heads * group, n_queries, dim).astype(np.float32)


def reference(q, k, v, *, start, scale=None, causal=False, window=None, first_query=None):
    """In float64; `q` ``[heads][n_queries][dim]``, `start` the position of the first K."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, (n_queries, n) = q.shape[0] // k.shape[0], (q.shape[1], k.shape[1])
    if first_query is None:
        first_query = start + n - n_queries
    at, own = start + np.arange(n), first_query + np.arange(n_queries)
    seen = np.ones((n_queries, n), bool)
    if causal:
        seen &= at <= own[:, None]
    if window is not None:
        seen &= at > own[:, None] - window
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for h in range(q.shape[0]):
        scores = q[h] @ k[h // group].T * (q.shape[2] ** -0.5 if scale is None else scale)
        scores[~seen] = -np.inf
        most = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
        total = weights.sum(-1, keepdims=True)
        np.divide(weights @ v[h // group], total, out=out[h], where=total > 0)
    return out


def check(session, q, layer=0, start=None, stop=None, k_state="post", **options):
    """`attend` of a session is what attention over its values is; returns it."""
    k = session.read(layer, "k", start, stop, k_state, "float32")
    v = session.read(layer, "v", start, stop, dtype="float32")
    first = session.start_token(layer) if start is None else start
    found = attend(q, session, layer, start=start, stop=stop, k_state=k_state, **options)
    options.pop("n_threads", None)
    np.testing.assert_allclose(found, reference(q, k, v, start=first, **options), atol=2e-5)
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(archive, sample, codec):
    session = session_of(archive, sample, CODECS[codec], block_tokens="auto")
    for layer in (0, 1):
        q = queries(sample, layer, 5)
        check(session, q, layer)
        check(session, q, layer, causal=True)
        check(session, q, layer, k_state="pre", scale=0.3)
        check(session, q, layer, causal=True, window=200, first_query=300, n_threads=2)
        check(session, q, layer, start=130, stop=401, window=3)
        one = attend(q[:, 0], session, layer)
        np.testing.assert_allclose(one, attend(q[:, :1], session, layer)[:, 0], atol=1e-6)
        assert one.dtype == np.float32


@pytest.mark.parametrize("codec", ["kvr1", "q8_0"])
def test_groups_and_numbers_of_queries(archive, sample, codec):
    session = session_of(archive, sample, CODECS[codec], 300)
    for group, n_queries in ((1, 1), (1, 300), (2, 33), (4, 16), (8, 1), (5, 3)):
        check(session, queries(sample, 1, n_queries, group), 1, causal=True)


@pytest.mark.parametrize("codec", ["kvr1", "q8_0"])
@pytest.mark.parametrize("block_tokens", [1, 16, 100, 512])
def test_lengths_and_blocks(archive, sample, codec, block_tokens):
    q = queries(sample, 0, 2)
    for n in (1, 2, 63, 64, 65, 127, 128, 129, 200):
        session = archive.create_session(
            f"{n}",
            model=sample.model,
            codec=CODECS[codec],
            block_tokens=block_tokens,
            fit_tokens=50,
        )
        session.append([x[:, :n] for x in sample.k], [x[:, :n] for x in sample.v])
        session.commit()
        check(session, q)


def test_empty_sessions_give_zeros(archive, sample):
    session = archive.create_session("s", model=sample.model, codec=GGML("q8_0"))
    q = queries(sample, 0, 4)
    np.testing.assert_array_equal(attend(q, session, 0, causal=True), np.zeros((9, 4, 64)))
    session.append(sample.k, sample.v)
    np.testing.assert_array_equal(attend(q[:, 0], session, 0), np.zeros((9, 64)))
    session.commit()
    check(session, q)
    # What lies behind every query is not seen.
    found = attend(q, session, 0, start=100, causal=True, first_query=98)
    np.testing.assert_array_equal(found[:, :2], 0)
    assert found[:, 2:].any(axis=-1).all()
    assert attend(q[:, :0], session, 0).shape == (9, 0, 64)


@pytest.mark.parametrize("codec", ["kvr1", "q8_0", "mixed", "raw"])
def test_after_forks_trims_and_truncations(archive, sample, codec):
    parent = session_of(archive, sample, CODECS[codec], 500)
    q = queries(sample, 0, 3)
    fork = parent.fork("fork", 333)
    check(fork, q, causal=True)
    fork.append([x[:, 500:] for x in sample.k], [x[:, 500:] for x in sample.v])
    fork.commit()
    check(fork, q)
    fork.trim_front(150)
    check(fork, q)
    check(fork, q, start=200, window=100)
    fork.truncate(400)
    check(fork, q)
    parent.truncate(77)
    check(parent, q)
    archive.delete_session("s")
    check(fork, q)


def test_ranges_appended_from_elsewhere(archive, sample):
    source = session_of(archive, sample, GGML("q8_0"), 400)
    session = session_of(archive, sample, GGML("q8_0"), 256, name="t")
    session.append_range(source, 128, 384)
    check(session, queries(sample, 1, 3), 1)


def layers_of(model, n, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        [
            rng.standard_normal((s.heads, n, s.head_dim)).astype(np.float32)
            if model.has_stream(i, kind) and (s := model.stream(i, kind))
            else None
            for i in range(model.n_layers)
        ]
        for kind in ("k", "v")
    )


@pytest.mark.parametrize("codec", ["kvr1", "q8_0", "f16"])
def test_every_geometry(archive, codec):
    half, other = (
        Rope.from_theta(1e4, 32),
        Rope.from_theta(1e6, 48, style="interleaved", scaling=1.5),
    )
    model = Model(
        "m",
        [
            LayerSpec(2, 64, 64),
            LayerSpec(4, 80, 16, rope=other),
            LayerSpec(8, 36, 48, rope=None),
            LayerSpec(2, 32, 128),
            LayerSpec(2, 64, 64, window=50),
        ],
        rope=half,
    )
    k, v = layers_of(model, 300)
    session = archive.create_session("s", model=model, codec=CODECS[codec], block_tokens=64)
    session.append(
        [x[:, 230:] if i == 4 else x for i, x in enumerate(k)],
        [x[:, 230:] if i == 4 else x for i, x in enumerate(v)],
    )
    session.commit()
    assert session.start_token(4) == 230
    rng = np.random.default_rng(1)
    for layer, spec in enumerate(model.layers):
        q = rng.standard_normal((2 * spec.heads, 7, spec.head_dim_k)).astype(np.float32)
        check(session, q, layer, causal=True)
        check(session, q, layer, k_state="pre")
        check(session, q, layer, window=40, first_query=250)


def test_layers_without_v(archive):
    model = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=64, head_dim_v=None)
    session = archive.create_session("s", model=model, codec=Raw())
    session.append([np.ones((1, 3, 64), np.float32)])
    session.commit()
    with pytest.raises(kvstore.InvalidArgument, match="no V"):
        attend(np.ones((1, 64), np.float32), session, 0)


def test_sinks(archive, sample):
    k, v = [x.astype(np.float32) for x in sample.k], sample.v
    k[0][:, :4] *= 100
    session = archive.create_session("s", model=sample.model, codec=GGML("q8_0"))
    session.append(k, v)
    session.commit()
    q = queries(sample, 0, 3) * 30
    scores = np.einsum(
        "htd,hd->ht", session.read(0, "k", k_state="post", dtype="float32"), q[::3, 0]
    )
    assert np.abs(scores / 8).max() > 1e4
    check(session, q)
    check(session, q, start=4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_of_queries(archive, sample, dtype):
    session = session_of(archive, sample, GGML("q8_0"), 200)
    check(session, queries(sample, 0, 3).astype(float_dtype(dtype)))


@pytest.mark.parametrize("codec", ["kvr1", "q8_0", "raw"])
def test_damaged_blocks_are_found(archive, sample, codec):
    session = session_of(archive, sample, CODECS[codec])
    q = queries(sample, 0, 2)
    before = attend(q, session, 0, stop=256)
    with archive._read() as snapshot:
        owner = archive._catalog.id(snapshot, "s")
    items, key = memory._stores["attention"].version.items, keys.frame_key(owner, 0, "v", 3)
    value = bytearray(items[key])
    value[500] ^= 1
    items[key] = bytes(value)
    with pytest.raises(kvstore.Corrupt, match="layer 0 v block 3"):
        attend(q, session, 0)
    np.testing.assert_array_equal(attend(q, session, 0, stop=256), before)
    attend(q, session, 1)


def test_arguments_are_checked(archive, sample):
    session = session_of(archive, sample, GGML("q8_0"), 200)
    q = queries(sample, 0, 2)
    bad = q.copy()
    bad[4, 1, 7] = np.nan
    for wrong, message in (
        (q[..., :63], r"\(9, 2, 63\).*head_dim=64"), (q[:8], r"\(8, 2, 64\).*3 KV heads"),
        (q[0, 0], r"shape \(64,\)"), (q[:0], "no heads"), (q[None], "shape"), (bad, r"\(4, 1, 7\)"),
        (q.astype(np.int32), "int32"), (q.astype(np.float64), "float64"),
    ):  # fmt: skip
        with pytest.raises(kvstore.InvalidArgument, match=message):
            attend(wrong, session, 0)
    for options in (
        {"scale": np.nan}, {"scale": np.inf}, {"scale": "1"}, {"scale": 1e39}, {"window": 0},
        {"window": 2.5}, {"first_query": -1}, {"first_query": 0.5}, {"start": 5, "stop": 4},
        {"stop": 201}, {"start": -1}, {"k_state": "both"}, {"n_threads": 0}, {"layer": 2},
        {"layer": None}, {"first_query": 1 << 70, "causal": True},
    ):  # fmt: skip
        with pytest.raises(kvstore.InvalidArgument):
            attend(q, session, **({"layer": 0} | options))
    for source in (None, "s", archive, q):
        with pytest.raises(kvstore.InvalidArgument, match="source"):
            attend(q, source, 0)
    archive.delete_session("s")
    with pytest.raises(kvstore.NotFound):
        attend(q, session, 0)


class FakeLayer:
    """Rows in memory, as a layer of a flat archive has them."""

    def __init__(self, k, v, k_scheme, v_scheme, rope=None, k_state="pre", start=0, step=100):
        self.k_state, self.start, self.stop = k_state, start, start + k.shape[1]
        self._specs = {
            "k": StreamSpec("k", k.shape[0], k.shape[2], rope),
            "v": StreamSpec("v", v.shape[0], v.shape[2]),
        }
        self._schemes = {"k": scheme_by_name(k_scheme), "v": scheme_by_name(v_scheme)}
        self._step = step
        rows = {"k": k, "v": v}
        self.rows = {
            kind: quantise(
                np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(
                    x.shape[1], x.shape[0] * x.shape[2]
                ),
                scheme,
            )
            for (kind, x), scheme in zip(rows.items(), self._schemes.values(), strict=True)
        }

    def spec(self, kind):
        return self._specs[kind]

    def scheme(self, kind):
        return self._schemes[kind]

    def values(self, kind):
        spec = self._specs[kind]
        flat = dequantise(self.rows[kind], self._schemes[kind])
        return flat.reshape(-1, spec.heads, spec.head_dim).transpose(1, 0, 2)

    def pieces(self, start, stop):
        for at in range(start, stop, self._step):
            lo, hi = at - self.start, min(at + self._step, stop) - self.start
            yield at, hi + self.start, self.rows["k"][lo:hi], self.rows["v"][lo:hi]


class FakeSession:
    def __init__(self, *layers):
        self._layers = layers

    def layer(self, layer):
        return self._layers[layer]


@pytest.mark.parametrize("k_state", ["pre", "post"])
def test_layers_of_rows(sample, k_state):
    rope = sample.model.rope
    layer = FakeLayer(
        sample.k[0].astype(np.float32),
        sample.v[0].astype(np.float32),
        "q8_0",
        "f16",
        rope,
        k_state,
        50,
    )
    k, v = layer.values("k"), layer.values("v")
    if k_state == "pre":
        k = from_coded(k, layer.spec("k"), "post", 50)
    q = queries(sample, 0, 4)
    for options in ({}, {"causal": True}, {"window": 60, "first_query": 400}):
        expected = reference(q, k, v, start=50, **options)
        for found in (
            attend(q, layer, **options),
            attend(q, FakeSession(None, layer), 1, n_threads=2, **options),
        ):
            np.testing.assert_allclose(found, expected, atol=2e-5)
    found = attend(q, layer, start=60, stop=61)
    np.testing.assert_allclose(found, reference(q, k[:, 10:11], v[:, 10:11], start=60), atol=2e-5)
    for start, stop in ((49, 60), (60, 59), (0, 5), (60, 50 + 646)):
        with pytest.raises(kvstore.InvalidArgument, match="the layer has"):
            attend(q, layer, start=start, stop=stop)
    with pytest.raises(kvstore.InvalidArgument):
        attend(q, layer, 0)
    with pytest.raises(kvstore.InvalidArgument):
        attend(q, FakeSession(layer))
    if k_state == "post":
        with pytest.raises(kvstore.InvalidArgument, match="after RoPE"):
            attend(q, layer, k_state="pre")
    empty = FakeLayer(k[:, :0], v[:, :0], "q8_0", "f16")
    np.testing.assert_array_equal(attend(q, empty), np.zeros(q.shape))


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_scheme(scheme, simd):
    # Any bytes will do whose scales are small.
    heads, n, dim, rows = 4, 70, 64, 3
    rng = np.random.default_rng(scheme.number)
    data = rng.integers(0, 256, (2, n, scheme.row_bytes(heads * dim)), dtype=np.uint8) & 0xBB
    k, v = dequantise(data, scheme).reshape(2, n, heads, dim).transpose(0, 2, 1, 3)
    q = rng.standard_normal((heads, rows, dim)).astype(np.float32)
    scale = 3 / np.abs(np.einsum("hrd,htd->hrt", q, k)).max()
    attention = Attention(q, dim, scale=scale, first=[0] * rows, last=[n] * rows, simd=simd)
    attention.add(Rows(data[0], scheme), Rows(data[1], scheme), 0, n_threads=1)
    expected = reference(q, k, v, start=0, scale=scale)
    np.testing.assert_allclose(attention.result(), expected, atol=1e-5 * np.abs(v).max())
