"""The GPU kernels on the host: the same bits as the core, and the same refusals."""

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from host_kernels import struct_sizes
from kvcodecs import _core
from kvcodecs.codec import codec_for
from kvcodecs.errors import InvalidArgument, KvError
from kvcodecs.kvr1 import CODEC as KVR1_CODEC
from kvcodecs.kvr1 import KVR1, tables
from kvcodecs.plan import Plan
from kvcodecs.rope import Rope, to_coded
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import TKV1, TkvFile
from kvgpu import structs
from kvtools.sample import load_sample

GOLDEN = Path(__file__).parent / "golden"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def cases_of(codec):
    return {c["name"]: c for c in json.loads((GOLDEN / codec / "MANIFEST.json").read_text())}


def test_structs_match_the_kernels(host_library):
    mirrors = [
        structs.SOURCE,
        structs.TARGET,
        structs.ROTATION,
        structs.LANE_ARGUMENTS,
        structs.COMPONENT,
        structs.BLOCK_ARGUMENTS,
        structs.COPY,
        structs.COPY_ARGUMENTS,
        structs.BOOK,
        structs.SPAN,
    ]
    sizes = [dtype.itemsize for dtype in mirrors]
    sizes += [structs.CONTENTS_BYTES, structs.MARK_BYTES, structs.VECTOR_ARGUMENTS.itemsize]
    assert struct_sizes(host_library) == sizes


