"""Commands about a whole archive, and about which sessions it has: their arguments."""

from __future__ import annotations

import argparse

from kvtools.command import Command, add_archive, add_archive_or_flat
from kvtools.values import byte_count, path, quota


def _add_ls(parser: argparse.ArgumentParser) -> None:
    add_archive_or_flat(parser)
    parser.add_argument("--prefix", default="", metavar="P", help="names that begin with P")
    parser.add_argument("--pinned", action="store_true", help="pinned sessions only")
    parser.add_argument(
        "--long", action="store_true", help="bits per value and size too; looks at every frame"
    )


def _add_info(parser: argparse.ArgumentParser) -> None:
    add_archive_or_flat(parser)
    parser.add_argument("--session", metavar="NAME", help="(default: all)")
    parser.add_argument("--layers", action="store_true", help="one line per layer and kind")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_archive_or_flat(parser)
    parser.add_argument("--decode", action="store_true", help="decode every block as well")
    parser.add_argument(
        "--receipts",
        action="store_true",
        help="check receipts against the frames, parameters and errors that are stored",
    )


def _add_receipt(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", nargs="?", help="(default: the only one)")
    parser.add_argument("--layers", action="store_true", help="one line per layer and kind")
    parser.add_argument(
        "--source",
        type=path,
        metavar="FILE",
        help="say whether FILE, the safetensors file that was packed, is what the receipts are of; "
        "exit 1 if not",
    )


def _add_rm(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", nargs="+")


def _add_quota(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument(
        "bytes",
        nargs="?",
        type=quota,
        metavar="BYTES",
        help="such as 500M or 10G (powers of 1000), 1.5GiB (of 1024), or none (default: show it)",
    )


def _add_upgrade(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--backup",
        type=path,
        metavar="DIR",
        help="put the copy there, where nothing is yet (default: ARCHIVE.backup-formatN beside it)",
    )
    where.add_argument("--no-backup", action="store_true", help="keep no copy")


def _add_seal(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", nargs="*", help="(default: all)")
    parser.add_argument(
        "--shard",
        action="store_true",
        help="in a zarr archive, lay blocks together, many to an object; single ones are read as "
        "before",
    )
    parser.add_argument(
        "--shard-bytes",
        type=byte_count,
        metavar="BYTES",
        help="about how large an object gets, such as 64M; implies --shard (default: 32MiB)",
    )


COMMANDS = {
    "ls": Command(
        "listing",
        "List the sessions of an archive; exit 1 if some cannot be read.",
        _add_ls,
        "kvstore ls chats.kv --prefix alice/",
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
    "receipt": Command(
        "receipt",
        "Show what commits left of receipts: digests of source, parameters and frames, and errors.",
        _add_receipt,
        "kvstore receipt chats.kv alice/42 --json",
    ),
    "rm": Command(
        "listing",
        "Delete sessions; none of them if one is missing.",
        _add_rm,
        "kvstore rm chats.kv alice/42",
    ),
    "gc": Command(
        "upkeep",
        "Free the space of what killed writers left; in zarr, of what was deleted an hour ago too.",
        add_archive,
        "kvstore gc chats.kv",
    ),
    "seal": Command(
        "seal",
        "Finish sessions: from then on only read and forked; their blocks may share objects.",
        _add_seal,
        "kvstore seal zarr:chats.zarr --shard",
    ),
    "reindex": Command(
        "upkeep",
        "Make the prefix index anew, where verify says that it is damaged.",
        add_archive,
        "kvstore reindex chats.kv",
    ),
    "compact": Command(
        "upkeep",
        "Give free space back to the file system, while nobody has the archive open.",
        add_archive,
        "kvstore compact chats.kv",
    ),
    "upgrade": Command(
        "upkeep",
        "Bring an archive of an older release to the newest format; keeps a copy of the old one.",
        _add_upgrade,
        "kvstore upgrade chats.kv --backup /backups/chats-old.kv",
    ),
    "quota": Command(
        "quota",
        "Show or set how large the archive's file may get; evicts what was not used for longest.",
        _add_quota,
        "kvstore quota chats.kv 10G",
    ),
}
