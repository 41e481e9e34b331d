"""`kvstore receipt`: what the commits of a session left of receipts."""

from __future__ import annotations

import argparse
from typing import Any

from kvcodecs.errors import InvalidArgument

import kvstore
from kvstore import SessionReceipt, StreamReceipt
from kvstore.source_digests import SourceHasher
from kvtools.kvfile import KvFile
from kvtools.source import FileSource
from kvtools.tensorfile import TensorFile
from kvtools.terminal import (
    count_text,
    date_text,
    listed,
    note,
    number_text,
    plain,
    show_json,
    show_table,
)
from kvtools.unpack import only_session

#: Digits of a digest that are shown.
SHORT_DIGITS = 12


def run_receipt(args: argparse.Namespace) -> int:
    """Show receipts; exit with 1 if the file is not the source that they tell."""
    with kvstore.open(args.archive) as archive:
        name = only_session(archive) if args.session is None else args.session
        session = archive.session(name)
        receipts = session.receipts()
    unlike = None if args.source is None else _compare(args.source, name, receipts)
    if args.json:
        found = [
            {"digest": receipt.digest(), "kept": receipt.kept, "receipt": receipt.to_json()}
            for receipt in receipts
        ]
        about: dict[str, Any] = {"archive": args.archive, "session": name, "receipts": found}
        if unlike is not None:
            about["source"] = {"file": args.source, "same": not unlike, "unlike": unlike}
        show_json(about)
        return 1 if unlike else 0
    if not receipts:
        note(
            f"session {name!r} has no receipts: sessions leave them that are packed with "
            "--receipts or created with receipts=True",
            quiet=args.quiet,
        )
    elif args.layers:
        _show_streams(receipts)
    else:
        _show(receipts)
    if unlike is not None and not args.quiet:
        text = f"differs in {listed(unlike)}" if unlike else "is the source of these receipts"
        print(plain(f"{args.source}: {text}"))
    return 1 if unlike else 0


def _show(receipts: list[SessionReceipt]) -> None:
    columns = ("receipt", "tokens", "origin", "frames", "with raw", "max error", "made", "digest")
    rows = []
    for number, receipt in enumerate(receipts):
        parts = [part.receipt for part in receipt.streams]
        errors = [part.max_error for part in parts]
        known = [error for error in errors if error is not None]
        rows.append(
            (
                str(number),
                _tokens(receipt),
                receipt.origin,
                str(sum(part.n_pages for part in parts)),
                str(sum(part.raw_fallback_blocks for part in parts)),
                number_text(max(known) if known and len(known) == len(errors) else None),
                f"{date_text(receipt.recorded_unix_seconds)}, {receipt.software}",
                _short(receipt.digest()),
            )
        )
    show_table("", columns, rows)


def _show_streams(receipts: list[SessionReceipt]) -> None:
    columns = (
        *("receipt", "tokens", "layer", "kind", "codec", "frames", "with raw", "max error", "rms"),
        *("source", "parameters", "why raw"),
    )
    rows = [
        (str(number), _tokens(receipt), str(part.layer), part.kind, *_stream(part))
        for number, receipt in enumerate(receipts)
        for part in receipt.streams
    ]
    show_table("", columns, rows)


def _stream(part: StreamReceipt) -> tuple[str, ...]:
    receipt = part.receipt
    return (
        str(receipt.codec["codec"]),
        str(receipt.n_pages),
        str(receipt.raw_fallback_blocks),
        number_text(receipt.max_error),
        number_text(receipt.rms),
        _short(receipt.values_digest),
        _short(receipt.profile_digest),
        ", ".join(receipt.fallback_reasons),
    )


def _tokens(receipt: SessionReceipt) -> str:
    text = f"{receipt.first_token}:{receipt.stop_token}"
    if receipt.kept == receipt.stop_token:
        return text
    return f"{text}, taken back from {max(receipt.kept, receipt.first_token)}"


def _short(digest: str) -> str:
    return digest.removeprefix("blake3:")[:SHORT_DIGITS]


def _compare(path: str, name: str, receipts: list[SessionReceipt]) -> list[str]:
    """Return the streams of which a file's values are not those of the receipts."""
    made = [receipt for receipt in receipts if receipt.origin == "append"]
    if not made or len(made) < len(receipts):
        what = "no receipts" if not receipts else "receipts of tokens that came from elsewhere"
        raise InvalidArgument(f"session {name!r} has {what}: nothing to compare with a file")
    unlike = []
    with TensorFile(path) as file:
        kv = KvFile(file)
        source = FileSource(kv)
        stop = max(receipt.stop_token for receipt in made)
        if kv.n_tokens != stop or len(kv.layers) <= made[0].streams[-1].layer:
            raise InvalidArgument(
                f"{path}: {count_text(kv.n_tokens, 'token')} of "
                f"{count_text(len(kv.layers), 'layer')}, the receipts are of {stop} of "
                f"{made[0].streams[-1].layer + 1}"
            )
        for number, receipt in enumerate(made):
            for part in receipt.streams:
                if _digest(source, part, receipt, stop) != part.receipt.source_digest:
                    unlike.append(f"receipt {number} layer {part.layer} {part.kind}")
    return unlike


def _digest(source: FileSource, part: StreamReceipt, receipt: SessionReceipt, stop: int) -> str:
    """Return the digest of the tokens of a receipt in the file."""
    hasher: SourceHasher | None = None
    at = stop - source.n_tokens(part.layer, part.kind)
    for chunk in source.chunks(part.layer, part.kind):
        hasher = hasher or SourceHasher(chunk.shape[0], chunk.shape[2])
        lo, hi = max(receipt.first_token - at, 0), max(receipt.stop_token - at, 0)
        hasher.update(chunk[:, lo:hi])
        at += chunk.shape[1]
    return "" if hasher is None else hasher.digest()
