"""Codecs of KV-cache streams: tensors to bytes and back, never files.

`spec` and `rope` describe a stream, `codec` is the interface and registry of block codecs,
`frame` the stored form of a block, `plan` the tables and the executor that decode many blocks
at once. Byte layouts: FORMAT.md.
"""

from .codec import codec_by_name, codec_by_number, codec_for, config_from_json
from .errors import (
    Closed,
    Corrupt,
    Full,
    IdentityMismatch,
    InvalidArgument,
    KvError,
    Locked,
    NotFound,
    Truncated,
    Unsupported,
)
from .fibquant import FibQuant
from .ggml import GGML
from .kvr1 import KVR1
from .plan import Plan
from .raw import Raw
from .rope import Rope
from .spec import StreamSpec
from .tkv1 import TKV1

__all__ = [
    "GGML",
    "KVR1",
    "TKV1",
    "Closed",
    "Corrupt",
    "FibQuant",
    "Full",
    "IdentityMismatch",
    "InvalidArgument",
    "KvError",
    "Locked",
    "NotFound",
    "Plan",
    "Raw",
    "Rope",
    "StreamSpec",
    "Truncated",
    "Unsupported",
    "codec_by_name",
    "codec_by_number",
    "codec_for",
    "config_from_json",
]
