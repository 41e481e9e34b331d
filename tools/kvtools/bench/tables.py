"""Rows of one group as a table with a line for each thing measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtools.bench.rows import Row
from kvtools.terminal import number_text, show_table


def show_by_name(first: str, rows: Sequence[Row], units: Mapping[str, str], legend: str) -> None:
    """Print rows called "thing, what", which all have the same `units`, by what.

    Parameters
    ----------
    first
        Title of the column of things.
    units
        Of each column.
    legend
        What a reader has to know to use the numbers; a column is added for notes, if there are any.
    """
    lines: dict[str, list[str]] = {}
    notes = {}
    for row in rows:
        name = row.name.partition(", ")[0]
        lines.setdefault(name, []).append(number_text(row.value, 5))
        notes[name] = row.note
    columns = [what if unit.startswith(what) else f"{what} {unit}" for what, unit in units.items()]
    noted = any(notes.values())
    columns += ["note"] if noted else []
    table = [(name, *line, *((notes[name],) if noted else ())) for name, line in lines.items()]
    show_table("", (first, *(column.strip() for column in columns)), table)
    print(legend)
