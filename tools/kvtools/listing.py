"""`kvstore ls`, `verify`, `rm`, `gc`: what is in an archive, and whether it is sound."""

from __future__ import annotations

import argparse

from kvcodecs.errors import NotFound

import kvstore
from kvstore.catalog import listed_names
from kvtools.info import session_summary, show_damaged
from kvtools.terminal import (
    count_text,
    number_text,
    plain,
    progress,
    show_json,
    show_table,
    size_text,
)


def run_ls(args: argparse.Namespace) -> int:
    """List sessions, in byte order of their names; exit with 1 if some cannot be read."""
    with kvstore.open(args.archive) as archive:
        found = archive.survey()
    sessions, damaged = found.sessions, found.damaged
    if args.json:
        broken = [{"name": name, "error": str(error)} for name, error in damaged.items()]
        show_json([session_summary(info) for info in sessions] + broken)
        return 1 if damaged else 0
    rows = [
        (
            info.name,
            info.model.name,
            str(info.model.n_layers),
            str(info.n_tokens),
            number_text(info.bits_per_value, 3),
            size_text(info.total_bytes),
        )
        for info in sessions
    ]
    show_table("", ("session", "model", "layers", "tokens", "bits/value", "size"), rows)
    return show_damaged(damaged)


def run_verify(args: argparse.Namespace) -> int:
    """Check everything; print one line per problem and exit with 1 if there is any."""
    with kvstore.open(args.archive) as archive:
        label = "decode" if args.decode else "verify"
        with progress(label, quiet=args.quiet or args.json) as advance:
            report = archive.verify(decode=args.decode, progress=advance)
    if args.json:
        show_json(
            {
                "ok": report.ok,
                "problems": [problem._asdict() for problem in report.problems],
                "n_sessions": report.n_sessions,
                "n_frames": report.n_frames,
                "frame_bytes": report.frame_bytes,
                "n_values": report.n_values,
                "n_leftover": report.n_leftover,
                "decoded": report.decoded,
            }
        )
        return 0 if report.ok else 1
    for problem in report.problems:
        print(plain(" ".join(f"{problem.kind}: {problem.message}".split())))
    if not args.quiet:
        verdict = "sound" if report.ok else count_text(len(report.problems), "problem")
        print(
            f"{args.archive}: {verdict}; {count_text(report.n_sessions, 'session')}, "
            f"{count_text(report.n_frames, 'frame')}, {size_text(report.frame_bytes)}"
            + (", all decoded" if report.decoded and report.ok else "")
        )
        if report.n_leftover:
            entries = count_text(report.n_leftover, "entry", "entries")
            print(f"{entries} left over from killed writers, harmless; `kvstore gc` removes them")
    return 0 if report.ok else 1


def run_gc(args: argparse.Namespace) -> int:
    """Remove leftovers of killed writers."""
    with _existing(args.archive) as archive:
        n_bytes = archive.gc()
    if args.json:
        show_json({"archive": args.archive, "freed_bytes": n_bytes})
    elif not args.quiet:
        print(f"{args.archive}: {size_text(n_bytes)} freed for what is written next")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Delete sessions; if any of them is missing, none."""
    removed: list[str] = []
    with _existing(args.archive) as archive:
        names = list(dict.fromkeys(args.session))
        missing = [name for name in names if name not in archive]
        if missing:
            listed = ", ".join(map(repr, missing))
            there = archive.names()
            others = f"; there are {listed_names(there)}" if there else ""
            raise NotFound(f"{args.archive}: no session {listed}; nothing is removed{others}")
        try:
            for name in names:
                archive.delete_session(name)
                removed.append(name)
        finally:
            _show_removed(args, removed)
    return 0


def _show_removed(args: argparse.Namespace, removed: list[str]) -> None:
    if args.json:
        show_json({"removed": removed})
    elif not args.quiet:
        for name in removed:
            print(f"removed {name!r}")


def _existing(path: str) -> kvstore.Archive:
    """Open an archive for writing; a missing one is an error, not an empty new one."""
    kvstore.open(path).close()
    return kvstore.open(path, mode="a")
