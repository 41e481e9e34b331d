"""A slow and readable KVR1, section by section as FORMAT.md section 9.

The oracle of the tests: the C++ in `kvcodecs._core` must give the same bytes and the same values.
It shares no code with it, nor with the rest of this package; only the tests import it.
"""

from .coding import (
    HEAD,
    Decoder,
    Residual,
    decode_block,
    encode_block,
    encode_steps,
    floats,
    split,
    steps_of,
)
from .parameters import (
    MAX_SINK_DIV,
    N_CLASSES,
    Params,
    fit,
    pack_header,
    parse_header,
    shift_of,
    sink_classes,
    table_of,
    tables,
)

__all__ = [
    "HEAD",
    "MAX_SINK_DIV",
    "N_CLASSES",
    "Decoder",
    "Params",
    "Residual",
    "decode_block",
    "encode_block",
    "encode_steps",
    "fit",
    "floats",
    "pack_header",
    "parse_header",
    "shift_of",
    "sink_classes",
    "split",
    "steps_of",
    "table_of",
    "tables",
]
