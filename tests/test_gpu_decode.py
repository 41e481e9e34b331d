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
from kvgpu.device import Slot, using
from kvgpu.host_device import HostArray, HostDevice, HostStream
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

    def __init__(
        self, config, *, heads=2, head_dim=16, n_tokens=100, rope=None, block=32, seed=0, scale=1
    ):
        self.spec = StreamSpec("k", heads, head_dim, rope)
        self.codec = codec_for(config)
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((heads, n_tokens, head_dim)) * rng.uniform(0.1, 4, head_dim)
        x = scale * (x + rng.normal(0, 3, head_dim))
        coded = to_coded(x.astype(np.float32), self.spec)
        self.params = self.codec.fit(config, self.spec, lambda: [coded])
        self.shape = coded.shape
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


def with_blocks(stream, blocks):
    """Return the stream with other blocks."""
    other = Stream.__new__(Stream)
    other.__dict__ = stream.__dict__ | {"blocks": blocks}
    return other


def damaged(stream, rng, share=1.0):
    """Return the stream with bits flipped in such a share of its blocks, or in fewer."""
    blocks = []
    for first, n, payload in stream.blocks:
        data = np.frombuffer(payload, np.uint8).copy()
        for _ in range(rng.integers(0, 3) * (rng.random() < share)):
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        blocks.append((first, n, data.tobytes()))
    return with_blocks(stream, blocks)


def planned(stream, whole):
    """Return the stream with the blocks of `whole` where a plan does not take its own."""
    out = np.zeros(stream.shape, np.float32)
    return with_blocks(
        stream,
        [
            good if error_of(with_blocks(stream, [bad]).add, Plan(), 0, out.shape[1], out) else bad
            for bad, good in zip(stream.blocks, whole.blocks, strict=True)
        ],
    )


def error_of(action, *args):
    """Return kind and text of the error that an action ends with, None without one."""
    try:
        action(*args)
    except KvError as error:
        return type(error), str(error)
    return None


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


# Pretended limits, and the kernel of KVR1 that they make it.
GRIDS = {
    "all rows in scratch": (Limits(1, 0), "kv_decode_blocks"),
    "large rows in scratch": (Limits(1, 8 << 10), "kv_decode_blocks"),
    "tables in shared memory": (Limits(1, 163 << 10), "kv_decode_blocks_compact"),
    "a warp for each block": (Limits(200, 227 << 10), "kv_decode_blocks"),
}


@pytest.fixture(scope="module", params=[KVR1(), TKV1(lane_channels=2)], ids=["kvr1", "tkv1"])
def many_blocks(request):
    """More blocks and lanes than a processor has warps and threads, of small rows and large ones.

    Neither are whole steps of a warp.
    """
    rope = Rope.from_theta(1e4, 14)
    return [
        Stream(request.param, heads=heads, head_dim=14, n_tokens=n, rope=rope, block=4)
        for heads, n in ((3, 200), (90, 9))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("limits", "kernel"), GRIDS.values(), ids=GRIDS)
def test_any_grid_gives_the_same_bits(gpu, monkeypatch, many_blocks, limits, kernel, dtype):
    """Warps and threads that decode one block after the other, damaged ones among them."""
    if not isinstance(gpu.device, HostDevice):
        room = gpu.device.limits.shared_bytes
        if limits.n_processors == 1 and room < limits.shared_bytes:
            pytest.skip("tables do not fit the shared memory of this device")
        limits = replace(limits, shared_bytes=min(limits.shared_bytes, room))
    monkeypatch.setattr(gpu.device, "limits", limits)
    rng, errors = np.random.default_rng(5), []
    for streams in (many_blocks, [planned(damaged(s, rng, 0.2), s) for s in many_blocks]):
        wanted = [np.zeros(stream.shape, dtype) for stream in streams]
        outputs = [gpu.put(out) for out in wanted]
        plans = Plan(), Plan()
        for plan, arrays in zip(plans, (wanted, outputs), strict=True):
            for stream, out in zip(streams, arrays, strict=True):
                stream.add(plan, 0, out.shape[1], out, rotated=True)
        error = error_of(plans[0].run)
        with kvgpu.Decoding(plans[1]) as decoding:
            found = {launch.kernel for launch in decoding._staging.launches}
            assert found == ({kernel} if plans[1].blocks.rows else {"kv_decode_lanes"})
            decoding.upload()
            decoding.launch()
            assert error_of(decoding.wait) == error
        for whole, stream, out, want in zip(many_blocks, streams, outputs, wanted, strict=True):
            found = gpu.get(out)
            for block in set(whole.blocks) & set(stream.blocks):
                rows = slice(block[0], block[0] + block[1])
                assert_same(found[:, rows], want[:, rows])
        errors.append(error)
    # TKV1 takes most bits as values.
    assert errors[0] is None
    assert errors[1] is not None or not plan.blocks.rows


