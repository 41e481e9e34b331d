"""`kvstore ls`, `rm`: which sessions are in an archive."""

from __future__ import annotations

import argparse

import kvstore
from kvtools.existing import existing_archive, existing_sessions
from kvtools.info import session_summary, show_damaged
from kvtools.terminal import number_text, show_json, show_table, size_text


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


def run_rm(args: argparse.Namespace) -> int:
    """Delete sessions; if any of them is missing, none."""
    removed: list[str] = []
    with existing_archive(args.archive) as archive:
        names = existing_sessions(archive, args.session, "nothing is removed")
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
