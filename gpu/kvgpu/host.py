"""Blocks of codecs that have no kernel: decoded on the host, placed by the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.plan import Plan
from kvcodecs.targets import Failure

from .arrays import View

_NOTHING = np.empty((0, 0, 0), np.float32)


def host_values(
    plan: Plan, outputs: Sequence[View], n_threads: int
) -> tuple[dict[int, npt.NDArray[Any]], list[Failure]]:
    """Decode what has no kernel, by the CPU's executor.

    Returns
    -------
    values
        By target.
    failures
        What does not decode: reported with what the device finds, in the order of the CPU.

    Raises
    ------
    InvalidArgument
        A value at hand overflows its output; `Plan.run` looks at those first, too.
    """
    wanted = {copy.target for copy in plan.copies}
    if plan.rows.rows:
        wanted.update(plan.rows.arrays()[0]["output"].tolist())
    if not wanted:
        return {}, []
    values = {at: np.empty(outputs[at].shape, outputs[at].dtype) for at in sorted(wanted)}
    arrays = [values.get(at, _NOTHING) for at in range(len(outputs))]
    plan.place_copies(arrays)
    return values, plan.rows.run(plan.targets.arguments(arrays), n_threads, SIMD_LEVELS[0])
