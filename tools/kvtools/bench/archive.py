"""Groups `file`, `range`, `open` and `append`: archives on disk."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.frame import FrameHeader, open_frame
from kvcodecs.plan import Plan
from kvcodecs.spec import KINDS, Kind

import kvstore
from kvtools.bench.codec import Source, encode_stream
from kvtools.bench.rows import Row, interleaved, median_seconds
from kvtools.sample import Sample

N_SESSIONS = 100
APPEND_LAYERS = 30
APPEND_PREFILL = 600
APPENDS = 20


def fill(
    archive: kvstore.Archive, name: str, sample: Sample, config: CodecConfig
) -> kvstore.Session:
    """Store a sample as one session, committed."""
    session = archive.create_session(name, model=sample.model, codec=config)
    session.append(sample.k, sample.v, token_ids=sample.token_ids)
    session.commit()
    return session


def measure_file(config: CodecConfig, sample: Sample, folder: Path, reps: int) -> list[Row]:
    """Every byte of an archive that holds the data once, and the speed of writing and reading."""
    path = folder / "file.kv"
    with kvstore.open(path, mode="a") as archive:
        start = time.perf_counter()
        session = fill(archive, "bench", sample, config)
        write_seconds = time.perf_counter() - start
        info, about = session.info(), archive.info()
        read_seconds = median_seconds(session.read_all, reps)
        verify_seconds = median_seconds(archive.verify, reps)
    n_values = info.n_values
    overhead = info.total_bytes / info.payload_bytes - 1
    return [
        Row("file", "payloads", 8 * info.payload_bytes / n_values, "bits per value"),
        Row("file", "everything", info.bits_per_value, "bits per value", "with records and keys"),
        Row("file", "frames, headers, records", 100 * overhead, "% of payloads"),
        Row("file", "file", 8 * about.file_bytes / n_values, "bits per value"),
        Row("file", "file / frames", about.overhead, "ratio"),
        Row("file", "float16 / everything", info.ratio_fp16, "ratio"),
        Row("file", "max error", info.error.max_error, "", "coded domain"),
        Row("file", "RMS error", info.error.rms, "", "coded domain"),
        Row("file", "create, append, commit", n_values / write_seconds / 1e6, "Mvalues/s"),
        Row("file", "read all", n_values / read_seconds / 1e6, "Mvalues/s", "model's dtype"),
        Row("file", "verify", about.frame_bytes / verify_seconds / 1e9, "GB/s of frames"),
    ]


def measure_range(
    config: CodecConfig, sample: Sample, folder: Path, reps: int, lengths: tuple[int, int]
) -> list[Row]:
    """Read the same block of all layers from a short and a long session.

    Compared with the pure decode of the same lanes from memory: no archive, no checksum.
    """
    short, long = (sample.tiled(n) for n in lengths)
    with kvstore.open(folder / "range.kv", mode="a") as archive:
        sessions = [fill(archive, name, s, config) for name, s in (("a", short), ("b", long))]
        block = max(stream.block_tokens for stream in sessions[0].info().streams)
        if block > lengths[0]:
            raise InvalidArgument(f"a block of {block} tokens is longer than {lengths[0]} tokens")
        # The last full block of the short session, at the same place in the long one.
        stop = lengths[0] - lengths[0] % block
        span = (stop - block, stop)
        decode = PureDecode(config, short, span, sessions[0])
        found = decode.outputs("float32")
        pure = decode.plan(found)
        pure.run()
        for (layer, kind), expected in found.items():
            if not np.array_equal(sessions[0].read(layer, kind, *span, dtype="float32"), expected):
                raise Corrupt("a range differs from the pure decode of its lanes")
        times = interleaved(
            [
                lambda: sessions[0].read_all(*span, dtype="float32"),
                lambda: sessions[1].read_all(*span, dtype="float32"),
                pure.run,
            ],
            reps,
        )
    note = f"tokens {span[0]}:{span[1]} of {sample.model.n_layers} layers"
    return [
        Row("range", f"from {lengths[0]} tokens", 1e3 * times.seconds(0), "ms", note),
        Row("range", f"from {lengths[1]} tokens", 1e3 * times.seconds(1), "ms", note),
        Row("range", "pure decode", 1e3 * times.seconds(2), "ms", note),
        Row("range", "long / short", times.ratio(1, 0), "ratio"),
        Row("range", "short / pure decode", times.ratio(0, 2), "ratio"),
    ]


class PureDecode:
    """Tokens ``[start, stop)`` of all streams, coded in memory: no archive, no checksum.

    Parameters
    ----------
    session
        Holds the sample: its blocks are coded here once more.
    """

    def __init__(
        self,
        config: CodecConfig,
        sample: Sample,
        span: tuple[int, int],
        session: kvstore.Session,
    ) -> None:
        self._codec, self._model, self._span = codec_for(config), sample.model, span
        self._frames: list[tuple[tuple[int, Kind], Any, FrameHeader, memoryview]] = []
        blocks = {(s.layer, s.kind): s.block_tokens for s in session.info().streams}
        for layer in range(sample.model.n_layers):
            for kind, tensors in zip(KINDS, (sample.k, sample.v), strict=True):
                source = Source(layer, sample.model.stream(layer, kind), tensors[layer])
                stream = encode_stream(config, source, blocks[layer, kind])
                for frame in stream.frames:
                    header, payload = open_frame(frame)
                    if header.first_token < span[1] and header.stop_token > span[0]:
                        self._frames.append(((layer, kind), stream.params, header, payload))

    def outputs(self, dtype: str) -> dict[tuple[int, Kind], npt.NDArray[Any]]:
        """Return new arrays to decode to: of one piece where layers are alike, as reads do."""
        n, layers = self._span[1] - self._span[0], range(self._model.n_layers)
        found: dict[tuple[int, Kind], npt.NDArray[Any]] = {}
        for kind in KINDS:
            shapes = [
                (s.heads, n, s.head_dim) for s in (self._model.stream(i, kind) for i in layers)
            ]
            whole = np.empty((len(layers), *shapes[0]), dtype) if len(set(shapes)) == 1 else None
            for i, shape in enumerate(shapes):
                found[i, kind] = np.empty(shape, dtype) if whole is None else whole[i]
        return found

    def plan(self, outputs: dict[tuple[int, Kind], npt.NDArray[Any]]) -> Plan:
        """Return what decodes to `outputs`, which need not be of all streams."""
        plan = Plan()
        for name, params, header, payload in self._frames:
            if name not in outputs:
                continue
            start = max(self._span[0], header.first_token)
            stop = min(self._span[1], header.stop_token)
            plan.add(
                self._codec, params, payload,
                first_token=header.first_token, n_tokens=header.n_tokens, start=start, stop=stop,
                out=outputs[name][:, start - self._span[0] : stop - self._span[0]],
            )  # fmt: skip
        return plan


def measure_open(config: CodecConfig, sample: Sample, folder: Path, reps: int) -> list[Row]:
    """Open an archive of many sessions, and one session in it."""
    path = folder / "open.kv"
    tiny = sample.tiled(16)
    with kvstore.open(path, mode="a") as archive:
        for index in range(N_SESSIONS):
            fill(archive, f"user/{index}", tiny, config)
    if len(_names(path)) != N_SESSIONS:
        raise Corrupt(f"{path}: sessions are missing")
    times = interleaved(
        [
            lambda: kvstore.open(path).close(),
            lambda: _session(path),
            lambda: _names(path),
        ],
        reps,
    )
    note = f"{N_SESSIONS} sessions, opened and closed"
    return [
        Row("open", name, 1e3 * times.seconds(index), "ms", note)
        for index, name in enumerate(
            ("archive", "archive and one session", "archive and all names")
        )
    ]


def _session(path: Path) -> int:
    with kvstore.open(path) as archive:
        return archive.session(f"user/{N_SESSIONS // 2}").n_committed


def _names(path: Path) -> list[str]:
    with kvstore.open(path) as archive:
        return archive.names()


def measure_append(config: CodecConfig, sample: Sample, folder: Path) -> list[Row]:
    """Append and commit single tokens to a session of many layers, as decoding does."""
    path = folder / "append.kv"
    whole = sample.tiled(APPEND_PREFILL + APPENDS, APPEND_LAYERS)
    seconds, written = [], []
    with kvstore.open(path, mode="a") as archive:
        session = fill(archive, "bench", whole.tiled(APPEND_PREFILL), config)
        before = archive.info()
        for token in range(APPEND_PREFILL, APPEND_PREFILL + APPENDS):
            k, v = ([x[:, token : token + 1] for x in xs] for xs in (whole.k, whole.v))
            n_written, start = _bytes_written(), time.perf_counter()
            session.append(k, v, token_ids=whole.token_ids[token : token + 1], start=token)
            session.commit()
            seconds.append(time.perf_counter() - start)
            written.append(_bytes_written() - n_written)
        after = archive.info()
        appended = session.read(APPEND_LAYERS - 1, "v", APPEND_PREFILL)
    if appended.shape[1] != APPENDS:
        raise Corrupt(f"{path}: appended tokens are missing")
    note = f"{APPEND_LAYERS} layers, from token {APPEND_PREFILL} on, {APPENDS} commits"
    growth = (after.file_bytes - before.file_bytes) / APPENDS
    return [
        Row("append", "append and commit one token", 1e3 * statistics.median(seconds), "ms", note),
        Row(
            "append",
            "bytes written",
            statistics.median(written) / 1e3,
            "kB per commit",
            "handed to write()",
        ),
        Row("append", "file growth", growth / 1e3, "kB per commit", note),
        Row(
            "append",
            "values of one token as float16",
            2 * whole.n_values / whole.n_tokens / 1e3,
            "kB",
        ),
    ]


def _bytes_written() -> int:
    """Bytes that this process has passed to write calls; LMDB writes its pages that way."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))
