"""TKV1 lanes as tables of a plan: independently decodable substreams into rows of an output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core

if TYPE_CHECKING:
    from .targets import Arguments, Failure, Placement

# The structs of csrc/plan_tables.hpp and csrc/lane.hpp, field by field.
LANE_DTYPE = np.dtype(
    [
        ("offset", "u8"),
        ("n_bytes", "u8"),
        ("first_token", "u8"),
        ("sink", "u8"),
        ("channels", "u8"),
        ("classes", "u8"),
        ("payload", "u4"),
        ("output", "u4"),
        ("head", "u4"),
        ("n_tokens", "u4"),
        ("skip", "u4"),
        ("row", "u4"),
        ("width", "u4"),
        ("n_classes", "u4"),
        ("sink_div", "u4"),
        ("unit", "f4"),
        ("rope", "i4"),
        ("rope_row", "u4"),
        ("first_pair", "u4"),
        ("n_pairs", "u4"),
    ]
)
CHANNEL_DTYPE = np.dtype([("mean", "i4"), ("rho", "u4"), ("models", "u4"), ("output", "u4")])


#: Prior, lanes, channels and classes of a plan, as the core takes them.
LaneArrays: TypeAlias = tuple[
    npt.NDArray[np.uint32], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.uint8]
]


@dataclass(frozen=True, slots=True)
class LaneTables:
    """Channel and class tables of one stream's lanes, in lane order; built once per stream.

    Attributes
    ----------
    lanes : (n_lanes,) LANE_DTYPE
        With everything set that does not depend on the block; ``channels`` and ``classes``
        count from the start of the tables here.
    channels : (n,) CHANNEL_DTYPE
    classes : (n,) uint8
        Classes present in each lane.
    prior : (7056,) uint32
        Initial bit models of every class.
    """

    lanes: npt.NDArray[Any]
    channels: npt.NDArray[Any]
    classes: npt.NDArray[np.uint8]
    prior: npt.NDArray[np.uint32]


@dataclass(slots=True)
class Lanes:
    """All lanes of one plan."""

    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    _tables: dict[int, tuple[LaneTables, int, int]] = field(default_factory=dict)
    _n_channels: int = 0
    _n_classes: int = 0

    def add(
        self,
        tables: LaneTables,
        entries: npt.NDArray[np.uint64],
        first_token: int,
        placement: Placement,
        target: int,
        rope: int,
    ) -> None:
        """Add one block's lanes; `target` and `rope` are indices into the plan's `Targets`."""
        if id(tables) not in self._tables:
            self._tables[id(tables)] = (tables, self._n_channels, self._n_classes)
            self._n_channels += len(tables.channels)
            self._n_classes += len(tables.classes)
        _, channels, classes = self._tables[id(tables)]
        lanes = tables.lanes.copy()
        lanes["offset"], lanes["n_bytes"] = entries[:, 0], entries[:, 1]
        lanes["channels"] += np.uint64(channels)
        lanes["classes"] += np.uint64(classes)
        lanes["first_token"] = first_token
        lanes["payload"] = lanes["output"] = target
        lanes["n_tokens"] = placement.stop - first_token
        lanes["skip"] = placement.start - first_token
        lanes["rope"] = rope
        if placement.rope is not None:
            lanes["rope_row"] = placement.start - placement.rope.first_token
        self.rows.append(lanes)

    def arrays(self) -> LaneArrays:
        """Return the prior, the lanes, and the channel and class tables that they index."""
        tables = [entry[0] for entry in self._tables.values()]
        return (
            tables[0].prior,
            np.concatenate(self.rows),
            np.concatenate([t.channels for t in tables]),
            np.concatenate([t.classes for t in tables]),
        )

    def run(self, arguments: Arguments, n_threads: int) -> list[Failure]:
        """Decode all lanes; return those that fail."""
        if not self.rows:
            return []
        arrays = self.arrays()
        return failed_lanes(_core.run_lanes(*arrays, *arguments, n_threads), arrays[1])


def failed_lanes(status: npt.NDArray[np.uint8], lanes: npt.NDArray[Any]) -> list[Failure]:
    """Return the lanes, of `LANE_DTYPE`, that have a status."""
    return [
        (int(status[i]), int(lanes[i]["output"]), f"lane of head {lanes[i]['head']}: ")
        for i in np.flatnonzero(status)
    ]
