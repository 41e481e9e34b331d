"""Block-quantised rows in files that are mapped: one for each layer, read by position.

`create` or `open` a `FlatSession`, a folder of layers, or use one `FlatLayer` alone. FORMAT.md
section 11. `sessions` finds those in a folder, `verify` checks all of one.
"""

from .checking import FlatReport, verify
from .folder import anonymous, create, open, sessions
from .layer import FlatLayer
from .session import FlatSession

__all__ = [
    "FlatLayer",
    "FlatReport",
    "FlatSession",
    "anonymous",
    "create",
    "open",
    "sessions",
    "verify",
]
