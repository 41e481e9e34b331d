"""`kvstore verify`, `gc`, `reindex`, `compact`, `upgrade`: what keeps an archive sound."""

from __future__ import annotations

import argparse

import kvstore
from kvtools import flat_reports
from kvtools.existing import existing_archive
from kvtools.flat_sessions import flat_sessions
from kvtools.terminal import count_text, plain, progress, show_json, size_text


def run_verify(args: argparse.Namespace) -> int:
    """Check everything; print one line per problem and exit with 1 if there is any."""
    folders = flat_sessions(args.archive)
    if folders is not None:
        if args.receipts:
            args.parser.error("--receipts goes with an archive: flat layers have none")
        return flat_reports.verify(args, folders)
    with kvstore.open(args.archive) as archive:
        label = "decode" if args.decode else "verify"
        with progress(label, quiet=args.quiet or args.json) as advance:
            report = archive.verify(decode=args.decode, receipts=args.receipts, progress=advance)
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
                "receipts_checked": report.receipts,
                "n_receipts": report.n_receipts,
                "n_without_receipts": report.n_without,
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
        if report.receipts:
            without = f"; {count_text(report.n_without, 'session')} without"
            print(
                f"{count_text(report.n_receipts, 'receipt')} checked"
                + (without if report.n_without else "")
            )
        if report.n_leftover:
            entries = count_text(report.n_leftover, "entry", "entries")
            print(f"{entries} left over from killed writers, harmless; `kvstore gc` removes them")
    return 0 if report.ok else 1


def run_gc(args: argparse.Namespace) -> int:
    """Remove leftovers of killed writers."""
    with existing_archive(args.archive) as archive:
        n_bytes = archive.gc()
    if args.json:
        show_json({"archive": args.archive, "freed_bytes": n_bytes})
    elif not args.quiet:
        print(f"{args.archive}: {size_text(n_bytes)} freed")
    return 0


def run_reindex(args: argparse.Namespace) -> int:
    """Make the prefix index anew; print one line per error and exit with 1 if there is any."""
    with existing_archive(args.archive) as archive:
        n_entries, errors = archive.reindex()
    if args.json:
        problems = [{"kind": type(e).__name__, "message": str(e)} for e in errors]
        show_json({"archive": args.archive, "n_entries": n_entries, "errors": problems})
        return 1 if errors else 0
    for error in errors:
        print(plain(" ".join(f"{type(error).__name__}: {error}".split())))
    if not args.quiet:
        entries = count_text(n_entries, "entry", "entries")
        left_out = f"; {count_text(len(errors), 'session')} left out" if errors else ""
        print(f"{args.archive}: {entries} in the prefix index{left_out}")
    return 1 if errors else 0


def run_compact(args: argparse.Namespace) -> int:
    """Give free space back to the file system."""
    with progress("compact", quiet=args.quiet or args.json) as advance:
        before, after = kvstore.compact(args.archive, progress=advance)
    if args.json:
        show_json({"archive": args.archive, "bytes_before": before, "bytes_after": after})
    elif not args.quiet:
        print(f"{args.archive}: {size_text(before)} before, {size_text(after)} now")
    return 0


def run_upgrade(args: argparse.Namespace) -> int:
    """Upgrade the format; print one line per error and exit with 1 if there is any."""
    backup = not args.no_backup if args.backup is None else args.backup
    with progress("backup", quiet=args.quiet or args.json) as advance:
        done = kvstore.upgrade(args.archive, backup=backup, progress=advance)
    if args.json:
        show_json(
            {
                "archive": args.archive,
                "format_before": done.before,
                "format_after": done.after,
                "backup": done.backup,
                "n_sessions": done.n_sessions,
                "errors": [{"kind": type(e).__name__, "message": str(e)} for e in done.problems],
            }
        )
        return 1 if done.problems else 0
    for error in done.problems:
        print(plain(" ".join(f"{type(error).__name__}: {error}".split())))
    if not args.quiet:
        if done.before == done.after:
            text = f"format {done.after} is the newest there is; nothing to do"
        else:
            sessions = count_text(done.n_sessions, "session")
            text = f"format {done.before} before, {done.after} now; {sessions}"
        print(f"{args.archive}: {text}")
        if done.backup is not None:
            print(f"{done.backup}: the archive as it was")
    return 1 if done.problems else 0
