"""Write the golden KVR1 files with the readable reference, once: existing files are never replaced.

Run as ``python tests/golden/kvr1/make.py``. A stream whose bytes would differ from what is here
means that the format changed; that needs a new version and a new folder.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from kvcodecs.kvr1 import reference as ref

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """An input, and how it is coded.

    `fit_tokens` says how many tokens the statistics come from; 0 means that `change` makes them
    up, so that classes fit the values badly.
    """

    name: str
    x: np.ndarray
    params: ref.Params
    block_tokens: int
    fit_tokens: int
    change: dict = field(default_factory=dict)
    first_token: int = 0


def smooth(seed, heads, n, head_dim, spread=1.0):
    """Return channels of different mean, spread and memory, the first token far out."""
    rng = np.random.default_rng(seed)
    n_channels = heads * head_dim
    mean = rng.normal(0, 2, n_channels)
    sd = spread * np.exp(rng.normal(0, 0.8, n_channels))
    memory = rng.uniform(0, 0.95, n_channels)
    x = np.empty((n, n_channels))
    state = rng.normal(0, 1, n_channels)
    for t in range(n):
        state = memory * state + np.sqrt(1 - memory**2) * rng.normal(0, 1, n_channels)
        x[t] = mean + sd * state
    x[0] *= 5
    return np.ascontiguousarray(x.reshape(n, heads, head_dim).transpose(1, 0, 2), np.float32)


def cases():
    pair = smooth(1, 1, 40, 2)
    yield Case("one_pair", pair, ref.Params(1, 2, 0.25), 16, 40)
    yield Case("one_pair_no_ar", pair, ref.Params(1, 2, 0.25, ar=False), 40, 40)
    yield Case("three_heads", smooth(2, 3, 72, 64), ref.Params(3, 64, 153 / 512), 64, 48)
    wide = smooth(3, 1, 48, 80)
    yield Case("partial_step", wide, ref.Params(1, 80, 0.25), 32, 48)
    yield Case("many_heads", smooth(4, 8, 16, 128), ref.Params(8, 128, 1.0), 16, 16)
    yield Case("one_token", smooth(5, 2, 1, 16), ref.Params(2, 16, 0.125), 128, 1)
    yield Case("zeros", np.zeros((2, 300, 6), np.float32), ref.Params(2, 6, 2.0**-6), 300, 300)
    yield Case("very_coarse", 8 * smooth(6, 2, 64, 20), ref.Params(2, 20, 64.0), 64, 64)
    # Values up to 2^22 units: wide classes, and sinks of step 1 unit.
    yield Case("very_fine", smooth(7, 1, 24, 34), ref.Params(1, 34, 2.0**-14), 24, 24)
    yield Case("sinks_only", smooth(8, 2, 12, 8), ref.Params(2, 8, 0.5, 100, 512), 5, 12)
    yield Case("no_sink", smooth(9, 2, 12, 8), ref.Params(2, 8, 0.5, 0, 1), 12, 12)
    # Class 0 for everything: nearly all values are escapes, many of two words.
    yield Case(
        "escapes",
        smooth(10, 2, 10, 10, 2.0**12),
        ref.Params(2, 10, 0.25, 2, 16),
        6,
        0,
        {"mu": (0,) * 20, "rho": (3,) * 20, "classes": (0,) * 20},
        7,
    )
    # Every class from 0 to 87, whatever the values.
    yield Case(
        "all_classes",
        smooth(11, 1, 20, 88, 30.0),
        ref.Params(1, 88, 0.5, 4, 16),
        20,
        0,
        {"mu": tuple(range(-440, 440, 10)), "rho": (9,) * 88, "classes": tuple(range(88))},
    )


def write_new(path, data):
    if path.exists():
        if path.read_bytes() != data:
            raise SystemExit(f"{path}: would change")
        return
    path.write_bytes(data)


def entry(case):
    params = ref.fit(case.params, case.x[:, : case.fit_tokens]) if case.fit_tokens else case.params
    params = replace(params, **case.change)
    header = ref.pack_header(params)
    payloads, values = [], []
    n = case.x.shape[1]
    for at in range(0, n, case.block_tokens):
        block = case.x[:, at : at + case.block_tokens]
        payload, decoded = ref.encode_block(params, block, case.first_token + at)
        payloads.append(payload)
        values.append(decoded)
    write_new(HERE / f"{case.name}.in.f32", case.x.astype("<f4").tobytes())
    write_new(HERE / f"{case.name}.kvr1", header + b"".join(payloads))
    return {
        "name": case.name,
        "shape": case.x.shape,
        "first_token": case.first_token,
        "block_tokens": case.block_tokens,
        "fit_tokens": case.fit_tokens,
        "header_bytes": len(header),
        "payload_bytes": [len(payload) for payload in payloads],
        "stream_sha256": hashlib.sha256(header + b"".join(payloads)).hexdigest(),
        "values_sha256": hashlib.sha256(np.concatenate(values).astype("<i4").tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    entries = [json.dumps(entry(case)) for case in cases()]
    write_new(HERE / "MANIFEST.json", ("[\n " + ",\n ".join(entries) + "\n]\n").encode())
