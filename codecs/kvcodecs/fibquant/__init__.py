"""FibQuant: unit vectors, rotated and taken block by block to the nearest points of a codebook.

FORMAT.md section 11.
"""

from .config import FibQuant, config_from_fields
from .profile import Profile
from .quality import (
    QualityBudget,
    QualityReport,
    attention_quality,
    key_quality,
    own_probes,
    value_quality,
)

__all__ = [
    "FibQuant",
    "Profile",
    "QualityBudget",
    "QualityReport",
    "attention_quality",
    "config_from_fields",
    "key_quality",
    "own_probes",
    "value_quality",
]
