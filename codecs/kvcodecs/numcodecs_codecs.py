"""The numcodecs classes of the codecs: what `numcodecs.get_codec` finds by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .container import DTYPES, Head, encode_blocks
from .errors import InvalidArgument
from .fibquant.config import Axis, FibQuant, OnFailure
from .fibquant.profile import Rotation
from .fibquant.quality import QualityBudget
from .ggml import GGML
from .kvr1 import KVR1
from .numcodecs_arrays import ArrayCodec, Target
from .raw import Raw
from .spec import F32, Kind
from .tkv1 import TKV1, TkvFile
from .tkv1.stream_container import decode_file, encode_file
from .tkv1.tkvheader import Layout as TkvLayout

BARE_MAGIC: Final = b"TKV1"


class TKV1Codec(ArrayCodec):
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
        target = Target(out, Head("lane", 0, "k", 0, heads, head_dim, 1, file.n_tokens))
        decode_file(file, target.array)
        return target.deliver()


class KVR1Codec(ArrayCodec):
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


class GGMLCodec(ArrayCodec):
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


class FibQuantCodec(ArrayCodec):
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
        axis: Axis = "per_channel",
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
            raw_heads=raw_heads,  # type: ignore[arg-type]  # checked, and made a tuple
            on_failure=on_failure,
            budget=_budget(budget) if isinstance(budget, Mapping) else budget,
        )
        super().__init__(kind, asked, block_tokens, "fibquant")

    def get_config(self) -> dict[str, object]:
        """Return the JSON configuration that `numcodecs.get_codec` takes."""
        config = super().get_config()
        del config["raw_layers"]  # an array has none
        return config


def _budget(fields: Mapping[str, Any]) -> QualityBudget:
    try:
        return QualityBudget(**fields)
    except TypeError as error:
        raise InvalidArgument(f"FibQuant: budget {dict(fields)}: {error}") from error


class KVRawCodec(ArrayCodec):
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
