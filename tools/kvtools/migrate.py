"""`kvstore migrate`: sessions from one archive, or another format, to another.

Formats that are no archives come and go through an archive: with another codec through one in a
temporary folder beside the target.
"""

from __future__ import annotations

import argparse

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument

import kvstore
from kvstore.backend import MEMORY_PREFIX
from kvstore.destination import Place
from kvtools.pack import POLICIES, codec_config
from kvtools.terminal import count_text, listed, note, progress, rate_text, show_json, size_text


def run_migrate(args: argparse.Namespace) -> int:
    """Migrate; a new archive appears whole or not at all."""
    codec = _codec(args)
    for text in (args.source, args.target):
        if text.startswith(MEMORY_PREFIX):
            raise InvalidArgument(f"{text}: an archive in memory would end with this command")
    try:
        done = _between_archives(args, codec)
    except (KeyboardInterrupt, SystemExit):
        _note_partial(args)
        raise
    _show(args, done)
    return 0


def _codec(args: argparse.Namespace) -> CodecConfig | None:
    """Return the codec that is asked for; wrong usage exits."""
    if args.codec is not None:
        return codec_config(args)
    for name in (*POLICIES, "sink", "sink_div"):
        if getattr(args, name) is not None:
            args.parser.error(f"--{name.replace('_', '-')} goes with --codec")
    return None


def _between_archives(args: argparse.Namespace, codec: CodecConfig | None) -> kvstore.Migrated:
    with progress("migrate", quiet=args.quiet or args.json, rate=True) as advance:
        return kvstore.migrate(
            args.source,
            args.target,
            sessions=args.sessions,
            codec=codec,
            workers=args.workers,
            resume=args.resume,
            verify=args.verify,
            dask=args.dask,
            progress=advance,
        )


def _note_partial(args: argparse.Namespace) -> None:
    folder = Place.of(args.target).partial.folder
    if folder is not None and folder.exists():
        note(f"{folder} keeps what was moved: --resume goes on, or remove it", quiet=args.quiet)


def _show(args: argparse.Namespace, done: kvstore.Migrated) -> None:
    if args.json:
        show_json(
            {
                "source": args.source,
                "target": args.target,
                "moved": done.moved,
                "recoded": done.recoded,
                "flattened": done.flattened,
                "skipped": done.skipped,
                "n_bytes": done.n_bytes,
                "verified": done.verified,
                "seconds": done.seconds,
            }
        )
        return
    if done.flattened:
        note(
            f"coded anew with frames of their own, shared no more: {listed(done.flattened)}",
            quiet=args.quiet,
        )
    if args.quiet:
        return
    parts = [
        f"{count_text(len(names), 'session')} {what}"
        for names, what in (
            (done.moved, "moved byte for byte"),
            (done.recoded, "coded anew"),
            (done.skipped, "there already"),
        )
        if names
    ]
    print(
        f"{args.target}: {', '.join(parts) or 'no sessions'}; {size_text(done.n_bytes)} in "
        f"{done.seconds:.2f} s ({rate_text(done.n_bytes, done.seconds)})"
        f"{', all read again' if done.verified else ''}"
    )
