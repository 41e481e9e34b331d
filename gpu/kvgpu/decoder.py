"""Plans executed by a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.plan import Plan, available_cpus, check_threads
from kvcodecs.targets import check_output, is_device_output

from .arrays import View, view_of
from .device import Device, Event, Slot, current
from .staging import Staging


def decode(
    plan: Plan,
    payloads: Iterable[Any] | None = None,
    out: Iterable[Any] | None = None,
    stream: Any = None,
    *,
    n_threads: int | None = None,
) -> None:
    """Decode everything of a plan into arrays of the device; the bits are those of `Plan.run`.

    Tables and payloads go up in one piece, then kernels of each codec decode all its blocks.
    Blocks of codecs that have no kernel (raw values, ggml rows) are decoded by the CPU, and only
    placed by the device.

    Parameters
    ----------
    plan
        The same object that the CPU executes.
    payloads
        The bytes of every block in the order of `Plan.add`, in place of those that the plan was
        given: buffers of the host, or arrays of the device, which are not uploaded and stay as
        they are until the decode is done. Codecs without a kernel have read theirs already.
    out : (heads, rows, head_dim) each, float32, float16 or bfloat16
        An output for every block, in the same order; None: those that the plan was given. Arrays
        of the device: CuPy's, PyTorch tensors, anything else with ``__cuda_array_interface__`` or
        DLPack, or `Paged`.
    stream
        A stream of CuPy or PyTorch, any other object with ``__cuda_stream__``, or a
        ``cudaStream_t`` as a number; None: CuPy's current one. The outputs are written, and
        payloads of the device read, in this stream's order: what was asked of them in other
        streams must be done. Only DLPack and version 3 of ``__cuda_array_interface__`` (CuPy's
        arrays, not PyTorch's tensors) tell in which stream that was, and then are waited for.
    n_threads
        Of the host, that copy payloads; None: one per CPU this process may use.

    Raises
    ------
    Corrupt, Truncated
        A block that does not decode, named. The outputs are then undefined.
    InvalidArgument
        Outputs or payloads that are not on the device or do not fit, or a value beyond the range
        of a float16 or bfloat16 output; ask for float32.
    Unsupported
        There is no CuPy, or no device.

    Notes
    -----
    Returns when the outputs are written: waits for the stream once.
    """
    with Decoding(plan, payloads, out, n_threads=n_threads) as decoding:
        decoding.upload()
        decoding.launch(stream)
        decoding.wait()


class Decoding:
    """A plan made ready for the device: uploaded once, decoded once or more often.

    `upload`, then `launch`, which returns at once, then `wait`. `launch` and `wait` again decode
    again; `upload` again brings what the host's payloads hold by then.

    A context manager, or `close` it: it holds memory of the device from `upload` on. The
    parameters and errors are those of `decode`. It belongs to the device that was current when
    it was made.

    Attributes
    ----------
    n_bytes
        That an upload brings to the device.
    """

    _slot: Slot | None = None  # of the class: `close` looks at it also where nothing was made

    def __init__(
        self,
        plan: Plan,
        payloads: Iterable[Any] | None = None,
        out: Iterable[Any] | None = None,
        *,
        n_threads: int | None = None,
    ) -> None:
        self._base = 0
        self._uploaded: Event | None = None
        self._done: Event | None = None
        self._is_decoded = False
        self._n_threads = check_threads(n_threads) or available_cpus()
        self._device = current()
        self._plan = plan
        targets = plan.targets
        n = len(targets.outputs)
        parts = targets.payloads if payloads is None else _one_each(payloads, n, "payloads")
        arrays = targets.outputs if out is None else _one_each(out, n, "outputs")
        # What the device reads and writes lives as long as this does.
        self._outputs = _views(plan, arrays, self._device)
        self._staging = Staging(plan, parts, self._outputs, self._device, self._n_threads)

    @property
    def n_bytes(self) -> int:
        return self._staging.image.stop - self._staging.image.first

    def upload(self) -> None:
        """Start to bring tables and payloads to the device; the host's may then change.

        What was launched before is waited for.
        """
        self._check_device()
        self.synchronize()
        self._uploaded, self._is_decoded = None, False
        image = self._staging.image
        if self._slot is None:
            self._slot = self._device.slots.take()
        self._base = self._slot.reserve(image.stop)
        image.place(self._base)
        self._uploaded = self._slot.upload(image, self._base, self._n_threads)

    def launch(self, stream: Any = None) -> None:
        """Start to decode what was uploaded, in the order of `stream`."""
        if self._slot is None or self._uploaded is None:
            raise InvalidArgument("decoding: nothing is uploaded yet")
        self._check_device()
        if self._done is not None:
            self._done.wait()  # its statuses were not read yet
        self._is_decoded = False
        runs_in = self._device.stream(stream)
        status = self._slot.status(self._staging.n_status)
        runs_in.wait(self._uploaded)
        for producer in sorted(self._staging.producers):
            runs_in.follow(producer)
        try:
            for launch in self._staging.launches:
                runs_in.launch(launch, self._base)
            if status.size:
                runs_in.download(self._base, status)
        finally:  # what was started uses the memory, whatever was raised
            self._done = runs_in.record()
        self._is_decoded = True

    def wait(self) -> None:
        """Return when the outputs are written; raise what `decode` raises."""
        if self._slot is None or not self._is_decoded:
            raise InvalidArgument("decoding: nothing was launched")
        self.synchronize()
        status = self._slot.status(self._staging.n_status)
        self._plan.check(self._staging.failures(status))

    def synchronize(self) -> None:
        """Return when the device is through with all that was started.

        Says nothing of blocks that do not decode, as `wait` does; good after `upload` alone.
        """
        for event in (self._uploaded, self._done):
            if event is not None:
                event.wait()

    def close(self) -> None:
        """Give the device's memory back, when the device is through with it."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self.synchronize()
            self._device.slots.give(slot)

    def _check_device(self) -> None:
        if current() is not self._device:
            raise InvalidArgument("decoding: it was made for another device than the current one")

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class Queue:
    """Plans decoded one after the other, two at a time: one goes up while one decodes.

    A context manager; everything is decoded when it ends without an error.

    Parameters
    ----------
    n_threads
        Of the host, that copy payloads; None: one per CPU this process may use.
    stream
        That all plans are decoded in, as `decode` takes it.
    """

    def __init__(self, n_threads: int | None = None, stream: Any = None) -> None:
        self._n_threads, self._stream = check_threads(n_threads), stream
        self._under_way: list[Decoding] = []
        self._has_ended = False

    def add(self, plan: Plan) -> None:
        """Start to decode a plan; its payloads may change when this returns.

        Raises what `decode` raises, also for the plans before.
        """
        if self._has_ended:
            raise InvalidArgument("queue: it has ended, nothing would wait for the plan")
        decoding = Decoding(plan, n_threads=self._n_threads)
        if len(self._under_way) == _AT_A_TIME:
            self._end_first()
        try:
            decoding.upload()
            decoding.launch(self._stream)
        except BaseException:
            decoding.close()
            raise
        self._under_way.append(decoding)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: object) -> None:
        self._has_ended = True
        # An error of one plan comes before what went wrong after that plan was added.
        try:
            while self._under_way and (kind is None or issubclass(kind, Exception)):
                self._end_first()
        finally:
            for decoding in self._under_way:
                decoding.close()

    def _end_first(self) -> None:
        with self._under_way.pop(0) as decoding:
            decoding.wait()


