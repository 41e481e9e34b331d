"""One stream being written: tokens in, frames out, nothing stored here.

A stream passes through two stages. Until its header is fixed, tokens wait, and a commit keeps
them raw (the *head*). Once the header is fixed they are coded block by block; the head that was
committed before stays where it is and is what readers see, so no committed value ever changes.
FORMAT.md section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from kvcodecs.codec import (
    BlockCodec,
    BlockEncoder,
    Chunks,
    CodecConfig,
    CodedRows,
    KeepingEncoder,
    RowEncoder,
    codec_for,
    last_tokens,
)
from kvcodecs.frame import BytesLike, ErrorStats, header_tag, pack_frame, seal_record
from kvcodecs.plan import available_cpus
from kvcodecs.spec import F32, Kind, KState, StreamSpec

from . import keys
from .codings import Coding
from .newest import Newest
from .raw_head import RAW, RawHead, check_raw
from .records import HEADER_MAGIC, located
from .session_record import StreamState
from .shared_objects import object_puts
from .stored_rows import StoredRows

Put = tuple[bytes, bytes | None]  # None deletes


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tokens that were checked and can be pushed without failing.

    Attributes
    ----------
    chunks
        The new tokens, coded domain or coded; can be iterated again.
    n_tokens
        How many.
    params
        What the header will be fixed to, if these tokens make it due.
    dtype
        Name of a dtype that holds every value exactly.
    post
        Whether the values were taken after RoPE.
    """

    chunks: Callable[[], Iterable[F32 | CodedRows]]
    n_tokens: int
    params: Any
    dtype: str
    post: bool


