"""Commands about a whole archive, and about which sessions it has: their arguments."""

from __future__ import annotations

import argparse

from kvtools.command import Command, add_archive


def _add_info(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("--session", metavar="NAME", help="(default: all)")
    parser.add_argument("--layers", action="store_true", help="one line per layer and kind")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("--decode", action="store_true", help="decode every block as well")


def _add_rm(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", nargs="+")


COMMANDS = {
    "ls": Command(
        "listing", "List the sessions of an archive.", add_archive, "kvstore ls chats.kv"
    ),
    "info": Command(
        "info",
        "Show identity, geometry, size and recorded error, without decoding.",
        _add_info,
        "kvstore info chats.kv --session alice/42 --layers",
    ),
    "verify": Command(
        "upkeep",
        "Read every frame and record and check it; exit 1 if anything is wrong.",
        _add_verify,
        "kvstore verify chats.kv --decode",
    ),
    "rm": Command(
        "listing",
        "Delete sessions; none of them if one is missing.",
        _add_rm,
        "kvstore rm chats.kv alice/42",
    ),
    "gc": Command(
        "upkeep",
        "Free the space of what killed writers left behind; the file keeps its size.",
        add_archive,
        "kvstore gc chats.kv",
    ),
}
