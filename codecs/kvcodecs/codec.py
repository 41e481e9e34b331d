"""What every block codec offers, and the registry by number and name.

A codec turns the coded domain of one stream into blocks: `fit` fixes the statistics from the
prefill, `encoder` codes one block token by token, `schedule` puts the decoding of a block into
a plan. The numbers are part of the frame (FORMAT.md section 1.2) and never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from .errors import Corrupt, InvalidArgument, Unsupported
from .frame import BytesLike, ErrorStats
from .shared import Shared, nothing_shared
from .spec import F32, KState, StreamSpec
from .suggestion import did_you_mean

if TYPE_CHECKING:
    from .plan import Plan
    from .targets import Placement

Chunks: TypeAlias = Callable[[], Iterable[F32]]

# Modules load on first use: each codec costs an import only to those who meet it.
_MODULES = {0: "raw", 1: "tkv1", 2: "kvr1", 3: "ggml", 4: "fibquant"}
_NUMBERS = {name: number for number, name in _MODULES.items()}
#: Codecs of which a name may go on with a scheme: ``"ggml.q8_0"``, ``"fibquant.4x256"``.
_FAMILIES = ("ggml", "fibquant")


class CodecConfig(Protocol):
    """What the user asks of a codec: small, frozen, JSON."""

    @property
    def codec(self) -> str: ...
    def to_json(self) -> dict[str, object]: ...


def config_of_layer(config: CodecConfig, layer: int) -> CodecConfig:
    """Return the configuration of a layer's streams, where `config` treats layers apart.

    Such a configuration has a method ``of_layer(layer)``.
    """
    of_layer = getattr(config, "of_layer", None)
    if of_layer is None:
        return config
    of_this: CodecConfig = of_layer(layer)
    return of_this


def raw_layers(config: CodecConfig) -> tuple[int, ...]:
    """Return the layers that `config` keeps raw, ascending; the model must have them.

    Such a configuration has an attribute of this name.
    """
    return tuple(getattr(config, "raw_layers", ()))


def last_tokens(config: CodecConfig) -> int:
    """Return how many of the newest tokens `config` wants kept raw whenever a session is committed.

    Such a configuration has an attribute of this name, and its encoders `KeepingEncoder.keep`.
    """
    return int(getattr(config, "last_tokens", 0))


class Params(Protocol):
    """What a codec fixed for one stream and stored in its header."""

    @property
    def spec(self) -> StreamSpec: ...


class CodedRows(NamedTuple):
    """Successive tokens as they are stored, of a codec with `rows_stand_alone`.

    Attributes
    ----------
    data
        The rows, one a token.
    n_tokens
        How many.
    error
        Of these tokens.
    """

    data: memoryview
    n_tokens: int
    error: ErrorStats

    def cut(self, start: int, stop: int) -> CodedRows:
        """Return some of the tokens."""
        start, stop = min(start, self.n_tokens), min(stop, self.n_tokens)
        n_bytes, n = self.data.nbytes // max(self.n_tokens, 1), stop - start
        rows = self.data[start * n_bytes : stop * n_bytes]
        return CodedRows(rows, n, self.error.share(n, self.n_tokens))


class BlockEncoder(Protocol):
    """One block under construction."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def error(self) -> ErrorStats: ...
    def push(self, x: F32, n_threads: int = 1) -> None:
        """Append tokens, ``[heads][n][head_dim]`` of the coded domain in coded channel order.

        Does not fail on values that the codec's `check` accepted. The result does not depend on
        the number of threads.
        """

    def payload(self) -> bytes:
        """Return the block coded so far; more tokens may follow."""

    def resume(self, values: F32, payload: BytesLike, error: ErrorStats) -> None:
        """Go on with the first tokens of a frame; nothing was pushed before.

        They keep the values that they have, and the error that the frame says: both were coded
        from an original that is gone.

        Parameters
        ----------
        values : (heads, n, head_dim)
            What the tokens decode to, coded domain, coded channel order.
        payload
            Of the frame. Its first `n` tokens are these; there may be more.
        error
            Of these tokens.
        """


class RowEncoder(BlockEncoder, Protocol):
    """A `BlockEncoder` of a codec with `rows_stand_alone`."""

    def append_rows(self, rows: CodedRows) -> None:
        """Append tokens that are coded, of a stream with the same header, and their error.

        Raises
        ------
        Truncated, Corrupt
            They are not whole rows.
        """


class KeepingEncoder(BlockEncoder, Protocol):
    """A `BlockEncoder` of a codec whose configurations have `last_tokens`."""

    def keep(self, x: F32) -> None:
        """Append tokens as `push` does, but exactly as they are."""


