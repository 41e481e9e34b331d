"""Flat layers where something is wrong: files that are cut, no room, no permission, forks."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import tempfile
import threading

import numpy as np
import pytest
from kvcodecs.errors import Closed, Corrupt, Full, InvalidArgument, Locked, NotFound, Truncated

import kvstore
from kvstore import LayerSpec, Model, flat
from kvstore.flat import FlatLayer
from kvstore.flat.file import LayerFile

SLOW = pytest.mark.slow
HEADS, DIM, ROWS = 2, 256, 100  # 16 rows of 1 KB of K to a block
MODEL = Model("m", (LayerSpec(HEADS, DIM, DIM),) * 2)


def values(start, stop):
    x = np.arange(start, stop, dtype=np.float32)
    return np.broadcast_to(x[None, :, None], (HEADS, stop - start, DIM))


def make(path, n=ROWS, **options):
    options = {"heads": HEADS, "head_dim": DIM, "scheme": "f16", "capacity": 32, **options}
    layer = FlatLayer.create(path, **options)
    layer.append(values(0, n), values(0, n))
    layer.commit()
    return layer


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "a.kvf")


def in_child(body):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("pread", "step"),
    [(False, 3), (True, 3), *(pytest.param(x, 1, marks=SLOW) for x in (False, True))],
)
def test_cut_at_every_part(path, pread, step):
    """Rows are right or refused, by a reader of before and by one that opens it then."""
    with make(path) as layer:
        segments, size = layer._segments._segments, os.stat(path).st_size
        assert len(segments) == 3
        cuts = {0, 1, 20, 8191, 8192, 8193, 8703, 8704, 12287, 12288, 12799, 12800, 65535, size - 1}
        for segment in segments:
            for area, sums in segment.areas.values():
                cuts |= {area, area + 1, area + 5000, area + 16384, sums, sums + 3, sums + 4}
    readers = [FlatLayer.open(path, pread=pread)]
    readers[0].read_all()
    (view,) = readers[0].raw_rows("k")[:1] if not pread else [None]
    for cut in sorted(cuts, reverse=True)[::step]:
        os.truncate(path, cut)
        try:
            readers.append(FlatLayer.open(path, pread=pread))
        except (Truncated, Corrupt) as error:
            assert path in str(error)  # noqa: PT017
            assert cut < 12800
        for reader in readers:
            for lo, hi in ((0, 1), (17, 40), (60, 100), (0, 100)):
                places = np.arange(lo, hi)[::-7]
                for read, want in (
                    (lambda r, lo, hi, _: r.read_rows(lo, hi), values(lo, hi)),
                    (lambda r, lo, hi, at: r.gather(at), values(0, 100)[:, places]),
                ):
                    try:
                        got = read(reader, lo, hi, places)
                    except (Truncated, Corrupt) as error:
                        assert path in str(error)  # noqa: PT017
                    else:
                        assert np.array_equal(got, [want, want])
            with pytest.raises((Truncated, Corrupt)):
                reader.verify()
        with pytest.raises((Truncated, Corrupt)):
            FlatLayer.open(path, "a", pread=pread)
        for reader in readers[1:]:
            reader.close()
        del readers[1:]
    del view
    readers[0].close()


@pytest.mark.parametrize(
    ("pread", "n_bits"),
    [(False, 1), (True, 1), *(pytest.param(x, 9, marks=SLOW) for x in (False, True))],
)
def test_no_flipped_bit_gives_other_rows(path, pread, n_bits):
    with make(path) as layer:
        spans = [(0, 8192), (8192, 8704), (12288, 12800)]
        for segment in layer._segments._segments:
            for kind, (area, sums) in segment.areas.items():
                n = min(segment.rows, max(0, ROWS - segment.first))
                spans.append((area, area + n * layer.header.row_bytes(kind)))
                spans.append((sums, sums + n // 16 * 4))
    rng = np.random.default_rng(0)
    want = values(0, ROWS)
    for lo, hi in spans:
        for at in {lo, hi - 1, *rng.integers(lo, hi, n_bits).tolist()}:
            flip(path, at)
            try:
                with FlatLayer.open(path, pread=pread) as reader:
                    assert reader.stop in (0, ROWS)  # one copy of the commit may be the one before
                    k, v = reader.read_all()
                    assert at < 12800
                    assert np.array_equal(k, want[:, : reader.stop])
                    assert np.array_equal(v, want[:, : reader.stop])
                    with pytest.raises(Corrupt):
                        reader.verify()
            except (Corrupt, Truncated) as error:
                assert path in str(error)  # noqa: PT017
            flip(path, at)
    with FlatLayer.open(path) as reader:
        reader.verify()


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_what_is_no_file_of_a_layer(tmp_path, path):
    make(path).close()
    folder, pipe, empty, loop = (str(tmp_path / name) for name in "fpel")
    os.mkdir(folder)
    os.mkfifo(pipe)
    open(empty, "wb").close()
    os.symlink(loop, loop)
    os.symlink(path, tmp_path / "link")
    for mode in "ra":
        for wrong in (folder, pipe, loop, "/dev/null", str(tmp_path / ("n" * 300))):
            with pytest.raises(InvalidArgument, match=r"layer|regular"):
                FlatLayer.open(wrong, mode)
        with pytest.raises(Truncated, match="no layer's file, or cut"):
            FlatLayer.open(empty, mode)
        with pytest.raises(NotFound):
            FlatLayer.open(os.path.join(path, "x"), mode)
        FlatLayer.open(tmp_path / "link", mode).close()
    for taken in (folder, pipe, empty, loop):
        with pytest.raises(InvalidArgument, match="exists"):
            make(taken)
    with pytest.raises(NotFound, match="no such directory"):
        make(os.path.join(path, "x"))
    with pytest.raises(NotFound, match="no session"):
        flat.open(folder)
    os.mkfifo(os.path.join(folder, "session"))
    with pytest.raises(Corrupt, match="regular"):
        flat.open(folder)
    for wrong in ({"capacity": 1 << 48}, {"max_rows": 1 << 48}, {"capacity": 1 << 47}):
        with pytest.raises((InvalidArgument, Full)):
            make(str(tmp_path / "big"), **wrong, sparse=True)
    with pytest.raises(InvalidArgument, match="no file is so large"):
        make(str(tmp_path / "big"), capacity=1 << 48, head_dim=1 << 15)
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


def test_without_permission():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path, secret = os.path.join(folder, "a.kvf"), os.path.join(folder, "s.kvf")
        make(path).close()
        make(secret).close()
        flat.create(os.path.join(folder, "chat"), MODEL, scheme="f16").close()
        os.chmod(path, 0o444)
        os.chmod(secret, 0)
        os.chmod(os.path.join(folder, "chat"), 0o555)
        if os.geteuid() != 0:
            os.chmod(folder, 0o555)

        def body():
            if os.geteuid() == 0:
                os.seteuid(65534)
            with FlatLayer.open(path) as layer:
                assert np.array_equal(layer.read_all()[0], values(0, ROWS))
            with pytest.raises(InvalidArgument, match="mode='r'"):
                FlatLayer.open(path, "a")
            with pytest.raises(InvalidArgument, match="cannot be read"):
                FlatLayer.open(secret)
            with pytest.raises(InvalidArgument, match="cannot be created"):
                make(os.path.join(folder, "new.kvf"))
            with pytest.raises(InvalidArgument, match="cannot be created"):
                flat.create(os.path.join(folder, "new"), MODEL)

        in_child(body)
        os.chmod(folder, 0o755)
        os.chmod(os.path.join(folder, "chat"), 0o755)


@pytest.mark.parametrize("sparse", [False, True])
def test_no_room(path, tmp_path, sparse):
    """`Full`, nothing is appended, and it goes on once there is room."""
    layer = make(path, sparse=sparse)

    def body():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with FlatLayer.open(path, "a", sparse=sparse) as layer:
            size = os.stat(path).st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
            for _ in range(2):
                with pytest.raises(Full, match=r"a\.kvf: .*make room.*unharmed"):
                    layer.append(values(100, 400), values(100, 400))
                assert layer.stop == ROWS
                assert os.stat(path).st_size == size
            layer.append(values(100, 110), values(100, 110))
            layer.commit()
            with pytest.raises(Full):
                make(str(tmp_path / "b.kvf"), capacity=100_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            layer.append(values(110, 400), values(110, 400))
            layer.commit()

    layer.close()
    in_child(body)
    with FlatLayer.open(path) as layer:
        layer.verify()
        assert np.array_equal(layer.read_all()[1], values(0, 400))
    assert os.listdir(tmp_path) == ["a.kvf"]


def test_no_room_in_one_layer_of_a_session(tmp_path):
    path = str(tmp_path / "chat")
    k = [values(0, 40)] * 2
    session = flat.create(path, MODEL, scheme="f16", capacity=32)
    session.append(k, k)
    session.commit()
    reserve = session.layers[1]._file.reserve

    def full(*args, **options):
        raise Full("no room")

    session.layers[1]._file.reserve = full
    more = [values(40, 400)] * 2
    with pytest.raises(Full):
        session.append(more, more)
    assert [layer.stop for layer in session.layers] == [40, 40]
    session.layers[1]._file.reserve = reserve
    session.append(more, more, start=40)
    session.commit()
    session.close()
    with flat.open(path) as session:
        session.verify()
        assert np.array_equal(session.read(1, "k"), values(0, 400))


@pytest.mark.parametrize("failing", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_to_store_a_commit(path, monkeypatch, failing):
    layer = make(path)
    layer.append(values(100, 120), values(100, 120))
    real = os.fdatasync

    def fail(fd):
        raise OSError(failing, os.strerror(failing))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(Full if failing == errno.ENOSPC else OSError):
        layer.commit()
    monkeypatch.setattr(os, "fdatasync", real)
    for again in (layer.commit, lambda: layer.append(values(120, 121), values(120, 121))):
        with pytest.raises(Closed, match="open it again"):
            again()
    assert layer.read_all()[0].shape[1] == 120
    layer.close()
    with FlatLayer.open(path, "a") as layer:
        assert layer.stop == ROWS


def test_a_view_keeps_no_lock(path):
    """Nor a descriptor: many layers of many segments would have too many."""
    layer = make(path)
    (view, *_) = layer.raw_rows("k")
    assert view.flags.writeable is False
    seen = view.copy()
    layer.close()
    with FlatLayer.open(path, "a") as other:
        other.append(values(100, 300), values(100, 300))
        other.commit()
        assert np.array_equal(view, seen)
    layer = FlatLayer.open(path, "a")
    (view, *_) = layer.raw_rows("k")
    del layer  # without close
    gc.collect()
    FlatLayer.open(path, "a").close()
    assert np.array_equal(view, seen)
    count = len(os.listdir("/proc/self/fd"))
    with FlatLayer.open(path) as reader:
        reader.read_all()
        assert len(reader._segments) > 2
        assert len(os.listdir("/proc/self/fd")) == count + 1
    assert len(os.listdir("/proc/self/fd")) == count


def maps_of(path):
    with open("/proc/self/maps") as file:
        return sum(path in line for line in file)


def test_maps_go_with_the_last_view(path):
    make(path).close()
    with FlatLayer.open(path) as layer:
        part = layer.raw_rows("k")[1][3:5].view(np.float16)
        assert maps_of(path) == len(layer._segments)
    gc.collect()
    assert maps_of(path) == 1
    assert part[1, 7] == 36
    with pytest.raises(ValueError, match="WRITEABLE"):
        part.flags.writeable = True
    del part
    assert maps_of(path) == 0


def test_what_cannot_be_mapped(path, monkeypatch):
    with make(path) as layer, monkeypatch.context() as patch:
        layer._segments.close()
        patch.setattr(layer._file, "_fd", os.open(os.devnull, os.O_RDONLY))
        patch.setattr(LayerFile, "check_size", lambda *_: None)
        with pytest.raises(InvalidArgument, match="pread=True"):
            layer.raw_rows("k")
        os.close(layer._file._fd)


def test_positions_have_an_end(tmp_path):
    end, n = 1 << 48, 10
    with flat.anonymous(MODEL, scheme="f16") as session:
        k = [values(0, n)] * 2
        for start in (end, end - n + 1):
            with pytest.raises(InvalidArgument, match="positions end"):
                session.append(k, k, start=start)
        assert [layer.stop for layer in session.layers] == [0, 0]
        session.append(k, k, start=end - n)
        with pytest.raises(InvalidArgument, match="positions end"):
            session.append(k, k)
    path = str(tmp_path / "a.kvf")
    with FlatLayer.create(path, heads=HEADS, head_dim=DIM, scheme="f16") as layer:
        layer.append(values(0, n), values(0, n), start=end - n)
        layer.commit()
    with FlatLayer.open(path, "a") as layer:
        assert np.array_equal(layer.read_all(), [values(0, n)] * 2)


def test_taking_nothing_back_commits(path):
    with make(path) as layer, FlatLayer.open(path) as reader:
        layer.append(values(100, 120), values(100, 120))
        layer.drop_front(7)
        layer.take_back(120)
        assert (reader.start, reader.stop) == (7, 120)


def test_a_forked_child_reads(path):
    layer = make(path)
    reader = FlatLayer.open(path)
    layer.append(values(100, 120), values(100, 120))

    def body():
        for each in (layer, reader):
            assert each.stop == ROWS  # what is committed
            assert np.array_equal(each.read_all()[0], values(0, ROWS))
            assert each.gather([3])[0][0, 0, 0] == 3
        for write in (
            lambda: layer.append(values(100, 101), values(100, 101)),
            layer.commit,
            lambda: layer.drop_front(3),
            lambda: layer.take_back(50),
        ):
            with pytest.raises(Closed, match="before a fork"):
                write()
        layer.close()
        with pytest.raises(Closed, match="open it again"):
            layer.read_all()
        with pytest.raises(Locked):
            FlatLayer.open(path, "a")

    in_child(body)
    with pytest.raises(Locked):
        FlatLayer.open(path, "a")
    assert layer.stop == 120
    layer.commit()
    assert np.array_equal(reader.read_all()[0], values(0, 120))
    layer.close()
    FlatLayer.open(path, "a").close()


@pytest.mark.parametrize("pread", [False, True])
def test_closed_while_threads_read(path, pread):
    make(path, 2000).close()
    for _ in range(5):
        layer = FlatLayer.open(path, pread=pread)
        wrong, begun = [], threading.Barrier(4)

        def read(layer=layer, wrong=wrong, begun=begun):
            begun.wait()
            try:
                while True:
                    if not np.array_equal(layer.read_rows(500, 1500)[0], values(500, 1500)):
                        wrong.append("rows")
                    for start, stop, k, _ in layer.pieces(0, 2000):
                        if k.view(np.float16)[:, 0].tolist() != list(range(start, stop)):
                            wrong.append("piece")
            except Closed:
                return
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        layer.read_all()
        layer.close()
        layer.close()
        for thread in threads:
            thread.join()
        assert not wrong


def test_rows_that_go_while_they_are_used(path):
    """Views of a ring's rows that another process may write over are taken back in time."""
    layer = make(path, 60, max_rows=64)
    reader = FlatLayer.open(path)
    pieces = reader.pieces(0, 60)
    next(pieces)
    layer.drop_front(40)
    layer.append(values(60, 80), values(60, 80))
    layer.commit()
    with pytest.raises(NotFound, match="read again"):
        next(pieces)
    pieces = reader.pieces(40, 80)
    next(pieces)
    layer.take_back(70)
    with pytest.raises(NotFound, match="read again"):
        list(pieces)
    with pytest.raises(NotFound, match="begin at 40"):
        reader.gather([39, 50])
    with pytest.raises(InvalidArgument, match="up to 70"):
        reader.gather([50, 70])
    q = np.ones((HEADS, DIM), np.float32)
    assert np.allclose(kvstore.attend(q, reader, start=69), 69)


