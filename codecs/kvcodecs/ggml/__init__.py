"""The block-quantised codecs `ggml.<scheme>`: f16 and the 24 schemes of ggml, at a fixed rate.

`arrays` quantises plain arrays, `codec` codes the blocks of archives. FORMAT.md section 10.
"""

from .arrays import dequantise, quantise
from .codec import CODEC
from .config import GGML, config_from_fields
from .schemes import SCHEMES, Scheme, scheme_by_name, scheme_by_number

__all__ = [
    "CODEC",
    "GGML",
    "SCHEMES",
    "Scheme",
    "config_from_fields",
    "dequantise",
    "quantise",
    "scheme_by_name",
    "scheme_by_number",
]
