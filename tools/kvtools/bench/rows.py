"""What a measurement returns, how it is timed, and where it ran."""

from __future__ import annotations

import csv
import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number.

    Attributes
    ----------
    group, name
        What was measured; `group` is what ``--only`` selects.
    value, unit
        The number. Times are medians.
    note
        What a reader has to know to use the number.
    """

    group: str
    name: str
    value: float
    unit: str
    note: str = ""


def median_seconds(action: Callable[[], object], reps: int) -> float:
    """Return the median wall time of `reps` calls after one to warm up."""
    return interleaved_seconds([action], reps)[0]


def interleaved_seconds(actions: Sequence[Callable[[], object]], reps: int) -> list[float]:
    """Return the median wall time of each action, run in turns.

    Taking turns spreads the noise of a shared machine over all of them, so that their ratios
    hold where their absolute times do not.
    """
    samples: list[list[float]] = [[] for _ in actions]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for action in actions:
            action()
        for _ in range(reps):
            for action, times in zip(actions, samples, strict=True):
                start = time.perf_counter()
                action()
                times.append(time.perf_counter() - start)
    finally:
        if was_enabled:
            gc.enable()
    return [statistics.median(times) for times in samples]


def environment() -> dict[str, str]:
    """Return what a CSV row needs to be judged later: code, machine, interpreter."""
    from importlib.metadata import version

    return {
        "version": version("kvstore"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def write_csv(path: str, rows: Sequence[Row], context: dict[str, str]) -> None:
    """Write one line per row, each with the whole `context`."""
    # A file's name may be no text; its bytes are no reason to lose the numbers.
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "name", "value", "unit", "note", *context])
        for row in rows:
            value = repr(row.value)
            writer.writerow([row.group, row.name, value, row.unit, row.note, *context.values()])
