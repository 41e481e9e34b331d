"""A receipt in a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

from kvcodecs.digests import canonical_json

from kvstore import SessionReceipt
from kvtools.temporary import folder_for


def write_receipt(path: str, receipt: SessionReceipt) -> None:
    """Write a receipt's document to a file that appears whole or not at all."""
    target = Path(path)
    with folder_for(target) as folder:
        made = folder / "receipt"
        made.write_bytes(canonical_json(receipt.to_json()) + b"\n")
        os.replace(made, target)
