"""Plans on a device: the bits of the CPU, its errors, and nothing outside the outputs."""

from dataclasses import replace

import kvgpu
import ml_dtypes
import numpy as np
import pytest
from kvcodecs.codec import codec_for
from kvcodecs.errors import Corrupt, InvalidArgument, KvError
from kvcodecs.ggml import GGML
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import Plan
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope, to_coded
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import TKV1
from kvgpu.launches import Limits

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
CONFIGS = {
    "kvr1": KVR1(),
    "kvr1, no sinks": KVR1(sink=0, step=0.01),
    "tkv1": TKV1(),
    "tkv1, narrow lanes": TKV1(lane_channels=4),
    "raw": Raw(),
    "ggml": GGML("q8_0"),
}
ROPES = {
    "none": None,
    "half": Rope.from_theta(1e4, 16),
    "partial": Rope.from_theta(1e4, 10),
    "interleaved": Rope.from_theta(1e4, 16, style="interleaved"),
    "interleaved partial, scaled": Rope.from_theta(1e4, 6, style="interleaved", scaling=1.25),
}


class Stream:
    """A coded stream of a few blocks."""

    def __init__(self, config, *, heads=2, head_dim=16, n_tokens=100, rope=None, block=32, seed=0):
        self.spec = StreamSpec("k", heads, head_dim, rope)
        self.codec = codec_for(config)
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((heads, n_tokens, head_dim)) * rng.uniform(0.1, 4, head_dim)
        coded = to_coded((x + rng.normal(0, 3, head_dim)).astype(np.float32), self.spec)
        self.params = self.codec.fit(config, self.spec, lambda: [coded])
        self.rope = None if rope is None else rope.table(0, n_tokens)
        self.blocks = []
        for first in range(0, n_tokens, block):
            encoder = self.codec.encoder(self.params, first)
            part = np.ascontiguousarray(coded[:, first : first + block])
            encoder.push(part)
            self.blocks.append((first, part.shape[1], encoder.payload()))

    def add(self, plan, start, stop, out, *, rotated=False):
        for first, n, payload in self.blocks:
            lo, hi = max(start, first), min(stop, first + n)
            if lo < hi:
                plan.add(
                    self.codec, self.params, payload, first_token=first, n_tokens=n, start=lo,
                    stop=hi, out=out[:, lo - start : hi - start],
                    rope=self.rope if rotated else None, where=f"block at {first}",
                )  # fmt: skip
        return plan

    def decode(self, start, stop, dtype, *, rotated=False):
        out = np.zeros((self.spec.heads, stop - start, self.spec.head_dim), dtype)
        self.add(Plan(), start, stop, out, rotated=rotated).run(1)
        return out


def assert_same(x, y):
    assert x.dtype == y.dtype
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bits_of_the_cpu(gpu, config, rope):
    stream = Stream(config, rope=rope)
    for dtype in DTYPES:
        for start, stop in ((31, 33), (0, 97)):
            for rotated in {False, rope is not None}:
                want = stream.decode(start, stop, dtype, rotated=rotated)
                out = gpu.put(np.zeros_like(want))
                kvgpu.decode(stream.add(Plan(), start, stop, out, rotated=rotated))
                assert_same(gpu.get(out), want)


@pytest.mark.parametrize(
    ("heads", "head_dim", "n_tokens"), [(1, 2, 40), (3, 6, 70), (5, 64, 33), (16, 128, 20)]
)
@pytest.mark.parametrize("config", [KVR1(), TKV1()], ids=["kvr1", "tkv1"])
def test_all_shapes(gpu, config, heads, head_dim, n_tokens):
    """Rows that are no whole steps of a warp, and more components than its shared memory holds."""
    rope = Rope.from_theta(1e4, head_dim)
    stream = Stream(config, heads=heads, head_dim=head_dim, n_tokens=n_tokens, rope=rope)
    want = stream.decode(3, n_tokens, np.float16, rotated=True)
    out = gpu.put(np.zeros_like(want))
    kvgpu.decode(stream.add(Plan(), 3, n_tokens, out, rotated=True))
    assert_same(gpu.get(out), want)


def test_streams_of_all_codecs_in_one_plan(gpu):
    streams = [
        Stream(config, rope=ROPES["half"], seed=seed, head_dim=dim)
        for seed, (config, dim) in enumerate(
            [(config, dim) for config in CONFIGS.values() for dim in (16, 32)]
        )
    ]
    plan, outputs = Plan(), []
    for i, stream in enumerate(streams):
        outputs.append(gpu.put(np.zeros((2, 60, stream.spec.head_dim), DTYPES[i % 3])))
        stream.add(plan, 10, 70, outputs[-1], rotated=i % 2 == 0)
    kvgpu.decode(plan)
    for i, (stream, out) in enumerate(zip(streams, outputs, strict=True)):
        assert_same(gpu.get(out), stream.decode(10, 70, DTYPES[i % 3], rotated=i % 2 == 0))


