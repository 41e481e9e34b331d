"""What ends a command from outside, and how it clears up first.

SIGTERM and SIGHUP become `SystemExit`, so that half-written files are removed on the way out; a
second one, or a second ^C, must not interrupt that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Let the block unwind when a signal asks the process to end.

    A signal that somebody ignores, as under `nohup`, or handles stays as it is.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    taken = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, end)
    except ValueError:  # not the main thread: signals are the caller's business
        taken = []
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back ^C and the signals that end a process while the block clears up."""
    held: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, *_ENDING):
            before[number] = signal.signal(number, lambda n, _: held.append(n))
    except ValueError:  # not the main thread, which no signal disturbs
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for pending in dict.fromkeys(held):
            os.kill(os.getpid(), pending)
