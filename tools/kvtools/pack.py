"""`kvstore pack`: a safetensors file of K and V into an archive, in constant memory."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from kvcodecs.errors import InvalidArgument, KvError, NotFound

import kvstore
from kvstore.keys import check_name
from kvstore.layout import MAX_FIT_TOKENS
from kvstore.place import MEMORY_PREFIX, Place
from kvtools.codec_options import codec_configs
from kvtools.kvfile import KvFile
from kvtools.rope_options import check_rope, rope_option
from kvtools.source import FileSource, build_model, has_rope
from kvtools.temporary import folder_for
from kvtools.tensorfile import TensorFile
from kvtools.terminal import (
    count_text,
    listed,
    note,
    number_text,
    progress,
    ratio_text,
    show_json,
    size_text,
)

#: Options that state the field of the same name of a model.
IDENTITY = ("revision", "weights", "tokenizer", "adapter", "layout", "salt", "dtype")


def run_pack(args: argparse.Namespace) -> int:
    """Pack one file. Nothing is left behind when it fails."""
    codec_configs(args)  # wrong usage is reported before any file is looked at
    if args.rope_theta is None and args.rotary_dim is not None:
        args.parser.error("--rotary-dim goes with --rope-theta")
    name = _session_name(args)
    if args.fit_tokens > MAX_FIT_TOKENS:
        args.parser.error(f"--fit-tokens {args.fit_tokens}: at most {MAX_FIT_TOKENS}")
    with TensorFile(args.input) as file:
        kv = KvFile(file, k_state=args.k_state, no_v=args.no_v)
        kv.require_v("--no-v packs K alone")
        _check_positions(args, kv)
        stated = {name: getattr(args, name) for name in IDENTITY}
        model = build_model(
            kv,
            name=args.model_name,
            rope=rope_option(args, kv),
            shard=_shard(args),
            **stated,
        )
        check_rope(args, kv, model)
        _note_unused(kv, quiet=args.quiet)
        job = _Job(args, name, kv, model)
        job.run()
        summary = job.summary
    if args.json:
        show_json(summary)
    elif not args.quiet:
        rate = f"{number_text(summary['bits_per_value'], 3)} bits per value, "
        print(
            f"packed {name!r}: {count_text(kv.n_tokens, 'token')}, "
            f"{count_text(model.n_layers, 'layer')}, {rate if summary['n_values'] else ''}"
            f"{size_text(summary['total_bytes'])} ({ratio_text(summary['ratio_fp16'])}) "
            f"in {summary['seconds']:.2f} s"
        )
    return 0


def _session_name(args: argparse.Namespace) -> str:
    if args.session is not None:
        return check_name(args.session)
    try:
        return check_name(Path(args.input).stem)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; give another one with --session") from error


def _shard(args: argparse.Namespace) -> kvstore.Shard | None:
    if args.shard is None:
        return None
    rank, size, start, stop = args.shard
    return kvstore.Shard(rank, size, (start, stop))


def _may_hold_an_archive(folder: Path) -> bool:
    """Whether there is an archive, or nothing that one would be put among."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    return not found or "data.mdb" in found or "_kvstore" in found


def _check_positions(args: argparse.Namespace, kv: KvFile) -> None:
    """Refuse a part of a session, whose tokens would silently get other positions."""
    first = kv.hints.first_token()
    if not first:
        return
    start = f"{kv.file.path}: starts at token {first}, but a session starts at 0"
    if kv.k_state == "post":
        raise InvalidArgument(f"{start}, and K is after RoPE; unpack it with --k-state pre")
    if not args.renumber:
        raise InvalidArgument(f"{start}; --renumber packs it as tokens 0:{kv.n_tokens}")


def _note_unused(kv: KvFile, *, quiet: bool) -> None:
    names = kv.unused()
    if names:
        note(f"not packed: {listed(names)}", quiet=quiet)