@pytest.mark.parametrize(
    "limits",
    [Limits(1, 0), Limits(1, 4096), Limits(1, 227 << 10), Limits(200, 227 << 10)],
    ids=str,
)
def test_any_grid_gives_the_same_bits(gpu, limits):
    """Many blocks on few warps, with and without tables and rows in shared memory."""
    if not hasattr(gpu.device, "launched"):
        pytest.skip("a real device has the limits it has")
    gpu.device.limits = limits
    for config in (KVR1(), TKV1()):
        stream = Stream(config, n_tokens=400, block=8)
        want = stream.decode(0, 400, np.float16)
        out = gpu.put(np.zeros_like(want))
        kvgpu.decode(stream.add(Plan(), 0, 400, out))
        assert_same(gpu.get(out), want)


def test_strides_and_what_lies_beside(gpu):
    stream = Stream(KVR1(), rope=ROPES["half"])
    for config in CONFIGS.values():
        stream = Stream(config)
        for dtype in DTYPES:
            wide = np.full((5, 2, 90, 24), 7, dtype)
            array = gpu.put(wide)
            kvgpu.decode(stream.add(Plan(), 10, 75, array[3][:, 5:70, 4:20]))
            wide[3, :, 5:70, 4:20] = stream.decode(10, 75, dtype)
            assert_same(gpu.get(array), wide)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pages(gpu, config, layout):
    """A sequence in pages of a pool, in any order; other pages stay as they are."""
    stream = Stream(config, rope=ROPES["half"])
    shape = (12, 2, 8, 16) if layout == "HND" else (12, 8, 2, 16)
    numbers = np.random.default_rng(1).permutation(12)[:11]
    for dtype in DTYPES:
        pool = np.full(shape, 3, dtype)
        array = gpu.put(pool)
        paged = kvgpu.Paged(array, numbers, first_row=5, n_rows=80, layout=layout)
        assert paged.shape == (2, 80, 16)
        out = kvgpu.Destination().view(paged)
        kvgpu.decode(stream.add(Plan(), 15, 95, out, rotated=True))
        want = stream.decode(15, 95, dtype, rotated=True)
        by_head = pool if layout == "HND" else pool.transpose(0, 2, 1, 3)
        for row in range(80):
            page, at = divmod(5 + row, 8)
            by_head[numbers[page], :, at] = want[:, row]
        assert_same(gpu.get(array), pool)


def test_payloads_and_outputs_in_place_of_the_plans(gpu):
    stream = Stream(TKV1())
    want = stream.decode(0, 100, np.float16)
    other = np.zeros_like(want)
    plan = stream.add(Plan(), 0, 100, other)
    out = [gpu.put(np.zeros((2, n, 16), np.float16)) for _, n, _ in stream.blocks]
    resident = [gpu.put(np.frombuffer(payload, np.uint8)) for _, _, payload in stream.blocks]
    with pytest.raises(InvalidArgument, match=r"on the host: use Plan\.run, or give `out`"):
        kvgpu.decode(plan)
    for payloads in (resident, [bytearray(p) for _, _, p in stream.blocks]):
        kvgpu.decode(plan, payloads, out)
        for (first, n, _), array in zip(stream.blocks, out, strict=True):
            assert_same(gpu.get(array), want[:, first : first + n])
    assert not other.any()
    with pytest.raises(InvalidArgument, match="3 payloads for a plan of 4 blocks"):
        kvgpu.decode(plan, resident[:3], out)
    with pytest.raises(InvalidArgument, match="3 outputs for a plan of 4 blocks"):
        kvgpu.decode(plan, resident, out[:3])
    with pytest.raises(InvalidArgument, match="of shape"):
        kvgpu.decode(plan, resident, [*out[:3], out[0]])
    short = [gpu.put(np.zeros(3, np.uint8)), *resident[1:]]
    with pytest.raises(InvalidArgument, match="offset out of range"):
        kvgpu.decode(plan, short, out)


