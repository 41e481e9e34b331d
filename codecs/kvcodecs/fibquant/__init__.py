"""FibQuant: unit vectors, rotated and taken block by block to the nearest points of a codebook.

FORMAT.md section 11.
"""

from .book import Book, book_for, book_of
from .calibration import CalibrationSummary, calibrate
from .codec import CODEC
from .config import FibQuant, config_from_fields
from .geometry import PageGeometry
from .kvprofile import KvProfile
from .layout import CacheLayout
from .policies import CompressionPolicy, Decision, FallbackPolicy, ProtectedPolicy
from .profile import Profile
from .quality import (
    QualityBudget,
    QualityReport,
    attention_quality,
    key_quality,
    own_probes,
    value_quality,
)
from .quantiser import Codes, Quantiser
from .shape import TensorShape
from .tensor import EncodedTensor
from .tensor_decoder import DecodedTensor, decode_tensor
from .tensor_encoder import encode_tensor

__all__ = [
    "CODEC",
    "Book",
    "CacheLayout",
    "CalibrationSummary",
    "Codes",
    "CompressionPolicy",
    "Decision",
    "DecodedTensor",
    "EncodedTensor",
    "FallbackPolicy",
    "FibQuant",
    "KvProfile",
    "PageGeometry",
    "Profile",
    "ProtectedPolicy",
    "QualityBudget",
    "QualityReport",
    "Quantiser",
    "TensorShape",
    "attention_quality",
    "book_for",
    "book_of",
    "calibrate",
    "config_from_fields",
    "decode_tensor",
    "encode_tensor",
    "key_quality",
    "own_probes",
    "value_quality",
]
