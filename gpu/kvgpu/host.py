"""Blocks of codecs that have no kernel: decoded on the host, placed by the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.plan import Plan

from .arrays import View

_NOTHING = np.empty((0, 0, 0), np.float32)


def host_values(plan: Plan, outputs: Sequence[View], n_threads: int) -> dict[int, npt.NDArray[Any]]:
    """Decode what has no kernel, by the CPU's executor; return its values by target.

    Raises
    ------
    Corrupt, Truncated, InvalidArgument
        As `Plan.run`.
    """
    wanted = {copy.target for copy in plan.copies}
    if plan.rows.rows:
        wanted.update(plan.rows.arrays()[0]["output"].tolist())
    if not wanted:
        return {}
    values = {at: np.empty(outputs[at].shape, outputs[at].dtype) for at in sorted(wanted)}
    arrays = [values.get(at, _NOTHING) for at in range(len(outputs))]
    plan.place_copies(arrays)
    plan.check(plan.rows.run(plan.targets.arguments(arrays), n_threads, SIMD_LEVELS[0]))
    return values
