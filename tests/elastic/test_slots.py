"""Slots: memory with a checksum of its contents."""

import numpy as np
import pytest

from bagua_comm.elastic.snapshot.slot import (
    COMMITTED,
    PREPARED,
    ArraySpec,
    Slot,
    checksum,
    copy_into,
    offsets,
    views,
)
from bagua_comm.elastic.snapshot.snapshots import Buffer, OwnParts

ARRAYS = [
    np.arange(5, dtype=np.float32),
    np.array(7),
    np.ones((2, 3), np.complex128),
    np.zeros((0, 4)),
    np.array([True]),
]


def fill(slot, version, arrays=ARRAYS, header=None):
    specs = [ArraySpec.of(x) for x in arrays]
    _, size = offsets(specs)
    sums = [copy_into(out, x) for out, x in zip(views(slot.begin(size), specs), arrays, strict=True)]
    slot.finish(version, header or {"sums": sums}, size)
    return specs


def test_a_written_slot_is_read():
    slot = Slot()
    specs = fill(slot, 3)
    found = slot.read()
    assert (found.version, found.state) == (3, PREPARED)
    for x, there, total in zip(ARRAYS, views(found.data, specs), found.header["sums"], strict=True):
        np.testing.assert_array_equal(x, there)
        assert (x.dtype, checksum(there)) == (there.dtype, total)
    slot.commit()
    assert slot.read().state == COMMITTED


def test_an_empty_slot_and_one_half_written_hold_nothing():
    slot = Slot()
    assert slot.read() is None
    fill(slot, 1)
    slot.commit()
    slot.begin(8)
    assert slot.read() is None


def test_a_slot_allocates_nothing_once_it_is_large_enough():
    slot = Slot()
    fill(slot, 1)
    memory = slot.read().data.ctypes.data
    fill(slot, 2)
    assert slot.read().data.ctypes.data == memory


def test_a_header_that_has_grown_keeps_the_data():
    slot = Slot()
    specs = fill(slot, 1)
    fill(slot, 2, header={"text": "x" * 200_000})
    np.testing.assert_array_equal(ARRAYS[0], views(slot.read().data, specs)[0])


def test_a_file_outlives_the_slot(tmp_path):
    specs = fill(slot := Slot(tmp_path / "slot"), 9)
    slot.commit()
    found = Slot(tmp_path / "slot").read()
    assert (found.version, found.state) == (9, COMMITTED)
    np.testing.assert_array_equal(ARRAYS[2], views(found.data, specs)[2])
    slot.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "header", "magic"])
def test_a_damaged_file_holds_nothing(tmp_path, damage):
    path = tmp_path / "slot"
    fill(Slot(path), 9)
    content = bytearray(path.read_bytes())
    where = {"cut": 40, "header": content.index(b"sums"), "magic": 0}[damage]
    path.write_bytes(content[:where] if damage == "cut" else content[:where] + b"?" + content[where + 1 :])
    assert Slot(path).read() is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64])
@pytest.mark.parametrize("size", [2, 8, 1000])
def test_a_checksum_finds_changed_signs(dtype, size):
    x = np.arange(1, size + 1).astype(dtype)
    assert len({checksum(y) for y in (x, -x, np.where(np.arange(size) % 2, x, -x))}) == 3
    assert checksum(np.zeros(size)) != checksum(-np.zeros(size))


@pytest.mark.parametrize("size", [1, 7, 8, 1 << 18, (1 << 18) + 3])
def test_a_checksum_finds_changed_and_exchanged_bytes(size):
    x = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    total = checksum(x)
    assert copy_into(np.empty_like(x), x) == total
    for at in {0, size // 2, size - 1}:
        other = x.copy()
        other[at] += 1
        assert checksum(other) != total
    if size > 16:
        other = x.copy()
        other[:8], other[8:16] = x[8:16], x[:8]
        assert checksum(other) != total
    assert checksum(np.append(x, np.uint8(0))) != total


def test_arrays_that_are_not_contiguous_are_copied():
    x = np.arange(12.0).reshape(3, 4).T
    out = np.empty((4, 3))
    assert copy_into(out, x) == checksum(np.ascontiguousarray(x))
    np.testing.assert_array_equal(x, out)


def test_a_process_that_takes_the_number_of_an_older_one_has_all_of_its_copies(tmp_path):
    """After a restart: this rank's snapshots, and those that it stored for other ranks."""

    def kept(buffer):
        return {(each.header["rank"], each.whole): each.arrays[0].tolist() for each in buffer.snapshots()}

    buffer = Buffer("a", tmp_path, 0, OwnParts(tmp_path, 0))
    for rank, slot in enumerate((buffer.local, *buffer.peer_slots(2))):
        spec = ArraySpec("float32", (3,))
        data = slot.begin(offsets([spec])[1])
        (out,) = views(data, [spec])
        total = copy_into(out, np.full(3, rank, np.float32))
        header = {
            "rank": rank,
            "whole": rank == 0,
            "held": [0],
            "private": [0],
            "arrays": [["float32", [3], None]],
            "sums": [total],
        }
        slot.finish(7, header, data.size)
        slot.commit()
    assert kept(buffer) == {(0, True): [0] * 3, (1, False): [1] * 3, (2, False): [2] * 3}
    again = Buffer("a", tmp_path, 0, OwnParts(tmp_path, 0))
    assert kept(again) == kept(buffer)
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_prepared_for_a_commit_that_another_rank_has_made_is_committed():
    buffer = Buffer("a", None, 0, OwnParts(None, 0))
    for slot, rank in [(buffer.local, 0), *((slot, 1) for slot in buffer.peer_slots(1))]:
        slot.begin(0)
        slot.finish(5, {"run": "this", "rank": rank}, 0)
    for version, run in [(4, "this"), (5, "another")]:
        buffer.confirm(version, run)
        assert {slot.read().state for slot in (buffer.local, *buffer.peers)} == {PREPARED}
    buffer.confirm(5, "this")
    assert {slot.read().state for slot in (buffer.local, *buffer.peers)} == {COMMITTED}
