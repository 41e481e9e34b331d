"""Flat layers that are asked for what cannot be: the error says so, and nothing has changed."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
from kvcodecs.errors import Full, InvalidArgument

from kvstore import LayerSpec, Model, flat
from kvstore.flat import FlatLayer

MODEL = Model("m", (LayerSpec(2, 32, 32),) * 2)


def test_wrong_calls_of_a_session(tmp_path):
    x = np.ones((2, 10, 32), np.float32)
    with flat.create(tmp_path / "chat", MODEL, scheme="f16") as session:
        n = len(session.layers)
        session.append((x for _ in range(n)), [x] * n)  # what can be looked at once
        layer = session.layer(np.int64(0))
        for call in (
            lambda: session.append(None),
            lambda: session.append([[[1.0, 2.0], [3.0]]] * n, [x] * n),
            lambda: session.layer(True),
            lambda: session.drop_front(True),
            lambda: session.drop_front("1"),
            lambda: session.read(0, "k", 0, "1"),
            lambda: session.read(0, []),
            lambda: session.read_all(0.0),
            lambda: layer.read_rows(0, 5, kinds=None),
            lambda: layer.read_rows(0, 5, kinds=[["k"]]),
            lambda: layer.append_rows(None),
            lambda: layer.prefetch_rows(1.0, 5),
            lambda: layer.release("1"),
            lambda: list(layer.pieces(0, 5, n_threads=-1)),
            lambda: list(layer.pieces("0", 5)),
            lambda: flat.open("a\0b"),
            lambda: flat.open("flat:"),
            lambda: flat.create(tmp_path / ("n" * 300), MODEL, scheme="f16"),
            lambda: FlatLayer.create("", heads=1, head_dim=32),
            lambda: FlatLayer.open(5),
        ):
            with pytest.raises(InvalidArgument):
                call()
        assert (session.start, session.stop) == (0, 10)
        rows = layer.read_rows(0, 5, kinds=(kind for kind in "kv"))
        assert np.array_equal(rows, [x[:, :5]] * 2)
    assert os.listdir(tmp_path) == ["chat"]
    assert not flat.verify("x" * 300).ok


def test_names_and_numbers_that_fit(tmp_path):
    for name in ("n" * 250, "\N{SNOWMAN}" * 80):  # of at most 255 bytes
        flat.create(tmp_path / name, MODEL, scheme="f16").close()
        path = os.path.join(tmp_path, name, name)
        FlatLayer.create(path, heads=np.int64(2), head_dim=np.int16(32)).close()
        with FlatLayer.open(path) as layer:
            assert layer.spec("k").heads == 2
    assert len(os.listdir(tmp_path)) == 2


@pytest.fixture
def descriptors():
    """Set how many more this process may open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(n):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        most = len(os.listdir("/proc/self/fd")) - 1 + n
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("kind", ["session", "layer", "anonymous"])
def test_without_descriptors(tmp_path, descriptors, kind):
    """Too few at any moment: `Full`, by the name that was given, and nothing stays."""
    path, refused, made = tmp_path / "chat", 0, False
    while not made:
        descriptors(refused)
        try:
            if kind == "session":
                flat.create(path, MODEL, scheme="f16").close()
            elif kind == "layer":
                FlatLayer.create(path, heads=1, head_dim=32).close()
            else:
                flat.anonymous(MODEL, scheme="f16").close()
            made = True
        except Full as error:
            assert "partial" not in str(error)  # noqa: PT017
            refused += 1
        descriptors(50)
        assert os.listdir(tmp_path) == ["chat"] * (made and kind != "anonymous")
    assert refused
