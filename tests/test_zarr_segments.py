"""Tables: what goes in comes out, in order, and no damaged byte goes unnoticed."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, Truncated, Unsupported
from kvcodecs.frame import crc32c

from kvstore.backends.zarr import segment as module
from kvstore.backends.zarr.segment import (
    FOOTER_BYTES,
    GONE,
    MOST_INLINE,
    Outside,
    Segment,
    merge_segments,
    pack_segment,
    reader_of,
    successor,
)
from kvstore.backends.zarr.transaction import Overlay

KEYS = st.binary(min_size=1, max_size=6) | st.sampled_from([b"\xff", b"\xff\xff", b"a" * 511])
VALUES = st.one_of(
    st.just(GONE),
    st.binary(max_size=20),
    st.integers(MOST_INLINE - 1, 3 * MOST_INLINE).map(lambda n: bytes([n % 251]) * n),
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=40)


def opened(entries, lead=b""):
    """Pack entries and open them again, behind some bytes that are none of theirs."""
    packed = pack_segment(sorted(entries.items()))
    data = lead + packed.data
    return Segment(reader_of(data), len(data), "here", crc=packed.crc)


def value_of(entry):
    return entry.read() if isinstance(entry, Outside) else entry


def items(table, prefix=b""):
    return [(key, value_of(entry)) for key, _, entry in table.scan(prefix, 0)]


def everything(data, crc=None):
    """Read all there is in a table."""
    return items(Segment(reader_of(data), len(data), "here", crc=crc))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 40)


def overlay_of(entries):
    overlay = Overlay()
    for key, entry in entries.items():
        overlay.put(key, entry)
    return overlay


@pytest.mark.parametrize("make", [opened, overlay_of])
@pytest.mark.parametrize("block_bytes", [1, 40, 8192])
@settings(max_examples=60, deadline=None)
@given(entries=TABLES, probes=st.lists(KEYS, max_size=10))
def test_a_table_is_an_ordered_map(make, block_bytes, entries, probes):
    before, module._BLOCK_BYTES = module._BLOCK_BYTES, block_bytes
    try:
        table = make(entries)
    finally:
        module._BLOCK_BYTES = before
    names = sorted(entries)
    assert items(table) == [(name, entries[name]) for name in names]
    for key in [*probes, *names[:5], *(name + b"\0" for name in names[:5])]:
        entry = table.get(key)
        assert (None if entry is None else value_of(entry)) == entries.get(key)
        after = [name for name in names if name >= key]
        assert table.at_or_after(key) == (after[0] if after else None)
        less = [name for name in names if name < key]
        assert table.before(key) == (less[-1] if less else None)
        expected = [(name, entries[name]) for name in names if name.startswith(key[:2])]
        assert items(table, key[:2]) == expected


@settings(max_examples=100, deadline=None)
@given(layers=st.lists(TABLES, min_size=1, max_size=5), keep=st.booleans())
def test_merged_tables_say_what_the_newest_says(layers, keep):
    model = {}
    for layer in layers:
        model.update(layer)
    if not keep:
        model = {key: value for key, value in model.items() if value is not GONE}
    tables = [opened(layer, b"x" * i) for i, layer in enumerate(layers)]
    packed = merge_segments(tables[::-1], keep_deleted=keep)
    if packed is None:
        assert model == {}
    else:
        assert everything(packed.data, packed.crc) == sorted(model.items())


def some_table():
    entries = {b"key %03d" % i: bytes([i]) * (i * 13) for i in range(24)}
    entries[b"gone"] = GONE
    return entries


def test_every_byte_counts(small_blocks):
    packed = pack_segment(sorted(some_table().items()))
    assert everything(packed.data) == sorted(some_table().items())
    for i in range(len(packed.data)):
        wrong = bytearray(packed.data)
        wrong[i] ^= 1 << i % 8
        with pytest.raises((Corrupt, Truncated, Unsupported), match="here: "):
            everything(bytes(wrong))


def test_every_truncation_is_noticed(small_blocks):
    packed = pack_segment(sorted(some_table().items()))
    for n in range(len(packed.data)):
        with pytest.raises((Corrupt, Truncated), match="here: "):
            everything(packed.data[:n])
        # Whoever knows how long it should be finds out in whatever it reads.
        with pytest.raises((Corrupt, Truncated), match="here: "):
            items(Segment(reader_of(packed.data[:n]), len(packed.data), "here"))


def test_another_table_is_not_taken_for_this_one():
    one, other = (pack_segment([(b"a", value)]) for value in (b"1", b"2"))
    assert len(one.data) == len(other.data)
    with pytest.raises(Corrupt, match="footer"):
        everything(other.data, crc=one.crc)


def footer(**changes):
    """Return a table of no entries whose footer says something else, under a right checksum."""
    names = [
        "values",
        "blocks",
        "entries",
        "n",
        "index",
        "index_crc",
        "version",
        "reserved",
        "magic",
    ]
    fields = dict(zip(names, module._FOOTER.unpack(pack_segment([]).data[:-4]), strict=True))
    packed = module._FOOTER.pack(*(fields | changes).values())
    return packed + module._CRC.pack(crc32c(packed))


def test_numbers_that_cannot_be():
    with pytest.raises(Unsupported, match="upgrade"):
        everything(footer(version=2))
    tracemalloc.start()
    for changes in (
        {"version": 0},
        {"values": 1},
        {"values": (1 << 64) - 1},
        {"blocks": 5},
        {"n": 1 << 31},
        {"n": 1 << 31, "index": (1 << 32) - 1},
        {"index": 8},
        {"magic": b"KVZC"},
    ):
        with pytest.raises((Corrupt, Truncated)):
            everything(footer(**changes))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_keys_out_of_order():
    """So that no walk goes round in circles."""
    packed = pack_segment([(b"b", b""), (b"a", GONE)])
    with pytest.raises(Corrupt, match="block 0"):
        everything(packed.data)
    packed = pack_segment([(b"a", b""), (b"a", GONE)])
    with pytest.raises(Corrupt, match="block 0"):
        everything(packed.data)


def test_blocks_out_of_order(small_blocks):
    packed = pack_segment([(b"b" * 100, b""), (b"a" * 100, b"")])
    with pytest.raises(Corrupt, match="not in order"):
        everything(packed.data)
    packed = pack_segment([(b"a", b""), (b"c" * 50, b""), (b"b" * 60, b"")])
    with pytest.raises(Corrupt, match="block 0"):
        everything(packed.data)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\0\0\0\0",
        b"\1\0\0\0\1\0",
        b"\xff\xff\xff\xff\1\0\0\0a",
        b"\1\0\0\0\1\0\0\0",
        b"\1\0\0\0\1\0\0\0ab",
        b"\1\0\0\0\1\0\1\0a",
        b"\1\0\0\0\1\0\1\1a",
        b"\1\0\0\0\1\0\xfe\xffa",
        b"\1\0\0\0\1\0\0\0b",
    ],
)
def test_blocks_that_are_none(block):
    index = module.struct.pack("<HII", 1, len(block), crc32c(block)) + b"a"
    end = footer(blocks=len(block), n=1, index=len(index), index_crc=crc32c(index))
    data = block + index + end
    with pytest.raises(Corrupt, match="block 0"):
        Segment(reader_of(data), len(data), "here").get(b"a")


def test_a_value_that_lies_nowhere():
    place = module._PLACE.pack(1 << 60, 1 << 60, 0)
    block = b"\1\0\0\0\1\0\xfe\xffa" + place
    index = module.struct.pack("<HII", 1, len(block), crc32c(block)) + b"a"
    end = footer(blocks=len(block), n=1, index=len(index), index_crc=crc32c(index))
    data = block + index + end
    entry = Segment(reader_of(data), len(data), "here").get(b"a")
    assert entry.n_bytes == 1 << 60
    with pytest.raises(Truncated):
        entry.read()


def test_damage_stays_damage_when_tables_are_merged():
    packed = pack_segment([(b"a", bytes(1000)), (b"b", bytes(1000))])
    wrong = b"\1" + packed.data[1:]
    merged = merge_segments([Segment(reader_of(wrong), len(wrong), "here")], keep_deleted=True)
    table = Segment(reader_of(merged.data), len(merged.data), "here")
    with pytest.raises(Corrupt, match="value of 1000 bytes"):
        table.get(b"a").read()
    assert table.get(b"b").read() == bytes(1000)


def test_a_long_table_is_read_piece_by_piece():
    entries = {b"%08d" % i: b"%d" % i for i in range(60_000)}
    entries[b"x"] = bytes(5 << 20)
    packed = pack_segment(sorted(entries.items()))
    n_read = 0

    def read(start, stop):
        nonlocal n_read
        n_read += stop - start
        return packed.data[start:stop]

    table = Segment(read, len(packed.data), "here")
    assert table.get(b"%08d" % 37_777) == b"37777"
    assert table.before(b"x") == b"%08d" % 59_999
    assert n_read < 100_000
    before = n_read
    for i in range(37_700, 37_800):
        assert table.get(b"%08d" % i) == b"%d" % i
    assert n_read - before < 20_000  # its neighbours lie beside it
    assert table.get(b"x").n_bytes == 5 << 20
    # Not all of what was looked at is kept.
    tracemalloc.start()
    assert sum(1 for _ in table.scan(b"", 0)) == len(entries)
    assert tracemalloc.get_traced_memory()[0] < 32 << 20
    tracemalloc.stop()


def test_successor():
    assert successor(b"a") == b"b"
    assert successor(b"a\xff\xff") == b"b"
    assert successor(b"") is successor(b"\xff\xff") is None


def test_an_empty_table():
    packed = pack_segment([])
    assert len(packed.data) == FOOTER_BYTES
    table = Segment(reader_of(packed.data), len(packed.data), "here")
    assert (table.get(b"a"), table.at_or_after(b""), table.before(b"z")) == (None, None, None)
    assert list(table.scan(b"", 0)) == []


def test_an_overlay_that_changes_while_one_walks():
    overlay = overlay_of({b"a": b"1", b"b": b"2"})
    walk = overlay.scan(b"", 0)
    overlay.put(b"b", GONE)
    overlay.put(b"c", b"3")
    assert [(key, entry) for key, _, entry in walk] == [(b"a", b"1"), (b"b", b"2")]
    assert items(overlay) == [(b"a", b"1"), (b"b", GONE), (b"c", b"3")]