class BlockCodec(Protocol):
    """A codec of one stream's blocks. ``params`` are always its own.

    Attributes
    ----------
    number, name
        Of the codec; a family of schemes has one of each.
    lossless
        Whether decoded values are those that were coded.
    header_at_once
        Whether `fit` looks at no value, so that a stream has its header from its first token on.
    rows_stand_alone
        Whether a payload is one row of so many bytes for each token, the same in any block and at
        any position.
    """

    number: int
    name: str
    lossless: bool
    header_at_once: bool
    rows_stand_alone: bool

    def check_stream(self, config: Any, spec: StreamSpec) -> None:
        """Raise `InvalidArgument` if no values of the stream `spec` could be coded."""

    def fit(self, config: Any, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre") -> Any:
        """Fix the parameters of a stream from its prefill.

        Parameters
        ----------
        config
            What the user asks.
        spec
            The stream.
        chunks
            Called for each pass: the prefill as successive token chunks
            ``[heads][n][head_dim]`` of the coded domain. The result does not depend on how the
            tokens are cut into chunks.
        k_state
            Whether K was given before or after RoPE; an error bound asked for on post-RoPE K
            needs a finer step.

        Raises
        ------
        InvalidArgument
            Non-finite values, or a request that the values make impossible.
        """

    def pack(self, params: Any) -> bytes:
        """Return the stream header."""

    def unpack(self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared) -> Any:
        """Read a stream header of the stream `spec`, and the objects that it needs.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            The header, or an object.
        NotFound
            An object is not there.
        """

    def needs(self, header: BytesLike) -> tuple[bytes, ...]:
        """Return the digests of the objects that a packed stream header needs to be read.

        Each once, in an order that depends on the header alone. `Truncated`, `Corrupt` or
        `Unsupported`.
        """

    def shared(self, params: Any) -> dict[bytes, bytes]:
        """Return the packed objects that the stream header of `params` needs, by digest."""

    def check(self, params: Any, x: F32, first_token: int) -> None:
        """Raise `InvalidArgument`, naming head, token and channel, if `x` cannot be coded."""

    def encoder(self, params: Any, first_token: int) -> BlockEncoder:
        """Start a block at absolute position `first_token`."""

    def schedule(
        self, plan: Plan, params: Any, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add the decoding of one block to `plan`. Use `Plan.add`."""

    def step(self, params: Any) -> float | None:
        """Return the quantiser step: decoded values are within half of it.

        None: there is no such bound, as for a codec that is lossless, or one of which only the
        measured error is known.
        """

    def name_of(self, params: Any) -> str:
        """Return what a stream is coded with: `name`, or for a family that and its scheme."""

    def worst_case_bytes(self, params: Any, n_tokens: int) -> int:
        """Return a payload size that no block of `n_tokens` exceeds."""


@cache
def codec_by_number(number: int) -> BlockCodec:
    """Return the codec that frames call `number`, else raise `Unsupported`."""
    if number not in _MODULES:
        raise Unsupported(f"codec number {number} is unknown to this release; upgrade to read it")
    codec: BlockCodec = import_module(f".{_MODULES[number]}", __package__).CODEC
    return codec


def codec_by_name(name: str) -> BlockCodec:
    """Return the codec called `name`, else raise `Unsupported` (`InvalidArgument` if no string).

    One scheme of a family has the family's name before it, ``"ggml.q8_0"``, in any case;
    ``"fibquant.4x256"`` is a codebook.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"codec {name!r}: give its name")
    family, scheme = _split(name)
    _check_family(family, name)
    codec = codec_by_number(_NUMBERS[family])
    if scheme:
        _config(family, {"scheme": scheme}, name)
    return codec


def codec_for(config: CodecConfig) -> BlockCodec:
    """Return the codec that `config` configures; `InvalidArgument` if it is no configuration."""
    if isinstance(config, type) or not hasattr(config, "codec"):
        raise InvalidArgument(
            f'codec {config!r}: give a configuration, such as KVR1(rel_step=0.25) or GGML("q8_0")'
        )
    return codec_by_name(config.codec)


def config_by_name(name: str) -> CodecConfig:
    """Return the configuration of a codec without options: ``"kvr1"``, ``"ggml.q8_0"``.

    A codebook may be named with its codec: ``"fibquant.4x256"``.

    Raises
    ------
    InvalidArgument
        No such codec; says which name is close.
    """
    from .ggml.config import GGML
    from .ggml.schemes import SCHEMES

    family, _, scheme = name.strip().lower().partition(".")
    if family == "ggml" and scheme:
        return GGML(scheme)
    if family == "fibquant" and scheme:
        try:
            return config_from_json({"codec": family, "scheme": scheme})
        except Unsupported as error:
            raise InvalidArgument(str(error)) from error
    plain = [known for known in _NUMBERS if known != "ggml"]
    if family in plain and not scheme:
        return config_from_json({"codec": family})
    schemes = {s.name: f"ggml.{s.name}" for s in SCHEMES}
    meant = did_you_mean(schemes.get(family, name), [*plain, *schemes.values()])
    raise InvalidArgument(
        f"codec {name!r} is unknown{meant or ';'} there are {', '.join(plain)} and ggml.SCHEME, "
        "such as ggml.q8_0"
    )


def config_from_json(data: Mapping[str, object]) -> CodecConfig:
    """Return the configuration that its `to_json` described."""
    fields = dict(data)
    name = str(fields.pop("codec", None))
    family, scheme = _split(name)
    _check_family(family, name)
    if scheme and "scheme" in fields:
        raise Corrupt(f"codec {name!r}: configuration {fields!r} has another scheme")
    return _config(family, {**fields, "scheme": scheme} if scheme else fields, name)


def _split(name: str) -> tuple[str, str]:
    family, _, scheme = name.partition(".")
    return (family.lower(), scheme) if scheme else (name, "")


def _check_family(family: str, name: str) -> None:
    if family not in _NUMBERS:
        raise Unsupported(f"codec {name!r} is unknown; this release has {', '.join(_NUMBERS)}")


def _config(family: str, fields: Mapping[str, object], name: str) -> CodecConfig:
    if "scheme" in fields and family not in _FAMILIES:
        raise Unsupported(f"codec {name!r} is unknown; {family} has no schemes")
    module = import_module(f".{family}", __package__)
    config: CodecConfig = module.config_from_fields(fields)
    return config