class _Job:
    """Packing of one input under one name."""

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        kv: KvFile,
        model: kvstore.Model,
    ) -> None:
        self._args, self._name, self._kv, self._model = args, name, kv, model
        # K that is un-rotated before it is stored is no longer what the input's dtype can hold.
        as_it_is = kv.k_state == "pre" or not has_rope(model)
        k_dtype = kv.dtype("k") if as_it_is else "float32"
        self._codecs = codec_configs(args, {"k": k_dtype, "v": kv.dtype("v")})
        self._token_ids = kv.token_ids()
        self.summary: dict[str, Any] = {}

    def run(self) -> None:
        """Store the session, in a new archive if there is none."""
        path = self._args.archive
        if path.startswith(MEMORY_PREFIX):
            raise InvalidArgument(f"{path}: an archive in memory would end with this command")
        place = Place.of(path)
        target = place.folder
        if target is None or os.path.lexists(target):
            if target is not None and not _may_hold_an_archive(target):
                raise InvalidArgument(f"{path}: a folder with other files, and no archive")
            self._add(path)
            return
        # A new archive is built beside its place and moved there whole.
        if not target.parent.is_dir():
            raise NotFound(f"{path}: its folder does not exist")
        try:
            with folder_for(target) as temporary:
                self._build(temporary, target, place.prefix)
        except OSError as error:
            if not Path(str(error.filename)).name.startswith(f".{target.name}."):
                raise
            raise OSError(error.errno, error.strerror, path) from error
        self.summary["archive"] = path

    def _build(self, temporary: Path, target: Path, prefix: str) -> None:
        """Store the session in an empty folder and move that to its place."""
        try:
            self._add(f"{prefix}{temporary}")
        except KvError as error:
            said = self._args.archive.removeprefix(prefix)
            error.args = (str(error).replace(str(temporary), said),)
            raise
        os.rename(temporary, target)

    def _add(self, path: str) -> None:
        start = time.perf_counter()
        with kvstore.open(path, mode="a") as archive:
            if self._name in archive and not self._args.replace:
                raise InvalidArgument(
                    f"{path}: session {self._name!r} exists; --replace replaces it, --session "
                    "gives another name"
                )
            info = self._ingest(archive).info()
        self._note_raw(info)
        self.summary = {
            "archive": path,
            "session": self._name,
            "n_tokens": info.n_tokens,
            "n_layers": info.model.n_layers,
            "n_values": info.n_values,
            "total_bytes": info.total_bytes,
            "bits_per_value": info.bits_per_value,
            "ratio_fp16": info.ratio_fp16,
            "seconds": time.perf_counter() - start,
        }

    def _ingest(self, archive: kvstore.Archive) -> kvstore.Session:
        with progress("pack", quiet=self._args.quiet or self._args.json) as advance:
            return archive.ingest(
                self._name,
                FileSource(self._kv),
                model=self._model,
                codec=self._codecs,
                block_tokens=self._args.block_tokens,
                fit_tokens=self._args.fit_tokens,
                k_state=self._kv.k_state,
                token_ids=self._token_ids,
                metadata={"layers": [layer.number for layer in self._kv.layers]},
                replace=self._args.replace,
                receipts=self._args.receipts,
                progress=advance,
            )

    def _note_raw(self, info: kvstore.SessionInfo) -> None:
        """Say which streams are too short for the codec, which would be a surprise."""
        fit = self._args.fit_tokens
        raw = {s.layer for s in info.streams if not s.lossless and s.n_head_tokens and s.n_values}
        counts = {s.layer: s.n_tokens - s.start_token for s in info.streams if s.layer in raw}
        short = sorted(layer for layer, n in counts.items() if n < fit)
        if not short:
            return
        if info.n_tokens < fit:
            what = f"{info.name!r} has {count_text(info.n_tokens, 'token')}, fewer"
        elif len(short) == 1:
            what = f"layer {short[0]} has fewer tokens"
        else:
            what = f"layers {listed(short)} have fewer tokens"
        note(f"{what} than --fit-tokens {fit}: kept uncompressed", quiet=self._args.quiet)