@pytest.mark.parametrize("pread", [False, True])
def test_a_ring_that_another_process_writes(path, pread):
    """What is read while it wraps is right, or refused."""
    make(path, 60, max_rows=64).close()

    def write():
        os.fdatasync = lambda fd: None
        with FlatLayer.open(path, "a") as layer:
            for step in range(180):  # positions are exact in float16
                n = 1 + step % 20
                layer.drop_front(n)
                layer.append(*[values(layer.stop, layer.stop + n)] * 2)
                if step % 3:
                    layer.commit()
                if step % 7 == 0:
                    layer.take_back(layer.stop - 1)

    pid = os.fork()
    if pid == 0:
        try:
            write()
        finally:
            os._exit(0)
    seen = set()
    with FlatLayer.open(path, pread=pread) as reader:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            for k, v in (reader.read_all(), reader.read_window(50)):  # what there is, always
                first = int(k[0, 0, 0]) if k.size else 0
                assert np.array_equal([k, v], [values(first, first + k.shape[1])] * 2)
            reader.verify()
            start, stop = reader.start, reader.stop
            try:
                k, v = reader.read_rows(start, stop)
                assert np.array_equal([k, v], [values(start, stop)] * 2)
                places = [stop - 1, start]
                assert reader.gather(places)[0][0, :, 0].tolist() == places
                for lo, hi, rows, _ in reader.pieces(start, stop):
                    found = rows.view(np.float16)[:, 9].tolist()
                    last = list(range(lo, hi))
                assert found == last  # going on has not raised
                seen.add(start)
            except NotFound:
                continue
            except InvalidArgument as error:
                assert "there are rows up to" in str(error)  # noqa: PT017
        reader.verify()
        assert reader.stop > 1000
    assert seen


def test_wrong_calls(path):
    with make(path) as layer:
        rows = layer.stored_rows("k", 0, 4)
        for wrong in (
            lambda: layer.gather([0.5]),
            lambda: layer.gather([-1]),
            lambda: layer.gather(np.array([2**64 - 1], np.uint64)),
            lambda: layer.read_rows(0, 1, kinds=("q",)),
            lambda: layer.read_rows(0, 1, n_threads=0),
            lambda: layer.append_rows({"k": rows, "v": rows.tolist()}),
            lambda: layer.append_rows({"k": rows, "v": rows[:, :5]}),
            lambda: layer.append_rows({"k": rows}),
            lambda: layer.take_back(101),
        ):
            with pytest.raises(InvalidArgument):
                wrong()
        wide = np.repeat(rows, 2, axis=0)
        layer.append_rows({"k": wide[::2], "v": wide[::2]})  # strided
        assert np.array_equal(layer.read_rows(100, 104)[0], values(0, 4))
        assert layer.gather([])[0].shape == (HEADS, 0, DIM)