def test_compact_tables_say_the_same_as_slots():
    rans = _core.RansTables(tables.frequencies())
    slots = rans.slots
    n_tables, n_slots = slots.shape
    compact = rans.compact
    symbols = compact[: slots.size // 4].view(np.uint8).reshape(slots.shape)
    words = compact[slots.size // 4 :].reshape(n_tables, -1)
    found = np.take_along_axis(words, symbols.astype(np.intp), axis=1)
    np.testing.assert_array_equal(symbols, (slots.view(np.int32) >> 26) + 32)
    np.testing.assert_array_equal(found & 2047, slots & 2047)
    np.testing.assert_array_equal(np.arange(n_slots) - (found >> 16), slots >> 11 & 2047)


@pytest.mark.parametrize("name", [n for n, c in cases_of("tkv1").items() if c["params"]["gpu"]])
def test_golden_tkv1_files(name, checked_kernels):
    TkvFile.parse((GOLDEN / "tkv1" / f"{name}.tkv").read_bytes()).decode()
    assert checked_kernels.n_compared == np.prod(cases_of("tkv1")[name]["shape"])


@pytest.mark.parametrize("name", cases_of("kvr1"))
def test_golden_kvr1_streams(name, checked_kernels):
    case = cases_of("kvr1")[name]
    data = (GOLDEN / "kvr1" / f"{name}.kvr1").read_bytes()
    cuts = np.cumsum([0, case["header_bytes"], *case["payload_bytes"]]).tolist()
    header, *payloads = (data[a:b] for a, b in pairwise(cuts))
    heads, n, head_dim = case["shape"]
    params = KVR1_CODEC.unpack(StreamSpec("v", heads, head_dim), header)
    for dtype in DTYPES:
        out = np.zeros(case["shape"], dtype)
        plan = Plan()
        for at, payload in zip(range(0, n, case["block_tokens"]), payloads, strict=True):
            stop = min(at + case["block_tokens"], n)
            first = case["first_token"]
            tokens = {"first_token": first + at, "n_tokens": stop - at}
            wanted = {"start": first + at, "stop": first + stop, "out": out[:, at:stop]}
            plan.add(KVR1_CODEC, params, payload, **tokens, **wanted)
        try:
            plan.run()
        except InvalidArgument:
            assert dtype != np.float32  # an overflow, which the core reports too
    assert checked_kernels.n_compared >= np.prod(case["shape"])


class Coded:
    """Blocks of a stream."""

    def __init__(self, config, spec, x, block=32, first=0):
        self.codec, self.spec, self.first, self.n = codec_for(config), spec, first, x.shape[1]
        coded = to_coded(x, spec)
        self.params = self.codec.fit(config, spec, lambda: [coded])
        self.blocks = []
        for at in range(0, self.n, block):
            encoder = self.codec.encoder(self.params, first + at)
            part = np.ascontiguousarray(coded[:, at : at + block])
            encoder.push(part)
            self.blocks.append((first + at, part.shape[1], encoder.payload()))

    def add(self, plan, start, stop, out, rope=None, damage=lambda payload: payload):
        for first, n, payload in self.blocks:
            lo, hi = max(start, first), min(stop, first + n)
            if lo >= hi:
                continue
            tokens = {"first_token": first, "n_tokens": n, "start": lo, "stop": hi, "rope": rope}
            rows = out[:, lo - start : hi - start]
            plan.add(self.codec, self.params, damage(payload), out=rows, **tokens)


def test_payloads_too_long_for_the_kernels_are_refused():
    """They count words in 32 bits."""
    x = np.zeros((1, 8, 2), np.float32)
    plan = Plan()
    Coded(KVR1(), StreamSpec("v", 1, 2), x).add(plan, 0, 8, x.copy())
    rest = np.array([[1, 8, 2]], np.uint64), np.zeros((0, 2), np.uint64)
    _core.check_blocks(*plan.blocks.arrays(), np.array([1 << 32], np.uint64), *rest)
    with pytest.raises(InvalidArgument, match="block 0: payload of more than 4 GiB"):
        _core.check_blocks(*plan.blocks.arrays(), np.array([(1 << 32) + 1], np.uint64), *rest)


@pytest.mark.parametrize("config", [KVR1(), TKV1(), TKV1(lane_channels=16)], ids=str)
def test_the_packaged_sample(config, checked_kernels):
    sample = load_sample()
    plan, n = Plan(), min(sample.n_tokens, 80)
    layers = range(0, sample.model.n_layers, 7)
    for layer in layers:
        for kind, values in (("k", sample.k), ("v", sample.v)):
            x = np.ascontiguousarray(values[layer][:, :n].astype(np.float32))
            heads, _, head_dim = x.shape
            spec = StreamSpec(kind, heads, head_dim, sample.model.rope if kind == "k" else None)
            rope = sample.model.rope.table(0, n) if kind == "k" else None
            out = np.zeros((heads, n - 5, head_dim), np.float16)
            Coded(config, spec, x).add(plan, 3, n - 2, out, rope)
    plan.run()
    assert checked_kernels.n_compared > 0
    assert checked_kernels.statuses == {0}


GEOMETRIES = [(1, 2), (1, 62), (2, 32), (3, 64), (5, 6), (9, 16), (2, 128), (33, 2), (2, 256)]
ROPES = {
    "none": lambda n: None,
    "half": lambda n: Rope.from_theta(1e4, n),
    "partial": lambda n: Rope.from_theta(1e4, max(n // 4 * 2, 2)),
    "interleaved": lambda n: Rope.from_theta(1e4, n, style="interleaved", scaling=1.25),
}


def random_values(rng, heads, n, head_dim, limit=2e4):
    """Return values of all spreads, with steps that escape."""
    x = rng.normal(0, 1, (heads, n, head_dim)).cumsum(axis=1)
    x *= 2.0 ** rng.integers(-6, 9, (heads, 1, head_dim))
    x[rng.random(x.shape) < 0.02] *= 50
    return np.clip(x, -limit, limit).astype(np.float32)


def random_config(rng):
    sinks = {"sink": int(rng.choice([0, 3, 40])), "sink_div": int(rng.choice([1, 2, 7, 16, 512]))}
    step = float(rng.choice([0.02, 0.5, 4.0]))
    if rng.integers(2):
        return KVR1(step=step, ar=bool(rng.integers(2)), **sinks)
    return TKV1(step=step, ar=bool(rng.integers(2)), **sinks)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("seed", range(4))
def test_many_streams_in_one_plan(seed, rope, checked_kernels):
    """Any geometries, ranges, sinks and classes side by side; rows strided, in any dtype."""
    rng = np.random.default_rng([seed, *rope.encode()])
    plan, rooms = Plan(), []
    for heads, head_dim in GEOMETRIES:
        n, first = int(rng.integers(1, 60)), int(rng.integers(0, 50))
        config = random_config(rng)
        limit = min(2.0**21 * config.step / config.sink_div, 2e4)  # rotated, fits float16
        x = random_values(rng, heads, n, head_dim, limit)
        turns = ROPES[rope](head_dim)
        spec = StreamSpec("k" if turns else "v", heads, head_dim, turns)
        stream = Coded(config, spec, x, int(rng.integers(1, 40)), first)
        start = first + int(rng.integers(0, n))
        stop = int(rng.integers(start, first + n)) + 1
        # Rows and channels around the output that nobody may touch.
        room = np.full((stop - start + 1, heads + 1, head_dim + 1), 7, DTYPES[rng.integers(3)])
        out = room[:-1, :-1, :-1].transpose(1, 0, 2)
        table = turns.table(start, stop) if turns and rng.integers(4) else None
        stream.add(plan, start, stop, out, table)
        rooms.append((room, out))
    plan.run()
    assert checked_kernels.n_compared == sum(out.size for _, out in rooms)
    for room, out in rooms:
        out[...] = 7
        assert (room == 7).all()


def spoiled(rng, payload):
    bad = bytearray(payload)
    if rng.random() < 0.4:
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256)
    if rng.random() < 0.3:
        bad += rng.bytes(2 * int(rng.integers(1, 20)))
    elif rng.random() < 0.3 and len(bad) > 131:
        del bad[129 + 2 * int(rng.integers(0, (len(bad) - 129) // 2)) :]
    return bytes(bad)


@pytest.mark.parametrize("config", [KVR1(step=0.5), TKV1(step=0.5)], ids=str)
def test_damage_has_the_same_status(config, checked_kernels):
    """Lanes and blocks that fail or overflow, among others that do not."""
    rng = np.random.default_rng(3)
    streams = []
    for heads, head_dim in ((2, 32), (5, 6), (18, 2), (1, 64)):
        x = random_values(rng, heads, 40, head_dim, 1e5)
        streams.append(Coded(config, StreamSpec("v", heads, head_dim), x, 10))
    for _ in range(60):
        plan = Plan()
        for stream in streams:
            start, stop = np.sort(rng.integers(0, 41, 2)).tolist()
            shape = stream.spec.heads, stop - start, stream.spec.head_dim
            out = np.zeros(shape, DTYPES[rng.integers(3)])
            with suppress(KvError):  # where the lengths of lanes are damaged
                stream.add(plan, start, stop, out, damage=lambda payload: spoiled(rng, payload))
        with suppress(KvError):
            plan.run()
    assert checked_kernels.statuses >= ({0, 3, 4} if isinstance(config, KVR1) else {0, 3})
