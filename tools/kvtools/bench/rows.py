"""What a measurement returns, how it is timed, and where it ran."""

from __future__ import annotations

import csv
import gc
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Clock = Literal["wall", "cpu"]


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


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of actions that were run in turns, seconds for one call.

    Attributes
    ----------
    wall : (actions, rounds) float64
        What threads and disks gain or cost shows here only.
    cpu : (actions, rounds) float64
        CPU time of this process: of one thread, what it takes where nobody else computes.
    """

    wall: npt.NDArray[np.float64]
    cpu: npt.NDArray[np.float64]

    def seconds(self, action: int, clock: Clock = "wall") -> float:
        """Return the median time of an action."""
        return float(np.median(getattr(self, clock)[action]))

    def ratio(self, action: int, other: int, clock: Clock = "wall") -> float:
        """Return the median over the rounds of `action`'s time over `other`'s."""
        times = getattr(self, clock)
        return float(np.median(times[action] / times[other]))


def median_seconds(action: Callable[[], object], reps: int) -> float:
    """Return the median wall time of `reps` calls after one to warm up."""
    return interleaved([action], reps).seconds(0)


def interleaved(
    actions: Sequence[Callable[[], object]], rounds: int, *, least_seconds: float = 0.0
) -> Timings:
    """Time every action once a round, in turns, after one round to warm up.

    A shared machine changes its speed by half within seconds. Whatever is compared is therefore
    run within one round, and compared there: ratios are medians of the rounds' ratios, not ratios
    of medians. Actions should take some tens of milliseconds at most.

    Parameters
    ----------
    least_seconds
        An action shorter than this is called several times a round, as often in every round:
        what ran before it then leaves no mark on its time.
    """
    samples = np.empty((2, len(actions), rounds))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        calls = [math.ceil(least_seconds / max(_sample(a, 1)[0], 1e-9)) or 1 for a in actions]
        for at in range(rounds):
            for index, action in enumerate(actions):
                samples[:, index, at] = _sample(action, calls[index])
    finally:
        if was_enabled:
            gc.enable()
    return Timings(*samples)


def _sample(action: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return wall and CPU seconds of one of `calls` calls."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        action()
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


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
