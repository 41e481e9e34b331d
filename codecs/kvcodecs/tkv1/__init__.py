"""The TKV1 codec: closed-loop prediction per channel and adaptive binary range coding.

`codec` codes blocks for archives (lane layout), `tkvfile` and `tkvencoder` read and write `.tkv`
files in both layouts, `reference` is the readable second implementation that tests compare with.
FORMAT.md sections 3 to 6.
"""

from .codec import CODEC
from .params import TKV1, TKV1Params, config_from_fields, lane_channel, prior_table
from .tkvencoder import StreamEncoder, encode_stream, step_for_bpv
from .tkvfile import GpuTables, TkvFile
from .tkvheader import TkvParams

__all__ = [
    "CODEC",
    "TKV1",
    "GpuTables",
    "StreamEncoder",
    "TKV1Params",
    "TkvFile",
    "TkvParams",
    "config_from_fields",
    "encode_stream",
    "lane_channel",
    "prior_table",
    "step_for_bpv",
]
