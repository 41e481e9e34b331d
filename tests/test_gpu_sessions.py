"""Reading sessions to a device: the bits of a read to the host, whatever the session is."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import kvgpu
import ml_dtypes
import numpy as np
import pytest
from kvcodecs.kvr1.codec import CODEC
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import TkvFile

import kvstore
from kvstore import Corrupt, InvalidArgument

GOLDEN = Path(__file__).parent / "golden"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def assert_same(x, y):
    assert x.dtype == y.dtype
    assert x.tobytes() == y.tobytes()


def ranges(session, layer, kind):
    """Some ranges of a stream: all of it, one token, and over the borders of blocks."""
    first, stop = session.start_token(layer, kind), session.n_committed
    yield None, None
    if stop - first > 20:
        yield first + 1, stop - 1
        yield first + 15, first + 18
        yield stop - 1, stop


def test_every_kind_of_session(gpu, sessions_of_every_kind):
    """Forks, trimmed and short sessions, windows, no V, shifted ranges, all codecs."""
    n_read = 0
    with kvstore.open(sessions_of_every_kind, "r") as archive:
        for entry in archive.sessions():
            session = archive.session(entry.name)
            for layer in range(session.model.n_layers):
                for kind in ("k", "v"):
                    if not session.model.has_stream(layer, kind):
                        continue
                    for at, (start, stop) in enumerate(ranges(session, layer, kind)):
                        state = "post" if (at + layer) % 2 else "pre"
                        args = layer, kind, start, stop, state, DTYPES[at % 3]
                        want = session.read(*args, position_offset=7 * at)
                        out = session.read(*args, position_offset=7 * at, device="cuda")
                        assert_same(gpu.get(out), want)
                        n_read += 1
    assert n_read > 100


def test_every_layer_at_once(gpu, sessions_of_every_kind):
    with kvstore.open(sessions_of_every_kind, "r") as archive:
        for entry in archive.sessions():
            session = archive.session(entry.name)
            want = session.read_all(k_state="post")
            found = session.read_all(k_state="post", device="cuda")
            for x, y in zip(found, want, strict=True):
                assert isinstance(x, list) == isinstance(y, list)
                if not isinstance(x, list):
                    x, y = [x], [y]
                for a, b in zip(x, y, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        assert_same(gpu.get(a), b)


@pytest.mark.parametrize("name", ["format1", "format2"])
def test_golden_archives(gpu, name, tmp_path):
    path = shutil.copytree(GOLDEN / "archives" / f"{name}.kv", tmp_path / "a.kv")
    with kvstore.open(path, "r") as archive:
        for session in (archive.session(entry.name) for entry in archive.sessions()):
            for layer in range(session.model.n_layers):
                for kind in ("k", "v"):
                    if session.model.has_stream(layer, kind):
                        want = session.read(layer, kind, k_state="post")
                        found = session.read(layer, kind, k_state="post", device="cuda")
                        assert_same(gpu.get(found), want)


@pytest.mark.parametrize("path", sorted((GOLDEN / "tkv1").glob("*.tkv")), ids=lambda p: p.stem)
def test_golden_files_of_tkv1(gpu, path, monkeypatch):
    file = TkvFile.parse(path.read_bytes())
    want = file.decode()
    monkeypatch.setattr(Plan, "run", lambda plan, *args: gpu.run(plan))
    assert_same(file.decode(), want)


def test_golden_files_of_kvr1(gpu):
    for case in json.loads((GOLDEN / "kvr1" / "MANIFEST.json").read_text()):
        data = (GOLDEN / "kvr1" / f"{case['name']}.kvr1").read_bytes()
        heads, n_tokens, head_dim = case["shape"]
        cuts = np.cumsum([0, case["header_bytes"], *case["payload_bytes"]]).tolist()
        header, *payloads = (data[lo:hi] for lo, hi in pairwise(cuts))
        params = CODEC.unpack(StreamSpec("v", heads, head_dim), header)
        out = np.zeros(case["shape"], np.float32)
        plan = Plan()
        for at, payload in zip(range(0, n_tokens, case["block_tokens"]), payloads, strict=True):
            n = min(case["block_tokens"], n_tokens - at)
            first = case["first_token"] + at
            plan.add(
                CODEC, params, payload, first_token=first, n_tokens=n, start=first,
                stop=first + n, out=out[:, at : at + n],
            )  # fmt: skip
        plan.run()
        want = out.copy()
        out[:] = 0
        gpu.run(plan)
        assert_same(out, want)


@pytest.fixture
def session(tmp_path):
    model = kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=2, head_dim=16, rope=kvstore.Rope.from_theta(1e4, 16)
    )
    x = np.random.default_rng(0).standard_normal((2, 2, 2, 300, 16), dtype=np.float32)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        with archive.create_session("s", model=model, block_tokens=32, fit_tokens=32) as session:
            session.append(*x)
            session.commit()
        yield archive.session("s")


def test_outputs_of_the_caller(gpu, session):
    want = session.read(1, "k", 10, 200, "post", "float16")
    out = gpu.put(np.zeros_like(want))
    assert session.read(1, "k", 10, 200, "post", out=out) is out
    assert_same(gpu.get(out), want)
    pool = gpu.put(np.zeros((30, 2, 8, 16), np.float16))
    paged = kvgpu.Paged(pool, np.arange(29, 4, -1), n_rows=190, first_row=3, layout="HND")
    assert session.read(1, "k", 10, 200, "post", out=paged) is paged
    rows = gpu.get(pool)[29:4:-1].transpose(1, 0, 2, 3).reshape(2, 200, 16)
    assert_same(np.ascontiguousarray(rows[:, 3:193]), want)
    with pytest.raises(InvalidArgument, match=r"layer 1 k: out is float16 \(2, 190, 16\)"):
        session.read(1, "k", 10, 201, out=out)
    whole = kvgpu.Paged(pool, np.arange(29, 4, -1), layout="HND")
    with pytest.raises(InvalidArgument, match=r"\(2, 200, 16\), expected .*; .* n_rows those"):
        session.read(1, "k", 10, 200, out=whole)
    with pytest.raises(InvalidArgument, match="layer 1 k: out is float16"):
        session.read(1, "k", 10, 200, dtype="float32", out=out)
    with pytest.raises(InvalidArgument, match="float32, float16 or bfloat16 on the device"):
        session.read(1, "k", 10, 200, out=np.zeros((2, 190, 16), np.float16), device="cuda")
    for array in (out, paged):
        with pytest.raises(InvalidArgument, match="device 'cpu' writes NumPy arrays"):
            session.read(1, "k", 10, 200, out=array, device="cpu")
    with pytest.raises(InvalidArgument, match=r"device 'cuda:0': .*Device\(i\)\.use"):
        session.read(1, "k", device="cuda:0")


@pytest.mark.parametrize("form", ["arrays", "lists", "pages"])
def test_outputs_of_the_caller_for_every_layer(gpu, session, form):
    want = session.read_all(3, 290, k_state="post", dtype="float16")
    if form == "pages":
        table = np.arange(39, 3, -1)
        pools = [[gpu.put(np.zeros((40, 2, 8, 16), np.float16)) for _ in x] for x in want]
        given = tuple(
            [kvgpu.Paged(pool, table, n_rows=287, layout="HND") for pool in kind] for kind in pools
        )
    else:
        given = tuple(gpu.put(np.zeros_like(x)) for x in want)
        if form == "lists":
            given = tuple([x[i] for i in range(2)] for x in given)
    found = session.read_all(3, 290, k_state="post", out=given)
    assert found[0] is given[0]
    assert found[1] is given[1]
    for kind in range(2):
        for layer in range(2):
            if form == "pages":
                rows = gpu.get(pools[kind][layer])[table].transpose(1, 0, 2, 3).reshape(2, 288, 16)
                assert_same(np.ascontiguousarray(rows[:, :287]), want[kind][layer])
            else:
                assert_same(gpu.get(found[kind][layer]), want[kind][layer])
    with pytest.raises(InvalidArgument, match=r"layer 0 k: out is float16 \(2, 287, 16\)"):
        session.read_all(3, 291, out=given)
    on_host = (given[0], np.zeros_like(want[1]))
    with pytest.raises(InvalidArgument, match="float32, float16 or bfloat16 on the device"):
        session.read_all(3, 290, out=on_host)


def test_all_layers_go_up_together(gpu, session, monkeypatch):
    """One plan for what the host reads in many: a GPU wants many blocks at a time."""
    plans = []
    add = kvgpu.Queue.add
    monkeypatch.setattr(
        kvgpu.Queue, "add", lambda queue, plan: (plans.append(plan), add(queue, plan))
    )
    monkeypatch.setattr(kvstore.destination.Host, "batch_bytes", 1000)
    session.read_all(k_state="post", device="cuda")
    assert len(plans) == 1
    n_blocks, n_ropes = len(plans[0].targets.outputs), len(plans[0].targets.ropes)
    assert n_blocks == 4 * 10
    assert n_ropes == 10
    # They count once: tables are 32 tokens of 8 pairs, 2 KiB, and payloads not much more.
    n_bytes = sum(len(part) for part in plans[0].targets.payloads)
    n_bytes += sum(a.nbytes + b.nbytes for a, b in plans[0].targets.ropes)
    for limit, n_plans in ((n_bytes, 1), (n_bytes - 1, 2)):
        plans.clear()
        monkeypatch.setattr(kvgpu.Destination, "batch_bytes", limit)
        session.read_all(k_state="post", device="cuda")
        assert len(plans) == n_plans


def test_reads_are_done_in_the_stream_given(gpu, session, monkeypatch):
    asked = []
    launch = kvgpu.Decoding.launch

    def note(decoding, stream=None):
        asked.append(stream)
        launch(decoding, stream)

    monkeypatch.setattr(kvgpu.Decoding, "launch", note)
    given = 1  # the legacy stream, as a number
    want = session.read(0, "k")
    assert_same(gpu.get(session.read(0, "k", device="cuda", stream=given)), want)
    session.read_all(device="cuda", stream=given)
    assert asked
    assert set(asked) == {given}


def test_a_long_read_is_done_in_batches(gpu, session, monkeypatch):
    """Two plans are under way at a time, and memory goes from one to the next."""
    want = session.read_all(3, 299, k_state="post")
    for limit in (1, 1000, 5000):
        monkeypatch.setattr(kvgpu.Destination, "batch_bytes", limit)
        found = session.read_all(3, 299, k_state="post", device="cuda")
        for x, y in zip(found, want, strict=True):
            assert_same(gpu.get(x), y)


def test_an_error_in_a_batch_ends_the_read(gpu, session, monkeypatch):
    """The memory of those under way is given back: the next read works."""
    monkeypatch.setattr(kvgpu.Destination, "batch_bytes", 1000)
    check, calls = Plan.check, []
    n_free = len(gpu.device.slots._free)

    def fail(plan, failures):
        calls.append(plan)
        if len(calls) == 4:
            raise Corrupt("fourth")
        check(plan, failures)

    monkeypatch.setattr(Plan, "check", fail)
    with pytest.raises(Corrupt, match="fourth"):
        session.read_all(device="cuda")
    want = session.read(0, "k")
    assert_same(gpu.get(session.read(0, "k", device="cuda")), want)
    assert len(gpu.device.slots._free) == max(n_free, 2)


def test_overflow_names_the_block(gpu, tmp_path):
    model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=16)
    x = np.full((2, 1, 1, 40, 16), 1e5, np.float32)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        with archive.create_session("s", model=model, codec=kvstore.Raw()) as session:
            session.append(*x)
            session.commit()
        with pytest.raises(InvalidArgument, match=r"layer 0 k.*overflows float16"):
            session.read(0, "k", dtype="float16", device="cuda")
