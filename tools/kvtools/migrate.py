"""`kvstore migrate`: sessions from one archive, or another format, to another.

Formats that are no archives come and go through an archive: with another codec through one in a
temporary folder beside the target.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import Kind

import kvstore
from kvstore.catalog import listed_names
from kvstore.migration.plan import chosen_names
from kvstore.place import MEMORY_PREFIX, Place
from kvtools.codec_options import CODEC_OPTIONS, other_codecs
from kvtools.formats.foreign import (
    TKV_SUFFIX,
    ZARR2_PREFIX,
    export,
    is_tkv_folder,
    take_in,
    tkv_sessions,
)
from kvtools.terminal import (
    Progress,
    count_text,
    listed,
    note,
    progress,
    rate_text,
    show_json,
    size_text,
)

Codecs: TypeAlias = Mapping[Kind, CodecConfig]
SAFETENSORS = ".safetensors"


def run_migrate(args: argparse.Namespace) -> int:
    """Migrate; a new archive appears whole or not at all."""
    codec = other_codecs(args)
    for text in (args.source, args.target):
        if text.startswith(MEMORY_PREFIX):
            raise InvalidArgument(f"{text}: an archive in memory would end with this command")
    if Path(args.source).is_file():
        return _pack(args)
    if args.target.endswith(SAFETENSORS):
        return _unpack(args)
    if args.dask is not None and (_foreign_source(args) or _foreign_target(args)):
        args.parser.error("--dask goes with archives alone")
    try:
        with progress("migrate", quiet=args.quiet or args.json, rate=True) as advance:
            if _foreign_source(args):
                done = _take_in(args, codec)
            elif _foreign_target(args):
                done = _export(args, codec, advance)
            else:
                done = _between_archives(args, codec, advance)
    except (KeyboardInterrupt, SystemExit):
        _note_partial(args)
        raise
    _show(args, done)
    return 0


def _foreign_source(args: argparse.Namespace) -> bool:
    return args.source.startswith(ZARR2_PREFIX) or is_tkv_folder(args.source)


def _foreign_target(args: argparse.Namespace) -> bool:
    target: str = args.target
    return target.startswith(ZARR2_PREFIX) or target.rstrip("/").endswith(TKV_SUFFIX)


def _between_archives(
    args: argparse.Namespace, codec: Codecs | None, advance: Progress
) -> kvstore.Migrated:
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


def _export(args: argparse.Namespace, codec: Codecs | None, advance: Progress) -> kvstore.Migrated:
    from kvtools.formats import tkv_export, zarr2_export

    is_zarr2 = args.target.startswith(ZARR2_PREFIX)
    return export(
        args.source,
        args.target.removeprefix(ZARR2_PREFIX),
        zarr2_export.write_session if is_zarr2 else tkv_export.write_session,
        zarr2_export.begin if is_zarr2 else lambda folder: None,
        sessions=args.sessions,
        codec=codec,
        resume=args.resume,
        verify=args.verify,
        workers=args.workers,
        progress=advance,
    )


def _take_in(args: argparse.Namespace, codec: Codecs | None) -> kvstore.Migrated:
    if _foreign_target(args):
        raise InvalidArgument(
            f"{args.target}: no archive, nor is {args.source}; go to an archive "
            "first, and on from there"
        )
    if args.source.startswith(ZARR2_PREFIX):
        from kvtools.formats.zarr2_import import zarr2_sessions

        found: list[Any] = zarr2_sessions(args.source.removeprefix(ZARR2_PREFIX))
    else:
        found = tkv_sessions(args.source)
    with progress("migrate", quiet=args.quiet or args.json) as count:
        return take_in(
            found,
            args.source,
            args.target,
            sessions=args.sessions,
            codec=codec,
            resume=args.resume,
            verify=args.verify,
            workers=args.workers,
            progress=count,
        )


def _pack(args: argparse.Namespace) -> int:
    """Pack a safetensors file, with the options that both commands have."""
    if args.sessions is not None and len(args.sessions) != 1:
        args.parser.error("a file is one session: give its name with --sessions")
    name = ["--session", args.sessions[0]] if args.sessions is not None else []
    return _delegate(args, ["pack", args.source, args.target, *name], codec=args.codec or "kvr1")


def _unpack(args: argparse.Namespace) -> int:
    """Unpack one session to a safetensors file."""
    if other_codecs(args) is not None:
        args.parser.error("--codec does not go with a safetensors file, which is not coded")
    with kvstore.open(args.source) as archive:
        names = chosen_names(archive.names(), args.sessions, args.source)
    if len(names) > 1:
        raise InvalidArgument(
            f"{args.target}: holds one session, not {len(names)}; choose one with --sessions: "
            f"{listed_names(names)}"
        )
    name = ["--session", names[0]] if names else []
    return _delegate(args, ["unpack", args.source, args.target, *name])


def _delegate(args: argparse.Namespace, argv: list[str], **also: Any) -> int:
    from kvtools import cli

    argv = [
        argv[0],
        *(f"./{text}" if text.startswith("-") else text for text in argv[1:3]),
        *argv[3:],
    ]
    given = cli.build_parser().parse_args(argv)
    for option in ("json", "quiet", *CODEC_OPTIONS):
        if hasattr(given, option):
            setattr(given, option, getattr(args, option))
    for option, value in also.items():
        setattr(given, option, value)
    module = importlib.import_module(f"kvtools.{given.module}")
    code: int = getattr(module, f"run_{given.command}")(given)
    return code


def _note_partial(args: argparse.Namespace) -> None:
    folder = Place.of(args.target.removeprefix(ZARR2_PREFIX)).partial.folder
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
            f"frames of their own now, shared no more: {listed(done.flattened)}",
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
        f"{', all read again' if done.verified and (done.moved or done.recoded) else ''}"
    )
