"""`kvstore ls`, `rm`: which sessions are in an archive."""

from __future__ import annotations

import argparse
from typing import Any

from kvcodecs.errors import KvError, NotFound

import kvstore
from kvstore import SessionEntry, SessionInfo
from kvtools import flat_reports
from kvtools.existing import existing_archive, existing_sessions
from kvtools.flat_sessions import flat_sessions
from kvtools.info import session_sizes, show_damaged
from kvtools.terminal import date_text, number_text, show_json, show_table, size_text


def run_ls(args: argparse.Namespace) -> int:
    """List sessions, in byte order of their names; exit with 1 if some cannot be read."""
    folders = flat_sessions(args.archive)
    if folders is not None:
        return flat_reports.ls(args, folders)
    with kvstore.open(args.archive) as archive:
        entries, damaged = _entries(archive, args.prefix)
        if args.pinned:  # a damaged record does not say
            entries = [entry for entry in entries if entry.pinned]
        infos = _infos(archive, entries, damaged) if args.long else {}
    if args.long:
        entries = [entry for entry in entries if entry.name in infos]
    if args.json:
        found = [_to_json(entry, infos.get(entry.name)) for entry in entries]
        broken = [{"name": name, "error": str(error)} for name, error in damaged.items()]
        show_json(found + broken)
        return 1 if damaged else 0
    _show(entries, infos)
    return show_damaged(damaged)


def _entries(
    archive: kvstore.Archive, prefix: str
) -> tuple[list[SessionEntry], dict[str, KvError]]:
    """Return the sessions from their records alone, and why the others cannot be read."""
    entries = archive.sessions(prefix)
    readable = {entry.name for entry in entries}
    damaged: dict[str, KvError] = {}
    for name in archive.names():
        if name.startswith(prefix) and name not in readable:
            try:
                archive.session(name)
            except NotFound:
                continue  # deleted meanwhile
            except KvError as error:
                damaged[name] = error
    return entries, damaged


def _infos(
    archive: kvstore.Archive, entries: list[SessionEntry], damaged: dict[str, KvError]
) -> dict[str, SessionInfo]:
    """Return what the frames tell of sessions; adds to `damaged`."""
    infos = {}
    for entry in entries:
        try:
            infos[entry.name] = archive.session(entry.name).info()
        except NotFound:
            continue  # deleted meanwhile
        except KvError as error:
            damaged[entry.name] = error
    return infos


def _to_json(entry: SessionEntry, info: SessionInfo | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.model.name,
        "n_layers": entry.model.n_layers,
        "n_tokens": entry.n_tokens,
        "first_token": entry.first_token,
        "has_token_ids": entry.has_token_ids,
        "pinned": entry.pinned,
        "finished": entry.finished,
        "created": entry.created,
        "updated": entry.updated,
        "used": entry.used,
        "metadata": dict(entry.metadata),
        **(session_sizes(info) if info is not None else {}),
    }


def _show(entries: list[SessionEntry], infos: dict[str, SessionInfo]) -> None:
    # Most archives have no such sessions: their tables stay without the columns.
    trimmed = any(entry.first_token for entry in entries)
    pinned = any(entry.pinned for entry in entries)
    sealed = any(entry.finished for entry in entries)
    columns = (
        *("session", "model", "layers", "tokens"),
        *(("first token",) if trimmed else ()),
        *(("bits/value", "size") if infos else ()),
        *(("pinned",) if pinned else ()),
        *(("sealed",) if sealed else ()),
        "last use (UTC)",
    )
    rows = []
    for entry in entries:
        info = infos.get(entry.name)
        row = [entry.name, entry.model.name, str(entry.model.n_layers), str(entry.n_tokens)]
        if trimmed:
            row.append(str(entry.first_token))
        if info is not None:
            row += [number_text(info.bits_per_value, 3), size_text(info.total_bytes)]
        if pinned:
            row.append("yes" if entry.pinned else "")
        if sealed:
            row.append("yes" if entry.finished else "")
        rows.append([*row, date_text(entry.used).removesuffix(" UTC")])
    show_table("", columns, rows)


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
