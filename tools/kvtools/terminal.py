"""What the commands print: tables, JSON, progress bars and notes."""

from __future__ import annotations

import codecs
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Progress = Callable[[int, int], None]
#: Items of a list that messages name before they only count.
MAX_LISTED = 8


def plain(text: str) -> str:
    """Escape control characters: names in files are others' words, and no commands to a terminal.

    Lone surrogates stay, which `accept_any_text` turns back into the bytes of a path.
    """
    return "".join(repr(c)[1:-1] if c < " " or "\x7f" <= c < "\xa0" else c for c in text)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: boxed on a terminal, plain aligned columns otherwise.

    Columns of numbers are aligned right, others left.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    numeric = [
        bool(rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in rows)
        for i in range(len(columns))
    ]
    if title:
        print(title)
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column, right in zip(columns, numeric, strict=True):
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: names may contain [markup]
        Console().print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = zip(line, widths, numeric, strict=True)
        print("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())


def show_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print ``name  value`` lines, the values aligned."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name.ljust(width)}  {plain(value)}".rstrip())


def accept_any_text() -> None:
    """Let stdout and stderr take any text: a name must not be an error.

    A file's name that is no text goes out as the bytes it is made of, so that it can be copied;
    anything else that the encoding lacks is escaped.
    """
    codecs.register_error("kvtools", _any_text)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="kvtools")


def _any_text(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        return bytes([ord(error.object[error.start]) - 0xDC00]), error.start + 1
    return codecs.backslashreplace_errors(error)


def show_json(value: object) -> None:
    """Print `value` as strict JSON; numbers that JSON lacks (NaN, infinity) become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def note(text: str, *, quiet: bool) -> None:
    """Tell the user something on stderr that is not an error."""
    if not quiet:
        print(f"kvstore: {plain(text)}", file=sys.stderr)


@contextmanager
def notes_of_log(*, quiet: bool) -> Iterator[None]:
    """Give as notes what the library logs meanwhile: what takes long."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage(), quiet=quiet)

    log, notes = logging.getLogger("kvcodecs"), Notes()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.setLevel(level)


@contextmanager
def progress(label: str, *, quiet: bool, rate: bool = False) -> Iterator[Progress]:
    """Yield a function ``(done, total)`` that moves a bar on stderr, if that is a terminal.

    With `rate` both are bytes, and the bar says how many a second there are.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if rate:
        columns.append(TransferSpeedColumn())
    columns.append(TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def size_text(n_bytes: float) -> str:
    """Write a size such as ``"1.3 MB"`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.2f} TB"


def rate_text(n_bytes: float, seconds: float) -> str:
    """Write bytes per second, such as ``"1.3 MB/s"``."""
    return f"{size_text(n_bytes / seconds if seconds > 0 else 0)}/s"


def date_text(seconds: float) -> str:
    """Write Unix time such as ``"2026-01-31 12:00:00 UTC"``; 0 is unknown."""
    if not seconds:
        return "unknown"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no year of a calendar
        return f"{seconds:.0f} s after 1970"


def number_text(value: float | None, digits: int = 4) -> str:
    """Write a number in `digits` significant digits, or ``"-"`` when it is unknown."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}g}"


def count_text(n: int, noun: str, plural: str | None = None) -> str:
    """Write a count such as ``"1 session"`` or ``"2 sessions"``."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def listed(items: Sequence[object]) -> str:
    """Write a list such as ``"0, 1, 2"``; of a long one its beginning, and how many more."""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(map(str, items[:MAX_LISTED])) + more


def ratio_text(ratio: float) -> str:
    """Say how a size compares with float16; `ratio` is float16's over it, NaN without values."""
    if math.isnan(ratio):
        return "no values"
    number = number_text(max(ratio, 1 / ratio), 3)
    if number == "1":
        return "as large as float16"
    return f"{number} times {'smaller' if ratio > 1 else 'larger'} than float16"
