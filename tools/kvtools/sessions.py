"""`kvstore fork`, `trim`, `rename`, `append-range`, `pin`: changes that copy no frame."""

from __future__ import annotations

import argparse

from kvcodecs.errors import InvalidArgument

from kvtools.existing import existing_archive, existing_sessions
from kvtools.terminal import count_text, number_text, show_json


def run_fork(args: argparse.Namespace) -> int:
    """Begin a session with the first tokens of another one."""
    with existing_archive(args.archive) as archive:
        parent = archive.session(args.session)
        fork = parent.fork(args.new, args.at, metadata=args.metadata, replace=args.replace)
        n_tokens = fork.n_committed
    if args.json:
        show_json({"session": args.new, "parent": args.session, "n_tokens": n_tokens})
    elif not args.quiet:
        print(f"forked {args.session!r} as {args.new!r}: {count_text(n_tokens, 'token')} shared")
    return 0


def run_trim(args: argparse.Namespace) -> int:
    """Drop tokens at the front, at the end, or both."""
    front, to = args.front, args.to
    if front is None and to is None:
        args.parser.error("give --front, --to or both")
    if front is not None and to is not None and front > to:
        args.parser.error(f"--front {front} is beyond --to {to}")
    with existing_archive(args.archive) as archive, archive.session(args.session) as session:
        n_tokens = session.n_committed
        # Before anything is dropped at the end.
        if front is not None and front > n_tokens:
            raise InvalidArgument(
                f"{args.archive}: session {args.session!r} has {count_text(n_tokens, 'token')}, "
                f"--front {front} is beyond them"
            )
        if to is not None:
            session.truncate(to)
        if front is not None:
            session.trim_front(front)
        first, n_tokens = session.first_token, session.n_committed
    if args.json:
        show_json({"session": args.session, "first_token": first, "n_tokens": n_tokens})
    elif not args.quiet:
        print(f"trimmed {args.session!r}: it has tokens {first}:{n_tokens}")
    return 0


def run_rename(args: argparse.Namespace) -> int:
    """Give a session another name."""
    with existing_archive(args.archive) as archive:
        archive.rename_session(args.session, args.new, replace=args.replace)
    if args.json:
        show_json({"session": args.new, "old_name": args.session})
    elif not args.quiet:
        print(f"renamed {args.session!r} to {args.new!r}")
    return 0


def run_append_range(args: argparse.Namespace) -> int:
    """Append tokens of one session to another."""
    start, stop = args.range
    with existing_archive(args.archive) as archive:
        source = archive.session(args.source)
        with archive.session(args.session) as session:
            first = session.n_committed
            if stop is None:
                stop = max(source.n_committed, start)
            done = session.append_range(source, start, stop)
    if args.json:
        show_json(
            {
                "session": args.session,
                "source": args.source,
                "start": start,
                "stop": stop,
                "first_token": first,
                "n_tokens": done.n_tokens,
                "n_shared": done.n_shared,
                "max_error": done.max_error,
            }
        )
    elif not args.quiet:
        error = number_text(done.max_error)
        further = f"largest further error {error}" if done.max_error else "no further error"
        print(
            f"appended {args.source!r} {start}:{stop} to {args.session!r} as its tokens "
            f"{first}:{first + done.n_tokens}, {done.n_shared} of them shared; {further}"
        )
    return 0


def run_pin(args: argparse.Namespace) -> int:
    """Pin sessions, or unpin them; if any of them is missing, none."""
    verb = "unpinned" if args.off else "pinned"
    done: list[str] = []
    with existing_archive(args.archive) as archive:
        names = existing_sessions(archive, args.session, f"nothing is {verb}")
        try:
            for name in names:
                archive.session(name).pin(not args.off)
                done.append(name)
        finally:
            if args.json:
                show_json({"sessions": done, "pinned": not args.off})
            elif not args.quiet:
                for name in done:
                    print(f"{verb} {name!r}")
    return 0
