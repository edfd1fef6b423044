"""State of which some copies are damaged, or of another commit: others are used."""

from contextlib import suppress

import numpy as np
import pytest

from bagua_comm import CommAborted, Communicator, Own
from bagua_comm.elastic.snapshot import parts
from bagua_comm.elastic.snapshot.commit import commit
from bagua_comm.elastic.snapshot.restore import Restore, newest
from bagua_comm.elastic.snapshot.shards import LostStateError
from bagua_comm.elastic.snapshot.snapshots import Buffer, OwnParts, snapshots_in
from bagua_comm.testing import run_ranks


def restored(folder, damaged, *, hosts="aaa", trainers=3, lengths=(1, 1, 1)):
    """What new processes on the hosts of dead ones restore; the private values of rank n were n, and "n".

    Args:
        folder: Has a folder for each host.
        damaged: The damaged snapshots, as (process, whose state).
        hosts: The hosts of the processes.
        trainers: How many processes restore.
        lengths: Of the arrays of the ranks.
    """

    texts = []

    def write(comm):
        rank, value = comm.rank, np.full(lengths[comm.rank], comm.rank, np.float64)
        (folder / hosts[rank]).mkdir(exist_ok=True)
        buffer = Buffer("a", folder / hosts[rank], rank, OwnParts(folder / hosts[rank], rank))
        tree = [Own(value, "mean"), str(rank)]
        commit(comm, buffer, lambda: parts.packed(tree), run="run", version=1, buddies=[1, 2, 0])
        for snapshot in buffer.snapshots():
            if (rank, snapshot.header["rank"]) in damaged:
                snapshot.arrays[0][:] = 7

    def read(comm):
        found = snapshots_in(folder / hosts[comm.rank], except_of=-1)
        sources = newest(comm.allgather_object([each.info for each in found]))
        content = Restore(comm, sources, found, range(trainers), hosts[:trainers]).run()
        own, text = content.tree()
        texts.append(text)
        return own.value.tolist()

    run_ranks(3, write)
    return run_ranks(trainers, read), sorted(texts)


def test_a_process_uses_no_damaged_file_of_the_dead_rank_that_it_replaces(tmp_path):
    """The file of its buddy, which it can read as well, is intact."""
    assert restored(tmp_path, {(0, 0)}) == ([[0], [1], [2]], ["0", "1", "2"])


def test_the_copy_of_another_process_takes_the_place_of_a_damaged_one(tmp_path):
    assert restored(tmp_path, {(0, 0), (2, 1)}, hosts="abc") == ([[0], [1], [2]], ["0", "1", "2"])


def test_damaged_values_do_not_enter_the_mean_of_fewer_ranks(tmp_path, caplog):
    assert restored(tmp_path, {(0, 0), (1, 0)}, trainers=2) == ([[1.5], [1.5]], ["0", "0"])
    assert "the private state of ranks [0] in commit 1 is lost" in caplog.text


def test_where_all_copies_of_arrays_that_nothing_replaces_are_damaged_all_raise_an_error(tmp_path):
    with pytest.raises(LostStateError, match=r"the private state of rank . in commit 1"):
        restored(tmp_path, {(n, m) for n in range(3) for m in range(3)}, lengths=(1, 2, 3))


def test_ranks_of_a_host_restore_their_own_copies_without_a_message(tmp_path, monkeypatch):
    """Each process of a host can read the copies of all: the first one gave the others theirs."""

    def send(comm, x, *, dest):
        raise AssertionError(f"{x} is sent to rank {dest}")

    monkeypatch.setattr(Communicator, "send", send)
    monkeypatch.setattr(Communicator, "send_object", send)
    assert restored(tmp_path, {}) == ([[0], [1], [2]], ["0", "1", "2"])


# Deaths while a commit is agreed on -------------------------------------------------------------------------


def buffers_after(folder, *, values=1, barrier=lambda rank: None, live=lambda array: None):
    """The buffers of three ranks after two commits; the private value of rank n was n, and n + 10 in the second.

    Args:
        folder: Of the slots, or None.
        values: The length of each array.
        barrier: Called at the end of the second commit's barrier, with the rank.
        live: Called with the array of each rank after it.
    """

    def write(comm):
        own = OwnParts(folder, comm.rank)
        pair = [Buffer(name, folder, comm.rank, own) for name in "ab"]
        mine, wait = np.full(values, comm.rank, np.float64), comm.barrier
        for version, buffer in enumerate(pair, 1):
            if version == 2:
                mine += 10
                comm.barrier = lambda: [wait(), barrier(comm.rank)]
            tree = [Own(mine, "mean"), np.full(2, version)]
            with suppress(CommAborted):
                commit(comm, buffer, lambda: parts.packed(tree), run="run", version=version, buddies=[1, 2, 0])  # noqa: B023
        live(mine)
        return pair

    return run_ranks(3, write)


