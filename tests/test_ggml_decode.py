"""Decoders of the block-quantised schemes: the core, the readable ones and `gguf` agree."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import pytest
from gguf import quants
from kvcodecs.ggml.tables import GRIDS, IQ4_VALUES, Grid, grids, sign_masks


def test_the_grids_are_frozen() -> None:
    raw = resources.files("kvcodecs.ggml").joinpath("grids.bin").read_bytes()
    digest = "09b7593242bd052668b975959cdcfd43942fee2c1d75b7b9d4e2535c3c53d33e"
    assert hashlib.sha256(raw).hexdigest() == digest


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_grids_are_those_of_gguf(grid: Grid) -> None:
    owner = getattr(quants, grid.source)
    owner.init_grid()
    assert np.array_equal(grids()[grid.name], owner.grid.reshape(grid.entries, grid.width))


def test_the_small_tables_are_those_of_gguf() -> None:
    assert sign_masks().tobytes() == quants.IQ2_XXS.ksigns
    assert quants.IQ4_NL.kvalues == IQ4_VALUES
