"""Block-quantised rows in files that are mapped: one for each layer, read by position.

`create` or `open` a `FlatSession`, a folder of layers, or use one `FlatLayer` alone. FORMAT.md
section 11.
"""

from .layer import FlatLayer
from .session import FlatSession, anonymous, create, open

__all__ = ["FlatLayer", "FlatSession", "anonymous", "create", "open"]