def restored_by(pairs):
    """What processes restore from their buffers alone, for three ranks, and the number of the commit."""

    def read(comm):
        found = [each for buffer in pairs[comm.rank] for each in buffer.snapshots()]
        sources = newest(comm.allgather_object([each.info for each in found]))
        for buffer in pairs[comm.rank]:
            buffer.confirm(sources.version, sources.run)
        content = Restore(comm, sources, found, range(3), "abc").run()
        own, shared = content.tree()
        return own.value.tolist(), shared.tolist(), sources.version

    return run_ranks(3, read)


def new_process():
    return [Buffer(name, None, 3, own) for own in [OwnParts(None, 3)] for name in "ab"]


def notice_a_death(rank):
    if rank == 0:
        raise CommAborted("rank 1 died")


def test_of_two_ranks_of_which_one_has_agreed_on_a_commit_both_have_it():
    """Rank 1 had the only other copy of the parts of rank 0, which has not written them, and rank 2 has."""
    first, _, third = buffers_after(None, barrier=notice_a_death)
    expected = [([10.0 + rank], [2, 2], 2) for rank in range(3)]
    assert restored_by([first, new_process(), third]) == expected
    assert restored_by([first, new_process(), third]) == expected, "a death in the restore itself"


def test_parts_that_the_program_has_changed_since_are_not_taken_for_those_of_the_commit(caplog):
    def change(mine):
        mine *= 3

    first, _, third = buffers_after(None, barrier=notice_a_death, live=change)
    found = restored_by([first, new_process(), third])
    assert [each for each, *_ in found] == [[11.5], [11.0], [12.0]]
    assert "the private state of ranks [0] in commit 2 is lost" in caplog.text


def test_a_rank_that_dies_while_it_writes_its_own_parts_has_them_at_its_buddy():
    first, second, third = buffers_after(None)
    second[0].own.slot.begin(8)
    assert restored_by([first, new_process(), third]) == [([10.0 + rank], [2, 2], 2) for rank in range(3)]
    assert restored_by([first, second, third]) == [([10.0 + rank], [2, 2], 2) for rank in range(3)]


def test_nobody_writes_over_the_parts_of_a_commit_before_all_have_the_next_one():
    def die(rank):
        raise CommAborted("died")

    first, second, third = buffers_after(None, barrier=die)
    assert restored_by([first, second, third]) == [([float(rank)], [1, 1], 1) for rank in range(3)]
    assert restored_by([first, new_process(), third]) == [([float(rank)], [1, 1], 1) for rank in range(3)]


def test_snapshots_take_three_times_the_memory_of_the_parts_of_a_rank(tmp_path):
    """Its own once, and those of the rank whose buddy it is twice."""
    buffers_after(tmp_path, values=1 << 20)
    for rank in range(3):
        sizes = [path.stat().st_size for path in tmp_path.glob(f"slot-{rank}-*")]
        assert 3 <= sum(sizes) / (1 << 23) < 3.1, sizes


# Damaged shared state ---------------------------------------------------------------------------------------


def with_damaged_shared_state(*ranks):
    pairs = buffers_after(None)
    for rank in ranks:
        (snapshot,) = (each for each in pairs[rank][1].snapshots() if each.whole)
        snapshot.arrays[0][:] = 7  # shared ones come first
    return pairs


@pytest.mark.parametrize("damaged", [(0,), (0, 2)])
def test_damaged_shared_state_is_neither_kept_nor_sent_to_others(damaged):
    first, second, third = with_damaged_shared_state(*damaged)
    assert [shared for _, shared, _ in restored_by([first, second, third])] == [[2, 2]] * 3
    assert [shared for _, shared, _ in restored_by([first, second, new_process()])] == [[2, 2]] * 3


def test_where_all_copies_of_the_shared_state_are_damaged_all_raise_an_error_that_names_it():
    pairs = with_damaged_shared_state(0, 1, 2)
    with pytest.raises(LostStateError, match="the shared state in commit 2: all copies are damaged"):
        restored_by(pairs)
