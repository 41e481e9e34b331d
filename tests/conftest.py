"""What tests share: the command line, and a server that speaks S3, also one with faults."""

from __future__ import annotations

import http.client
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import host_kernels
import kvgpu
import numpy as np
import pytest
from kvcodecs import _core
from kvgpu.device import current, using
from kvgpu.host_device import HostArray, HostDevice
from kvtools import cli

import kvstore

# Started with nohup, or by a script in its background, the tests of signals would find that they
# are ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    # Books that tests build are neither the user's nor kept; workers inherit the folder.
    if "KVSTORE_CACHE" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="kvstore-books-")
        os.environ["KVSTORE_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels-on-host",
        action="store_true",
        help="decode every plan with the GPU kernels, compiled for the host, and compare",
    )


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory):
    """The GPU kernels, compiled for the host."""
    return host_kernels.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def checked_kernels(host_library, monkeypatch: pytest.MonkeyPatch):
    """Every plan is decoded with the GPU kernels on the host, and compared with the core."""
    checked = host_kernels.CheckedKernels(host_kernels.HostKernels(host_library))
    monkeypatch.setattr(_core, "run_lanes", checked.run_lanes)
    monkeypatch.setattr(_core, "run_blocks", checked.run_blocks)
    monkeypatch.setattr(_core, "run_fib_blocks", checked.run_fib_blocks)
    return checked


@pytest.fixture(autouse=True)
def _decode_with_kernels(request: pytest.FixtureRequest):
    if request.config.getoption("--kernels-on-host"):
        request.getfixturevalue("checked_kernels")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command line; return (exit code, stdout, stderr)."""

    def run_main(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run_main


# One request at a time: a conditional put then looks and puts at once, as S3 does.
S3_SERVER = """
import os, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

inner, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def app(environ, start_response):
    with lock:
        return [b"".join(inner(environ, start_response))]

def end_with_parent():
    sys.stdin.read()
    os._exit(0)

server = make_server("127.0.0.1", 0, app, threaded=True)
threading.Thread(target=end_with_parent, daemon=True).start()
print(server.port, flush=True)
server.serve_forever()
"""


@dataclass
class S3Server:
    """A server on loopback that speaks S3 and keeps everything in memory."""

    endpoint: str
    numbers: itertools.count = field(default_factory=itertools.count)

    @property
    def options(self) -> dict[str, str]:
        """What `storage_options` is to be."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "x",
            "secret_access_key": "y",
        }

    def bucket(self) -> str:
        """Make an empty bucket and return its URL."""
        name = f"bucket-{next(self.numbers)}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        return f"s3://{name}"


@pytest.fixture(scope="session")
def s3_server():
    """A server that speaks S3: its `endpoint`, `options` for it, and `bucket()` for new ones."""
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", S3_SERVER],
        env=os.environ | keys,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with server:
        try:
            port = server.stdout.readline().strip().decode()
            assert port, "the S3 server did not start; pip install 'kvstore[test]'"
            yield S3Server(f"http://127.0.0.1:{port}")
        finally:
            server.kill()


