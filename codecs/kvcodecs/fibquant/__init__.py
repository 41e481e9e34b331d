"""FibQuant: unit vectors, rotated and taken block by block to the nearest points of a codebook.

FORMAT.md section 11.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from .book import Book, book_for, book_of
    from .calibration import CalibrationSummary, calibrate
    from .codec import CODEC
    from .geometry import PageGeometry
    from .kvprofile import KvProfile
    from .layout import CacheLayout
    from .policies import CompressionPolicy, Decision, FallbackPolicy, ProtectedPolicy
    from .quantiser import Codes, Quantiser
    from .shape import TensorShape
    from .tensor import EncodedTensor
    from .tensor_decoder import DecodedTensor, decode_tensor
    from .tensor_encoder import encode_tensor

# Who configures a session with another codec does not wait for these.
_MODULES: Final = {
    "book": ("Book", "book_for", "book_of"),
    "calibration": ("CalibrationSummary", "calibrate"),
    "codec": ("CODEC",),
    "geometry": ("PageGeometry",),
    "kvprofile": ("KvProfile",),
    "layout": ("CacheLayout",),
    "policies": ("CompressionPolicy", "Decision", "FallbackPolicy", "ProtectedPolicy"),
    "quantiser": ("Codes", "Quantiser"),
    "shape": ("TensorShape",),
    "tensor": ("EncodedTensor",),
    "tensor_decoder": ("DecodedTensor", "decode_tensor"),
    "tensor_encoder": ("encode_tensor",),
}
_HOMES: Final = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
