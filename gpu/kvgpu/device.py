"""What decoding needs of a device, and the memory that it lends to one decode after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from .image import Image
from .launches import Launch, Limits

# Pinned memory is scarce, and made slowly: what is larger goes up in pieces, one being written
# while the one before is on its way.
_PIECE_BYTES: Final = 16 << 20
# Device memory beyond this is given back after the decode that needed it.
_KEEP_BYTES: Final = 256 << 20
_N_PIECES: Final = 2
_MOST_FREE: Final = 4


class Memory(Protocol):
    """Bytes of the device, as long as the object lives."""

    @property
    def address(self) -> int: ...


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Return when the device is there."""


class Stream(Protocol):
    """What the device does in order. Everything returns at once."""

    def upload(self, host: npt.NDArray[np.uint8], address: int) -> None:
        """Copy pinned memory to the device."""

    def download(self, address: int, host: npt.NDArray[np.uint8]) -> None:
        """Copy device memory to pinned memory."""

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        """Copy device memory to device memory."""

    def launch(self, launch: Launch, base: int) -> None:
        """Run a kernel; offsets count from `base`."""

    def record(self) -> Event: ...
    def wait(self, event: Event) -> None:
        """Do what comes next only after `event`, of another stream."""

    def follow(self, handle: int) -> None:
        """Do what comes next only after all that a ``cudaStream_t`` was asked for until now."""


class Device(Protocol):
    """A GPU, or what stands in for one.

    Attributes
    ----------
    limits
        What it has room for.
    uploads
        The stream of all uploads.
    slots, constants
        Memory for decodes, and for what all of them share.
    """

    @property
    def limits(self) -> Limits: ...
    @property
    def uploads(self) -> Stream: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def constants(self) -> Constants: ...
    def describe(self) -> str:
        """Return its name, and what compilers made of the kernels."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new array of the device's own library."""

    def from_dlpack(self, array: Any) -> Any:
        """Return the library's array for an array that speaks DLPack.

        `uploads` is then behind what was asked of its memory.
        """

    def check_address(self, address: int, what: str) -> None:
        """Raise `InvalidArgument`, which says `what` it is, unless this is its memory."""

    def memory(self, n_bytes: int) -> Memory: ...
    def pinned(self, n_bytes: int) -> npt.NDArray[np.uint8]: ...
    def stream(self, stream: Any) -> Stream:
        """Return the stream that a caller means: its object, a handle, or None for the current."""


class Slot:
    """Memory of the host and the device for one decode at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: Memory | None = None
        self._n_bytes = 0
        self._pieces: list[tuple[npt.NDArray[np.uint8], Event | None]] = []
        self._status = device.pinned(4096)

    def reserve(self, n_bytes: int) -> int:
        """Return the address of at least so much device memory."""
        if self._memory is None or self._n_bytes < n_bytes:
            self._memory = None  # goes first, so that both need not fit
            self._n_bytes = 1 << max(n_bytes - 1, 1 << 20).bit_length()
            if n_bytes > _KEEP_BYTES:
                self._n_bytes = n_bytes
            self._memory = self._device.memory(self._n_bytes)
        return self._memory.address

    def upload(self, image: Image, address: int, n_threads: int) -> Event:
        """Bring an image to `address`; its parts may change once this returns."""
        stream = self._device.uploads
        for at, start in enumerate(range(image.first, image.stop, _PIECE_BYTES)):
            size = min(_PIECE_BYTES, image.stop - start)
            piece = self._piece(at % _N_PIECES, size)
            image.write(start, piece, n_threads)
            try:
                stream.upload(piece, address + start)
            finally:  # the device may read it, whatever was raised
                self._pieces[at % _N_PIECES] = (self._pieces[at % _N_PIECES][0], stream.record())
        return stream.record()

    def status(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned memory for the statuses of a decode."""
        if self._status.size < n_bytes:
            self._status = self._device.pinned(n_bytes)
        return self._status[:n_bytes]

    def shrink(self) -> None:
        """Give back device memory that few decodes need."""
        if self._n_bytes > _KEEP_BYTES:
            self._memory, self._n_bytes = None, 0

    def _piece(self, index: int, size: int) -> npt.NDArray[np.uint8]:
        """Return one of the pinned pieces, when the device has read what was in it."""
        if index == len(self._pieces):
            self._pieces.append((self._device.pinned(_room(size)), None))
        memory, event = self._pieces[index]
        if event is not None:
            event.wait()
        if memory.size < size:
            memory = self._device.pinned(_room(size))
        self._pieces[index] = (memory, None)
        return memory[:size]


def _room(n_bytes: int) -> int:
    return min(1 << max(n_bytes - 1, 1 << 16).bit_length(), _PIECE_BYTES)


class Slots:
    """The slots of a device: as many as there are decodes at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Slot] = []
        self._lock = Lock()

    def take(self) -> Slot:
        """Return a slot that nobody uses; `give` it back when its work is done."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return Slot(self._device)

    def give(self, slot: Slot) -> None:
        """Take back a slot that no work of the device refers to any more."""
        slot.shrink()
        with self._lock:
            if len(self._free) < _MOST_FREE:
                self._free.append(slot)


class Constants:
    """Tables that all decodes share: brought to a device once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables: dict[tuple[int, str], tuple[object, Memory]] = {}
        self._lock = Lock()

    def address(self, owner: object, name: str, make: Callable[[], npt.NDArray[Any]]) -> int:
        """Return where the table `name` of `owner` lies, which `make` returns."""
        key = (id(owner), name)
        with self._lock:
            if key not in self._tables:
                table = make()
                memory = self._device.memory(table.nbytes)
                pinned = self._device.pinned(table.nbytes)
                pinned[:] = table.reshape(-1).view(np.uint8)
                self._device.uploads.upload(pinned, memory.address)
                self._device.uploads.record().wait()
                self._tables[key] = (owner, memory)
            return self._tables[key][1].address


_current: Device | None = None


def current() -> Device:
    """Return the device that is decoded on: CuPy's current one.

    Raises
    ------
    Unsupported
        CuPy is not installed, or finds no device.
    """
    if _current is not None:
        return _current
    from .cuda import current_device

    return current_device()


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Decode on `device`, in all threads: one that stands in for a GPU."""
    global _current
    before, _current = _current, device
    try:
        yield
    finally:
        _current = before
