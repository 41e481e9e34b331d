"""`kvstore pack`: a safetensors file of K and V into an archive, in constant memory."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind

import kvstore
from kvstore.backend import MEMORY_PREFIX
from kvtools.kvfile import KvFile, read_json, rope_from
from kvtools.source import FileSource, build_model, has_rope
from kvtools.tensorfile import TensorFile
from kvtools.terminal import note, number_text, progress, show_json, size_text

POLICIES = ("rel_step", "step", "max_error", "rmse", "bpv")


def codec_config(args: argparse.Namespace, raw_dtype: str = "float32") -> CodecConfig:
    """Return the codec that the options of `_add_codec` ask for; wrong usage exits."""
    options = {
        name: getattr(args, name)
        for name in (*POLICIES, "sink", "sink_div")
        if getattr(args, name) is not None
    }
    if args.codec == "raw":
        if options:
            flag = "--" + next(iter(options)).replace("_", "-")
            args.parser.error(f"{flag} does not go with --codec raw")
        return kvstore.Raw(raw_dtype)
    return kvstore.TKV1(**options)


def run_pack(args: argparse.Namespace) -> int:
    """Pack one file. Nothing is left behind when it fails."""
    codec_config(args)  # wrong usage is reported before any file is looked at
    if args.rope_theta is None and args.rotary_dim is not None:
        args.parser.error("--rotary-dim goes with --rope-theta")
    name = args.session or Path(args.input).stem
    with TensorFile(args.input) as file:
        kv = KvFile(file, k_state=args.k_state, no_v=args.no_v)
        model = build_model(
            kv,
            name=args.model_name,
            revision=args.revision,
            dtype=args.dtype,
            rope=_rope_option(args, kv),
        )
        _check_rope(args, kv, model)
        job = _Job(args, name, kv, model)
        job.run()
        summary = job.summary
    if args.json:
        show_json(summary)
    elif not args.quiet:
        print(
            f"packed {name!r}: {kv.n_tokens} tokens, {model.n_layers} layers, "
            f"{number_text(summary['bits_per_value'], 3)} bits per value, "
            f"{size_text(summary['total_bytes'])} "
            f"({number_text(summary['ratio_fp16'], 3)} times smaller than float16) "
            f"in {summary['seconds']:.2f} s"
        )
    return 0


def _rope_option(args: argparse.Namespace, kv: KvFile) -> Rope | None:
    """Return the RoPE that the options state, or None to leave it to the file."""
    style, scaling = args.rope_style, args.rope_scaling
    if args.rope_theta is not None:
        widths = {layer.k.head_dim for layer in kv.layers}
        if args.rotary_dim is None and len(widths) > 1:
            raise InvalidArgument("layers have different head_dim: give --rotary-dim or --inv-freq")
        rotary_dim = args.rotary_dim or widths.pop()
        return Rope.from_theta(
            args.rope_theta, rotary_dim, style=style or "half", scaling=scaling or 1.0
        )
    if args.inv_freq is not None:
        return rope_from(
            _frequencies(args.inv_freq),
            where="--inv-freq",
            style=style or "half",
            scaling=scaling or 1.0,
        )
    if style is None and scaling is None:
        return None
    stated = kv.rope()
    if stated is None:
        raise InvalidArgument(
            f"{kv.file.path}: --rope-style and --rope-scaling need frequencies: "
            "give --inv-freq or --rope-theta as well"
        )
    return Rope(stated.inv_freq, style=style or stated.style, scaling=scaling or stated.scaling)


def _frequencies(option: str) -> object:
    """Return the list of `--inv-freq`: inline JSON, or a file that holds it."""
    if option.lstrip().startswith("["):
        try:
            return json.loads(option)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"--inv-freq: not valid JSON: {error}") from error
    content = read_json(Path(option))
    if isinstance(content, dict):
        for key in ("rope_inv_freq_f32", "inv_freq"):
            if key in content:
                return content[key]
        raise Corrupt(f"{option}: no rope_inv_freq_f32 and no inv_freq")
    return content


def _check_rope(args: argparse.Namespace, kv: KvFile, model: kvstore.Model) -> None:
    if kv.k_state == "post" and kv.first_token():
        raise InvalidArgument(
            f"{kv.file.path}: K is after RoPE and starts at token {kv.first_token()}, but a "
            "session starts at 0; unpack it with --k-state pre"
        )
    if has_rope(model):
        return
    if kv.k_state == "post":
        raise InvalidArgument(
            f"{kv.file.path}: K is after RoPE and its frequencies are unknown; give --inv-freq or "
            "--rope-theta, put rope_inv_freq_f32 into the metadata or a .json file beside the "
            "input, or say --k-state pre if the model has no RoPE"
        )
    note(
        "no RoPE frequencies known: K is kept as it is and cannot be read after RoPE "
        "(--inv-freq or --rope-theta states them)",
        quiet=args.quiet,
    )


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
        self._codecs: dict[Kind, CodecConfig] = {
            "k": codec_config(args, kv.dtype("k") if as_it_is else "float32"),
            "v": codec_config(args, kv.dtype("v")),
        }
        self._token_ids = kv.token_ids()
        self.summary: dict[str, Any] = {}

    def run(self) -> None:
        """Store the session, in a new archive if there is none."""
        path = self._args.archive
        if path.startswith(MEMORY_PREFIX):
            raise InvalidArgument(f"{path}: an archive in memory would end with this command")
        if os.path.lexists(path):
            if os.path.isdir(path) and os.listdir(path) and "data.mdb" not in os.listdir(path):
                raise InvalidArgument(f"{path}: a folder with other files, and no archive")
            self._add(path)
            return
        # A new archive is built beside its place and moved there whole.
        target = Path(path)
        if not target.parent.is_dir():
            raise NotFound(f"{path}: its folder does not exist")
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._add(str(temporary))
            os.rename(temporary, target)
        except KvError as error:
            error.args = (str(error).replace(str(temporary), path),)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.summary["archive"] = path

    def _add(self, path: str) -> None:
        start = time.perf_counter()
        with kvstore.open(path, mode="a") as archive:
            if self._name in archive and not self._args.replace:
                raise InvalidArgument(
                    f"{path}: session {self._name!r} exists; --replace replaces it, --session "
                    "gives another name"
                )
            info = self._ingest(archive).info()
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
                k_state=self._kv.k_state,
                token_ids=self._token_ids,
                metadata={"layers": [layer.number for layer in self._kv.layers]},
                replace=self._args.replace,
                progress=advance,
            )
