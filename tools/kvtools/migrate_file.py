"""`kvstore migrate` from and to safetensors files: `pack` and `unpack`, of one session.

Where the other end is no archive either, the session passes through one beside the target.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
from pathlib import Path
from typing import Any

from kvcodecs.errors import InvalidArgument

import kvstore
from kvstore.catalog import listed_names
from kvstore.migration.plan import chosen_names
from kvtools.codec_options import CODEC_OPTIONS, codec_configs, other_codecs
from kvtools.formats.foreign import export, free_folder, take_in
from kvtools.formats.passing import passing
from kvtools.formats.registry import Format
from kvtools.migrated import show_migrated
from kvtools.terminal import note, progress


def pack_file(args: argparse.Namespace, target: Format | None) -> int:
    """Pack a safetensors file, with the options that both commands have."""
    if args.sessions is not None and len(args.sessions) != 1:
        args.parser.error("a file is one session: give its name with --sessions")
    name = ["--session", args.sessions[0]] if args.sessions is not None else []
    if target is None:
        return _delegate(
            args, ["pack", args.source, args.target, *name], codec=args.codec or "kvr1"
        )
    args.codec = args.codec or target.codec
    folder = free_folder(args.target, target)
    with passing(folder, args.source, resume=args.resume) as passed:
        shutil.rmtree(passed, ignore_errors=True)  # packing begins anew
        silent = {"codec": args.codec, "json": False, "quiet": True}
        code = _delegate(args, ["pack", args.source, str(passed), *name], **silent)
        if code:
            return code
        with progress("migrate", quiet=args.quiet or args.json, rate=True) as advance:
            done = export(
                str(passed),
                args.target,
                target,
                sessions=None,
                codec=None,
                resume=args.resume,
                verify=args.verify,
                workers=args.workers,
                progress=advance,
            )
    done.moved, done.recoded = [], done.moved
    show_migrated(args, done, codec_configs(args))
    return 0


def unpack_file(args: argparse.Namespace, source: Format | None) -> int:
    """Unpack one session to a safetensors file."""
    if other_codecs(args) is not None:
        args.parser.error("--codec does not go with a safetensors file, which is not coded")
    if source is None:
        return _unpack(args, args.source, args.sessions)
    with passing(Path(args.target), args.source, resume=args.resume) as passed:
        shutil.rmtree(passed, ignore_errors=True)
        left_out: list[str] = []
        with progress("migrate", quiet=args.quiet or args.json) as advance:
            take_in(
                args.source,
                str(passed),
                source,
                sessions=args.sessions,
                codec=None,
                resume=args.resume,
                verify=args.verify,
                workers=args.workers,
                progress=advance,
                say=left_out.append,
            )
        for text in left_out:
            note(text, quiet=args.quiet)
        return _unpack(args, str(passed), None)


def _unpack(args: argparse.Namespace, archive: str, sessions: list[str] | None) -> int:
    with kvstore.open(archive) as opened:
        names = chosen_names(opened.names(), sessions, archive)
    if len(names) > 1:
        raise InvalidArgument(
            f"{args.target}: holds one session, not {len(names)}; choose one with --sessions: "
            f"{listed_names(names)}"
        )
    name = ["--session", names[0]] if names else []
    return _delegate(args, ["unpack", archive, args.target, *name])


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
