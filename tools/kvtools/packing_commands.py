"""`pack` and `unpack` on the command line: their arguments."""

from __future__ import annotations

import argparse

from kvtools.command import PLACES, Command, add_archive
from kvtools.values import (
    block_size,
    codec_name,
    count,
    indices,
    integer,
    layer_list,
    path,
    positive_float,
    positive_int,
    shard,
    token_range,
)

DTYPES = ("float16", "bfloat16", "float32")
#: Of `kvcodecs.ggml`, which the command line does without until it is asked for something.
SCHEMES = (
    "f16, q8_0, q4_0, q5_0, q4_1, q5_1, q1_0, q2_0, q2_0_128, q2_k, q3_k, q4_k, q5_k, q6_k, q8_k, "
    "iq4_nl, iq4_xs, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m, tq1_0, tq2_0"
)


def add_codec(
    parser: argparse.ArgumentParser,
    default: str | None = "kvr1",
    *,
    otherwise: str = "",
    kinds: bool = True,
) -> argparse._ArgumentGroup:
    """Add the options that `kvtools.codec_options` reads.

    Without a `default`, `otherwise` says what happens. Without `kinds`, K and V have the same
    codec.
    """
    codec = parser.add_argument_group("codec")
    codec.add_argument(
        "--codec",
        type=codec_name,
        metavar="CODEC",
        default=default,
        help="kvr1: frozen tables; tkv1: adapts to each block, several times slower, smaller where "
        "the spread of a channel changes from token to token or where a few values lie far beyond "
        "all others; raw: bit exact; ggml.SCHEME: a fixed rate, no step and no bound, with SCHEME "
        f"one of {SCHEMES}; fibquant: vectors as points of a codebook, see below "
        f"(default: {default or otherwise})",
    )
    if kinds:
        for kind in ("k", "v"):
            codec.add_argument(
                f"--{kind}-codec",
                type=codec_name,
                metavar="CODEC",
                help=f"codec of {kind.upper()} (default: that of --codec)",
            )
    else:
        codec.set_defaults(k_codec=None, v_codec=None)
    policy = codec.add_mutually_exclusive_group()
    narrow = "float16 and bfloat16 add half a unit in their last place"
    for flag, metavar, text in (
        ("--rel-step", "R", "quantiser step as a multiple of each stream's RMS (default: 0.25)"),
        ("--step", "S", "quantiser step; the error is at most half of it, as --max-error"),
        ("--max-error", "E", f"largest absolute error as float32; {narrow}"),
        ("--rmse", "E", "root mean square error to aim at"),
        ("--bpv", "BITS", "bits per value of the payload, to aim at; headers come on top"),
    ):
        policy.add_argument(flag, type=positive_float, metavar=metavar, help=text)
    codec.add_argument(
        "--sink", type=count, metavar="N", help="first N tokens are coded finer (default: 4)"
    )
    codec.add_argument(
        "--sink-div", type=positive_int, metavar="D", help="how many times finer (default: 16)"
    )
    _add_fibquant(parser)
    return codec