@pytest.mark.parametrize("config", [KVR1(), TKV1()], ids=["kvr1", "tkv1"])
def test_floats_below_the_normal_ones(gpu, config):
    """Rotated values that flush-to-zero, which CuPy asks its compiler for, would change."""
    stream = Stream(config, rope=ROPES["half"], scale=1e-36)
    for dtype in DTYPES:
        want = stream.decode(0, 100, dtype, rotated=True)
        out = gpu.put(np.zeros_like(want))
        kvgpu.decode(stream.add(Plan(), 0, 100, out, rotated=True))
        assert_same(gpu.get(out), want)
    small = np.abs(stream.decode(0, 100, np.float32, rotated=True))
    assert ((small > 0) & (small < np.finfo(np.float32).tiny)).any()


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
        broken = damaged(stream, rng)
        want, out = np.zeros(stream.shape, np.float16), gpu.put(np.zeros(stream.shape, np.float16))
        error = error_of(lambda b, x: b.add(Plan(), 0, 60, x).run(), broken, want)
        assert error_of(lambda b, x: kvgpu.decode(b.add(Plan(), 0, 60, x)), broken, out) == error
        if error is None:
            assert_same(gpu.get(out), want)
        else:
            n_errors += 1
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


@pytest.mark.parametrize("config", [KVR1(), TKV1(), Raw(), GGML("q8_0")], ids=str)
def test_rope_tables_of_other_forms(gpu, config):
    """Converted once for all executors; two in one plan may share their cosines."""
    dim = 32
    stream = Stream(config, head_dim=dim, rope=Rope.from_theta(1e4, dim))
    table = stream.rope
    want = stream.decode(0, 100, np.float32, rotated=True)
    gaps = [np.repeat(part, 2, 1)[:, ::2] for part in table[1:]]
    for cos, sin in (
        (table.cos.astype(np.float64), table.sin.astype(np.float64)),
        (table.cos, table.sin.astype(np.float64)),
        gaps,
    ):
        stream.rope = table._replace(cos=cos, sin=sin)
        assert_same(stream.decode(0, 100, np.float32, rotated=True), want)
        out = gpu.put(np.zeros_like(want))
        kvgpu.decode(stream.add(Plan(), 0, 100, out, rotated=True))
        assert_same(gpu.get(out), want)
    for sin in (table.sin[:50], table.sin[:, :4], table.sin[0], [["x"]]):
        stream.rope = table._replace(sin=sin)
        for out in (np.zeros_like(want), gpu.put(np.zeros_like(want))):
            with pytest.raises(InvalidArgument, match="rope table"):
                stream.add(Plan(), 0, 100, out, rotated=True)
    plan, outs, wants = Plan(), [], []
    for sin in (table.sin, -table.sin):
        stream.rope = table._replace(sin=sin)
        wants.append(stream.decode(0, 100, np.float32, rotated=True))
        outs.append(gpu.put(np.zeros_like(want)))
        stream.add(plan, 0, 100, outs[-1], rotated=True)
    kvgpu.decode(plan)
    assert_same(gpu.get(outs[0]), wants[0])
    assert_same(gpu.get(outs[1]), wants[1])
    assert not np.array_equal(*wants)


