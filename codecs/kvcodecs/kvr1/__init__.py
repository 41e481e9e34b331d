"""The KVR1 codec: closed-loop prediction per channel, frozen tables, and 32 rANS states.

`codec` codes blocks for archives, `tables` holds the frozen frequencies, `reference` is the
readable second implementation that tests compare with. FORMAT.md section 9.
"""

from .codec import CODEC
from .params import KVR1, KVR1Params, config_from_fields

__all__ = ["CODEC", "KVR1", "KVR1Params", "config_from_fields"]
