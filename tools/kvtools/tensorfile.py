"""Read and write safetensors files in constant memory.

The reader uses plain reads, not a memory map: mapped pages count as resident memory, and `pack`
promises a fixed amount of it for inputs of any size. The whole header is validated before the
first tensor is touched. The writer fills a temporary file beside its target, which appears under
its name complete or not at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound, Truncated, Unsupported

from kvtools.tensorheader import (
    MAX_HEADER_BYTES,
    MAX_SIZE,
    NUMPY_DTYPES,
    TensorInfo,
    dtype_name,
    parse_header,
)
from kvtools.terminal import listed

AnyArray = npt.NDArray[Any]


class TensorFile:
    """A safetensors file opened for reading; a context manager.

    Raises
    ------
    NotFound
        No such file.
    InvalidArgument
        A folder.
    Truncated, Corrupt
        See `parse_header`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        where = str(self.path)
        try:
            self._file = io.FileIO(self.path, opener=_open)
        except FileNotFoundError as error:
            raise NotFound(f"{where}: no such file") from error
        except IsADirectoryError as error:
            message = f"{where}: a folder, expected a safetensors file"
            raise InvalidArgument(message) from error
        try:
            file_bytes = os.fstat(self._file.fileno()).st_size
            if file_bytes < 8:
                raise Truncated(f"{where}: {file_bytes} bytes: not a safetensors file, or cut off")
            length = bytearray(8)
            self._read_into(0, memoryview(length), "header length")
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise Corrupt(
                    f"{where}: not a safetensors file (header of {header_bytes} bytes, at most "
                    f"{MAX_HEADER_BYTES} are allowed)"
                )
            if 8 + header_bytes > file_bytes:
                raise Truncated(
                    f"{where}: {file_bytes} bytes, the header alone needs {8 + header_bytes}: not "
                    "a safetensors file, or cut off"
                )
            text = bytearray(header_bytes)
            self._read_into(8, memoryview(text), "header")
            self.tensors, self.metadata = parse_header(
                bytes(text), data_start=8 + header_bytes, file_bytes=file_bytes, where=where
            )
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays already read stay valid."""
        self._file.close()

    def info(self, name: str) -> TensorInfo:
        """Describe tensor `name`; `NotFound` lists what the file has instead."""
        try:
            return self.tensors[name]
        except KeyError:
            has = listed(sorted(self.tensors)) or "nothing"
            raise NotFound(f"{self.path}: no tensor {name!r}; the file has {has}") from None

    def read(self, name: str) -> AnyArray:
        """Read a whole tensor into a new array."""
        info = self.info(name)
        out = np.empty(info.shape, self._dtype(info))
        self._read_into(info.start, out.reshape(-1).view(np.uint8).data, repr(name))
        return out

    def read_tokens(self, name: str, leading: tuple[int, ...], start: int, stop: int) -> AnyArray:
        """Read tokens ``[start, stop)`` of ``tensor[leading]``, which is [heads][tokens][head_dim].

        Returns a new C-contiguous array [heads][stop - start][head_dim] in the file's dtype. Only
        the bytes asked for are read.
        """
        info = self.info(name)
        dtype = self._dtype(info)
        heads, tokens, head_dim = info.shape[len(leading) :]
        if not 0 <= start <= stop <= tokens:
            raise InvalidArgument(
                f"{self.path}: tokens {start}:{stop} of {name!r}, it has {tokens}"
            )
        first = 0
        for index, size in zip(leading, info.shape, strict=False):
            first = first * size + index
        out = np.empty((heads, stop - start, head_dim), dtype)
        row_bytes = head_dim * dtype.itemsize
        for head in range(heads):
            offset = info.start + ((first * heads + head) * tokens + start) * row_bytes
            self._read_into(offset, out[head].reshape(-1).view(np.uint8).data, repr(name))
        return out

    def _dtype(self, info: TensorInfo) -> np.dtype[Any]:
        try:
            return NUMPY_DTYPES[info.dtype]
        except KeyError:
            raise Unsupported(
                f"{self.path}: tensor {info.name!r} is {info.dtype}; readable are "
                + ", ".join(NUMPY_DTYPES)
            ) from None

    def _read_into(self, offset: int, view: memoryview, what: str) -> None:
        self._file.seek(offset)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise Truncated(f"{self.path}: ends inside {what}, at byte {offset + done}")
            done += count


def _open(path: str, flags: int) -> int:
    """Open without waiting for somebody to write into a pipe, which is no such file anyway."""
    return os.open(path, flags | os.O_NONBLOCK)


class TensorWriter:
    """Write a safetensors file whose sizes are known; it appears complete or not at all.

    Use as a context manager: fill the arrays of `array`, and leave. An exception removes the
    temporary file and leaves the target as it was.

    Parameters
    ----------
    path
        The target. A symbolic link is followed.
    tensors
        Name to (dtype, shape), in numpy's terms.
    metadata
        Strings for the header's ``__metadata__``.
    overwrite
        Whether an existing file may be replaced.

    Raises
    ------
    InvalidArgument
        The target exists and `overwrite` is false, or it is not a plain file.
    OSError
        The disk is full, the folder is missing, and the like.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._given = os.fspath(path)
        self._overwrite = overwrite
        self._refuse_existing()
        self._infos: dict[str, TensorInfo] = {}
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        # Widest elements first, so that every tensor is aligned to its element size.
        by_width = sorted(tensors.items(), key=lambda item: (-np.dtype(item[1][0]).itemsize, item))
        for name, (dtype, shape) in by_width:
            end = position + math.prod(shape) * np.dtype(dtype).itemsize
            self._infos[name] = TensorInfo(name, dtype_name(dtype), tuple(shape), position, end)
            header[name] = {
                "dtype": dtype_name(dtype),
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise InvalidArgument(f"{self.path}: header of {len(text)} bytes is too long")
        self._data_start = 8 + len(text)
        self._head = len(text).to_bytes(8, "little") + text
        self._file_bytes = self._data_start + position
        if self._file_bytes >= MAX_SIZE:
            raise InvalidArgument(f"{self.path}: {self._file_bytes} bytes are no file size")

    def __enter__(self) -> TensorWriter:
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        with self._naming_target():
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                # Reserved, not just extended: a full disk is an OSError here, no SIGBUS later.
                os.posix_fallocate(self._fd, 0, self._file_bytes)
                self._map = mmap.mmap(self._fd, self._file_bytes)
                self._map[: len(self._head)] = self._head
            except BaseException:
                self._discard()
                raise
        return self

    def array(self, name: str) -> AnyArray:
        """Return the writable array of tensor `name`, valid until the writer is left."""
        info = self._infos[name]
        count = math.prod(info.shape)
        if count == 0:
            return np.empty(info.shape, NUMPY_DTYPES[info.dtype])
        offset = self._data_start + info.start
        flat = np.frombuffer(self._map, NUMPY_DTYPES[info.dtype], count, offset)
        return flat.reshape(info.shape)

    def release(self) -> None:
        """Drop the pages written so far from this process; the system keeps them for the file."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            with self._naming_target():
                self._map.flush()
                os.fsync(self._fd)
                self._publish()
        finally:
            self._discard()

    def _publish(self) -> None:
        if self._overwrite:
            os.replace(self._temporary, self.path)
        else:
            try:
                # A link, unlike a rename, never replaces a file that appeared meanwhile.
                os.link(self._temporary, self.path)
            except FileExistsError:
                self._refuse_existing()
                raise
            except OSError:  # a file system without hard links
                self._refuse_existing()
                os.replace(self._temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _naming_target(self) -> Iterator[None]:
        """Let errors name what the caller asked for, not a temporary file."""
        try:
            yield
        except OSError as error:
            text = error.strerror
            if not self.path.parent.exists():
                text = "its folder does not exist"
            raise OSError(error.errno, text, self._given) from error

    def _discard(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()

    def _refuse_existing(self) -> None:
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise InvalidArgument(f"{self.path}: exists and is not a plain file")
        if not self._overwrite:
            raise InvalidArgument(f"{self.path}: exists; --force replaces it")