_AT_A_TIME = 2


def _one_each(given: Iterable[Any], n: int, what: str) -> list[Any]:
    """Return what is given for every block of a plan."""
    try:
        parts = list(given)
    except TypeError as error:
        raise InvalidArgument(f"{what}: {error}; expected one for each block") from error
    if len(parts) != n:
        raise InvalidArgument(f"{len(parts)} {what} for a plan of {n} blocks")
    return parts


def _views(plan: Plan, arrays: list[Any], device: Device) -> list[View]:
    """Return the outputs of a plan as views, checked."""
    targets = plan.targets
    if arrays is not targets.outputs:
        for array, planned, where in zip(arrays, targets.outputs, targets.where, strict=True):
            heads, rows, head_dim = planned.shape
            check_output(array, (heads, rows, head_dim), where)
    views: list[View] = []
    seen: set[int] = set()
    for array, where in zip(arrays, targets.where, strict=True):
        if not is_device_output(array):
            raise InvalidArgument(f"{where}output is on the host: use Plan.run, or give `out`")
        view = view_of(array, device.from_dlpack)
        if id(view.owner) not in seen and 0 not in view.shape:
            device.check_address(view.address, f"{where}output")
            seen.add(id(view.owner))
        views.append(view)
    return views


class Destination:
    """Where `kvstore` reads to for ``device="cuda"``: arrays of the current device."""

    # Of a plan, two of which are under way: an H200 wants thousands of blocks at a time, and of
    # KVR1 this is a few thousand at 8 heads of 128.
    batch_bytes = 256 << 20

    def __init__(self, stream: Any = None) -> None:
        self._device, self._stream = current(), stream
        self._device.stream(stream)  # refuses what is none before anything is read

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new array of the device's library."""
        return self._device.empty(shape, dtype)

    def view(self, array: Any) -> View:
        """Return an array as plans take it: slices of its rows cost little."""
        return view_of(array, self._device.from_dlpack)

    def queue(self, n_threads: int | None) -> Queue:
        """Return what executes plans."""
        return Queue(n_threads, self._stream)
