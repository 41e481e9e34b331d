"""KVR1 under hostile bytes: blocks side by side, values at the limits, flipped headers."""

from contextlib import suppress

import numpy as np
import pytest
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated
from kvcodecs.kvr1 import CODEC, KVR1, KVR1Params
from kvcodecs.kvr1 import reference as ref
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec

# Of as many components, so that blocks of one decode beside blocks of the other.
SHAPES = {64: [(1, 64), (2, 32), (32, 2)], 34: [(1, 34), (17, 2)], 2: [(1, 2)]}
LIMIT = 1 << 24


def make_block(rng, shape, n_tokens, first, **fields):
    """Return parameters, payload and values of a block with some escapes."""
    heads, head_dim = shape
    x = rng.standard_normal((heads, n_tokens, head_dim), dtype=np.float32)
    x *= np.float32(2.0) ** rng.integers(-4, 8, (heads, 1, head_dim)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 20
    params = CODEC.fit(KVR1(step=1.0, **fields), StreamSpec("v", *shape), lambda: [x])
    encoder = CODEC.encoder(params, first)
    encoder.push(x)
    payload = encoder.payload()
    out = np.empty_like(x)
    plan = Plan()
    add(plan, params, payload, first, n_tokens, out)
    plan.run(1, "portable")
    assert np.abs(out - x).max() <= params.step / 2
    return params, payload, first, out


def add(plan, params, payload, first, n_tokens, out, where=""):
    stop = first + out.shape[1]
    where = {"n_tokens": n_tokens, "start": first, "stop": stop, "where": where}
    plan.add(CODEC, params, payload, first_token=first, out=out, **where)


def damage(rng, payload):
    """Return bytes that do not decode: too few or many words, other bare steps, a bad state."""
    kind = rng.integers(0, 4)
    if kind == 0 and len(payload) > 131:
        return payload[: 129 + 2 * int(rng.integers(0, (len(payload) - 129) // 2))]
    if kind == 1:
        return bytes([payload[0] ^ 1 << int(rng.integers(0, 3))]) + payload[1:]
    if kind == 2:
        return payload[:1] + bytes(4) + payload[5:]
    return payload + rng.bytes(2 * int(rng.integers(1, 200)))


@pytest.mark.parametrize("n_channels", SHAPES)
@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_a_damaged_block_leaves_those_beside_it_alone(simd, n_channels):
    rng = np.random.default_rng(n_channels)
    for _ in range(25):
        blocks = []
        for _ in range(rng.integers(2, 6)):
            shape = SHAPES[n_channels][rng.integers(0, len(SHAPES[n_channels]))]
            n_tokens, first = int(rng.choice([1, 2, 9, 60])), int(rng.choice([0, 1, 17, 300]))
            sinks = {"sink": int(rng.choice([0, 4, 20])), "sink_div": int(rng.choice([1, 7, 512]))}
            blocks.append(make_block(rng, shape, n_tokens, first, **sinks))
        bad = set(np.flatnonzero(rng.random(len(blocks)) < 0.4).tolist())
        plan = Plan()
        outs = []
        for i, (params, payload, first, values) in enumerate(blocks):
            # Rows and channels around the output that nobody may touch.
            room = np.full(np.add(values.shape, (1, 2, 3)), 7, np.float32)
            heads, n_tokens, head_dim = values.shape
            outs.append(room)
            given = damage(rng, payload) if i in bad else payload
            out = room[:heads, :n_tokens, :head_dim]
            add(plan, params, given, first, n_tokens, out, f"block {i}")
        n_threads = int(rng.choice([1, 2, 5]))
        if bad:
            with pytest.raises(Corrupt, match=f"^block {min(bad)}: the block does not decode"):
                plan.run(n_threads, simd)
        else:
            plan.run(n_threads, simd)
        for i, ((*_, values), room) in enumerate(zip(blocks, outs, strict=True)):
            inside = room[: values.shape[0], : values.shape[1], : values.shape[2]]
            if i not in bad:
                assert inside.tobytes() == values.tobytes()
            inside[...] = 7
            assert (room == 7).all()


@pytest.mark.parametrize("lane", [0, 31, 32, 33])
@pytest.mark.parametrize("sink_div", [1, 16, 512])
@pytest.mark.parametrize("cls", [0, 24, 87])
def test_values_end_at_2_24_units_in_every_lane(cls, sink_div, lane):
    """The last value that fits decodes, the one after it is corrupt, whoever decodes it."""
    n, first, n_tokens = 34, 3, 3  # the first token is a sink
    for t in range(n_tokens):
        for sign in (1, -1):
            for beyond in (False, True):
                scale = 1 if t == 0 else sink_div
                # So that a whole number of steps leads from the mean to the value.
                mu = sign * ((LIMIT - 1 + beyond) % scale)
                p = ref.Params(1, n, 1.0, 4, sink_div, True, (mu,) * n, (0,) * n, (cls,) * n)
                residuals = np.zeros((n_tokens, n), int)
                residuals[t, lane] = sign * ((LIMIT - 1 + beyond) // scale)
                steps = ref.steps_of(p, first, n_tokens)
                payload = ref.encode_steps(steps, residuals.ravel().tolist())
                values = np.full((1, n_tokens, n), mu, np.float32)
                values[0, t, lane] = sign * (LIMIT - 1 + beyond)
                fast = core_params(p)
                for simd in SIMD_LEVELS:
                    out = np.empty((1, n_tokens, n), np.float32)
                    plan = Plan()
                    add(plan, fast, payload, first, n_tokens, out)
                    if beyond:
                        with pytest.raises(Corrupt):
                            plan.run(1, simd)
                    else:
                        plan.run(1, simd)
                        np.testing.assert_array_equal(out, values * np.float32(p.unit))


def core_params(p):
    columns = (np.array(p.mu, np.int32), np.array(p.rho, np.uint8), np.array(p.classes, np.uint8))
    spec = StreamSpec("v", p.heads, p.head_dim)
    return KVR1Params(spec, p.step, p.sink, p.sink_div, p.ar, *columns)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_a_short_payload_of_a_huge_block_ends_at_once(simd):
    """What stops a decoder is the end of the words, not the number of tokens claimed."""
    params, *_ = make_block(np.random.default_rng(0), (1, 2), 40, 0)
    n_tokens = 1 << 20
    out = np.full((1, n_tokens, 2), 7, np.float32)
    plan = Plan()
    add(plan, params, bytes(1) + b"\xff" * 128, 0, n_tokens, out)
    with pytest.raises(Corrupt):
        plan.run(1, simd)
    assert (out[:, 10_000:] == 7).all()


@pytest.mark.parametrize("fields", [{}, {"ar": False, "sink_div": 1}, {"sink_div": 512}], ids=str)
def test_a_flipped_header_is_refused_or_works(fields):
    """Whatever a header says that is not refused, blocks are coded and decoded with it."""
    rng = np.random.default_rng(0)
    params, payload, *_ = make_block(rng, (2, 6), 9, 0, **fields)
    spec, header = params.spec, CODEC.pack(params)
    x = rng.standard_normal((2, 9, 6), dtype=np.float32)
    for n in range(len(header)):
        with pytest.raises((Truncated, Corrupt)):
            CODEC.unpack(spec, header[:n])
    n_read = 0
    for at in range(len(header)):
        for bit in range(8):
            bad = bytearray(header)
            bad[at] ^= 1 << bit
            try:
                found = CODEC.unpack(spec, bad)
            except KvError:
                continue
            n_read += 1
            out = np.empty_like(x)
            plan = Plan()
            add(plan, found, payload, 0, 9, out)
            with suppress(Corrupt):
                plan.run(1)
            encoder = CODEC.encoder(found, 0)
            try:
                CODEC.check(found, x, 0)
                encoder.push(x)
            except InvalidArgument:
                continue
            plan = Plan()
            add(plan, found, encoder.payload(), 0, 9, out)
            plan.run(1)
            error = np.abs(out.astype(np.float64) - x).max()
            assert error == encoder.error.max_error
            assert error <= found.step / 2 * (1 + 1e-6) + np.spacing(np.abs(x).max())
    assert n_read > len(header)
