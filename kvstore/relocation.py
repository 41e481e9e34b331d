"""A range of one session appended to another, at another place of its context.

K is stored before RoPE, so a token's frame is the same wherever it goes: where the blocks of both
sessions lie alike, whole blocks are shared as a fork shares them, and reading turns K for the new
positions. The rest is decoded and coded again. FORMAT.md section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from kvcodecs.errors import IdentityMismatch, InvalidArgument

from . import keys
from .backend import Snapshot
from .identity import check_identity
from .session_record import Part, SessionRecord
from .spans import Span, head_of, header_of, spans_of
from .token_ids import Ids

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """What `Session.append_range` did.

    Attributes
    ----------
    n_tokens
        Tokens appended.
    n_shared
        How many of them, the first, share the source's frames: their values are the source's.
    max_error
        Largest difference between a value of the source and the one now stored for it, in the
        coded domain, measured; 0.0 if all are shared. The source's own error comes on top.
    """

    n_tokens: int
    n_shared: int
    max_error: float