class Failing(HostDevice):
    """Notes when its work is waited for; one kernel of it does not start."""

    def __init__(self, library):
        super().__init__(library)
        self.events, self.fails = [], ()
        device = self

        class Event:
            def wait(self):
                device.events.append("wait")

        class Noting(HostStream):
            def launch(self, launch, base):
                if launch.kernel in device.fails:
                    raise RuntimeError("no kernel")
                device.events.append("launch")
                super().launch(launch, base)

            def record(self):
                device.events.append("record")
                return Event()

        self._stream, self.uploads = Noting(self), Noting(self)

    def stream(self, stream):
        return self._stream


def test_memory_comes_back_only_when_kernels_are_done(host_library):
    """Whatever is raised after the first launch, and however the decoding ends."""
    streams = [Stream(TKV1()), Stream(KVR1())]
    device = Failing(host_library)
    with using(device):
        plan = Plan()
        for stream in streams:
            stream.add(plan, 0, 100, HostArray(np.zeros((2, 100, 16), np.float16)))
        kvgpu.decode(plan)
        device.fails = ("kv_decode_blocks", "kv_decode_blocks_compact")
        device.events.clear()
        decoding = kvgpu.Decoding(plan)
        decoding.upload()
        with pytest.raises(RuntimeError, match="no kernel"):
            decoding.launch()
        assert device.events[-2:] == ["launch", "record"]
        with pytest.raises(InvalidArgument, match="nothing was launched"):
            decoding.wait()
        decoding.close()
        assert device.events[-1] == "wait"
        device.fails = ()
        dropped = kvgpu.Decoding(plan)
        dropped.upload()
        dropped.launch()
        assert not device.slots._free
        del dropped
        assert device.events[-1] == "wait"
        assert len(device.slots._free) == 1


