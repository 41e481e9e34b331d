"""What `kvstore migrate` says at its end."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kvcodecs.codec import CodecConfig
from kvcodecs.spec import Kind

import kvstore
from kvtools.terminal import count_text, listed, note, rate_text, show_json, size_text


def show_migrated(
    args: argparse.Namespace,
    done: kvstore.Migrated,
    codec: Mapping[Kind, CodecConfig] | None,
    left_out: Sequence[str] = (),
) -> None:
    """Say what was done: coded with which codecs, and what was left out."""
    if args.json:
        show_json(
            {
                "source": args.source,
                "target": args.target,
                "moved": done.moved,
                "recoded": done.recoded,
                "flattened": done.flattened,
                "skipped": done.skipped,
                "left_out": list(left_out),
                "n_bytes": done.n_bytes,
                "verified": done.verified,
                "seconds": done.seconds,
            }
        )
        return
    if done.flattened:
        note(
            f"frames of their own now, shared no more: {listed(done.flattened)}",
            quiet=args.quiet,
        )
    for text in left_out:
        note(text, quiet=args.quiet)
    if args.quiet:
        return
    parts = [
        f"{count_text(len(names), 'session')} {what}"
        for names, what in (
            (done.moved, "moved byte for byte"),
            (done.recoded, f"coded anew with {_names(codec)}"),
            (done.skipped, "there already"),
        )
        if names
    ]
    print(
        f"{args.target}: {', '.join(parts) or 'no sessions'}; {size_text(done.n_bytes)} in "
        f"{done.seconds:.2f} s ({rate_text(done.n_bytes, done.seconds)})"
        f"{', all read again' if done.verified and (done.moved or done.recoded) else ''}"
    )


def _names(codec: Mapping[Kind, CodecConfig] | None) -> str:
    if codec is None:
        return "the codecs that they have"
    names = {kind: config.codec for kind, config in codec.items()}
    if len(set(names.values())) == 1:
        return names["k"]
    return ", ".join(f"{name} ({kind})" for kind, name in names.items())
