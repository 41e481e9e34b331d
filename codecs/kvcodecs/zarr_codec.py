"""The codec that zarr loads by itself: plain `zarr.open` reads the arrays of an archive.

The only module that imports zarr. What chunks are made of is in `zarr_frames`.

zarr hands a codec one chunk at a time and never says which. So a reader checks what a frame says
of itself (layer, kind, stream, number of tokens), but not that it is the right one of its array:
archives do, with their own reader. A chunk that is missing reads as the fill value, which is NaN.

Writes into an archive's array are refused before anything is changed, and so is another shape.
What zarr does without asking a codec it does: it deletes arrays and writes attributes; arrays in
shards it resizes, and its fused pipeline leaves out a block of nothing but fill values that is
written into a shard.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from zarr.abc.codec import (
    ArrayBytesCodec,
    ArrayBytesCodecPartialDecodeMixin,
    ArrayBytesCodecPartialEncodeMixin,
)
from zarr.abc.store import ByteGetter, ByteSetter
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer, cpu
from zarr.storage import StorePath

from .codec import codec_for
from .errors import Corrupt, InvalidArgument, Unsupported
from .shared import unpack_shared
from .spec import Kind, StreamSpec
from .zarr_configuration import NAME, ArchiveArray, check_header
from .zarr_frames import Objects, Shape, decode_archived, decode_own, encode_own
from .zarr_own import OwnArray

#: Stream headers that were read from arrays of their own, by tag.
_fetched: dict[int, bytes] = {}
_MOST_FETCHED: Final = 256
#: Shared objects that were read from archives, by digest.
_objects: dict[bytes, bytes] = {}
_MOST_OBJECTS: Final = 32


class _Decoded(cpu.NDBuffer):
    """A decoded chunk. zarr merges a partial write into a copy, which is of this class as well."""


class _Elsewhere(NamedTuple):
    """What chunks are decoded with and another place of the archive holds.

    Attributes
    ----------
    what
        It, for messages.
    up
        How many parts of a chunk's path lead to where `key` begins.
    key
        Its path from there.
    opened
        What has to be opened with zarr for this to be in reach.
    """

    what: str
    up: int
    key: str
    opened: str

    def place(self, byte_getter: Any) -> StorePath:
        """Return where it is, from a chunk that `byte_getter` gets."""
        parts = byte_getter.path.split("/") if isinstance(byte_getter, StorePath) else []
        if len(parts) < self.up or parts[-4:-3] != ["c"]:  # array, c, head, token, channel
            raise self.out_of_reach()
        return StorePath(byte_getter.store, "/".join([*parts[: -self.up], self.key]))

    def bytes_of(self, place: StorePath, data: Buffer | None) -> bytes:
        """Return what was read there."""
        if data is None:
            raise Corrupt(f"{NAME}: {place.path}: missing; it holds the {self.what}")
        return data.as_numpy_array().tobytes()

    def out_of_reach(self) -> Unsupported:
        return Unsupported(
            f"{NAME}: the {self.what} is in {self.key!r}, which is out of reach from here; open "
            f"{self.opened}, and the array in it"
        )


class _Parts:
    """What the chunks of an array are decoded with.

    Attributes
    ----------
    missing
        What has to be read first, each with what takes it.
    """

    def __init__(self, array: ArchiveArray | OwnArray) -> None:
        self.header = b""
        self._objects: dict[bytes, bytes] = {}
        self.missing: list[tuple[_Elsewhere, Callable[[StorePath, bytes], None]]] = []
        if isinstance(array, OwnArray):
            return  # each chunk has its own
        header = _fetched.get(array.header_tag) if array.header is None else array.header
        if header is None:
            where = _Elsewhere("stream header", 5, f"{array.header_array}/c/0", "the whole group")
            self.missing.append((where, partial(self._take_header, array.header_tag)))
        else:
            self.header = header
        for digest, packed in array.shared:
            found = _objects.get(digest) if packed is None else packed
            if found is None:
                key = f"_kvstore/books/{digest.hex()}/c/0"
                where = _Elsewhere("codebook", 6, key, "the archive itself, not one group of it")
                self.missing.append((where, partial(self._take_object, digest)))
            else:
                self._objects[digest] = found

    @property
    def objects(self) -> Objects:
        return tuple(self._objects.items())

    def _take_header(self, tag: int, place: StorePath, data: bytes) -> None:
        self.header = check_header(data, tag, place.path)
        if len(_fetched) >= _MOST_FETCHED:
            _fetched.clear()
        _fetched[tag] = self.header

    def _take_object(self, digest: bytes, place: StorePath, data: bytes) -> None:
        self._objects[digest] = bytes(unpack_shared(data, f"{NAME}: {place.path}"))
        if len(_objects) >= _MOST_OBJECTS:
            _objects.clear()
        _objects[digest] = self._objects[digest]


@dataclass(frozen=True, init=False)
class FrameCodec(
    ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin, ArrayBytesCodecPartialEncodeMixin
):
    """Chunks that are our blocks, as a zarr serializer.

    For an array of your own, ``[heads][tokens][head_dim]`` of float16 or float32, with chunks that
    span heads and head_dim. Only whole chunks can be written: a partial write would decode and
    quantise again what it does not touch. Each chunk is coded by itself; the arrays of an archive
    are smaller, and only `session.append` writes them.

    Parameters
    ----------
    codec
        ``"tkv1"``, ``"kvr1"``, ``"raw"``, ``"fibquant"``, or a scheme of ggml: ``"ggml.q8_0"``.
    kind
        ``"k"`` (give K before RoPE) or ``"v"``.
    step
        Quantiser step: values come back within half of it; float16 adds half a unit in the last
        place.
    rel_step
        The step as a fraction of the RMS of each chunk. Give one of both to TKV1 and KVR1.
    options
        Of FibQuant: ``block_dim=4, codebook_size=256`` and what else `kvcodecs.FibQuant` takes, but
        what it says of layers and of the first and last tokens. The codebook is in ``zarr.json``.

    Raises
    ------
    InvalidArgument
        A value out of range.

    Examples
    --------
    >>> import numpy as np, zarr
    >>> array = zarr.create_array(
    ...     {}, shape=(1, 256, 64), chunks=(1, 128, 64), dtype="float16", fill_value=float("nan"),
    ...     serializer=FrameCodec(codec="kvr1", kind="v", step=0.25), compressors=None)
    >>> array[:, :128] = np.ones((1, 128, 64), "float16")
    >>> float(array[0, 100, 7])
    1.0
    """

    array: ArchiveArray | OwnArray
    is_fixed_size = False

    def __init__(
        self,
        *,
        codec: str,
        kind: Kind,
        step: float | None = None,
        rel_step: float | None = None,
        **options: Any,
    ) -> None:
        array = OwnArray.of_options(codec, kind, step, rel_step, **options)
        object.__setattr__(self, "array", array)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the codec of a `zarr.json`; `Corrupt`, `InvalidArgument` or `Unsupported`."""
        configuration = data.get("configuration") or {}
        if not isinstance(configuration, Mapping):
            raise Corrupt(f"{NAME}: configuration {configuration!r} is no object")
        kind = ArchiveArray if "archive" in configuration else OwnArray
        codec = cls.__new__(cls)
        object.__setattr__(codec, "array", kind.from_json(configuration))
        return codec

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `zarr.json`."""
        return {"name": NAME, "configuration": self.array.to_json()}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise: the size depends on the values."""
        raise NotImplementedError

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Return the codec of an array of this shape, with the book for it.

        Raises
        ------
        InvalidArgument
            As `validate`: of arrays inside shards it is asked nothing else.
        """
        _, _, head_dim = self._check(array_spec.shape, array_spec.dtype)
        if isinstance(self.array, ArchiveArray):
            return self
        array = self.array.of_head_dim(head_dim)
        if array is self.array:
            return self
        codec = type(self).__new__(type(self))
        object.__setattr__(codec, "array", array)
        return codec

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Check array and chunks; zarr asks before it creates, opens or resizes an array.

        Raises
        ------
        InvalidArgument
            Not ``[heads][tokens][head_dim]`` of float16 or float32, chunks that do not span heads
            and head_dim or do not fill the array, or another length than the archive's.
        """
        heads, tokens, head_dim = self._check(shape, dtype)
        chunk = tuple(getattr(chunk_grid, "chunk_shape", ()))
        n = chunk[1] if len(chunk) == 3 else 0
        tail = self.array.tail if isinstance(self.array, ArchiveArray) else 0
        if n < 1 or chunk != (heads, n, head_dim) or tokens % n not in (0, tail):
            raise InvalidArgument(
                f"{NAME}: chunks of {chunk} in an array of {shape}: make them span heads and "
                "head_dim, and tokens a multiple of theirs"
            )
        if isinstance(self.array, ArchiveArray) and self.array.tokens not in (None, tokens):
            raise InvalidArgument(
                f"{NAME}: {tokens} tokens, but the archive has {self.array.tokens}; only "
                "session.append of kvstore makes its arrays longer"
            )

    def _check(self, shape: tuple[int, ...], dtype: Any) -> Shape:
        native = dtype.to_native_dtype()
        if native.kind != "f" or native.itemsize not in (2, 4):
            raise InvalidArgument(f"{NAME}: dtype {native}, expected float16 or float32")
        if len(shape) != 3:
            raise InvalidArgument(f"{NAME}: shape {shape}, expected (heads, tokens, head_dim)")
        heads, tokens, head_dim = shape
        spec = StreamSpec(self.array.kind, heads, head_dim)
        if isinstance(self.array, OwnArray):
            asked = self.array.asked("float32")
            codec_for(asked).check_stream(asked, spec)
        return heads, tokens, head_dim

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        parts = _Parts(self.array)
        for elsewhere, _ in parts.missing:
            raise elsewhere.out_of_reach()
        x = self._decode(chunk_data, chunk_spec, slice(0, chunk_spec.shape[1]), parts)
        if chunk_spec.prototype.nd_buffer is cpu.NDBuffer:
            return _Decoded.from_numpy_array(x)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(x)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        data = await byte_getter.get(chunk_spec.prototype)
        if data is None:
            return None
        parts = _Parts(self.array)
        for elsewhere, take in parts.missing:
            place = elsewhere.place(byte_getter)
            take(place, elsewhere.bytes_of(place, await place.get(chunk_spec.prototype)))
        return await asyncio.to_thread(self._part, data, selection, chunk_spec, parts)

    def _decode_partial_sync(
        self, byte_getter: Any, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        data = byte_getter.get_sync(prototype=chunk_spec.prototype)
        if data is None:
            return None
        parts = _Parts(self.array)
        for elsewhere, take in parts.missing:
            place: Any = elsewhere.place(byte_getter)
            found = place.get_sync(prototype=chunk_spec.prototype)
            take(place, elsewhere.bytes_of(place, found))
        return self._part(data, selection, chunk_spec, parts)

    def _part(self, data: Buffer, selection: Any, chunk_spec: ArraySpec, parts: _Parts) -> NDBuffer:
        """Decode the tokens that a selection touches, and select."""
        selection = selection if isinstance(selection, tuple) else (selection,)
        rows = slice(0, chunk_spec.shape[1])
        if len(selection) == 3:
            rows, tokens = _rows(selection[1], chunk_spec.shape[1])
            selection = (selection[0], tokens, selection[2])
        x = self._decode(data, chunk_spec, rows, parts)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(np.asarray(x[selection]))

    def _decode(
        self, data: Buffer, chunk_spec: ArraySpec, rows: slice, parts: _Parts
    ) -> npt.NDArray[Any]:
        heads, tokens, head_dim = chunk_spec.shape
        dtype: np.dtype[Any] = chunk_spec.dtype.to_native_dtype()
        native = dtype.newbyteorder("=")
        source, shape = data.as_numpy_array(), (heads, tokens, head_dim)
        if isinstance(self.array, OwnArray):
            x = decode_own(self.array, source, shape, rows, native)
        else:
            x = decode_archived(
                self.array, parts.header, parts.objects, source, shape, rows, native
            )
        return x.astype(dtype, copy=False)

    def _encode_sync(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        array = self._own()
        if isinstance(chunk_data, _Decoded):
            raise _partial(chunk_spec)
        data = encode_own(array, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(data)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    # With these two zarr hands over what is written and where to, and merges nothing by itself.

    async def _encode_partial_single(
        self, byte_setter: ByteSetter, chunk_array: NDBuffer, selection: Any, chunk_spec: ArraySpec
    ) -> None:
        chunk = self._whole(chunk_array, selection, chunk_spec)
        if chunk is None:
            await byte_setter.delete()
        else:
            await byte_setter.set(await self._encode_single(chunk, chunk_spec))

    def _encode_partial_sync(
        self, byte_setter: Any, value: NDBuffer, selection: Any, chunk_spec: ArraySpec
    ) -> None:
        chunk = self._whole(value, selection, chunk_spec)
        if chunk is None:
            byte_setter.delete_sync()
        else:
            byte_setter.set_sync(self._encode_sync(chunk, chunk_spec))

    def _whole(self, value: NDBuffer, selection: Any, chunk_spec: ArraySpec) -> NDBuffer | None:
        """Return the chunk that is written, None if it is all fill value and zarr keeps none."""
        self._own()
        x, shape = value.as_numpy_array(), chunk_spec.shape
        if not _is_whole(selection, shape) or x.size not in (1, math.prod(shape)):
            raise _partial(chunk_spec)
        x = np.broadcast_to(x, shape) if x.size == 1 else x.reshape(shape)
        chunk = chunk_spec.prototype.nd_buffer.from_numpy_array(x)
        keep = chunk_spec.config.write_empty_chunks or not chunk.all_equal(chunk_spec.fill_value)
        return chunk if keep else None

    def _own(self) -> OwnArray:
        if isinstance(self.array, OwnArray):
            return self.array
        raise InvalidArgument(
            f"{NAME}: this array belongs to an archive of kvstore and cannot be written with zarr; "
            "open the archive and use session.append"
        )


def _partial(chunk_spec: ArraySpec) -> InvalidArgument:
    return InvalidArgument(
        f"{NAME}: a chunk of shape {chunk_spec.shape} is written in part, which would quantise the "
        "rest of it again; write whole chunks, with slices"
    )


def _is_whole(selection: Any, shape: tuple[int, ...]) -> bool:
    """Whether a selection of slices and integers is the whole chunk, in order."""
    selection = selection if isinstance(selection, tuple) else (selection,)
    if len(selection) != len(shape):
        return False
    for part, size in zip(selection, shape, strict=True):
        if isinstance(part, slice):
            if part.indices(size) != (0, size, 1):
                return False
        elif not isinstance(part, int | np.integer) or size != 1:
            return False
    return True


def _rows(part: Any, n_tokens: int) -> tuple[slice, Any]:
    """Return the tokens that a selection of one axis touches, and the selection among them."""
    if isinstance(part, slice):
        steps = range(*part.indices(n_tokens))
        lo, hi = (steps[0], steps[-1] + 1) if steps else (0, 0)
        return slice(lo, hi), slice(None, None, steps.step)
    index = np.asarray(part)
    if index.dtype == np.bool_:
        index = np.flatnonzero(index)
    lo, hi = (int(index.min()), int(index.max()) + 1) if index.size else (0, 0)
    return slice(lo, hi), index - lo
