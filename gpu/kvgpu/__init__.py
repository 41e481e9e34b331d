"""Decoding on GPUs: the plans of `kvcodecs`, executed by CUDA kernels, with the same bits.

Importing this touches no device, nor imports CuPy: that happens with the first decode.
"""

from .arrays import Paged
from .cuda import is_available
from .decoder import Decoding, Destination, Queue, decode

__all__ = ["Decoding", "Destination", "Paged", "Queue", "decode", "is_available"]
