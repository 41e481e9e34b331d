"""`attend` against attention in float64 over what `read` returns."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.attention import SIMD_LEVELS, Attention, Rows
from kvcodecs.frame import open_frame, pack_frame
from kvcodecs.ggml import SCHEMES, dequantise
from kvcodecs.spec import float_dtype
from kvtools.sample import load_sample

import kvstore
from kvstore import GGML, KVR1, TKV1, LayerSpec, Model, Raw, Rope, attend, flat, keys
from kvstore.backends import memory
from kvstore.flat import FlatLayer

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


@pytest.mark.parametrize("codec", ["kvr1", "q8_0", "mixed"])
def test_ranges_appended_from_elsewhere(archive, sample, codec):
    source = session_of(archive, sample, CODECS[codec], 400)
    session = session_of(archive, sample, CODECS[codec], 256, name="t")
    session.append_range(source, 128, 384)
    session.append_range(source, 31, 190)
    for layer in (0, 1):
        check(session, queries(sample, layer, 3), layer)
        check(session, queries(sample, layer, 3), layer, start=250, stop=530, causal=True)


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
        if codec == "kvr1" or layer == 4:
            continue
        with FlatLayer.anonymous(
            heads=spec.heads, head_dim=spec.head_dim_k, head_dim_v=spec.head_dim_v,
            rope=model.stream(layer, "k").rope, scheme=codec,
        ) as rows:  # fmt: skip
            rows.append(k[layer], v[layer])
            found, expected = (
                attend(q, *source, causal=True) for source in ((rows,), (session, layer))
            )
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layers_without_v(archive):
    model = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=64, head_dim_v=None)
    session = archive.create_session("s", model=model, codec=Raw())
    session.append([np.ones((1, 3, 64), np.float32)])
    session.commit()
    with pytest.raises(kvstore.InvalidArgument, match="no V"):
        attend(np.ones((1, 64), np.float32), session, 0)
    with FlatLayer.anonymous(heads=1, head_dim=64, head_dim_v=None) as layer:
        layer.append(np.ones((1, 3, 64), np.float32))
        with pytest.raises(kvstore.InvalidArgument, match="no V"):
            attend(np.ones((1, 64), np.float32), layer)


@pytest.mark.parametrize(
    "codec",
    [GGML("q8_0"), KVR1(step=0.5, sink=4, sink_div=16), TKV1(step=0.5, sink=4, sink_div=16)],
)
def test_sinks(archive, sample, codec):
    k, v = [x.astype(np.float32) for x in sample.k], sample.v
    k[0][:, :4] *= 100
    session = archive.create_session("s", model=sample.model, codec=codec)
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


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    counts = st.integers(1, 4)
    heads, group, n_queries, n = draw(counts), draw(counts), draw(counts), draw(st.integers(0, 90))
    dims = st.sampled_from([32, 64, 96])
    dim, dim_v, block, extra = draw(dims), draw(dims), draw(st.integers(1, 40)), draw(counts)
    rope = draw(st.sampled_from([None, Rope.from_theta(1e4, 32), Rope.from_theta(1e6, 16)]))
    codecs = st.sampled_from([Raw(), KVR1(step=0.1), TKV1(step=0.1), GGML("q8_0"), GGML("f16")])
    model = Model(name="m", layers=[LayerSpec(heads, dim, dim_v)], rope=rope)
    rng = np.random.default_rng(n)
    k, v = (rng.standard_normal((heads, n + extra, d)).astype(np.float32) for d in (dim, dim_v))
    memory.discard("shapes")
    with kvstore.open("memory:shapes", "a") as archive:
        codec = {"k": draw(codecs), "v": draw(codecs)}
        session = archive.create_session(
            "s", model=model, codec=codec, block_tokens=block, fit_tokens=draw(st.integers(1, 60))
        )
        session.append([k[:, :n]], [v[:, :n]])
        session.commit()
        start = draw(st.integers(0, n))
        q = rng.standard_normal((heads * group, n_queries, dim)).astype(np.float32)
        options = {
            "start": draw(st.none() | st.just(start)),
            "stop": draw(st.none() | st.integers(start, n)),
            "causal": draw(st.booleans()),
            "window": draw(st.none() | st.integers(1, 100)),
            "first_query": draw(st.integers(0, n + 3)),
            "k_state": draw(st.sampled_from(["pre", "post"])),
            "scale": draw(st.none() | st.floats(-2, 2)),
        }
        check(session, q, **options)
        session.append([k[:, n:]], [v[:, n:]])
        session.commit()
        check(session, q, **options | {"start": None, "stop": None})


def test_what_a_writer_does_meanwhile_is_not_seen(tmp_path, sample, monkeypatch):
    path, q = str(tmp_path / "a.kv"), queries(sample, 0, 2)
    for action in ("append", "truncate", "delete", "trim"):
        with kvstore.open(path, "a") as archive, kvstore.open(path) as other:
            session = session_of(archive, sample, GGML("q8_0"), 300, name=action)
            seen = other.session(action)
            before = attend(q, seen, 0, n_threads=1)

            def change(session=session, action=action, archive=archive):
                if action == "append":
                    session.append([x[:, 300:] for x in sample.k], [x[:, 300:] for x in sample.v])
                    session.commit()
                elif action == "truncate":
                    session.truncate(10)
                elif action == "trim":
                    session.trim_front(290)
                else:
                    archive.delete_session("delete")

            between_pieces(monkeypatch, change)
            np.testing.assert_array_equal(attend(q, seen, 0, n_threads=1), before)
            if action == "delete":
                with pytest.raises(kvstore.NotFound):
                    attend(q, seen, 0)
            else:
                check(seen, q)


def test_threads_attend_while_another_appends(archive, sample):
    session = session_of(archive, sample, GGML("q8_0"), 100)
    q = queries(sample, 0, 1)
    wrong = []

    def look():
        while session.n_committed < 500 and not wrong:
            n = session.n_committed
            found = attend(q, session, 0, stop=n)
            values = (session.read(0, x, 0, n, "post", "float32") for x in ("k", "v"))
            if np.abs(found - reference(q, *values, start=0)).max() > 2e-5:
                wrong.append(n)

    with ThreadPoolExecutor(3) as pool:
        looks = [pool.submit(look) for _ in range(3)]
        for lo in range(100, 500, 40):
            session.append(
                [x[:, lo : lo + 40] for x in sample.k], [x[:, lo : lo + 40] for x in sample.v]
            )
            session.commit()
        for future in looks:
            future.result()
    assert not wrong


def test_forked_children_attend(tmp_path, sample):
    path, q = str(tmp_path / "a.kv"), queries(sample, 0, 2)
    with kvstore.open(path, "a") as archive, flat.anonymous(sample.model) as rows:
        session = session_of(archive, sample, GGML("q8_0"), 300)
        rows.append(sample.k, sample.v)
        rows.commit()  # a child sees what is committed
        before = [attend(q, source, 0, n_threads=1) for source in (session, rows)]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(kvstore.Closed, match="before a fork"):
                    attend(q, session, 0)
                with kvstore.open(path) as again:
                    sources = again.session("s"), rows
                    found = [attend(q, source, 0, n_threads=1) for source in sources]
                    status = int(not np.array_equal(found, before))
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for source in (session, rows):
        with pytest.raises(kvstore.Closed):
            attend(q, source, 0)


def test_values_that_are_no_numbers_are_named(archive, sample):
    # Their checksums are right: only who decodes them can tell.
    session = session_of(archive, sample, GGML("q8_0"), 300)
    q = queries(sample, 0, 2)
    with archive._read() as snapshot:
        owner = archive._catalog.id(snapshot, "s")
    items, key = memory._stores["attention"].version.items, keys.frame_key(owner, 0, "k", 1)
    header, payload = open_frame(items[key])
    rows = bytearray(payload)
    rows[:2] = b"\x00\x7c"
    items[key] = pack_frame(
        codec=header.codec, kind=header.kind, owner=header.owner, layer=header.layer,
        first_token=header.first_token, n_tokens=header.n_tokens, payload=rows,
        header_tag=header.header_tag, error=header.error,
    )  # fmt: skip
    with pytest.raises(kvstore.Corrupt, match="layer 0 k block 1"):
        attend(q, session, 0)
    check(session, q, stop=128)
    with FlatLayer.anonymous(heads=3, head_dim=64) as layer:
        row = np.zeros((1, layer.bytes_per_row // 2), np.uint8)
        layer.append_rows({"k": row, "v": row})
        assert not attend(q, layer).any()
        wrong = row.copy()
        wrong[0, :2] = (0, 0x7C)
        layer.append_rows({"k": row, "v": wrong})
        with pytest.raises(kvstore.Corrupt, match=r"v rows \[0, 2\)"):
            attend(q, layer)


def test_queries_of_any_memory_layout(archive, sample):
    session = session_of(archive, sample, GGML("q8_0"), 200)
    q = queries(sample, 0, 4)
    expected = attend(q, session, 0, n_threads=1)
    many = np.zeros((9, 8, 128), np.float32)
    many[:, ::-2, ::2] = q
    for same in (np.asfortranarray(q), many[:, ::-2, ::2], q.astype(">f4")):
        np.testing.assert_array_equal(attend(same, session, 0, n_threads=1), expected)


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
        {"scale": 10**400}, {"scale": np.complex64(1)}, {"scale": True}, {"window": True},
        {"window": 2.5}, {"first_query": -1}, {"first_query": 0.5}, {"start": 5, "stop": 4},
        {"stop": 201}, {"start": -1}, {"k_state": "both"}, {"n_threads": 0}, {"layer": 2},
        {"layer": None}, {"first_query": 1 << 70, "causal": True}, {"n_threads": 1 << 32},
        {"causal": np.array([1, 2])}, {"causal": "x"}, {"scale": 10**5000},
    ):  # fmt: skip
        with pytest.raises(kvstore.InvalidArgument):
            attend(q, session, **({"layer": 0} | options))
    with pytest.raises(kvstore.InvalidArgument, match=r"k: tokens \[250, 200\) are not a range"):
        attend(q, session, 0, start=250)
    for options in ({"window": True}, {"first_query": 0.5}, {"start": 1.5}):
        with pytest.raises(kvstore.InvalidArgument, match="is no integer"):
            attend(q, session, 0, **options)
    with pytest.raises(kvstore.InvalidArgument, match="not an array"):
        attend([[1], [1, 2]], session, 0)
    for source in (None, "s", archive, q):
        with pytest.raises(kvstore.InvalidArgument, match="source"):
            attend(q, source, 0)
    archive.delete_session("s")
    with pytest.raises(kvstore.NotFound):
        attend(q, session, 0)


@pytest.mark.parametrize("k_state", ["pre", "post"])
@pytest.mark.parametrize("ring", [False, True])
def test_flat_layers(sample, k_state, ring):
    k, v = sample.k[0], sample.v[0]
    options = {"capacity": 64, "max_rows": 300 if ring else None, "store_k": k_state}
    with FlatLayer.anonymous(
        heads=3, head_dim=64, scheme={"k": "q8_0", "v": "f16"}, rope=sample.model.rope, **options
    ) as layer:
        q = queries(sample, 0, 4)
        np.testing.assert_array_equal(attend(q, layer), np.zeros(q.shape))
        layer.append(k[:, :250], v[:, :250], start=50)
        layer.drop_front(130)
        layer.append(k[:, 250:400], v[:, 250:400])
        for start, stop in (
            (None, None),
            (180, 450),
            (181, 450),
            (200, 201),
            (300, 440),
            (250, 250),
        ):
            lo, hi = start or 180, stop or 450
            k_rows, v_rows = layer.read_rows(lo, hi, k_state="post")
            for options in (
                {},
                {"causal": True},
                {"window": 60, "first_query": 400},
                {"scale": -2},
            ):
                expected = reference(q, k_rows, v_rows, start=lo, **options)
                for n_threads in (1, 2):
                    found = attend(q, layer, start=start, stop=stop, n_threads=n_threads, **options)
                    np.testing.assert_allclose(found, expected, atol=2e-5)
        for start, stop in ((260, 259), (-1, 300), (260, 451), (460, None)):
            with pytest.raises(kvstore.InvalidArgument, match=r"the layer has \[180, 450\)"):
                attend(q, layer, start=start, stop=stop)
        for start, stop in ((179, 260), (0, 5), (None, 170), (100, None)):
            with pytest.raises(
                kvstore.NotFound, match=r"\d\): dropped; the layer has \[180, 450\)"
            ):
                attend(q, layer, start=start, stop=stop)
        with pytest.raises(kvstore.InvalidArgument, match="leave it out"):
            attend(q, layer, 0)
        if k_state == "post":
            with pytest.raises(kvstore.InvalidArgument, match="keeps K after it; leave k_state"):
                attend(q, layer, k_state="pre")
        else:
            plain = layer.read_rows(180, 450, k_state="pre")
            found = attend(q, layer, k_state="pre")
            np.testing.assert_allclose(found, reference(q, *plain, start=180), atol=2e-5)


def test_flat_sessions(sample):
    with flat.anonymous(sample.model, scheme={"k": "q8_0", "v": "q5_1"}) as session:
        session.append([x[:, :300] for x in sample.k], [x[:, :300] for x in sample.v])
        q = queries(sample, 1, 3)
        for layer in (0, 1):
            k = session.read(layer, "k", k_state="post", dtype="float32")
            v = session.read(layer, "v", dtype="float32")
            expected = reference(q, k, v, start=0, causal=True)
            np.testing.assert_allclose(attend(q, session, layer, causal=True), expected, atol=2e-5)
        with pytest.raises(kvstore.InvalidArgument, match="which layer"):
            attend(q, session)
        with pytest.raises(kvstore.InvalidArgument, match=r"layer 1: .*the layer has \[0, 300\)"):
            attend(q, session, 1, stop=301)


def test_a_flat_layer_without_v():
    layers = (LayerSpec(2, 32, 32), LayerSpec(2, 32, None))
    with flat.anonymous(Model(name="m", layers=layers, rope=None)) as session:
        q = np.ones((2, 32), np.float32)
        for source, layer, where in ((session, 1, "layer 1"), (session.layer(1), None, "layer")):
            with pytest.raises(kvstore.InvalidArgument, match=f"{where}: the layer has no V"):
                attend(q, source, layer)


def test_a_decode_loop(tmp_path, sample):
    """A writer sees of a layer what it has now, a reader what all layers have committed."""
    q, path = queries(sample, 0, 1), tmp_path / "chat"

    def cut(layer, start, stop):
        return sample.k[layer][:, start:stop], sample.v[layer][:, start:stop]

    def seen(layer, start, stop):
        k, v = layer.read_rows(start, stop, k_state="post")
        return reference(q, k, v, start=start)

    with flat.create(path, sample.model, scheme="q8_0") as session:
        reader = flat.open(path)
        for token in range(3):
            for number in (0, 1):
                layer = session.layer(number)
                layer.append(*cut(number, token, token + 1))
                found = attend(q, session, number)
                np.testing.assert_allclose(found, seen(layer, 0, token + 1), atol=2e-5)
                assert not attend(q, reader, number).any()
        session.commit()
        committed = attend(q, session, 0)
        np.testing.assert_array_equal(attend(q, reader, 0), committed)
        # One layer is ahead, and durable: readers do not see it before the others are.
        session.layer(0).append(*cut(0, 3, 5))
        session.layer(0).commit()
        np.testing.assert_allclose(attend(q, session, 0), seen(session.layer(0), 0, 5), atol=2e-5)
        np.testing.assert_array_equal(attend(q, reader, 0), committed)
        with pytest.raises(kvstore.InvalidArgument, match="layer 0 has tokens up to 5, layer 1"):
            session.append(*zip(cut(0, 5, 6), cut(1, 5, 6), strict=True))
        session.layer(1).append(*cut(1, 3, 5))
        session.layer(0).drop_front(2)
        np.testing.assert_allclose(attend(q, session, 0), seen(session.layer(0), 2, 5), atol=2e-5)
        np.testing.assert_allclose(attend(q, session, 1), seen(session.layer(1), 0, 5), atol=2e-5)
        session.layer(0).commit()
        session.layer(1).commit()
        expected = seen(session.layer(1), 2, 5)
        np.testing.assert_allclose(attend(q, reader, 1), expected, atol=2e-5)
        reader.close()


@pytest.mark.parametrize("how", ["dropped", "taken back"])
@pytest.mark.parametrize("pread", [False, True])
def test_rows_that_are_written_over_meanwhile(tmp_path, sample, monkeypatch, how, pread):
    path, rope = tmp_path / "layer", sample.model.rope
    k, v = sample.k[0], sample.v[0]
    with FlatLayer.create(path, heads=3, head_dim=64, rope=rope, max_rows=100) as writer:
        writer.append(k[:, :100], v[:, :100])
        writer.commit()

        def write_over():
            if how == "dropped":
                writer.drop_front(90)
            else:
                writer.take_back(10)
            writer.append(k[:, 200:280], v[:, 200:280])
            writer.commit()

        with FlatLayer.open(path, pread=pread) as layer:
            q = queries(sample, 0, 1)
            between_pieces(monkeypatch, write_over)
            with pytest.raises(kvstore.NotFound, match=r"while they were read|dropped"):
                attend(q, layer, start=0)
            between_pieces(monkeypatch, write_over)
            found = attend(q, layer)
            rows = layer.read_all(k_state="post")
            np.testing.assert_allclose(found, reference(q, *rows, start=layer.start), atol=2e-5)
            between_pieces(monkeypatch, write_over, 99)
            with pytest.raises(kvstore.NotFound, match=r"while they were read|dropped"):
                attend(q, layer)


def between_pieces(monkeypatch, action, times=1):
    """Do something so many times, before a piece of an attention is added."""
    add, waiting = Attention.add, [action] * times

    def add_after(self, *args, **options):
        if waiting:
            waiting.pop()()
        return add(self, *args, **options)

    monkeypatch.setattr(Attention, "add", add_after)


def wide(sample, n=300):
    """K and V of one layer with four heads: rows of 256 channels, whole blocks of every scheme."""
    model = Model.uniform(
        name="wide", n_layers=1, n_kv_heads=4, head_dim=64, rope=sample.model.rope
    )
    return model, *(np.concatenate([x[0], x[1][:1]])[:, :n] for x in (sample.k, sample.v))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_scheme_in_sessions(archive, sample, scheme):
    model, k, v = wide(sample)
    other = SCHEMES[(SCHEMES.index(scheme) + 5) % len(SCHEMES)]
    codec = {"k": GGML(scheme.name), "v": GGML(other.name)}
    session = archive.create_session("s", model=model, codec=codec, block_tokens=48)
    session.append([k[:, :201]], [v[:, :201]])
    session.commit()
    taken = archive.create_session("t", model=model, codec=codec, block_tokens=48)
    taken.append([k[:, :30]], [v[:, :30]])
    taken.append_range(session, 48, 150)
    session.append([k[:, 201:]], [v[:, 201:]])
    session.commit()
    fork = session.fork("f", 111)
    q = np.repeat(k[:, [7, 250]].astype(np.float32), 2, axis=0)
    check(session, q, causal=True)
    check(session, q, window=100, start=20, stop=201, k_state="pre")
    check(taken, q, first_query=60, window=50)
    check(fork, q[:, :1])
    with flat.anonymous(model, scheme={"k": scheme.name, "v": other.name}) as rows:
        rows.append([k], [v])
        k_rows, v_rows = rows.layer(0).read_rows(0, 300, k_state="post")
        found = attend(q, rows, 0, causal=True)
        np.testing.assert_allclose(
            found, reference(q, k_rows, v_rows, start=0, causal=True), atol=2e-5
        )


@pytest.mark.parametrize("backend", ["", "zarr:"])
@pytest.mark.parametrize("codec", ["kvr1", "q8_0"])
def test_every_backend(tmp_path, sample, codec, backend):
    with kvstore.open(f"{backend}{tmp_path / 'a'}", "a") as archive:
        session = session_of(archive, sample, CODECS[codec], 300)
        check(session, queries(sample, 0, 3), causal=True)
        check(session.fork("f", 140), queries(sample, 1, 1), 1)
        session.trim_front(130)
        check(session, queries(sample, 1, 1), 1, window=100)


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