def test_memory_for_statuses_comes_before_kernels(host_library, monkeypatch):
    device, stream = HostDevice(host_library), Stream(KVR1())
    with using(device):
        plan = stream.add(Plan(), 0, 100, HostArray(np.zeros((2, 100, 16), np.float16)))
        with kvgpu.Decoding(plan) as decoding:
            decoding.upload()
            monkeypatch.setattr(Slot, "status", lambda slot, n: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                decoding.launch()
            assert not device.launched


def test_half_an_upload_is_not_decoded(host_library, monkeypatch):
    device, stream = HostDevice(host_library), Stream(KVR1())
    with using(device):
        plan = stream.add(Plan(), 0, 100, HostArray(np.zeros((2, 100, 16), np.float16)))
        with kvgpu.Decoding(plan) as decoding:
            decoding.upload()
            monkeypatch.setattr(device.uploads, "upload", lambda host, address: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                decoding.upload()
            with pytest.raises(InvalidArgument, match="nothing is uploaded"):
                decoding.launch()
            # What was to be uploaded may be on its way: its memory is waited for.
            assert all(event is not None for _, event in decoding._slot._pieces)


def test_a_decoding_belongs_to_its_device(host_library):
    stream = Stream(KVR1())
    with using(HostDevice(host_library)):
        plan = stream.add(Plan(), 0, 100, HostArray(np.zeros((2, 100, 16), np.float16)))
        decoding = kvgpu.Decoding(plan)
        decoding.upload()
    with using(HostDevice(host_library)):
        for start in (decoding.upload, decoding.launch):
            with pytest.raises(InvalidArgument, match="made for another device"):
                start()


def failing_streams():
    """KVR1 blocks that are damaged, and ggml rows that overflow float16."""
    damaged, large = Stream(KVR1()), Stream(GGML("q8_0"), head_dim=32)
    first, n, payload = damaged.blocks[0]
    damaged.blocks[0] = (first, n, payload[:-20] + bytes([255] * 20))
    x = np.full((2, 100, 32), 8e4, np.float32)
    encoder = large.codec.encoder(large.params, 0)
    encoder.push(x)
    large.blocks = [(0, 100, encoder.payload())]
    return damaged, large


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_error_is_that_of_the_cpu(gpu, order):
    """Damage that kernels find comes before an overflow that the host finds."""
    streams = failing_streams()[::order]

    def plan(put):
        made = Plan()
        for stream in streams:
            stream.add(made, 0, 100, put(np.zeros((2, 100, stream.spec.head_dim), np.float16)))
        return made

    with pytest.raises(Corrupt) as expected:
        plan(lambda out: out).run(1)
    with pytest.raises(Corrupt) as found:
        kvgpu.decode(plan(gpu.put))
    assert str(found.value) == str(expected.value)


def test_a_queue_raises_the_first_error(gpu):
    """Not that of a plan, or of what is done, after the plan that fails."""
    damaged, _ = failing_streams()
    fine = Stream(KVR1())

    def plan(stream):
        return stream.add(Plan(), 0, 100, gpu.put(np.zeros((2, 100, 16), np.float16)))

    on_host = fine.add(Plan(), 0, 100, np.zeros((2, 100, 16), np.float16))

    def run(first, then):
        with kvgpu.Queue() as queue:
            queue.add(plan(first))
            then(queue)

    def fail(queue):
        raise InvalidArgument("of what comes later")

    for then in (fail, lambda queue: queue.add(on_host)):
        with pytest.raises(InvalidArgument):
            run(fine, then)
        with pytest.raises(Corrupt):
            run(damaged, then)


def test_a_queue_takes_nothing_that_nobody_waits_for(gpu):
    fine = Stream(KVR1())
    plan = fine.add(Plan(), 0, 100, gpu.put(np.zeros((2, 100, 16), np.float16)))
    with kvgpu.Queue() as queue:
        pass
    with pytest.raises(InvalidArgument, match="has ended"):
        queue.add(plan)
    with pytest.raises(InvalidArgument, match="n_threads -1"):
        kvgpu.Queue(-1)


def test_a_decoding_that_was_not_made_holds_nothing():
    kvgpu.Decoding.__new__(kvgpu.Decoding).__del__()


def test_odd_payloads(gpu):
    stream = Stream(KVR1())
    want = stream.decode(0, 100, np.float16)
    payloads = [payload for _, _, payload in stream.blocks]
    out = gpu.put(np.zeros_like(want))
    plan = stream.add(Plan(), 0, 100, out)
    kvgpu.decode(plan, iter(payloads))
    assert_same(gpu.get(out), want)

    class Exported:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            raise BufferError("lies elsewhere")

    class Nowhere:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (9,), "typestr": "|u1", "data": (0, False), "version": 3}

    for odd in (None, "x", 3, np.zeros(40, np.uint8)[::2], Exported(), Nowhere()):
        with pytest.raises(InvalidArgument, match=r"payload 0|Exported: "):
            kvgpu.decode(plan, [odd, *payloads[1:]])
    for several in (3, b"abcd"):
        with pytest.raises(InvalidArgument):
            kvgpu.decode(plan, several)
        with pytest.raises(InvalidArgument):
            kvgpu.decode(plan, out=several)


@pytest.mark.parametrize("n_threads", [0, -1, 2.5, "a", 10**6, True])
def test_numbers_of_threads(gpu, n_threads):
    plan = Stream(KVR1()).add(Plan(), 0, 100, gpu.put(np.zeros((2, 100, 16), np.float16)))
    with pytest.raises(InvalidArgument, match="n_threads"):
        kvgpu.decode(plan, n_threads=n_threads)


def test_heads_that_overlap(gpu):
    stream = Stream(KVR1())
    same = np.lib.stride_tricks.as_strided(np.zeros(1600, np.float16), (2, 100, 16), (0, 32, 2))
    with pytest.raises(InvalidArgument, match="strides positive"):
        stream.add(Plan(), 0, 100, same)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_zero_tokens(gpu, config):
    """No grid of a launch may be empty."""
    stream = Stream(config)
    first, n, payload = stream.blocks[0]
    plan = Plan()
    plan.add(
        stream.codec, stream.params, payload, first_token=first, n_tokens=n, start=3, stop=3,
        out=gpu.put(np.zeros((2, 0, 16), np.float16)),
    )  # fmt: skip
    kvgpu.decode(plan)
    assert all(launch.n_blocks for launch in getattr(gpu.device, "launched", []))
