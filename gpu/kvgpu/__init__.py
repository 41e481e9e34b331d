"""Decoding on GPUs: the plans of `kvcodecs`, executed by CUDA kernels, with the same bits.

`kvstore`'s ``session.read(..., device="cuda")`` and ``read_all`` use this, and need nothing of it
but `Paged`, where values go to pages of a cache. `decode` executes plans that a program makes
itself, `Queue` many of them, and `Decoding` one of them step by step.

Importing this touches no device and does not import CuPy: its first use does, be it `is_available`
or a decode. Device memory for what goes up is kept for the next decode, in up to four pieces of up
to 256 MiB.
"""

from .arrays import Paged
from .cuda import is_available
from .decoder import Decoding, Destination, Queue, decode

__all__ = ["Decoding", "Destination", "Paged", "Queue", "decode", "is_available"]
