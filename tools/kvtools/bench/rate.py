"""Group `rate`: bits per value of KVR1 against TKV1 at the same error bounds."""

from __future__ import annotations

from dataclasses import replace

from kvcodecs.codec import CodecConfig
from kvcodecs.quantiser import QuantiserConfig
from kvcodecs.spec import KINDS

from kvtools.bench.codec import block_tokens, encode_all, rivals, sources_of
from kvtools.bench.rows import Row
from kvtools.sample import Sample

REL_STEPS = (1 / 8, 1 / 4, 1 / 2, 1.0)


def measure_rate(config: CodecConfig, sample: Sample) -> list[Row]:
    """Code the sample at `REL_STEPS` with both codecs, same sinks and same blocks."""
    if not isinstance(config, QuantiserConfig):
        return []
    rows = []
    for rel_step in REL_STEPS:
        asked = replace(config, step=None, max_error=None, rmse=None, bpv=None, rel_step=rel_step)
        rates = {name: _rates(each, sample) for name, each in rivals(asked).items()}
        for what in rates[config.codec]:
            name = f"rel_step {rel_step:g} {what}"
            rows += [
                Row("rate", f"{codec}, {name}", rate[what], "bits per value", "every byte")
                for codec, rate in rates.items()
            ]
            if {"tkv1", "kvr1"} == set(rates):
                ratio = 100 * rates["kvr1"][what] / rates["tkv1"][what]
                rows.append(Row("rate", f"kvr1 / tkv1, {name}", ratio, "%"))
    return rows


def _rates(config: CodecConfig, sample: Sample) -> dict[str, float]:
    """Bits per value of K, of V, and of both: stream headers, frames, their headers."""
    n_bytes, n_values = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for stream in encode_all(config, sources_of(sample), block_tokens(sample)):
        n_bytes[stream.source.spec.kind] += stream.n_bytes
        n_values[stream.source.spec.kind] += stream.source.x.size
    rates = {kind.upper(): 8 * n_bytes[kind] / n_values[kind] for kind in KINDS}
    return {**rates, "K and V": 8 * sum(n_bytes.values()) / sum(n_values.values())}