def test_a_decoding_is_done_more_than_once(gpu):
    stream = Stream(KVR1())
    want = stream.decode(0, 100, np.float32)
    payloads = [np.frombuffer(payload, np.uint8).copy() for _, _, payload in stream.blocks]
    out = gpu.put(np.zeros_like(want))
    plan = stream.add(Plan(), 0, 100, out)
    with kvgpu.Decoding(plan, payloads) as decoding:
        with pytest.raises(InvalidArgument, match="nothing is uploaded"):
            decoding.launch()
        with pytest.raises(InvalidArgument, match="nothing was launched"):
            decoding.wait()
        decoding.upload()
        for payload in payloads:
            payload[:] = 0  # they are on the device
        for _ in range(2):
            decoding.launch()
            decoding.wait()
            assert_same(gpu.get(out), want)
        decoding.upload()
        decoding.launch()
        with pytest.raises(Corrupt, match="block at 0"):
            decoding.wait()


@pytest.mark.parametrize("config", [KVR1(), TKV1()], ids=["kvr1", "tkv1"])
def test_damage_is_what_the_cpu_says(gpu, config):
    """Whatever is in the payloads: the same error, or the same bits."""
    stream = Stream(config, n_tokens=60)
    rng = np.random.default_rng(2)
    n_errors = 0
    for _ in range(50):
        damaged = []
        for first, n, payload in stream.blocks:
            data = np.frombuffer(payload, np.uint8).copy()
            for _ in range(rng.integers(0, 3)):
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            damaged.append((first, n, data.tobytes()))
        broken = Stream.__new__(Stream)
        broken.__dict__ = stream.__dict__ | {"blocks": damaged}
        out = gpu.put(np.zeros((2, 60, 16), np.float16))
        try:
            want = broken.decode(0, 60, np.float16)
        except KvError as error:
            n_errors += 1
            with pytest.raises(type(error)) as found:
                kvgpu.decode(broken.add(Plan(), 0, 60, out))
            assert str(found.value) == str(error)  # noqa: PT017
        else:
            kvgpu.decode(broken.add(Plan(), 0, 60, out))
            assert_same(gpu.get(out), want)
    assert n_errors > (8 if isinstance(config, KVR1) else 0)  # TKV1 takes most bits as values


@pytest.mark.parametrize("config", [KVR1(step=0.5), TKV1(step=0.5), Raw(), GGML("q8_0")], ids=str)
def test_overflow_is_what_the_cpu_says(gpu, config):
    spec = StreamSpec("v", 1, 32)
    x = np.full((1, 40, 32), 8e4, np.float32)
    stream = Stream.__new__(Stream)
    codec = codec_for(config)
    params = codec.fit(config, spec, lambda: [x])
    encoder = codec.encoder(params, 0)
    encoder.push(x)
    stream.__dict__ = {
        "spec": spec, "codec": codec, "params": params, "blocks": [(0, 40, encoder.payload())],
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="overflows float16") as expected:
        stream.decode(0, 40, np.float16)
    with pytest.raises(InvalidArgument) as found:
        kvgpu.decode(stream.add(Plan(), 0, 40, gpu.put(np.zeros((1, 40, 32), np.float16))))
    assert str(found.value) == str(expected.value)
    out = gpu.put(np.zeros((1, 40, 32), np.float32))
    kvgpu.decode(stream.add(Plan(), 0, 40, out))
    assert_same(gpu.get(out), stream.decode(0, 40, np.float32))


def test_a_large_plan_goes_up_in_pieces(gpu, monkeypatch):
    import kvgpu.device

    monkeypatch.setattr(kvgpu.device, "_PIECE_BYTES", 1000)
    for config in CONFIGS.values():
        stream = Stream(config, n_tokens=300, rope=ROPES["half"])
        want = stream.decode(0, 300, np.float32, rotated=True)
        out = gpu.put(np.zeros_like(want))
        kvgpu.decode(stream.add(Plan(), 0, 300, out, rotated=True))
        assert_same(gpu.get(out), want)


def test_no_table_reads_outside_its_buffers(gpu):
    """A plan out of range is refused before anything runs."""
    stream = Stream(KVR1())
    out = gpu.put(np.zeros((2, 100, 16), np.float32))
    plan = stream.add(Plan(), 0, 100, out)
    rows = plan.blocks.rows
    plan.blocks.rows = [rows[0], (*rows[1][:6], 10**6, *rows[1][7:]), *rows[2:]]
    with pytest.raises(InvalidArgument, match="plan: block 1"):
        kvgpu.decode(plan)
    plan.blocks.rows = rows
    tables, _ = next(iter(plan.blocks._tables.values()))
    plan.blocks._tables = {0: (replace(tables, heads=3), 0)}
    with pytest.raises(InvalidArgument, match="plan: block 0"):
        kvgpu.decode(plan)


def test_an_empty_plan(gpu):
    kvgpu.decode(Plan())