def _add_fibquant(parser: argparse.ArgumentParser) -> None:
    fib = parser.add_argument_group(
        "fibquant",
        "Each head of a token is a norm and, rotated, --block-dim channels at a time, the index\n"
        "of the nearest point of a codebook, which the archive keeps once. No step and no bound.",
    )
    fib.add_argument(
        "--block-dim",
        type=positive_int,
        metavar="K",
        help="channels to a point, a divisor of the head dim (default: 4); fibquant.KxN names both",
    )
    fib.add_argument(
        "--codebook-size",
        type=positive_int,
        metavar="N",
        help="points: log2(N) / K bits a value, and 16 for each vector (default: 256); the first "
        "use of thousands can take minutes, of more longer; then they are in ~/.cache/kvstore",
    )
    fib.add_argument(
        "--rotation",
        choices=("hadamard", "haar"),
        help="hadamard: fast; haar: a dense random matrix, 2 head dims of operations a value "
        "(default: hadamard)",
    )
    fib.add_argument("--seed", type=count, metavar="S", help="of both (default: 42)")
    fib.add_argument(
        "--axis",
        choices=("per_channel", "per_token", "role_aware", "raw"),
        help="per_channel: each channel less its mean, by the root of its deviation (default); "
        "per_token: as it is; role_aware: K per channel, V per token; raw: all is kept",
    )
    fib.add_argument(
        "--raw-first", type=count, metavar="N", help="first tokens that are kept raw (default: 4)"
    )
    fib.add_argument(
        "--raw-last",
        type=count,
        metavar="N",
        help="last tokens that are kept raw, for good; of a session that goes on, the last ones of "
        "each commit (default: 0)",
    )
    fib.add_argument(
        "--raw-layers", type=indices, metavar="LIST", help="layers that are kept raw, as 0,3,5-7"
    )
    fib.add_argument(
        "--raw-heads",
        type=indices,
        metavar="LIST",
        help="KV heads kept raw, in all layers",
    )
    fib.add_argument(
        "--on-failure",
        choices=("keep_raw", "fail_closed"),
        help="what happens to a vector that cannot be coded, of zeros or beyond float16 "
        "(default: keep_raw)",
    )


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        type=path,
        metavar="INPUT",
        help="safetensors file with tensors k_pre (K before RoPE) or k (after it), and v, "
        "[layers][heads][tokens][head_dim]; or layers.N.k_pre, layers.N.k and layers.N.v, "
        "[heads][tokens][head_dim]; F16, BF16 or F32; token_ids if it has them",
    )
    parser.add_argument(
        "archive", type=path, metavar="ARCHIVE", help=f"created if missing: {PLACES}"
    )
    parser.add_argument("--session", metavar="NAME", help="session name (default: INPUT's stem)")
    parser.add_argument(
        "--replace", action="store_true", help="replace the session if the archive has it"
    )
    parser.add_argument(
        "--receipts",
        action="store_true",
        help="leave a receipt, and one with each later commit; see kvstore receipt",
    )
    parser.add_argument(
        "--renumber",
        action="store_true",
        help="pack a part of a session, written by unpack --range, as tokens 0.. of a new one; "
        "K before RoPE only",
    )
    parser.add_argument(
        "--block-tokens",
        type=block_size,
        default="auto",
        metavar="N",
        help="tokens per block; auto: 128 to 1024 for each stream, so that blocks reach about "
        "32 KB (default: auto)",
    )
    add_codec(parser).add_argument(
        "--fit-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="fewest tokens that statistics are fitted to; shorter inputs are stored uncompressed "
        "(default: 128)",
    )
    keys = parser.add_argument_group(
        "keys and RoPE",
        "RoPE frequencies come from the options below, else from the key rope_inv_freq_f32\n"
        "of the input header's metadata (a JSON list), else from the same key of a file\n"
        "STEM.json beside the input. What unpack wrote needs none of this.",
    )
    keys.add_argument(
        "--k-state",
        choices=("pre", "post"),
        help="K before or after RoPE (default: pre for tensors k_pre, post for k)",
    )
    source = keys.add_mutually_exclusive_group()
    source.add_argument(
        "--inv-freq",
        type=path,
        metavar="JSON",
        help="RoPE frequencies: a JSON list, or a file that holds one",
    )
    source.add_argument(
        "--rope-theta", type=positive_float, metavar="T", help="RoPE frequencies from a base"
    )
    keys.add_argument(
        "--rotary-dim", type=positive_int, metavar="N", help="with --rope-theta (default: head_dim)"
    )
    keys.add_argument("--rope-style", choices=("half", "interleaved"), help="pairs (default: half)")
    keys.add_argument(
        "--rope-scaling", type=positive_float, metavar="G", help="attention scaling (default: 1)"
    )
    model = parser.add_argument_group(
        "model",
        "The session's identity: whatever differs here is never taken for the same KV.\n"
        "What unpack wrote keeps its own, but for what is given here.",
    )
    model.add_argument("--model-name", metavar="NAME", help="(default: the input's, or unknown)")
    for flag, metavar, text in (
        ("--revision", "REV", "of the model, a commit for example"),
        ("--weights", "DIGEST", "of the model's weights"),
        ("--tokenizer", "DIGEST", "of the tokenizer"),
        ("--adapter", "NAME", "what changes the weights (LoRA): a name, or better a digest"),
        ("--layout", "TEXT", "how heads and channels are arranged, where that can differ"),
        ("--salt", "TEXT", "keeps apart what is equal otherwise, tenants for example"),
    ):
        model.add_argument(flag, metavar=metavar, help=text)
    model.add_argument(
        "--shard",
        type=shard,
        metavar="RANK/SIZE:START-STOP",
        help="tensor-parallel shard and the range of the model's KV heads that it holds, "
        "such as 1/8:4-8",
    )
    model.add_argument(
        "--dtype", choices=DTYPES, help="what reads return by default (default: the input's)"
    )
    model.add_argument(
        "--no-v",
        action="store_true",
        help="K only: V of the input is left out, and layers get no V (as with multi-head latent "
        "attention)",
    )


def _add_unpack(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("output", type=path, metavar="OUT.safetensors")
    parser.add_argument("--session", metavar="NAME", help="(default: the only one)")
    parser.add_argument(
        "--range",
        type=token_range,
        metavar="A:B",
        help="tokens (default: all that each layer has)",
    )
    parser.add_argument(
        "--layers",
        type=layer_list,
        metavar="LIST",
        help="such as 0,3,5-7, counted from 0 in the archive (default: all)",
    )
    parser.add_argument(
        "--k-state", choices=("pre", "post"), default="pre", help="(default: pre, as tensor k_pre)"
    )
    parser.add_argument(
        "--position-offset",
        type=integer,
        default=0,
        metavar="D",
        help="rotate K for positions so much later, or earlier if negative; with --k-state post",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="(default: the session's)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--receipt",
        type=path,
        metavar="FILE",
        help="also write a decode receipt, JSON: digests of the values and of the frames they are "
        "from; replaced if it exists",
    )


COMMANDS = {
    "pack": Command(
        "pack",
        "Pack a safetensors file of K and V into an archive, in constant memory.",
        _add_pack,
        "kvstore pack chat.safetensors chats.kv --session alice/42 --rel-step 0.25",
    ),
    "unpack": Command(
        "unpack",
        "Write a session, or some tokens or layers of it, to a safetensors file.",
        _add_unpack,
        "kvstore unpack chats.kv out.safetensors --session alice/42 --range 1000:1200",
    ),
}
