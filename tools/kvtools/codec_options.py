"""The codec that options on the command line ask for; see `packing_commands.add_codec`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kvcodecs.codec import CodecConfig
from kvcodecs.spec import KINDS, Kind

import kvstore

POLICIES = ("rel_step", "step", "max_error", "rmse", "bpv")
#: Options that a codec with a quantiser takes.
STEP_OPTIONS = (*POLICIES, "sink", "sink_div")
#: All options of codecs.
CODEC_OPTIONS = ("k_codec", "v_codec", *STEP_OPTIONS)

_WITH_STEP: dict[str, type[kvstore.KVR1] | type[kvstore.TKV1]] = {
    "kvr1": kvstore.KVR1,
    "tkv1": kvstore.TKV1,
}
_FLOAT32: Mapping[Kind, str] = {"k": "float32", "v": "float32"}


def codec_configs(
    args: argparse.Namespace, raw_dtypes: Mapping[Kind, str] = _FLOAT32
) -> dict[Kind, CodecConfig]:
    """Return the codecs of K and V that are asked for; wrong usage exits.

    `raw_dtypes` are what raw values of each are kept in.
    """
    names: dict[Kind, str] = {kind: getattr(args, f"{kind}_codec") or args.codec for kind in KINDS}
    options = _options(args)
    if options and not any(name in _WITH_STEP for name in names.values()):
        asked = " and ".join(dict.fromkeys(names.values()))
        args.parser.error(f"{_flag(next(iter(options)))} does not go with --codec {asked}")
    return {kind: _config(name, options, raw_dtypes[kind]) for kind, name in names.items()}


def codec_config(args: argparse.Namespace, raw_dtype: str = "float32") -> CodecConfig:
    """Return the codec of both K and V; wrong usage exits."""
    return codec_configs(args, {"k": raw_dtype, "v": raw_dtype})["k"]


def other_codecs(args: argparse.Namespace) -> dict[Kind, CodecConfig] | None:
    """Return the codecs that are asked for where each session has its own, or None."""
    named = args.codec is not None or (args.k_codec is not None and args.v_codec is not None)
    if named:
        return codec_configs(args)
    for name in CODEC_OPTIONS:
        if getattr(args, name) is not None:
            args.parser.error(f"{_flag(name)} goes with --codec")
    return None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in STEP_OPTIONS if (value := getattr(args, name)) is not None}


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _config(name: str, options: Mapping[str, Any], raw_dtype: str) -> CodecConfig:
    if name in _WITH_STEP:
        return _WITH_STEP[name](**options)
    return kvstore.Raw(raw_dtype) if name == "raw" else kvstore.GGML(name)
