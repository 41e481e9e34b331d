"""What the numcodecs classes share: an array in, a self-contained container out, and back.

With `numcodecs_codecs` the only module that imports numcodecs. The bytes are in `container`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numcodecs.compat
import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec

from .codec import CodecConfig
from .container import (
    DTYPES,
    MAGIC,
    Head,
    Layout,
    check_finite,
    decode_blocks,
    encode_blocks,
    memory_of,
    read_blocks,
    read_head,
)
from .errors import Corrupt, InvalidArgument, Truncated
from .frame import seal_record
from .spec import F32, KINDS, MAX_BLOCK_TOKENS, MAX_VALUES, Kind, StreamSpec
from .tensor import as_array, as_float32, check_tensor
from .tkv1.stream_container import decode_file, read_file


class ArrayCodec(Codec):  # type: ignore[misc]
    """Float arrays ``[heads][tokens][head_dim]`` to containers and back."""

    codec_id: ClassVar[str]

    def __init__(self, kind: Kind, asked: CodecConfig, block_tokens: int, layout: Layout) -> None:
        if kind not in KINDS:
            raise InvalidArgument(f"{self.codec_id}: kind {kind!r}, expected 'k' or 'v'")
        if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"{self.codec_id}: block_tokens {block_tokens!r} is not 1 to 2^20"
            )
        self._kind: Kind = kind
        self._asked = asked
        self._block_tokens = block_tokens
        self._layout: Layout = layout

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the codec of a `get_config`; `InvalidArgument` for other keys or values."""
        try:
            return cls(**config)
        except TypeError as error:
            raise InvalidArgument(f"{cls.codec_id}: configuration: {error}") from error

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        asked = self._asked.to_json()
        del asked["codec"]
        return {
            "id": self.codec_id,
            "kind": self._kind,
            **asked,
            "block_tokens": self._block_tokens,
        }

    def __repr__(self) -> str:
        fields = (f"{k}={v!r}" for k, v in self.get_config().items() if k != "id")
        return f"{type(self).__name__}({', '.join(fields)})"

    def encode(self, buf: Any) -> bytes:
        """Return the container of an array.

        Parameters
        ----------
        buf : (heads, tokens, head_dim) float16, bfloat16, float32 or float64
            Any strides; read only. float64 is narrowed to float32 first.

        Raises
        ------
        InvalidArgument
            Another shape or dtype, a value that is not finite, too large for the step, or
            too large to decode into the dtype for certain.
        """
        x = as_array(buf, self.codec_id)
        if x.ndim != 3:
            raise InvalidArgument(
                f"{self.codec_id}: shape {x.shape}, expected (heads, tokens, head_dim)"
            )
        heads, n_tokens, head_dim = x.shape
        spec = StreamSpec(self._kind, heads, head_dim)
        check_tensor(x, spec, self.codec_id)
        dtype = DTYPES.index(x.dtype.newbyteorder("=") if x.dtype.kind == "f" else x.dtype)
        head = Head(
            self._layout,
            dtype,
            self._kind,
            memory_of(x),
            heads,
            head_dim,
            self._block_tokens,
            n_tokens,
        )
        if n_tokens == 0:
            return seal_record(MAGIC, head.pack())
        if head.n_values > MAX_VALUES:
            raise InvalidArgument(
                f"{self.codec_id}: {head.n_values} values, at most {MAX_VALUES}; cut it up"
            )
        y = as_float32(x)
        check_finite(y, spec)
        return self._encode(head, y)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the array of a container, of whichever layout and codec it is.

        Parameters
        ----------
        buf
            What `encode` returned; any contiguous buffer.
        out
            Array or buffer of the size of the result that receives it; returned if given. A float
            array of the result's shape gets its values, anything else its bytes.

        Returns
        -------
        x : (heads, tokens, head_dim)
            In the dtype, byte order and memory layout (C or Fortran) that was encoded.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            `buf` is not what was written. A given `out` is then undefined.
        InvalidArgument
            `out` has another size or is read-only, or `buf` is not contiguous.
        """
        try:
            data = memoryview(numcodecs.compat.ensure_contiguous_ndarray(buf).view(np.uint8))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{self.codec_id}: buf is not a contiguous buffer: {error}"
            ) from error
        return self._decode(data, out)

    def _encode(self, head: Head, y: F32) -> bytes:
        return encode_blocks(head, self._asked, y)

    def _decode(self, data: memoryview, out: Any) -> Any:
        if data.nbytes < len(MAGIC):
            raise Truncated(f"container: {data.nbytes} bytes")
        head, stream_header, rest = read_head(data)
        in_frames = head.n_tokens and head.layout != "stream"
        if stream_header.nbytes and not in_frames:
            raise Corrupt("container: bytes after its head")
        # Everything is checked before memory is taken: it bounds what the head may claim.
        if in_frames:
            params, payloads = read_blocks(head, stream_header, rest)
            target = Target(out, head)
            decode_blocks(head, params, payloads, target.array)
        elif head.n_tokens:
            file = read_file(head, rest)
            target = Target(out, head)
            decode_file(file, target.array)
        else:
            head.spec()
            if rest.nbytes:
                raise Corrupt("container: bytes after its head")
            target = Target(out, head)
        return target.deliver()


class Target:
    """The array that is decoded into: the caller's if it fits, else one to copy from."""

    def __init__(self, out: Any, head: Head) -> None:
        self._out = out
        self._head = head
        shape, dtype = (head.heads, head.n_tokens, head.head_dim), DTYPES[head.dtype]
        size = math.prod(shape) * dtype.itemsize
        if out is not None:
            try:
                given = numcodecs.compat.ensure_ndarray_like(out)
            except (TypeError, ValueError) as error:
                raise InvalidArgument(f"out is not a buffer: {error}") from error
            if not given.flags.writeable:
                raise InvalidArgument("out is read-only")
            if given.nbytes != size:
                raise InvalidArgument(f"out has {given.nbytes} bytes, expected {size}")
        # float64 output holds float32 values, and only these are decoded.
        narrow = DTYPES[0] if dtype == np.float64 else dtype
        direct = (
            isinstance(out, np.ndarray)
            and (out.shape, out.dtype) == (shape, narrow)
            and out.flags.c_contiguous
            and out.flags.writeable
        )
        self.array: npt.NDArray[Any] = out if direct else np.empty(shape, narrow)

    def deliver(self) -> Any:
        """Return the result, in the caller's memory if he gave some."""
        if self.array is self._out:
            return self._out
        result = self.array.astype(DTYPES[self._head.dtype], copy=False)
        out = self._out
        if isinstance(out, np.ndarray) and out.shape == result.shape and _is_float(out.dtype):
            out[...] = result  # any strides and byte order
            return out
        result = self._head.restore(result)
        return result if out is None else numcodecs.compat.ndarray_copy(result, out)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.newbyteorder("=") in DTYPES if dtype.kind == "f" else dtype in DTYPES
