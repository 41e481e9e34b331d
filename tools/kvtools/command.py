"""What a command is, and the argument that nearly all have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from kvtools.values import path

#: What an archive may be; FOLDER alone does for a zarr archive that is there.
PLACES = "FOLDER, zarr:FOLDER, s3://bucket/prefix or icechunk:FOLDER"


#: What commands take that read sessions of flat layers as well.
OR_FLAT = "or sessions of flat layers: their FOLDER, or flat:FOLDER"


class Command(NamedTuple):
    """A command.

    Attributes
    ----------
    module
        Of this package; its function ``run_NAME`` does the work and is imported only then.
    text
        What it does.
    add_arguments
        Adds its arguments to its parser.
    example
        A command line.
    """

    module: str
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    example: str


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add the archive, which exists."""
    parser.add_argument("archive", type=path, metavar="ARCHIVE", help=PLACES)


def add_archive_or_flat(parser: argparse.ArgumentParser) -> None:
    """Add the archive, or the folder of flat layers."""
    parser.add_argument("archive", type=path, metavar="ARCHIVE", help=f"{PLACES}; {OR_FLAT}")
