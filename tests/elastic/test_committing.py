"""Commits for which a rank has no room: an error on all ranks alike, and the commit before stays whole."""

import errno
import gc
import os
import re
import threading

import numpy as np
import pytest

from bagua_comm import ArrayError, Own
from bagua_comm.elastic import State, run
from bagua_comm.elastic.snapshot import slot as slots
from bagua_comm.elastic.snapshot.snapshots import Snapshot
from bagua_comm.live import writer as live
from bagua_comm.testing.fleets import ThreadJob, run_fleet

OWN, COPY, PARTS = "slot-1-[ab]-own", "slot-1-[ab]-for-0", "slot-1-parts"
"""Files of process 1: its own slot, that of the rank whose buddy it is, and that of its own parts with a rule."""


@pytest.fixture
def full(monkeypatch):
    """Add the pattern of a file's name, and there is no room for it any more."""
    patterns, extend = set(), slots._extend

    def find_room(path, size):
        if any(re.fullmatch(pattern, path.name) for pattern in patterns):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extend(path, size)

    monkeypatch.setattr(slots, "_extend", find_room)
    return patterns


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Copies lie in files."""
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))


def training(job, grow, full, pattern, *, dies):
    """Three ranks that keep more from step 3 on, for which process 1 has no room; what each of them has seen."""

    def body(fleet):
        state = State(step=0, notes="", own=Own([np.zeros(2)], "first"))

        @run(state, fleet=fleet)
        def train(comm):
            begun = state.step, state.notes[:2], state.own[0].tolist()[:2]
            while state.step < 5:
                state.step += 1
                state.own[0][:] += comm.rank
                if state.step == 3 and begun[0] == 0:
                    grow(state)
                    full.add(pattern)
                    comm.barrier()
                    with pytest.raises(ArrayError, match=r"commit: rank 1: .*No space.*before is still there"):
                        state.commit()
                    comm.barrier()
                    full.clear()
                    comm.barrier()
                    if dies:
                        job.kill(0, 1, 2)
                state.commit()
            return begun, state.own[0].tolist()[:2]

        return train

    return body


def longer_text(state):
    state.notes = "no" * 40_000


def larger_array(state):
    state.own = [np.full(200_000, state.own[0][0])]


CASES = pytest.mark.parametrize(
    ("grow", "pattern"),
    [(larger_array, PARTS), (larger_array, COPY), *((longer_text, pattern) for pattern in (OWN, COPY, PARTS))],
)


@CASES
def test_without_room_all_ranks_raise_and_train_on(full, grow, pattern):
    job = ThreadJob(3)
    outcomes = run_fleet(job, training(job, grow, full, pattern, dies=False))
    expected = [((0, "", [0.0] * 2), [5.0 * rank] * 2) for rank in range(3)]
    assert [outcome.get("result", outcome) for outcome in outcomes] == expected


@CASES
def test_without_room_the_commit_before_stays_whole(full, grow, pattern):
    job = ThreadJob(3)
    outcomes = run_fleet(job, training(job, grow, full, pattern, dies=True))
    assert all("killed" in outcome for outcome in outcomes), outcomes
    job = ThreadJob(3)
    again = run_fleet(job, training(job, grow, full, pattern, dies=False))
    expected = [((2, "", [2.0 * rank] * 2), [5.0 * rank] * 2) for rank in range(3)]
    assert [outcome.get("result", outcome) for outcome in again] == expected


def test_a_rank_that_goes_on_after_a_failed_commit_is_not_shown_as_committing(full, monkeypatch):
    shown, states = [], []
    monkeypatch.setattr(live, "note", shown.append)

    def body(fleet):
        state = State(step=0, notes="")

        @run(state, fleet=fleet)
        def train(comm):
            state.commit()
            state.notes = "x" * (1 << 20)
            full.add("slot-.*")
            with pytest.raises(ArrayError, match="No space"):
                state.commit()
            states.extend(shown[-2:])

        return train

    assert [outcome.get("error") for outcome in run_fleet(ThreadJob(1), body)] == [None]
    assert states == ["committing", "training"]


def test_without_memory_for_the_first_snapshot_all_ranks_raise(full):
    full.add("slot-0-[ab]-own")
    with_room = training(None, None, full, None, dies=False)
    errors = [outcome["error"] for outcome in run_fleet(ThreadJob(3, wanted=2), with_room)]
    assert {str(error) for error in errors} == {
        "elastic.run: process 0 cannot keep the initial state: [Errno 28] No space left on device"
    }
    assert {type(error) for error in errors} == {ArrayError}


def test_snapshots_of_dead_processes_are_removed_once_the_others_have_committed(tmp_path):
    gc.collect()  # what the processes of other tests had
    job, found, kept = ThreadJob(3), [], []

    def body(fleet):
        state = State(step=0, own=Own([np.zeros(2)], "sum"))

        @run(state, fleet=fleet)
        def train(comm):
            comm.barrier()
            if comm.rank == 0:
                found.append(sorted({int(path.name.split("-")[1]) for path in tmp_path.glob("slot-*")}))
                # The thread that stands for the dead process may still have the one that it was committing.
                kept.append([x for x in gc.get_objects() if type(x) is Snapshot and x.committed])
            comm.barrier()
            while state.step < 4:
                state.step += 1
                if state.step == 3:
                    job.kill(1)
                state.commit()

        return train

    outcomes = run_fleet(job, body)
    assert [outcome["error"] for outcome in outcomes if "error" in outcome] == []
    assert found == [[0, 1, 2], [0, 2]]
    assert kept == [[], []], "whoever trains has no use for what it has read, and would keep its memory"
    assert list(tmp_path.glob("slot-*")) == []


def test_a_process_that_can_open_no_more_files_leaves_out_the_snapshots_of_others(monkeypatch, caplog):
    """It still trains on: the others have the same commit."""
    job, mapped, is_out = ThreadJob(3), slots._mapped, threading.Event()

    def map_own(path, size):
        if is_out.is_set() and threading.current_thread() in seen:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return mapped(path, size)

    monkeypatch.setattr(slots, "_mapped", map_own)
    seen = []

    def body(fleet):
        state = State(step=0, total=np.zeros(2))
        if fleet.me == 0:
            seen.append(threading.current_thread())

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < 5:
                state.step += 1
                state.total += comm.allreduce(np.ones(2), op="avg")
                if state.step == 3 and fleet.me == 1:
                    is_out.set()
                    job.kill(1)
                state.commit()
            return state.total.tolist()

        return train

    first, second, third = run_fleet(job, body)
    assert [first.get("result", first), third.get("result", third)] == [[5.0] * 2] * 2
    assert "killed" in second
    assert re.search("slot-[12]-[ab]-own cannot be read, and is left out: .*Too many open files", caplog.text)
