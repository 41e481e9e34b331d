"""`kvstore migrate`: sessions from one archive, or another format, to another.

Formats that are no archives come and go through an archive: with another codec through one in a
folder beside the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import Kind

import kvstore
from kvstore.place import MEMORY_PREFIX, Place
from kvtools.codec_options import other_codecs
from kvtools.flat_sessions import check_no_layer
from kvtools.formats.foreign import export, take_in
from kvtools.formats.passing import passing_folder
from kvtools.formats.registry import Format, source_format, target_format, without_prefix
from kvtools.migrate_file import pack_file, unpack_file
from kvtools.migrated import show_migrated
from kvtools.terminal import Progress, note, progress

Codecs: TypeAlias = Mapping[Kind, CodecConfig]
SAFETENSORS = ".safetensors"


def run_migrate(args: argparse.Namespace) -> int:
    """Migrate; a new archive appears whole or not at all."""
    codec = other_codecs(args)
    for text in (args.source, args.target):
        if text.startswith(MEMORY_PREFIX):
            raise InvalidArgument(f"{text}: an archive in memory would end with this command")
    check_no_layer(args.source)
    is_file = Path(args.source).is_file()
    source = None if is_file else source_format(args.source)
    target = target_format(args.target)
    to_file = target is None and args.target.endswith(SAFETENSORS)
    if args.dask is not None and (is_file or to_file or source or target):
        args.parser.error("--dask goes with archives alone")
    if source is not None and target is not None:
        raise InvalidArgument(
            f"{args.target}: {args.source} is no archive either; go by one: kvstore migrate "
            "SRC NAME.kv, then kvstore migrate NAME.kv DST"
        )
    left_out: list[str] = []
    try:
        if is_file:
            return pack_file(args, target)
        if to_file:
            return unpack_file(args, source)
        with progress("migrate", quiet=args.quiet or args.json, rate=source is None) as advance:
            done = _migrate(args, source, target, codec, advance, left_out)
    except (KeyboardInterrupt, SystemExit):
        _note_partial(args)
        raise
    show_migrated(args, done, codec, left_out)
    return 0


def _migrate(
    args: argparse.Namespace,
    source: Format | None,
    target: Format | None,
    codec: Codecs | None,
    advance: Progress,
    left_out: list[str],
) -> kvstore.Migrated:
    options: Any = {
        "sessions": args.sessions,
        "codec": codec,
        "workers": args.workers,
        "resume": args.resume,
        "verify": args.verify,
        "progress": advance,
    }
    if source is not None:
        return take_in(args.source, args.target, source, say=left_out.append, **options)
    if target is not None:
        return export(args.source, args.target, target, **options)
    return kvstore.migrate(args.source, args.target, dask=args.dask, **options)


def _note_partial(args: argparse.Namespace) -> None:
    place = Place.of(without_prefix(args.target))
    if place.folder is None or place.partial.folder is None:
        return
    kept = [x for x in (place.partial.folder, passing_folder(place.folder)) if x.exists()]
    if kept:
        keep = "keeps" if len(kept) == 1 else "keep"
        names = " and ".join(map(str, kept))
        text = f"{names} {keep} what was moved: --resume goes on, or remove it"
        note(text, quiet=args.quiet)
