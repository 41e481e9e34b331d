"""The block-quantised codecs `ggml.<scheme>`: f16 and the 24 schemes of ggml, at a fixed rate."""

from .arrays import dequantise, quantise
from .schemes import SCHEMES, Scheme, scheme_by_name, scheme_by_number

__all__ = [
    "SCHEMES",
    "Scheme",
    "dequantise",
    "quantise",
    "scheme_by_name",
    "scheme_by_number",
]
