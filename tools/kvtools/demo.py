"""`kvstore demo`: the whole job on real data, across two processes, with every value checked.

A first process packs the packaged sample into an archive, commits, goes on writing, and is
killed. This process then opens the archive and compares what it reads with the input.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcodecs.errors import InvalidArgument, KvError

import kvstore
from kvtools.sample import Sample, load_sample
from kvtools.terminal import show_json

SESSION = "demo/prose"
REL_STEP = 0.25
#: Smaller than "auto" picks, so that even this short sample has several blocks per stream.
BLOCK_TOKENS = 128
RANGE = (200, 330)
UNCOMMITTED = 100
REPS = 5


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
    command = [sys.executable, "-P", "-m", "kvtools.demo", path]
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
            codec=kvstore.TKV1(rel_step=REL_STEP),
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
    raise NotImplementedError


def _show(sample: Sample, checks: list[Check], numbers: dict[str, Any]) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    _write(sys.argv[1])
