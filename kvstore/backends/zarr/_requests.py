"""Requests to a bucket: retried within bounds, with errors that say what to do.

The client library is told not to retry, so that every answer that was lost is known here: a
put that may have happened is recognised by its bytes when it is tried again.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from kvcodecs.errors import Closed, Full, InvalidArgument, KvError, Locked, NotFound, Unsupported

from .objects import Found

#: How often a request is repeated, and for how long after its first failure.
MAX_RETRIES: Final = 6
RETRY_SECONDS: Final = 30.0
_REQUEST_SECONDS: Final = "30s"
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_LIST_CHUNK: Final = 1000
_S3: Final = ("s3://", "s3a://")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_NO_SPACE: Final = ("StorageFull", "QuotaExceeded", "507 Insufficient")
# Where clouds tell machines their credentials; asked when none are given.
_CREDENTIALS: Final = ("169.254.", "metadata.google.internal")
_CONFLICT: Final = "409 Conflict"
_STATUS: Final = re.compile(r"status code: (4\d\d)")
_MAY_PASS: Final = frozenset(("408", "409", "425", "429"))
# What the HTTP client is told, not the storage.
_CLIENT: Final = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    )
)
_ENDPOINTS: Final = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_T = TypeVar("_T")

# The library's threads are not there after a fork, and calls wait for them for ever.
_used_by: int | None = None


class Tagged(NamedTuple):
    """An object, and the tag that changes with its bytes."""

    data: bytes
    tag: str


class _Again(OSError):
    """The storage asks for the request once more."""


def check_process(where: str, process: int | None = None) -> None:
    """Raise `Closed` in a child of the process that used buckets."""
    if (process or _used_by or os.getpid()) != os.getpid():
        raise Closed(
            f"{where}: a bucket cannot be used after a fork; start processes with 'spawn' or "
            "'forkserver' and open it there"
        )


class Requests:
    """Objects below a URL, as requests.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, or another that ``obstore.store.from_url`` takes.
    options
        What it takes as ``config``: endpoint, region, keys, also those of the HTTP client.
    max_retries, retry_seconds
        How often a failed request is repeated, and until when after it was made first.

    Raises
    ------
    Unsupported
        The library is not installed.
    InvalidArgument
        URL or options that it does not take.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, str] | None = None,
        *,
        max_retries: int = MAX_RETRIES,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        global _used_by
        self.where = url
        self._max_retries, self._retry_seconds = max_retries, retry_seconds
        try:
            self._api: Any = importlib.import_module("obstore")
            stores: Any = importlib.import_module("obstore.store")
        except ImportError as error:
            raise Unsupported(
                f"{url}: archives in buckets need obstore; pip install 'kvstore[s3]'"
            ) from error
        errors = self._api.exceptions
        self._taken = (errors.AlreadyExistsError, errors.PreconditionError)
        self._not_allowed = (errors.PermissionDeniedError, errors.UnauthenticatedError)
        self._errors = (errors.BaseError, OSError, ValueError)
        check_process(url)
        self._process = _used_by = os.getpid()
        try:
            config, client = _split(options or {}, url)
            if url.lower().startswith(_S3):
                # S3 has no conditional copy but this one, as the only part of an upload.
                config.setdefault("copy_if_not_exists", "multipart")
            self._store = stores.from_url(
                url, config=config, client_options=client, retry_config={"max_retries": 0}
            )
        except (errors.BaseError, OSError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{url}: {_text(error)}; check storage_options") from error

    def get(self, key: str, start: int | None, stop: int | None) -> bytes | None:
        """Return an object or bytes ``[start, stop)`` of it; None if there is none."""
        if stop is not None and stop <= (start or 0):
            return b"" if self.exists(key) else None
        options: dict[str, object] = {}
        if stop is not None:
            options["range"] = (start or 0, stop)
        elif start:
            options["range"] = {"offset": start}

        def act() -> bytes | None:
            try:
                return bytes(self._api.get(self._store, key, options=options).bytes())
            except FileNotFoundError as error:
                self._absent(error)
                return None
            except self._errors as error:
                if options and "416 Range" in str(error):
                    return b""  # begins behind the end
                raise

        return self._call(key, act)

    def get_tagged(self, key: str) -> Tagged | None:
        """Return an object and its tag."""

        def act() -> Tagged | None:
            try:
                result = self._api.get(self._store, key)
                return Tagged(bytes(result.bytes()), result.meta["e_tag"])
            except FileNotFoundError as error:
                self._absent(error)
                return None

        return self._call(key, act)

    def exists(self, key: str) -> bool:
        """Whether there is an object."""

        def act() -> bool:
            try:
                self._api.head(self._store, key)
            except FileNotFoundError as error:
                self._absent(error)
                return False
            return True

        return self._call(key, act)

    def put(self, key: str, data: bytes) -> None:
        """Put or replace an object."""
        self._call(key, lambda: self._put(key, data, "overwrite"))

    def create(self, key: str, data: bytes) -> str | None:
        """Put an object where there is none and return its tag; None if there is one."""
        return self._put_if(key, data, "create", None, self._max_retries)

    def replace(
        self, key: str, data: bytes, tag: str, *, max_retries: int | None = None
    ) -> str | None:
        """Replace an object that still has a tag and return its new one; None if it has not."""
        most = self._max_retries if max_retries is None else max_retries
        return self._put_if(key, data, {"e_tag": tag}, tag, most)

    def copy_new(self, source: str, target: str) -> bool:
        """Let the storage copy an object to where there is none.

        Returns
        -------
        bool
            False if there is one, or the storage cannot.

        Raises
        ------
        NotFound
            There is no such object to copy.
        """

        def act() -> bool:
            try:
                self._api.copy(self._store, source, target, overwrite=False)
            except (*self._taken, self._api.exceptions.NotSupportedError):
                return False
            except FileNotFoundError as error:
                self._absent(error)
                raise NotFound(f"{self.where}: no object {source!r} to copy") from error
            return True

        return self._call(target, act)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent ones are no error."""

        def act(paths: list[str]) -> None:
            try:
                self._api.delete(self._store, paths)
            except FileNotFoundError as error:
                self._absent(error)
                if len(paths) > 1:
                    for path in paths:
                        act([path])

        if keys:
            self._call(f"deletion of {keys[0]}", lambda: act(list(keys)))

    def listing(self, prefix: str, after: str | None) -> Iterator[Found]:
        """Yield objects in key order."""
        while True:
            some, is_more = self._call(prefix or "listing", partial(self._some, prefix, after))
            yield from some
            if not is_more:
                return
            after = some[-1].key

    def _some(self, prefix: str, after: str | None) -> tuple[list[Found], bool]:
        stream = self._api.list(
            self._store, prefix.rstrip("/") or None, offset=after, chunk_size=_LIST_CHUNK
        )
        found = [Found(meta["path"], meta["size"]) for meta in next(iter(stream), ())]
        # The library drops a slash at the end of `after`.
        some = [one for one in found if after is None or one.key > after]
        return some, len(found) == _LIST_CHUNK and bool(some)

    def _put(self, key: str, data: bytes, mode: object) -> str:
        try:
            result = self._api.put(self._store, key, data, mode=mode, use_multipart=False)
        except FileNotFoundError as error:
            self._absent(error)
            raise
        tag: str = result["e_tag"] or ""
        return tag

    def _put_if(
        self, key: str, data: bytes, mode: object, tag: str | None, max_retries: int
    ) -> str | None:
        may_be_done = False

        def act() -> str | None:
            nonlocal may_be_done
            try:
                return self._put(key, data, mode)
            except self._taken as error:
                conflict = _CONFLICT in str(error)
                if not may_be_done and not conflict:
                    return None
                found = self.get_tagged(key)
                if may_be_done and found is not None and found.data == data:
                    return found.tag
                # A put at the same time; whether it happened is to be seen.
                if conflict and (found.tag if found else None) == tag:
                    raise _Again(str(error)) from error
                return None
            except self._errors:
                may_be_done = True
                raise

        return self._call(key, act, max_retries)

    def _absent(self, error: OSError) -> None:
        """Raise `NotFound` if it is the bucket that is absent, not the object."""
        text = str(error)
        if any(name in text for name in _NO_BUCKET):
            raise NotFound(f"{self.where}: there is no such bucket; make it first") from error

    def _call(self, what: str, act: Callable[[], _T], max_retries: int | None = None) -> _T:
        check_process(self.where, self._process)
        deadline = time.monotonic() + self._retry_seconds
        most = self._max_retries if max_retries is None else max_retries
        tried = 0
        while True:
            try:
                return act()
            except self._errors as error:
                if isinstance(error, KvError):
                    raise
                final = self._final(error, what)
                if final is None and (tried == most or time.monotonic() > deadline):
                    final = self._given_up(error, what, tried)
                if final is not None:
                    raise final from error
            time.sleep(min(_FIRST_PAUSE * 2**tried, _LONGEST_PAUSE) * random.uniform(0.5, 1.0))
            tried += 1

    def _final(self, error: BaseException, what: str) -> KvError | None:
        """Return what to raise at once; None if it may go better the next time."""
        text = str(error)
        where = f"{self.where}: {what}"
        if isinstance(error, self._not_allowed):
            return InvalidArgument(
                f"{where}: the storage refuses it ({_text(error)}); check keys and rights"
            )
        if isinstance(error, self._api.exceptions.NotSupportedError):
            return Unsupported(
                f"{where}: this storage cannot put an object only where there is none "
                f"({_text(error)})"
            )
        if any(name in text for name in _NO_BUCKET):
            return NotFound(f"{self.where}: there is no such bucket; make it first")
        if any(name in text for name in _NO_SPACE):
            return Full(f"{where}: the storage is full ({_text(error)})")
        status = _STATUS.search(text)
        if status and any(name in text for name in _CREDENTIALS):
            return self._no_credentials(error)
        if isinstance(error, ValueError) or (status and status[1] not in _MAY_PASS):
            return InvalidArgument(f"{where}: the storage refuses it ({_text(error)})")
        return None

    def _given_up(self, error: BaseException, what: str, tried: int) -> KvError:
        text = _text(error)
        if any(name in text for name in _CREDENTIALS):
            return self._no_credentials(error)
        return Locked(
            f"{self.where}: {what}: the storage does not answer as it should, after {tried + 1} "
            f"tries ({text}); try again later"
        )

    def _no_credentials(self, error: BaseException) -> KvError:
        return InvalidArgument(
            f"{self.where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            f"or pass storage_options ({_text(error)})"
        )


def _split(options: Mapping[str, str], where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return what the storage is told and what the HTTP client is told."""
    config: dict[str, str] = {}
    client = {"timeout": _REQUEST_SECONDS}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(
                f"{where}: storage_options {name!r}: expected a string, not {value!r}"
            )
        short = name.lower().removeprefix("aws_")
        if short in _CLIENT:
            client[short] = value
        else:
            config[name] = value
    endpoints = [value for name, value in config.items() if "endpoint" in name.lower()]
    endpoints += [os.environ.get(name, "") for name in _ENDPOINTS]
    if any(text.startswith("http://") for text in endpoints):
        client.setdefault("allow_http", "true")  # who writes so means it
    return config, client


def _text(error: BaseException) -> str:
    """Return what the library says, without the insides that it prints below."""
    text = str(error).partition("Debug source")[0]
    code = re.search(r"<Code>([^<]*)</Code>", text)
    text = " ".join(text.partition("<?xml")[0].split()).rstrip(": ")
    return f"{text}: {code[1]}" if code else text
