"""Lloyd-Max refinement of codewords, with restarts and repair of empty cells. FORMAT.md 11.4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from .._core import fib_nearest_float64
from ..errors import Corrupt, InvalidArgument
from ..plan import available_cpus
from .profile import Profile
from .rotation import haar

F64 = npt.NDArray[np.float64]
Cells = npt.NDArray[np.uint32]

REPORT_SCHEMA: Final = "lloyd_report_v1"
_RESTART_STEP: Final = 0x9E3779B9
_SPLIT: Final = 1e-6
_LEAST_RESIDUAL: Final = 2.0**-52


@dataclass(frozen=True)
class RepairEvent:
    """A codeword without samples took its place beside the one with the largest distortion."""

    restart: int
    iteration: int
    empty_cell: int
    donor_cell: int
    donor_count_before: int
    donor_distortion: float
    residual_norm: float
    split_epsilon: float


@dataclass(frozen=True)
class LloydReport:
    """How a codebook was refined.

    Attributes
    ----------
    init_mse, best_mse
        Squared distance of a training vector to its codeword, a mean over the vectors (not over
        their values), of the first codewords and of the best ones.
    best_restart
        The restart that found them; 0 also where none improved on the first ones.
    repair_events
        Of all restarts.
    seed
        The profile's `codebook_seed`.
    """

    schema: str
    restarts: int
    iterations: int
    training_samples: int
    init_mse: float
    best_mse: float
    best_restart: int
    empty_cells_repaired: int
    repair_events: tuple[RepairEvent, ...]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields in their order."""
        return {**asdict(self), "repair_events": [asdict(event) for event in self.repair_events]}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Return the report of a stored document.

        Raises
        ------
        Corrupt
            Fields that are missing, not known, or of the wrong type.
        """
        values = _fields_of(cls, document)
        events = values["repair_events"]
        if not isinstance(events, list):
            raise Corrupt("FibQuant book: the repair events of its report are no list")
        values["repair_events"] = tuple(RepairEvent(**_fields_of(RepairEvent, e)) for e in events)
        return cls(**values)


def refine(profile: Profile, samples: F64, initial: F64) -> tuple[F64, LloydReport]:
    """Return the best codewords ``(N, k)`` that restarts of Lloyd's algorithm find.

    Parameters
    ----------
    profile
        Restarts, iterations, seed, and what is done about empty cells.
    samples
        Training vectors ``(n, k)``.
    initial
        The first codewords.

    Raises
    ------
    InvalidArgument
        An empty cell that cannot be mended, or may not be.
    """
    best = initial
    init_mse = best_mse = float(np.mean(_nearest(samples, initial)[1]))
    best_restart = 0
    events: list[RepairEvent] = []
    for restart in range(profile.lloyd_restarts):
        codewords = initial if restart == 0 else rotated(initial, profile, restart)
        for iteration in range(profile.lloyd_iterations):
            cells, distances = _nearest(samples, codewords)
            codewords, counts = _centroids(samples, cells, len(initial))
            repair = _Repair(samples, cells, distances, codewords, counts)
            for empty in np.flatnonzero(counts == 0).tolist():
                if profile.empty_cell_policy == "fail_closed":
                    raise InvalidArgument(
                        f"codeword {empty} of {len(initial)} has no training vectors in iteration "
                        f"{iteration} of restart {restart}; use fewer codewords, more training "
                        "samples, or split_highest_distortion"
                    )
                events.append(repair.fill(empty, restart, iteration))
        mse = float(np.mean(_nearest(samples, codewords)[1]))
        if mse < best_mse:
            best, best_mse, best_restart = codewords, mse, restart
    return best, LloydReport(
        schema=REPORT_SCHEMA,
        restarts=profile.lloyd_restarts,
        iterations=profile.lloyd_iterations,
        training_samples=len(samples),
        init_mse=init_mse,
        best_mse=best_mse,
        best_restart=best_restart,
        empty_cells_repaired=len(events),
        repair_events=tuple(events),
        seed=profile.codebook_seed,
    )


class _Repair:
    """Fills the empty cells of one assignment; moves `codewords` and counts as it goes."""

    def __init__(
        self, samples: F64, cells: Cells, distances: F64, codewords: F64, counts: npt.NDArray[Any]
    ) -> None:
        self._samples, self._cells = samples, cells
        self._codewords, self._counts = codewords, counts
        self._distortion = np.bincount(cells, distances, len(codewords))

    def fill(self, empty: int, restart: int, iteration: int) -> RepairEvent:
        where = f"codeword {empty} has no training vectors in restart {restart}"
        eligible = np.flatnonzero(self._counts > 1)
        if not eligible.size:
            raise InvalidArgument(f"{where} and no cell has two to give; use fewer codewords")
        distortion = self._distortion[eligible]
        donor = int(eligible[np.flatnonzero(distortion == distortion.max())[-1]])
        residuals = self._samples[self._cells == donor] - self._codewords[donor]
        squares = (residuals * residuals).sum(1)
        farthest = residuals[squares.argmax()]
        norm = float(np.sqrt(squares.max()))
        if norm <= _LEAST_RESIDUAL:
            raise InvalidArgument(f"{where} and those of cell {donor} are all equal")
        event = RepairEvent(
            restart=restart,
            iteration=iteration,
            empty_cell=empty,
            donor_cell=donor,
            donor_count_before=int(self._counts[donor]),
            donor_distortion=float(self._distortion[donor]),
            residual_norm=norm,
            split_epsilon=_SPLIT,
        )
        step = _SPLIT * (farthest / norm)
        self._codewords[empty] = self._codewords[donor] + step
        self._codewords[donor] = self._codewords[donor] - step
        self._counts[donor] -= 1
        self._counts[empty] = 1
        self._distortion[[donor, empty]] = 0.0
        return event


def _nearest(samples: F64, codewords: F64) -> tuple[Cells, F64]:
    return fib_nearest_float64(samples, np.ascontiguousarray(codewords), available_cpus())


def _centroids(samples: F64, cells: Cells, n: int) -> tuple[F64, npt.NDArray[np.int64]]:
    """Return the mean of each cell, 0 of empty ones, and the samples of each."""
    counts = np.bincount(cells, minlength=n)
    sums = np.stack([np.bincount(cells, column, n) for column in samples.T], 1)
    return sums / np.maximum(counts, 1)[:, None], counts


def rotated(initial: F64, profile: Profile, restart: int) -> F64:
    """Return the first codewords as a restart turns them."""
    seed = (profile.codebook_seed + restart * _RESTART_STEP) % (1 << 64)
    q = haar(seed, initial.shape[1])
    out = np.zeros_like(initial)
    for j, column in enumerate(initial.T):  # left to right, as one would by hand
        out += column[:, None] * q[:, j]
    return out


def _fields_of(kind: type, document: object) -> dict[str, Any]:
    known = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(document, Mapping) or list(document) != list(known):
        raise Corrupt(f"FibQuant book: {kind.__name__} needs {', '.join(known)}, in this order")
    for name, value in document.items():
        wanted = {"int": int, "float": float, "str": str}.get(known[name], object)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise Corrupt(f"FibQuant book: {name} {value!r} of its report")
    return dict(document)
