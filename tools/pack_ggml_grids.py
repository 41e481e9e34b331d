"""Pack the grids of the IQ schemes, as `gguf` has them, into the file of FORMAT.md 10.5.

The grids are part of the format, so what this writes is frozen: the script documents where the
file came from.

    python tools/pack_ggml_grids.py codecs/kvcodecs/ggml/grids.bin
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
from gguf import quants
from kvcodecs.ggml.tables import GRIDS


def main() -> None:
    """Write the file and print its hash."""
    parser = argparse.ArgumentParser(description="Pack the grids of the IQ schemes.")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    parts = []
    for grid in GRIDS:
        owner = getattr(quants, grid.source)
        owner.init_grid()
        values = owner.grid.reshape(grid.entries, grid.width)
        codes = np.searchsorted(grid.levels, values).astype(np.uint8)
        if not np.array_equal(np.array(grid.levels)[codes], values):
            raise SystemExit(f"{grid.name}: values other than {grid.levels}")
        per_byte = 8 // grid.bits
        shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(grid.bits)
        shifted = codes.reshape(-1, per_byte) << shifts
        parts.append(np.bitwise_or.reduce(shifted, axis=1).tobytes())
    data = b"".join(parts)
    out.write_bytes(data)
    print(f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
