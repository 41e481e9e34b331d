"""A storage engine for compressed KV-cache archives.

`open` an `Archive`, create or find a `Session` in it, `append` and `commit`, and read any token
range back within the stated error. Byte layouts: FORMAT.md in this package (archives) and in
kvcodecs (frames and codecs).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import (
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
from kvcodecs.fibquant import FibQuant, QualityBudget
from kvcodecs.ggml import GGML
from kvcodecs.kvr1 import KVR1
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope
from kvcodecs.tkv1 import TKV1

from .archive import Archive
from .attention import attend
from .identity import LayerSpec, Model, Shard
from .info import ArchiveInfo, SessionInfo, StreamInfo
from .matching import Match
from .migration.run import migrate
from .migration.work import Migrated
from .opening import compact, open
from .receipts import SessionReceipt, StreamReceipt
from .relocation import AppendedRange
from .session import Session
from .source_digests import source_digest
from .survey import SessionEntry
from .upgrading import Upgraded, upgrade

__all__ = [
    "GGML",
    "KVR1",
    "TKV1",
    "AppendedRange",
    "Archive",
    "ArchiveInfo",
    "Closed",
    "CodecConfig",
    "Corrupt",
    "FibQuant",
    "Full",
    "IdentityMismatch",
    "InvalidArgument",
    "KvError",
    "LayerSpec",
    "Locked",
    "Match",
    "Migrated",
    "Model",
    "NotFound",
    "QualityBudget",
    "Raw",
    "Rope",
    "Session",
    "SessionEntry",
    "SessionInfo",
    "SessionReceipt",
    "Shard",
    "StreamInfo",
    "StreamReceipt",
    "Truncated",
    "Unsupported",
    "Upgraded",
    "__version__",
    "attend",
    "compact",
    "flat",
    "migrate",
    "open",
    "source_digest",
    "upgrade",
]

if TYPE_CHECKING:
    from . import flat

    __version__: str


def __getattr__(name: str) -> object:
    # Reading the installed version costs 20 ms, flat layers cost as much: only who asks pays.
    if name == "__version__":
        from importlib.metadata import version

        return version("kvstore")
    if name == "flat":
        return import_module(".flat", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
