"""Private state of which some copies are damaged: others are used."""

import numpy as np
import pytest

from bagua_comm import Own
from bagua_comm.elastic.snapshot import parts
from bagua_comm.elastic.snapshot.commit import commit
from bagua_comm.elastic.snapshot.restore import Restore, newest
from bagua_comm.elastic.snapshot.shards import LostStateError
from bagua_comm.elastic.snapshot.snapshots import Buffer, snapshots_in
from bagua_comm.testing import run_ranks


def restored(folder, damaged, *, hosts="aaa", trainers=3, lengths=(1, 1, 1)):
    """What new processes on the hosts of dead ones restore; the private value of rank n was n.

    Args:
        folder: Has a folder for each host.
        damaged: The damaged snapshots, as (process, whose state).
        hosts: The hosts of the processes.
        trainers: How many processes restore.
        lengths: Of the arrays of the ranks.
    """

    def write(comm):
        rank, value = comm.rank, np.full(lengths[comm.rank], comm.rank, np.float64)
        (folder / hosts[rank]).mkdir(exist_ok=True)
        buffer = Buffer("a", folder / hosts[rank], rank)
        tree = Own(value, "mean")
        commit(comm, buffer, lambda: parts.packed(tree), run="run", version=1, buddies=[1, 2, 0])
        for snapshot in buffer.snapshots():
            if (rank, snapshot.header["rank"]) in damaged:
                snapshot.arrays[0][:] = 7

    def read(comm):
        found = snapshots_in(folder / hosts[comm.rank], except_of=-1)
        sources = newest(comm.allgather_object([each.info for each in found]))
        content = Restore(comm, sources, found, range(trainers), hosts[:trainers]).run()
        return content.tree().value.tolist()

    run_ranks(3, write)
    return run_ranks(trainers, read)


def test_a_process_uses_no_damaged_file_of_the_dead_rank_that_it_replaces(tmp_path):
    """The file of its buddy, which it can read as well, is intact."""
    assert restored(tmp_path, {(0, 0)}) == [[0], [1], [2]]


def test_the_copy_of_another_process_takes_the_place_of_a_damaged_one(tmp_path):
    assert restored(tmp_path, {(0, 0), (2, 1)}, hosts="abc") == [[0], [1], [2]]


def test_damaged_values_do_not_enter_the_mean_of_fewer_ranks(tmp_path, caplog):
    assert restored(tmp_path, {(0, 0), (1, 0)}, trainers=2) == [[1.5], [1.5]]
    assert "the private state of ranks [0] in commit 1 is lost" in caplog.text


def test_where_all_copies_of_arrays_that_nothing_replaces_are_damaged_all_raise_an_error(tmp_path):
    with pytest.raises(LostStateError, match=r"the private state of rank . in commit 1"):
        restored(tmp_path, {(n, m) for n in range(3) for m in range(3)}, lengths=(1, 2, 3))
