"""`kvstore seal`: finish sessions, and lay their blocks together."""

from __future__ import annotations

import argparse

from kvstore.finishing import SHARD_BYTES
from kvtools.existing import existing_archive, existing_sessions
from kvtools.terminal import count_text, progress, show_json


def run_seal(args: argparse.Namespace) -> int:
    """Finish sessions; if any of those named is missing, none."""
    shard_bytes = args.shard_bytes or (SHARD_BYTES if args.shard else None)
    with existing_archive(args.archive) as archive:
        names = (
            existing_sessions(archive, args.session, "nothing is sealed") if args.session else None
        )
        with progress("seal", quiet=args.quiet or args.json) as advance:
            done = archive.seal(names, shard_bytes=shard_bytes, progress=advance)
    if args.json:
        show_json({"archive": args.archive, "sealed": done, "shard_bytes": shard_bytes})
    elif not args.quiet:
        how = ", their blocks in shards" if shard_bytes and done else ""
        print(f"{args.archive}: {count_text(len(done), 'session')} sealed{how}")
    return 0
