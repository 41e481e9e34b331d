"""The session record in an archive of a session of flat layers; see `flat_import`."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml import GGML
from kvcodecs.raw import Raw
from kvcodecs.spec import Kind

from kvstore import Model, flat
from kvstore.flat.folder import read_session
from kvstore.layout import new_layout
from kvstore.metadata import canonical_json
from kvstore.place import FLAT_SIGN
from kvstore.session_record import SessionRecord, StreamState
from kvtools.formats.session_folder import Sidecar

_PERSON = b"kvs flat"


def is_rotated(session: flat.FlatSession) -> bool:
    """Whether K is kept after RoPE, which archives keep before it."""
    return any(x.k_state == "post" and x.spec("k").rope is not None for x in session.layers)


def check_schemes(session: flat.FlatSession, folder: Path) -> None:
    """Raise `InvalidArgument` if layers have different schemes, which an archive does not take."""
    for layer in session.layers:
        for kind in layer.header.kinds:
            first = next(x for x in session.layers if kind in x.header.kinds)
            if layer.scheme(kind) != first.scheme(kind):
                raise InvalidArgument(f"{folder}: layers with different schemes of {kind}")


def new_record(
    session: flat.FlatSession, folder: Path, name: str, known: Sidecar | None, *, grown: bool
) -> SessionRecord:
    """Return a record of the rows that there are; the same whenever they are.

    Blocks lie as in the known record if the session has `grown` since. K that is kept after RoPE
    is raw.
    """
    start, stop, number = session.start, session.stop, read_session(folder)[1]
    model: Model = session.model
    identity = canonical_json({"name": name, "session": number, "start": start, "stop": stop})
    digest = blake2b(identity, digest_size=8, person=_PERSON).digest()
    owner = int.from_bytes(digest, "big") or 1
    updated = int(max(path.stat().st_mtime for path in folder.glob("layer-*.kvf")))
    if known is None:
        schemes = _schemes(session)
        record = SessionRecord(
            id=owner,
            owner=owner,
            model=model.digest,
            n_tokens=0,
            codecs=schemes,
            fit_tokens=128,
            streams=new_layout(model, schemes, "auto", True, str(folder)),
            created=int((folder / FLAT_SIGN).stat().st_mtime),
        )
    else:
        record = known.record
    is_post = is_rotated(session)
    return replace(
        record,
        codecs={**record.codecs, "k": Raw("float32")} if is_post else record.codecs,
        post=record.post or is_post,
        id=owner,
        owner=owner,
        n_tokens=stop,
        first=start,
        streams={
            stream: StreamState(
                state.block_tokens, state.start if grown else start, has_header=True
            )
            for stream, state in record.streams.items()
        },
        n_faithful=None,
        has_ids=False,
        finished=False,
        updated=updated,
    )


def _schemes(session: flat.FlatSession) -> dict[Kind, GGML]:
    k = session.layers[0].scheme("k").name
    v = next((x.scheme("v").name for x in session.layers if x.header.v is not None), k)
    return {"k": GGML(k), "v": GGML(v)}
