"""`kvstore demo`: the whole job on real data, across two processes, with every value checked.

A first process packs the packaged sample into an archive, commits, goes on writing, and is
killed. This process then opens the archive and compares what it reads with the input.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, KvError
from kvcodecs.rope import from_coded, to_coded
from kvcodecs.spec import KState

import kvstore
from kvtools.sample import Sample, load_sample
from kvtools.terminal import number_text, ratio_text, show_json, show_table

SESSION = "demo/prose"
REL_STEP = 0.25
#: Smaller than "auto" picks, so that even this short sample has several blocks per stream.
BLOCK_TOKENS = 128
RANGE = (200, 330)
UNCOMMITTED = 100
REPS = 5
#: What the writing process runs, before the archive's path.
WRITER = ["-m", "kvtools.demo"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold."""

    name: str
    ok: bool
    detail: str


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; 0 only if every check passes."""
    sample = load_sample()
    with _folder(args.keep) as folder:
        path = str(folder / "demo.kv")
        if Path(path).exists():
            raise InvalidArgument(f"{path}: exists; choose another folder")
        written = _write_and_kill(path)
        checks, numbers = _read_and_check(path, sample)
    numbers["encode_mvalues_per_s"] = sample.n_values / written["seconds"] / 1e6
    passed = all(check.ok for check in checks)
    if args.json:
        listed = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]
        show_json({"ok": passed, "checks": listed, **numbers})
        return 0 if passed else 1
    _show(sample, checks, numbers)
    if args.keep and not args.quiet:
        print(f"kept: {path} (kvstore info {path})")
    return 0 if passed else 1


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        folder = Path(keep)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as temporary:
        yield Path(temporary)


def _write_and_kill(path: str) -> dict[str, Any]:
    """Let a second process write, and kill it after its commit, in the middle of an append."""
    command = [sys.executable, "-P", *WRITER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            line = writer.stdout.readline() if writer.stdout else b""
        finally:
            writer.kill()
        code = writer.wait()
    if not line or code != -signal.SIGKILL:
        raise KvError(f"the writing process ended by itself, with code {code}")
    report: dict[str, Any] = json.loads(line)
    return report


def _write(path: str) -> None:
    """Body of the writing process: commit the sample, append more, and wait to be killed."""
    sample = load_sample()
    with kvstore.open(path, mode="a") as archive:
        start = time.perf_counter()
        session = archive.create_session(
            SESSION,
            model=sample.model,
            codec=kvstore.KVR1(rel_step=REL_STEP),
            block_tokens=BLOCK_TOKENS,
        )
        session.append(sample.k, sample.v, k_state="pre", token_ids=sample.token_ids)
        session.commit()
        seconds = time.perf_counter() - start
        session.append(
            [x[:, :UNCOMMITTED] for x in sample.k],
            [x[:, :UNCOMMITTED] for x in sample.v],
            k_state="pre",
            token_ids=sample.token_ids[:UNCOMMITTED],
        )
        print(json.dumps({"seconds": seconds}), flush=True)
        sys.stdin.read()  # returns only if the parent dies; then nothing more is written either


def _read_and_check(path: str, sample: Sample) -> tuple[list[Check], dict[str, Any]]:
    """Open what the killed process left, and compare all of it with the input."""
    with kvstore.open(path) as archive:
        session = archive.session(SESSION, expect=sample.model)
        info = session.info()
        ids = session.token_ids()
        same_ids = ids is not None and np.array_equal(ids, sample.token_ids)
        survives = session.n_committed == sample.n_tokens and same_ids
        detail = (
            f"the {sample.n_tokens} committed tokens are there, the {UNCOMMITTED} appended after "
            "the commit are not"
            if survives
            else f"{session.n_committed} tokens are there, with "
            f"{'their' if same_ids else 'other'} ids; {sample.n_tokens} were committed"
        )
        checks = [Check("survives kill -9", survives, detail)]
        pre = session.read_all(k_state="pre", dtype="float32")
        worst = _worst_over_bound(info, sample, (0, sample.n_tokens), pre, "pre")
        n_compared = sum(x.size for x in (*pre[0], *pre[1]) if x is not None)
        checks.append(
            Check(
                "error within step/2",
                worst <= 1.0 and n_compared == sample.n_values,
                f"largest {worst:.4f} of the bound, {n_compared} values",
            )
        )
        n_before = session.n_frames_read
        post = session.read_all(*RANGE, k_state="post", dtype="float32")
        n_blocks = session.n_frames_read - n_before
        span = f"tokens {RANGE[0]}:{RANGE[1]}"
        worst_post = _worst_over_bound(info, sample, RANGE, post, "post")
        checks.append(
            Check(
                "K after RoPE within step/sqrt(2)",
                worst_post <= 1.0,
                f"largest {worst_post:.4f} of the bound, {span}",
            )
        )
        part = slice(*RANGE)
        equal = all(
            np.array_equal(
                session.read(stream.layer, stream.kind, *RANGE, dtype="float32"),
                _of(pre, stream)[:, part],
            )
            for stream in info.streams
        )
        checks.append(Check("a range is a slice of the whole", equal, f"K and V, {span}"))
        report = archive.verify(decode=True)
        checks.append(
            Check("verify finds no damage", report.ok, f"{report.n_frames} frames, all decoded")
        )
        seconds = []
        for _ in range(REPS):
            start = time.perf_counter()
            session.read_all(k_state="pre", dtype="float32")
            seconds.append(time.perf_counter() - start)
    numbers = {
        "bits_per_value": info.bits_per_value,
        "ratio_fp16": info.ratio_fp16,
        "max_error": info.error.max_error,
        "max_error_over_bound": worst,
        "max_error_post_over_bound": worst_post,
        "blocks_read": n_blocks,
        "blocks_stored": info.n_frames,
        "decode_mvalues_per_s": sample.n_values / statistics.median(seconds) / 1e6,
    }
    return checks, numbers


def _of(found: tuple[Any, Any], stream: kvstore.StreamInfo) -> npt.NDArray[np.float32]:
    """Return one stream of what `read_all` returned."""
    tensor: npt.NDArray[np.float32] = found[0 if stream.kind == "k" else 1][stream.layer]
    return tensor


def _worst_over_bound(
    info: kvstore.SessionInfo,
    sample: Sample,
    span: tuple[int, int],
    found: tuple[Any, Any],
    k_state: KState,
) -> float:
    """Return the largest error over its bound in `span`, of K alone if it is after RoPE.

    In the coded domain the bound is half a step, and finer for the sinks. After RoPE each value
    mixes two channels: sqrt(2) times that, and the rounding of float32 arithmetic.
    """
    worst = 0.0
    start, stop = span
    for stream in info.streams:
        rotated = k_state == "post"
        if rotated and stream.kind == "v":
            continue  # the same either way
        values = (sample.k if stream.kind == "k" else sample.v)[stream.layer]
        given = values[:, start:stop].astype(np.float32)
        if rotated:
            given = from_coded(
                to_coded(given, sample.model.stream(stream.layer, "k")),
                sample.model.stream(stream.layer, "k"),
                "post",
                start,
            )
        error = np.abs(_of(found, stream) - given)
        config = info.codecs[stream.kind]
        sink, sink_div = int(str(config["sink"])), int(str(config["sink_div"]))
        bound = np.full(stop - start, (stream.step or 0.0) / 2)
        bound[: max(0, sink - start)] /= sink_div
        if rotated:
            bound = bound * np.sqrt(2.0) + 4e-7 * float(np.abs(given).max())
        ratio = float((error / bound[:, None]).max())
        worst = max(worst, ratio if np.isfinite(ratio) else np.inf)
    return worst


def _show(sample: Sample, checks: list[Check], numbers: dict[str, Any]) -> None:
    show_table(
        f"{sample.model.name}, {sample.model.n_layers} layers, {sample.n_tokens} tokens of prose",
        ("", "value"),
        [
            (
                f"bits per value, every byte, {BLOCK_TOKENS}-token blocks",
                f"{numbers['bits_per_value']:.3f}",
            ),
            ("size", ratio_text(numbers["ratio_fp16"])),
            ("max error / bound (step/2)", f"{numbers['max_error_over_bound']:.4f}"),
            (
                f"blocks read for tokens {RANGE[0]}:{RANGE[1]}",
                f"{numbers['blocks_read']} of {numbers['blocks_stored']}",
            ),
            ("encode and commit, Mvalues/s", number_text(numbers["encode_mvalues_per_s"], 3)),
            ("read and decode, Mvalues/s", number_text(numbers["decode_mvalues_per_s"], 3)),
        ],
    )
    print()
    rows = [("ok" if check.ok else "FAILED", check.name, check.detail) for check in checks]
    for verdict, name, detail in rows:
        print(f"{verdict:7}{name}: {detail}")


if __name__ == "__main__":
    _write(sys.argv[1])
