"""`kvstore quota`: how large an archive may get."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvcodecs.errors import Full

import kvstore
from kvstore.backend import BackendInfo
from kvtools.existing import existing_archive
from kvtools.info import quota_text
from kvtools.terminal import count_text, show_json, show_pairs, size_text


@dataclass(frozen=True, slots=True)
class _Room:
    """An archive's quota and what is in use, found without a look at its frames."""

    quota: int | None
    sizes: BackendInfo
    n_sessions: int
    n_pinned: int

    def to_json(self) -> dict[str, object]:
        return {
            "quota_bytes": self.quota,
            "used_bytes": self.sizes.used_bytes,
            "file_bytes": self.sizes.file_bytes,
            "free_bytes": self.sizes.free_bytes,
            "n_sessions": self.n_sessions,
            "n_pinned": self.n_pinned,
        }


def run_quota(args: argparse.Namespace) -> int:
    """Show an archive's quota, or set it and say which sessions had to go."""
    if args.bytes is None:
        with kvstore.open(args.archive) as archive:
            room = _room(archive)
        if args.json:
            show_json({"archive": args.archive, **room.to_json(), "evicted": []})
        else:
            _show(room)
        return 0
    with existing_archive(args.archive) as archive:
        before = archive.names()
        failure = None
        try:
            archive.set_quota(None if args.bytes == "none" else args.bytes)
        except Full as error:  # what may not be evicted needs more; the quota is set nevertheless
            failure = error
        there = set(archive.names())
        _show_change(args, _room(archive), [name for name in before if name not in there])
    if failure is not None:
        raise failure
    return 0


def _room(archive: kvstore.Archive) -> _Room:
    n_pinned = len(archive.sessions(pinned=True))
    return _Room(archive.quota_bytes, archive.sizes(), len(archive.names()), n_pinned)


def _show(room: _Room) -> None:
    sizes = room.sizes
    show_pairs(
        [
            ("quota", quota_text(room.quota)),
            ("used", size_text(sizes.used_bytes)),
            ("file", f"{size_text(sizes.file_bytes)}, {size_text(sizes.free_bytes)} of it free"),
            ("sessions", f"{room.n_sessions}, {room.n_pinned} of them pinned"),
        ]
    )


def _show_change(args: argparse.Namespace, room: _Room, evicted: list[str]) -> None:
    if args.json:
        show_json({"archive": args.archive, **room.to_json(), "evicted": evicted})
        return
    if args.quiet:
        return
    for name in evicted:
        print(f"evicted {name!r}")
    used = f"{size_text(room.sizes.used_bytes)} used by {count_text(room.n_sessions, 'session')}"
    print(f"{args.archive}: quota {quota_text(room.quota)}, {used}")
    if room.quota is not None and room.sizes.file_bytes > room.quota:
        size = size_text(room.sizes.file_bytes)
        print(f"the file has {size}, more than the quota; `kvstore compact` makes it smaller")
