"""FibQuant: unit vectors, rotated and taken block by block to the nearest points of a codebook.

FORMAT.md section 11.
"""

from .config import FibQuant, config_from_fields

__all__ = ["FibQuant", "config_from_fields"]