class FaultyS3(S3Server):
    """An `S3Server` behind a proxy that fails as it is told to."""

    def __init__(self, endpoint: str, behind: S3Server) -> None:
        super().__init__(endpoint, behind.numbers)
        self.behind, self.faults, self.seen = behind, [], []

    def bucket(self) -> str:
        return self.behind.bucket()

    def fail(self, what: str, pattern: str, *, after: int = 0, times: int = 1) -> None:
        """Let requests fail whose "METHOD /path" matches `pattern`.

        Parameters
        ----------
        what
            A status, ``"503"``; ``"drop before"`` or ``"drop after"``: the connection is closed
            before or after the request is done; ``"hang"``: there is no answer for a second.
        after, times
            How many are let through first, and how many then fail.
        """
        self.faults.append([what, re.compile(pattern), after, times])

    def fault(self, request: str) -> str | None:
        self.seen.append(request)
        for fault in self.faults:
            what, pattern, after, times = fault
            if pattern.search(request) and times:
                if after:
                    fault[2] -= 1
                    continue
                fault[3] -= 1
                return what
        return None


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1  # or each answer takes 40 ms

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            what = self.server.faulty.fault(f"{self.command} {self.path}")
        if what and what.isdigit():
            code = "SlowDown" if what == "503" else "AccessDenied" if what == "403" else "Oops"
            self.answer(int(what), [], f"<?xml ?><Error><Code>{code}</Code></Error>".encode())
            return
        if what == "hang":
            time.sleep(1)
        if what in (None, "drop after"):
            address = self.server.faulty.behind.endpoint.removeprefix("http://")
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            reply = connection.getresponse()
            headers, content = reply.getheaders(), reply.read()
            connection.close()
        if what:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.answer(reply.status, headers, content)

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        named = {name.lower(): value for name, value in headers}
        for name in ("connection", "transfer-encoding"):
            named.pop(name, None)
        if self.command != "HEAD":
            named["content-length"] = str(len(content))
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def faulty_s3(s3_server):
    """The S3 server behind a proxy with faults: `FaultyS3.fail`; `seen` are its requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    server.daemon_threads, server.lock = True, threading.Lock()
    server.handle_error = lambda *args: None  # clients go away
    server.faulty = FaultyS3(f"http://127.0.0.1:{server.server_port}", s3_server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.faulty
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- an archive to migrate

MODEL = kvstore.Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=kvstore.Rope.from_theta(1e4, 8)
)
WINDOWED = kvstore.Model(
    "w",
    (kvstore.LayerSpec(1, 4, 4), kvstore.LayerSpec(1, 4, None, window=20)),
    rope=kvstore.Rope.from_theta(1e4, 4),
)


def add(session, n, seed, *, with_ids=True):
    k, v = np.random.default_rng(seed).standard_normal((2, 2, 2, n, 8), dtype=np.float32)
    ids = np.random.default_rng([seed, 1]).integers(0, 1000, n) if with_ids else None
    session.append(k, v, token_ids=ids)
    session.commit()


@pytest.fixture(scope="session")
def sessions_of_every_kind(tmp_path_factory):
    """Return the path of an archive with sessions of every kind that records can describe."""
    path = tmp_path_factory.mktemp("made") / "a.kv"
    options = {"model": MODEL, "block_tokens": 16, "fit_tokens": 8}
    with kvstore.open(path, "a") as archive:
        for seed, (name, codec) in enumerate(
            {
                "parent": kvstore.KVR1(step=0.25),
                "tkv1/ü 1": kvstore.TKV1(step=0.25),
                "raw": kvstore.Raw(),
            }.items()
        ):
            metadata = {"of": name}
            with archive.create_session(name, codec=codec, metadata=metadata, **options) as session:
                add(session, 5, seed)  # a raw head first
                add(session, 100, seed)
        with archive.session("parent").fork("fork", at=50) as fork:
            add(fork, 30, 5)
        archive.session("parent").fork("bare", at=45)
        archive.session("fork").fork("fork of a fork", at=60)
        with archive.session("fork") as fork:
            fork.truncate(70)
            add(fork, 9, 6)
        with archive.create_session("ranges", codec=kvstore.KVR1(step=0.25), **options) as session:
            add(session, 64, 7)
            session.append_range(archive.session("parent"), 16, 60)
        archive.session("parent").trim_front(40)
        archive.session("tkv1/ü 1").pin()
        archive.create_session("empty", **options).close()
        with archive.create_session("without ids", **options) as session:
            add(session, 40, 8, with_ids=False)
        with archive.create_session("short", stats_from="parent", model=MODEL) as session:
            add(session, 3, 9)
        with archive.create_session("windowed", model=WINDOWED, block_tokens=16) as session:
            x = np.random.default_rng(10).standard_normal((1, 200, 4), dtype=np.float32)
            session.append([x, x[:, 170:]], [x, None], token_ids=np.arange(200))
            session.commit()
        archive.session("short").pin()
        assert archive.verify(decode=True).ok
    return path


# -- devices to decode on: a stand-in everywhere, and with `-m gpu` CuPy's current one


@dataclass
class Gpu:
    """A device, and how arrays come to it and back."""

    device: object
    put: object
    get: object

    def run(self, plan, **options):
        """Execute a plan whose outputs are NumPy arrays, on the device."""
        host = plan.targets.outputs
        arrays = [self.put(np.ascontiguousarray(out)) for out in host]
        kvgpu.decode(plan, out=arrays, **options)
        for out, array in zip(host, arrays, strict=True):
            out[...] = self.get(array)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request):
    """The device that `kvgpu` decodes on in this test."""
    if request.param == "cuda":
        device = current()  # says what is missing
        import cupy

        yield Gpu(device, cupy.asarray, cupy.asnumpy)
        return
    device = HostDevice(request.getfixturevalue("host_library"))
    with using(device):
        yield Gpu(device, lambda x: HostArray(x.copy()), lambda x: x.array)