class StreamWriter:
    """Appends to one stream.

    Parameters
    ----------
    owner, layer, kind
        Where the stream's frames go.
    spec
        Geometry.
    config
        What the user asks of the codec.
    fit_tokens
        Fewest tokens that a header is fitted to; of no account where the codec fits nothing.
    state
        Layout as committed; a new stream has no tokens and perhaps a header.
    where
        Prefix of error messages, ``"layer 3 k"``.
    """

    def __init__(
        self,
        owner: int,
        layer: int,
        kind: Kind,
        spec: StreamSpec,
        config: CodecConfig,
        fit_tokens: int,
        state: StreamState,
        where: str,
    ) -> None:
        self.owner, self.layer, self.kind, self.spec = owner, layer, kind, spec
        self.where = where
        self.end = state.start
        self._config, self._codec = config, codec_for(config)
        # Tokens that fix the header at a commit, and those that do before one.
        at_once = self._codec.header_at_once
        self._fit_tokens = 1 if at_once else fit_tokens
        self._due_tokens = 1 if at_once else max(state.block_tokens, fit_tokens)
        self._state = state
        # Before the header is fixed.
        self._head = RawHead()
        # After.
        self._params: Any = None
        self._header = b""
        self._tag = 0
        self._encoder: BlockEncoder | None = None
        self._block = 0
        self._sealed: list[tuple[int, bytes]] = []
        self._header_stored = self._tail_stored = False
        self._n_threads = 1
        self._dirty = False
        # What a commit keeps as it is.
        self._newest = Newest(last_tokens(config))
        #: Called with number and bytes of each block that is sealed.
        self.on_frame: Callable[[int, bytes], None] | None = None

    @property
    def state(self) -> StreamState:
        """Layout that the next commit makes true."""
        n_head = self._state.n_head
        if self._params is None:
            n_head = self.end - self._state.start
        return replace(self._state, n_head=n_head, has_header=self._params is not None)

    @property
    def coding(self) -> Coding | None:
        """How the blocks are coded; None before the header is fixed."""
        return None if self._params is None else Coding(self._codec, self._params, self._tag)

    @property
    def block(self) -> int:
        """Number of the block that is not full yet."""
        return self._block

    @property
    def sealed_bytes(self) -> int:
        """Bytes of sealed frames that wait to be stored."""
        return sum(len(frame) for _, frame in self._sealed)

    @property
    def tail_values(self) -> int:
        """Values of the unfinished block."""
        n_coded = 0 if self._encoder is None else self._encoder.n_tokens
        return self.spec.n_values(n_coded + self._newest.n_tokens)

    def resume_header(self, codec: BlockCodec, params: Any, tag: int, header: bytes | None) -> None:
        """Go on with a stream header, parsed; its bytes where this owner has to store it too."""
        self._codec, self._params, self._tag = codec, params, tag
        self._header, self._header_stored = header or b"", header is None

    def resume_head(self, coded: F32, dtype: str, *, post: bool) -> None:
        """Go on with the committed tokens of a stream without header, and their stored dtype."""
        self._head.add([coded], dtype, post=post)
        self.end = self._state.start + coded.shape[1]

    def resume_blocks(
        self,
        n_sealed: int,
        tail: F32 | None = None,
        payload: BytesLike = b"",
        error: ErrorStats | None = None,
        *,
        own: bool,
    ) -> None:
        """Go on after `n_sealed` blocks with the tail: decoded, as it is stored, and its error.

        `payload` may hold more tokens. `own` says whether the tail is stored under this owner.
        """
        self._block = n_sealed
        self.end = self._state.start + n_sealed * self._state.block_tokens
        if tail is not None:
            self._encoder = self._codec.encoder(self._params, self.end)
            self._encoder.resume(tail, payload, error or ErrorStats.unknown())
            self.end += tail.shape[1]
        self._tail_stored, self._dirty = own and tail is not None, False

    def begin_at(self, start: int) -> None:
        """Set the position of the first token of a stream that has none yet."""
        self._state = replace(self._state, start=start)
        self.end = start

    def prepare(self, chunks: Chunks, n_tokens: int, k_state: KState, dtype: str) -> Prepared:
        """Check new tokens, and fit the header if they make it due; changes nothing.

        Parameters
        ----------
        chunks
            Called for each pass: successive chunks of the coded domain, from position `end`.
        n_tokens
            Tokens in all chunks.
        k_state, dtype
            How the values were given.

        Raises
        ------
        InvalidArgument
            A value that cannot be stored; names layer, kind, head, token and channel.
        """
        post = k_state == "post" and self.spec.rope is not None
        if post or dtype == "float64":
            dtype = "float32"
        prepared = Prepared(chunks, n_tokens, None, dtype, post)
        if n_tokens == 0:
            return prepared
        with located(self.where):
            if self._params is not None:
                self._check(self._params, chunks(), self.end)
                return prepared
            n_waiting = self.end - self._state.start + n_tokens
            due = n_waiting >= self._due_tokens
            # A fit finds what is not finite as well, but counts tokens from the stream's first.
            if not due or self._state.start:
                check_raw(self.spec, chunks, self.end)
            if not due:
                return prepared
            params = self._fit(lambda: self._all(chunks()), post or self._head.post)
        return replace(prepared, params=params)

    def prepare_rows(self, stored: StoredRows) -> Prepared | None:
        """Return stored tokens ready to be pushed as they are; None if they are coded otherwise."""
        params = None
        tag = self._tag
        if self._params is None and self._codec.rows_stand_alone:
            params = self._codec.fit(self._config, self.spec, lambda: ())
            tag = header_tag(self._codec.pack(params))
        if (stored.codec, stored.tag) != (self._codec.number, tag):
            return None
        return Prepared(stored.chunks, stored.n_tokens, params, "float32", post=False)

    def push(
        self,
        prepared: Prepared,
        on_seal: Callable[[], None] | None = None,
        n_threads: int | None = None,
    ) -> None:
        """Append prepared tokens; `on_seal` is called after each sealed block.

        `n_threads` None means one per CPU; the frames do not depend on it.
        """
        self._n_threads = n_threads or available_cpus()
        if prepared.n_tokens == 0:
            return
        self._dirty = True
        if self._params is None and prepared.params is None:
            values = cast("Iterable[F32]", prepared.chunks())
            self._head.add(values, prepared.dtype, post=prepared.post)
            self.end += prepared.n_tokens
            return
        if self._params is None:
            self._fix(prepared.params, self._codec.pack(prepared.params))
        for chunk in prepared.chunks():
            self._push(chunk, on_seal)

    @property
    def is_due(self) -> bool:
        """Whether a commit has to fix the header first."""
        return self._params is None and self.end - self._state.start >= self._fit_tokens

    def fix_if_due(self) -> None:
        """Fix the header before a commit, once there are `fit_tokens` tokens.

        Raises
        ------
        InvalidArgument
            The values cannot be coded as the configuration asks; nothing is changed.
        """
        if not self.is_due:
            return
        with located(self.where):
            params = self._fit(lambda: self._all(()), self._head.post)
        self._fix(params, self._codec.pack(params))

    def take_sealed(self) -> list[Put]:
        """Return the frames that wait to be stored; `sealed_stored` forgets them."""
        return [
            (keys.frame_key(self.owner, self.layer, self.kind, block), frame)
            for block, frame in self._sealed
        ]

    def sealed_stored(self) -> None:
        """Note that what `take_sealed` returned is stored."""
        self._sealed = []

    def puts(self) -> Iterator[Put]:
        """Yield what a commit has to store, besides the session record."""
        if not self._dirty:
            return
        for chunk in self._newest.take():
            self._code(chunk, keep=True)
        if self._params is None:
            head = self._head.encoder(self.spec, self._state.start)
            yield self._key(keys.HEAD), self._frame(RAW, head, self._state.start)
            return
        if not self._header_stored:
            yield from object_puts(self._codec.shared(self._params).items())
            body = bytes([self._codec.number]) + self._header
            yield self._key(keys.HEADER), seal_record(HEADER_MAGIC, body)
        yield from self.take_sealed()
        if self._encoder is not None:
            yield self._key(keys.TAIL), self._block_frame(self._encoder)
        elif self._tail_stored:
            yield self._key(keys.TAIL), None

    def committed(self) -> None:
        """Note that what `puts` yielded is durable."""
        self._state = self.state
        self._header_stored = self._params is not None
        self._tail_stored = self._encoder is not None
        self._sealed = []
        self._dirty = False

    def _all(self, new: Iterable[F32]) -> Iterator[F32]:
        yield from self._head.chunks
        yield from new

    def _fit(self, chunks: Chunks, post: bool) -> Any:
        params = self._codec.fit(self._config, self.spec, chunks, "post" if post else "pre")
        self._check(params, chunks(), self._state.start)
        return params

    def _check(self, params: Any, chunks: Iterable[F32], position: int) -> None:
        for chunk in chunks:
            self._codec.check(params, chunk, position)
            position += chunk.shape[1]

    def _fix(self, params: Any, header: bytes) -> None:
        self._params, self._header, self._tag = params, header, header_tag(header)
        self.end = self._state.start
        for chunk in self._head.take():
            self._push(chunk)

    def _push(self, chunk: F32 | CodedRows, on_seal: Callable[[], None] | None = None) -> None:
        self.end += _n_tokens(chunk)
        self._code(chunk if isinstance(chunk, CodedRows) else self._newest.push(chunk), on_seal)

    def _code(
        self,
        chunk: F32 | CodedRows,
        on_seal: Callable[[], None] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        block_tokens, at = self._state.block_tokens, 0
        n = _n_tokens(chunk)
        while at < n:
            if self._encoder is None:
                self._encoder = self._codec.encoder(self._params, self._block_start)
            end = min(n, at + block_tokens - self._encoder.n_tokens)
            if isinstance(chunk, CodedRows):
                cast(RowEncoder, self._encoder).append_rows(chunk.cut(at, end))
            elif keep:
                cast(KeepingEncoder, self._encoder).keep(np.ascontiguousarray(chunk[:, at:end]))
            else:
                self._encoder.push(np.ascontiguousarray(chunk[:, at:end]), self._n_threads)
            at = end
            if self._encoder.n_tokens == block_tokens:
                frame = self._block_frame(self._encoder)
                self._sealed.append((self._block, frame))
                if self.on_frame is not None:
                    self.on_frame(self._block, frame)
                self._block, self._encoder = self._block + 1, None
                if on_seal is not None:
                    on_seal()

    @property
    def _block_start(self) -> int:
        return self._state.start + self._block * self._state.block_tokens

    def _key(self, prefix: bytes) -> bytes:
        return keys.stream_key(prefix, self.owner, self.layer, self.kind)

    def _block_frame(self, encoder: BlockEncoder) -> bytes:
        return self._frame(self._codec, encoder, self._block_start, self._tag)

    def _frame(
        self, codec: BlockCodec, encoder: BlockEncoder, first_token: int, tag: int = 0
    ) -> bytes:
        return pack_frame(
            codec=codec.number,
            kind=self.kind,
            owner=self.owner,
            layer=self.layer,
            first_token=first_token,
            n_tokens=encoder.n_tokens,
            payload=encoder.payload(),
            header_tag=tag,
            error=encoder.error,
        )


def _n_tokens(chunk: F32 | CodedRows) -> int:
    return chunk.n_tokens if isinstance(chunk, CodedRows) else chunk.shape[1]
