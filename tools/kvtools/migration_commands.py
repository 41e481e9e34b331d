"""`migrate` on the command line: its arguments."""

from __future__ import annotations

import argparse

from kvtools.command import PLACES, Command
from kvtools.packing_commands import add_codec
from kvtools.values import path, up_to

MAX_WORKERS = 1024


def _add_migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=path,
        metavar="SRC",
        help=f"an archive ({PLACES}); or a folder of .tkv files, zarr2:FOLDER, flat:FOLDER (flat "
        "layers; their folder alone does), or a safetensors file as pack takes it",
    )
    parser.add_argument(
        "target",
        type=path,
        metavar="DST",
        help="an archive, begun if missing; or NAME.tkvdir for .tkv files, which hold TKV1 alone, "
        "zarr2:FOLDER for arrays of zarr format 2, flat:FOLDER for flat layers, which hold codecs "
        "ggml.* alone, or NAME.safetensors for one session decoded",
    )
    parser.add_argument(
        "--sessions",
        nargs="+",
        metavar="NAME",
        help="names, or patterns with *, ? and [...], quoted (default: all)",
    )
    add_codec(
        parser,
        default=None,
        otherwise="each session keeps its own; those of a safetensors file are coded with kvr1, "
        "to flat: with ggml.q8_0, to .tkvdir with tkv1",
    )
    parser.add_argument(
        "--workers",
        type=up_to(MAX_WORKERS),
        metavar="N",
        help="threads that code anew (default: one per CPU)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a migration was killed, which DST.partial keeps (on the way to another "
        "codec and format DST.passing as well); pass over sessions that DST, an archive, has "
        "already",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read all again before DST is given its name: moved sessions are compared byte for "
        "byte, others are checked (default: yes)",
    )
    parser.add_argument(
        "--dask",
        metavar="SCHEDULER",
        help="let the workers of this Dask cluster do the work, such as tcp://host:8786; they must "
        "reach SRC and DST under these names",
    )


COMMANDS = {
    "migrate": Command(
        "migrate",
        "Copy sessions to another archive or format: byte for byte, or coded anew with --codec.",
        _add_migrate,
        "kvstore migrate chats.kv zarr:chats.zarr --sessions 'alice/*'",
    ),
}
