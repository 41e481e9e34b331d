"""The numcodecs classes of the codecs: an array in, a self-contained container out.

The only module that imports numcodecs. The bytes are in `container`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

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
from .fibquant.config import Axis, FibQuant, OnFailure
from .fibquant.profile import Rotation
from .fibquant.quality import QualityBudget
from .frame import seal_record
from .ggml import GGML
from .kvr1 import KVR1
from .raw import Raw
from .spec import F32, KINDS, MAX_BLOCK_TOKENS, MAX_VALUES, Kind, StreamSpec
from .tensor import as_array, as_float32, check_tensor
from .tkv1 import TKV1, TkvFile
from .tkv1.stream_container import decode_file, encode_file, read_file
from .tkv1.tkvheader import Layout as TkvLayout

BARE_MAGIC: Final = b"TKV1"


class _ArrayCodec(Codec):  # type: ignore[misc]
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
            target = _Target(out, head)
            decode_blocks(head, params, payloads, target.array)
        elif head.n_tokens:
            file = read_file(head, rest)
            target = _Target(out, head)
            decode_file(file, target.array)
        else:
            head.spec()
            if rest.nbytes:
                raise Corrupt("container: bytes after its head")
            target = _Target(out, head)
        return target.deliver()


class TKV1Codec(_ArrayCodec):
    """TKV1 for numcodecs: ``[heads][tokens][head_dim]`` floats to bytes, within a bound.

    Arrays have these three axes and an even `head_dim`.

    Parameters
    ----------
    kind
        ``"k"``: channels ``(i, head_dim / 2 + i)`` are RoPE pairs and share their spread;
        ``"v"``: they do not. Give K before RoPE: only the stream layout un-rotates it.
    rel_step, step, max_error, rmse, bpv
        At most one. `step`: values decode within ``step / 2``, in float32 (see Notes).
        `max_error`: that half. `rel_step`: the step as a fraction of the RMS of the array, 1/4 if
        nothing is given. `rmse`: the expected root mean square error. `bpv`: the finest step that
        needs no more bits per value of the payload, of 1024 tokens at most; headers come on top.
    block_tokens
        Tokens per block, at most 2^20.
    sink, sink_div
        The first `sink` tokens are coded `sink_div` times finer.
    ar
        Predict each channel from its previous token.
    lane_channels
        Channels of an independently coded lane; 0 for `head_dim`.
    layout
        ``"lane"`` or ``"stream"`` (FORMAT.md sections 4 and 5).
    theta, pre_rope
        Stream layout only: RoPE base, and whether K is un-rotated with it before coding
        (default for K).

    Raises
    ------
    InvalidArgument
        A value out of range, or two policies.

    Notes
    -----
    Lossy: ``|x - y| <= step / 2`` in float32; an array of float16 or bfloat16 decodes to its dtype,
    which adds half a unit in the last place; ``step / sqrt(2)`` for K that the stream layout
    rotates. Encoding is deterministic. An array whose decoded values might overflow its dtype is
    refused. `decode` takes bare `.tkv` files as well, as float32.

    Examples
    --------
    >>> import numpy as np
    >>> codec = TKV1Codec(kind="v", step=0.5)
    >>> x = np.linspace(-1, 1, 12, dtype="f2").reshape(1, 3, 4)
    >>> y = codec.decode(codec.encode(x))
    >>> y.dtype, y.shape, bool(abs(x - y).max() <= 0.25)
    (dtype('float16'), (1, 3, 4), True)
    """

    codec_id = "tkv1"

    def __init__(
        self,
        kind: Kind = "v",
        *,
        rel_step: float | None = None,
        step: float | None = None,
        max_error: float | None = None,
        rmse: float | None = None,
        bpv: float | None = None,
        block_tokens: int = 128,
        sink: int = 4,
        sink_div: int = 16,
        ar: bool = True,
        lane_channels: int = 0,
        layout: TkvLayout = "lane",
        theta: float | None = None,
        pre_rope: bool | None = None,
    ) -> None:
        if layout not in ("lane", "stream"):
            raise InvalidArgument(f"tkv1: layout {layout!r}, expected 'lane' or 'stream'")
        if layout == "lane" and not (theta is None and pre_rope is None):
            raise InvalidArgument("tkv1: theta and pre_rope belong to layout='stream'")
        asked = TKV1(rel_step, step, max_error, rmse, bpv, sink, sink_div, ar, lane_channels)
        super().__init__(kind, asked, block_tokens, layout)
        self._tkv1 = asked
        self._theta = 1e5 if theta is None else float(theta)
        self._pre_rope = (kind == "k") if pre_rope is None else bool(pre_rope)
        if layout == "stream" and not (math.isfinite(self._theta) and self._theta > 0.0):
            raise InvalidArgument(f"tkv1: theta {theta!r} is not positive")

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        config = super().get_config() | {"layout": self._layout}
        if self._layout == "stream":
            config |= {"theta": self._theta, "pre_rope": self._pre_rope}
        return config

    def _encode(self, head: Head, y: F32) -> bytes:
        if self._layout == "stream":
            return encode_file(head, y, self._tkv1, theta=self._theta, pre_rope=self._pre_rope)
        return super()._encode(head, y)

    def _decode(self, data: memoryview, out: Any) -> Any:
        """Decode a container, or a bare `.tkv` file as float32."""
        if bytes(data[:4]) != BARE_MAGIC:
            return super()._decode(data, out)
        file = TkvFile.parse(data)
        heads, head_dim = file.params.heads, file.params.head_dim
        target = _Target(out, Head("lane", 0, "k", 0, heads, head_dim, 1, file.n_tokens))
        decode_file(file, target.array)
        return target.deliver()


class KVR1Codec(_ArrayCodec):
    """KVR1 for numcodecs: ``[heads][tokens][head_dim]`` floats to bytes, within a bound.

    Arrays have these three axes and an even `head_dim`.

    Parameters
    ----------
    kind
        ``"k"`` or ``"v"``: kept with the array; both are coded alike. Give K before RoPE: it is
        not un-rotated, and codes larger after it.
    rel_step, step, max_error, rmse, bpv
        At most one. `step`: values decode within ``step / 2``, in float32 (see Notes).
        `max_error`: that half. `rel_step`: the step as a fraction of the RMS of the array, 1/4 if
        nothing is given. `rmse`: the expected root mean square error. `bpv`: the finest step that
        needs no more bits per value of the payload, of 1024 tokens at most; headers come on top.
    block_tokens
        Tokens per block, at most 2^20.
    sink, sink_div
        The first `sink` tokens are coded `sink_div` times finer, at most 512.
    ar
        Predict each channel from its previous token.

    Raises
    ------
    InvalidArgument
        A value out of range, or two policies.

    Notes
    -----
    Lossy: ``|x - y| <= step / 2`` in float32; an array of float16 or bfloat16 decodes to its dtype,
    which adds half a unit in the last place. Encoding is deterministic. An array whose decoded
    values might overflow its dtype is refused.

    Examples
    --------
    >>> import numpy as np
    >>> codec = KVR1Codec(kind="v", step=0.5)
    >>> x = np.linspace(-1, 1, 12, dtype="f2").reshape(1, 3, 4)
    >>> y = codec.decode(codec.encode(x))
    >>> y.dtype, y.shape, bool(abs(x - y).max() <= 0.25)
    (dtype('float16'), (1, 3, 4), True)
    """

    codec_id = "kvr1"

    def __init__(
        self,
        kind: Kind = "v",
        *,
        rel_step: float | None = None,
        step: float | None = None,
        max_error: float | None = None,
        rmse: float | None = None,
        bpv: float | None = None,
        block_tokens: int = 128,
        sink: int = 4,
        sink_div: int = 16,
        ar: bool = True,
    ) -> None:
        asked = KVR1(rel_step, step, max_error, rmse, bpv, sink, sink_div, ar)
        super().__init__(kind, asked, block_tokens, "kvr1")


class GGMLCodec(_ArrayCodec):
    """ggml's block schemes for numcodecs: ``[heads][tokens][head_dim]`` floats at a fixed rate.

    Arrays have these three axes and an even `head_dim`; ``heads * head_dim``, the values of a
    token, are a multiple of the scheme's block size.

    Parameters
    ----------
    scheme
        ``"q8_0"``, ``"q4_k"`` and so on, in any case; FORMAT.md section 10 has all of them.
    kind
        ``"k"`` or ``"v"``: kept with the array; both are coded alike.
    block_tokens
        Tokens per frame, at most 2^20: each has a checksum.

    Raises
    ------
    InvalidArgument
        No such scheme, or a value out of range.

    Notes
    -----
    Lossy, and there is no bound: the frames say what error was measured. Coding decoded values
    again moves them. An array whose decoded values might overflow its dtype is refused, as is one
    with a block whose scale leaves float16.

    Examples
    --------
    >>> import numpy as np
    >>> codec = GGMLCodec("q8_0")
    >>> x = np.linspace(-1, 1, 96, dtype="f2").reshape(1, 3, 32)
    >>> y = codec.decode(codec.encode(x))
    >>> y.dtype, y.shape, bool(abs(x - y).max() < 0.01)
    (dtype('float16'), (1, 3, 32), True)
    """

    codec_id = "ggml"

    def __init__(self, scheme: str, kind: Kind = "v", *, block_tokens: int = 128) -> None:
        asked = GGML(scheme)
        super().__init__(kind, asked, block_tokens, "ggml")
        self._scheme = asked.scheme

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        return {
            "id": self.codec_id,
            "scheme": self._scheme,
            "kind": self._kind,
            "block_tokens": self._block_tokens,
        }


class FibQuantCodec(_ArrayCodec):
    """FibQuant for numcodecs: ``[heads][tokens][head_dim]`` floats as points of a codebook.

    Arrays have these three axes and an even `head_dim`.

    Parameters
    ----------
    kind
        ``"k"`` or ``"v"``: what ``axis="role_aware"`` goes by. Give K before RoPE: it is not
        un-rotated.
    block_dim, codebook_size, rotation, seed, axis, first_tokens, raw_heads, on_failure, budget
        As in `kvcodecs.FibQuant`; a `budget` may be given as the mapping that `get_config` returns.
    last_tokens
        So many tokens of the array's end are kept raw.
    block_tokens
        Tokens per block, at most 2^20.

    Raises
    ------
    InvalidArgument
        A value out of range.

    Notes
    -----
    Lossy, and there is no bound: the frames say what error was measured. The codebook, some KiB, is
    with the bytes of each array. An array whose decoded values might overflow its dtype is refused.

    Examples
    --------
    >>> import numpy as np
    >>> codec = FibQuantCodec("v", block_dim=2, codebook_size=64)
    >>> x = np.random.default_rng(0).standard_normal((1, 128, 64)).astype("f2")
    >>> y = codec.decode(codec.encode(x))
    >>> y.dtype, y.shape, bool(abs(x - y).max() < 1.5)
    (dtype('float16'), (1, 128, 64), True)
    """

    codec_id = "fibquant"

    def __init__(
        self,
        kind: Kind = "v",
        *,
        block_dim: int = 4,
        codebook_size: int = 256,
        rotation: Rotation = "hadamard",
        seed: int = 42,
        axis: Axis = "role_aware",
        first_tokens: int = 4,
        last_tokens: int = 0,
        raw_heads: Sequence[int] = (),
        on_failure: OnFailure = "keep_raw",
        budget: QualityBudget | Mapping[str, Any] | None = None,
        block_tokens: int = 128,
    ) -> None:
        asked = FibQuant(
            block_dim,
            codebook_size,
            rotation=rotation,
            seed=seed,
            axis=axis,
            first_tokens=first_tokens,
            last_tokens=last_tokens,
            raw_heads=tuple(raw_heads),
            on_failure=on_failure,
            budget=QualityBudget(**budget) if isinstance(budget, Mapping) else budget,
        )
        super().__init__(kind, asked, block_tokens, "fibquant")

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        config = super().get_config()
        del config["raw_layers"]  # an array has none
        return config


class KVRawCodec(_ArrayCodec):
    """Values as they are for numcodecs: ``[heads][tokens][head_dim]`` floats, checksummed.

    Arrays have these three axes and an even `head_dim`. What the other classes do to K and V this
    one leaves undone: the same container, for arrays that must come back bit for bit.

    Parameters
    ----------
    kind
        ``"k"`` or ``"v"``: kept with the array.
    block_tokens
        Tokens per block, at most 2^20.

    Raises
    ------
    InvalidArgument
        A value out of range.

    Notes
    -----
    float64 is refused, as are values that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> codec = KVRawCodec(kind="v")
    >>> x = np.linspace(-1, 1, 12, dtype="f2").reshape(1, 3, 4)
    >>> bool((x == codec.decode(codec.encode(x))).all())
    True
    """

    codec_id = "kvraw"

    def __init__(self, kind: Kind = "v", *, block_tokens: int = 128) -> None:
        super().__init__(kind, Raw(), block_tokens, "raw")

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        return {"id": self.codec_id, "kind": self._kind, "block_tokens": self._block_tokens}

    def _encode(self, head: Head, y: F32) -> bytes:
        dtype = DTYPES[head.dtype].name
        if dtype == "float64":
            raise InvalidArgument("kvraw: float64 would be narrowed; give float32")
        return encode_blocks(head, Raw(dtype), y)


class _Target:
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
