"""`kvstore info`, `ls` and `verify` of sessions of flat layers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcodecs.errors import Corrupt, KvError, Truncated

from kvstore import flat
from kvtools.flat_sessions import FlatInfo, FlatStream, described, problems_beside
from kvtools.info import IDENTITY, geometry_text, metadata_text, rope_text
from kvtools.terminal import (
    count_text,
    number_text,
    plain,
    progress,
    ratio_text,
    show_json,
    show_pairs,
    show_table,
    size_text,
)


def info(args: argparse.Namespace, folders: list[Path]) -> int:
    """Describe sessions from their headers and commit records."""
    infos, damaged = described(folders, args.archive, args.session)
    if args.json:
        show_json(
            {
                "path": args.archive,
                "backend": "flat",
                "n_sessions": len(infos) + len(damaged),
                "file_bytes": sum(info.file_bytes for info in infos),
                "disk_bytes": sum(info.disk_bytes for info in infos),
                "sessions": [_details(info, layers=args.layers) for info in infos],
                "damaged": {name: str(error) for name, error in damaged.items()},
            }
        )
        return 1 if damaged else 0
    for number, info in enumerate(infos):
        if number:
            print()
        _show_session(info, layers=args.layers)
    return _show_damaged(damaged)


def ls(args: argparse.Namespace, folders: list[Path]) -> int:
    """List sessions, in byte order of their names; exit with 1 if some cannot be read."""
    if args.pinned:
        args.parser.error("--pinned goes with archives: flat layers are never evicted")
    infos, damaged = described(folders, args.archive)
    infos = [info for info in infos if info.name.startswith(args.prefix)]
    damaged = {name: e for name, e in damaged.items() if name.startswith(args.prefix)}
    if args.json:
        found = [_details(info, layers=False) for info in infos]
        broken = [{"name": name, "error": str(error)} for name, error in damaged.items()]
        show_json(found + broken)
        return 1 if damaged else 0
    # Copies have one name; mostly the folder says nothing else.
    named = any(info.name != info.folder.absolute().name for info in infos)
    columns = (
        *("session", *(("folder",) if named else ()), "model", "layers", "positions", "scheme"),
        *(("rows", "K kept", "bits/value") if args.long else ()),
        "disk",
    )
    rows = [
        (
            *(info.name, *((info.folder.absolute().name,) if named else ())),
            *(info.model.name, str(info.model.n_layers), _positions_text(info.start, info.stop)),
            _schemes_text(info),
            *((_room_text(info), _kept_text(info)) if args.long else ()),
            *((number_text(info.bits_per_value, 3),) if args.long else ()),
            size_text(info.disk_bytes),
        )
        for info in infos
    ]
    show_table("", columns, rows)
    return _show_damaged(damaged)


def verify(args: argparse.Namespace, folders: list[Path]) -> int:
    """Check everything; print one line per problem and exit with 1 if there is any."""
    if args.decode:
        args.parser.error(
            "--decode goes with archives; of flat layers verify checks all rows without it"
        )
    problems: list[KvError] = []
    n_layers = n_blocks = n_bytes = 0
    with progress("verify", quiet=args.quiet or args.json) as advance:
        for number, folder in enumerate(folders):
            report = flat.verify(
                folder,
                progress=lambda done, total, before=number: advance(  # type: ignore[misc]
                    before * total + done, len(folders) * total
                ),
            )
            problems += report.problems
            problems += problems_beside(folder, sound=not report.problems)
            n_layers += report.n_layers
            n_blocks += report.n_blocks
            n_bytes += report.n_bytes
    if args.json:
        show_json(
            {
                "ok": not problems,
                "problems": [{"kind": type(e).__name__, "message": str(e)} for e in problems],
                "n_sessions": len(folders),
                "n_layers": n_layers,
                "n_blocks": n_blocks,
                "n_bytes": n_bytes,
            }
        )
        return 1 if problems else 0
    for error in problems:
        print(plain(" ".join(f"{type(error).__name__}: {error}".split())))
    if not args.quiet:
        verdict = count_text(len(problems), "problem") if problems else "sound"
        print(
            f"{args.archive}: {verdict}; {count_text(len(folders), 'session')}, "
            f"{count_text(n_layers, 'layer')}, {count_text(n_blocks, 'block')}, "
            f"{size_text(n_bytes)}"
        )
    return 1 if problems else 0


def _details(info: FlatInfo, *, layers: bool) -> dict[str, Any]:
    details = {
        "name": info.name,
        "folder": str(info.folder),
        "model": info.model.name,
        "n_layers": info.model.n_layers,
        "n_tokens": info.stop,
        "first_token": info.start,
        "store_k": info.store_k,
        "schemes": {kind: "/".join(info.schemes(kind)) or None for kind in "kv"},
        "capacity": info.capacity,
        "max_rows": info.max_rows,
        "bits_per_value": info.bits_per_value,
        "ratio_fp16": info.ratio_fp16,
        "row_bytes": info.row_bytes,
        "n_bytes": info.n_bytes,
        "file_bytes": info.file_bytes,
        "disk_bytes": info.disk_bytes,
        "has_token_ids": info.has_token_ids,
        "max_error": info.error.max_error if info.error.is_known else None,
        "metadata": info.metadata,
        "identity": info.model.to_json(),
    }
    if layers:
        details["layers"] = [_stream_details(stream) for stream in info.streams]
    return details


def _stream_details(stream: FlatStream) -> dict[str, Any]:
    return {
        "layer": stream.layer,
        "kind": stream.kind,
        "heads": stream.heads,
        "head_dim": stream.head_dim,
        "scheme": stream.scheme,
        "bits_per_value": stream.bits_per_value,
        "row_bytes": stream.row_bytes,
        "block_rows": stream.block_rows,
        "first_token": stream.start,
        "n_tokens": stream.stop,
        "capacity": stream.capacity,
    }


def _show_session(info: FlatInfo, *, layers: bool) -> None:
    model = info.model
    pairs = [
        ("session", info.name),
        ("flat layers", str(info.folder)),
        ("model", f"{model.name} {model.revision}".strip()),
        ("layers", f"{model.n_layers}: {geometry_text(model)}"),
        ("rope", rope_text(model)),
        ("dtype", model.dtype or "float32"),
        *((name, str(value)) for name in IDENTITY if (value := getattr(model, name))),
        ("positions", _positions_text(info.start, info.stop) + _ids_text(info)),
        ("K kept", _kept_text(info)),
        ("scheme", _schemes_text(info)),
        ("rows", _room_text(info)),
        ("bits/value", number_text(info.bits_per_value)),
        ("ratio", ratio_text(info.ratio_fp16)),
        ("size", f"{size_text(info.n_bytes)} of rows, {size_text(info.disk_bytes)} on the disk"),
        ("max error", _error_text(info)),
    ]
    if info.metadata:
        pairs.append(("metadata", metadata_text(info.metadata)))
    show_pairs(pairs)
    if layers:
        print()
        columns = (
            *("layer", "heads x dim", "scheme", "positions", "capacity"),
            *("block", "bits/value", "row bytes"),
        )
        rows = [
            (
                f"{stream.layer} {stream.kind}",
                f"{stream.heads} x {stream.head_dim}",
                stream.scheme,
                _positions_text(stream.start, stream.stop),
                *map(str, (stream.capacity, stream.block_rows)),
                number_text(stream.bits_per_value),
                str(stream.row_bytes),
            )
            for stream in info.streams
        ]
        show_table("", columns, rows)


def _schemes_text(info: FlatInfo) -> str:
    k, v = ("/".join(info.schemes(kind)) for kind in "kv")
    return k if v in ("", k) else f"k: {k}; v: {v}"


def _positions_text(start: int, stop: int) -> str:
    return f"[{start}, {stop})"


def _ids_text(info: FlatInfo) -> str:
    return ", with ids" if info.has_token_ids else ""


def _kept_text(info: FlatInfo) -> str:
    return f"{'after' if info.store_k == 'post' else 'before'} RoPE ({info.store_k})"


def _error_text(info: FlatInfo) -> str:
    if info.error.is_known:
        return f"{number_text(info.error.max_error)}, measured when the rows were coded"
    return "not known: it is not kept beside flat layers' rows"


def _room_text(info: FlatInfo) -> str:
    n = info.stop - info.start
    if info.max_rows is not None:
        return f"{n} in a ring of {info.max_rows}"
    return f"{n}, room for {info.capacity}"


def _show_damaged(damaged: Mapping[str, KvError]) -> int:
    for name, error in damaged.items():
        what = "damaged" if isinstance(error, Corrupt | Truncated) else "unreadable"
        text = f"kvstore: {what} session {name!r}: {error}"
        print(plain(" ".join(text.split())), file=sys.stderr)
    return 1 if damaged else 0
