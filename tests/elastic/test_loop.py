"""Training on threads that die: the ranks that continue, their commit, and their state."""

import gc
import itertools
import threading
import time

import numpy as np
import pytest

import bagua_comm
from bagua_comm import ArrayError, BootstrapError, CommAborted, RankFailed, optim
from bagua_comm.elastic import State, loop, run
from bagua_comm.elastic.loop import _without_frames
from bagua_comm.flight import read_folder
from bagua_comm.testing.fleets import ThreadFleet, ThreadJob, run_fleet

STEPS = 6


def counting(job, *, kills=(), min_ranks=1):
    """A program that adds up the mean of ones; process n dies in step s for every (n, s) of `kills`."""
    kills = set(kills)

    def body(fleet):
        total = np.full(3, 100.0 * fleet.me)
        state = State(total=total, step=0)

        @run(state, min_ranks=min_ranks, fleet=fleet)
        def train(comm):
            while state.step < STEPS:
                total[...] += comm.allreduce(np.ones(3), op="avg")
                state.step += 1
                if (fleet.me, state.step) in kills:
                    kills.discard((fleet.me, state.step))
                    job.kill(fleet.me)
                state.commit()
            return comm.rank, comm.size, total.copy()

        return train, state.history

    return body


def test_a_rank_dies_and_the_others_end_with_the_values_of_an_undisturbed_run():
    job = ThreadJob(3)
    first, second, third = run_fleet(job, counting(job, kills=[(1, 4)]))
    assert "killed" in second
    for outcome, rank in ((first, 0), (third, 1)):
        (got, size, total), (change,) = outcome["result"]
        assert (got, size) == (rank, 2)
        np.testing.assert_array_equal(np.full(3, float(STEPS)), total)
        assert change.commit == 4  # the first commit is that of the start
        assert [death.process.number for death in change.dead] == [1]
        assert change.recovery_s > 0


def test_bagua_top_is_told_the_stages_of_a_job(monkeypatch):
    noted = []
    monkeypatch.setattr(loop.live, "note", noted.append)
    job = ThreadJob(2, wanted=1)
    run_fleet(job, counting(job))
    assert noted.count("rendezvous") >= 2
    assert "standing by" in noted
    assert noted.count("committing") == STEPS
    assert noted.count("training") == STEPS + 1


def test_a_failure_before_any_commit_says_that_training_starts_again(caplog):
    def outcome(kill):
        caplog.clear()
        job = ThreadJob(3)
        run_fleet(job, counting(job, kills=[(1, kill)]))
        return "no step had been committed: training starts again from its initial state" in caplog.text

    assert outcome(kill=1)  # before the commit of its step
    assert not outcome(kill=2)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": {"b": x}, "n": 1}, lambda x: (1, [x])])
def test_arrays_and_optimizers_in_containers_are_restored_in_place(wrap):
    """Training holds them by names of its own, as `plan.allocate` and `plan.cut` return them."""
    job = ThreadJob(4, wanted=3)

    def body(fleet):
        total, sgd = np.full(3, 100.0 * fleet.me), optim.SGD(lr=1.0, momentum=0.5)
        memory = sgd.init(total)
        state = State(arrays=wrap(total), states=wrap(memory), step=0, losses=[])

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < STEPS:
                sgd.step(total, comm.allreduce(np.full(3, -1.0), op="avg"), memory)
                state.step += 1
                state.losses.append(float(total[0]))
                if (fleet.me, state.step) == (1, 4):
                    job.kill(fleet.me)
                state.commit()
            return total.copy(), state.losses

        return train

    expected, momentum, losses = 0.0, 0.0, []
    for _ in range(STEPS):
        momentum = 0.5 * momentum + 1
        expected += momentum
        losses.append(expected)
    outcomes = [outcome["result"] for outcome in run_fleet(job, body) if "result" in outcome]
    assert len(outcomes) == 3
    for total, seen in outcomes:
        np.testing.assert_allclose(total, expected)
        np.testing.assert_allclose(seen, losses)


def test_arrays_that_shared_memory_when_the_state_was_made_get_their_own_values():
    """As in State(w=w, best=[w]), where best is a copy later: a process that joins has one array twice."""
    job = ThreadJob(4, wanted=3)

    def body(fleet):
        total = np.zeros(3)
        state = State(total=total, best=[total], same=[total], sums=[np.zeros(2)] * 2, step=0)

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < STEPS:
                total[...] += comm.allreduce(np.ones(3), op="avg")
                state.step += 1
                if state.step == 2:
                    state.best = [total.copy()]
                    state.sums = [np.full(2, 5.0), np.full(2, 6.0)]
                if (fleet.me, state.step) == (1, 4):
                    job.kill(fleet.me)
                state.commit()
            return total.tolist(), state.best[0].tolist(), state.sums[0][0], state.sums[1][0]

        return train

    outcomes = [outcome["result"] for outcome in run_fleet(job, body) if "result" in outcome]
    assert outcomes == [([float(STEPS)] * 3, [2.0] * 3, 5.0, 6.0)] * 3


def test_an_object_that_is_put_into_the_state_later_is_refused_on_all_ranks():
    def body(fleet):
        state = State(kept=[])

        @run(state, fleet=fleet)
        def train(comm):
            state.kept.append(optim.SGD(lr=1.0).init(np.zeros(2)))
            with pytest.raises(ArrayError, match=r"kept\[0\] is an object that was put into the state later"):
                state.commit()
            return True

        return train

    assert all(outcome["result"] for outcome in run_fleet(ThreadJob(2), body))


@pytest.mark.parametrize("step_s", [86400.0, -86400.0])
def test_a_clock_that_is_set_during_a_recovery_changes_no_time_that_is_measured(monkeypatch, step_s):
    clock = itertools.count(1e9, step_s)  # set by a day between any two looks at it
    monkeypatch.setattr(time, "time", lambda: next(clock))
    job = ThreadJob(3)
    first, _, third = run_fleet(job, counting(job, kills=[(1, 4)]))
    for outcome in (first, third):
        _, (change,) = outcome["result"]
        assert 0 < change.recovery_s < 60


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_record_of_the_last_calls_is_written_when_training_continues_or_ends(tmp_path, goes_on):
    seen, all_have_looked = [], threading.Barrier(3)

    def body(fleet):
        state = State(step=0)

        @run(state, min_ranks=1 if goes_on else 3, fleet=fleet)
        def train(comm):
            comm.flight.folder = tmp_path / str(comm.size)
            seen.extend(tmp_path.glob("3/rank_[02].json"))
            if comm.size == 3:
                all_have_looked.wait(10)  # the first process to notice the death may write before others
                if comm.rank == 1:
                    job.kill(fleet.me)
            comm.barrier()
            state.commit()

    job = ThreadJob(3)
    run_fleet(job, body)
    assert seen == []  # not while the others wait
    assert {0, 2} <= {record.rank for record in read_folder(tmp_path / "3")}


def test_a_spare_replaces_a_dead_rank():
    job = ThreadJob(4, wanted=3)
    outcomes = run_fleet(job, counting(job, kills=[(1, 2)]))
    ranks = {n: outcome["result"][0][0] for n, outcome in enumerate(outcomes) if "result" in outcome}
    assert ranks == {0: 0, 3: 1, 2: 2}
    for n in ranks:
        np.testing.assert_array_equal(np.full(3, float(STEPS)), outcomes[n]["result"][0][2])


def test_a_spare_that_is_never_needed_returns_nothing():
    outcomes = run_fleet(job := ThreadJob(3, wanted=2), counting(job))
    assert outcomes[2]["result"] == (None, [])


def test_too_few_left_raises_on_all_of_them_and_names_the_dead():
    job = ThreadJob(3)
    first, _, third = run_fleet(job, counting(job, kills=[(1, 3)], min_ranks=3))
    for outcome in (first, third):
        assert isinstance(outcome["error"], RankFailed)
        assert (
            str(outcome["error"])
            == "2 ranks are left, and min_ranks is 3; dead: process 1 (on host, pid 1001) died"
        )


def test_more_ranks_wanted_than_there_are_is_an_error_at_the_start():
    job = ThreadJob(2)
    for outcome in run_fleet(job, counting(job, min_ranks=3)):
        with pytest.raises(ArrayError, match="min_ranks is 3, but only 2 ranks can train"):
            raise outcome["error"]


def test_an_error_of_the_program_passes_untouched():
    def body(fleet):
        @run(State(step=0), fleet=fleet)
        def train(comm):
            raise KeyError("mine")

    for outcome in run_fleet(ThreadJob(2), body):
        assert isinstance(outcome["error"], KeyError)


def test_every_communicator_of_training_has_the_order_that_was_asked_for():
    job, seen = ThreadJob(2), []

    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet, op_order="any")
        def train(comm):
            seen.append((comm.size, comm.op_order, comm.dup().op_order))
            if fleet.me == 1:
                job.kill(fleet.me)
            comm.barrier()

        return train, state.history

    run_fleet(job, body)
    assert set(seen) == {(2, "any", "any"), (1, "any", "any")}


def test_what_no_training_can_begin_with_is_refused():
    with pytest.raises(ArrayError, match="op_order is 'tree'"):
        run(State(step=0), op_order="tree")
    with pytest.raises(ArrayError, match=r"state is {'step': 0}, expected an elastic.State"):
        run({"step": 0})
    with bagua_comm.connect(alone=True), pytest.raises(BootstrapError, match="a communicator is open already"):
        run(State(step=0))(lambda comm: None)


@pytest.mark.parametrize("where", ["standing by", "the first rendezvous"])
def test_a_spare_raises_when_all_trainers_are_dead(monkeypatch, where):
    reached, killed, stand_by = threading.Event(), threading.Event(), ThreadFleet.stand_by

    def note(fleet, training):
        reached.set()
        return stand_by(fleet, training)

    def watch(number, what):
        if number == 2 and what == "broadcast_object" and not reached.is_set():  # of the initial state
            reached.set()
            assert killed.wait(10)

    def body(fleet):
        @run(state := State(step=0), fleet=fleet)
        def train(comm):
            state.commit()
            if where == "standing by":
                comm.barrier()
            assert reached.wait(10)
            job.kill(0, 1)
            killed.set()
            comm.barrier()

    job = ThreadJob(3, wanted=2)
    if where == "standing by":
        monkeypatch.setattr(ThreadFleet, "stand_by", note)
    else:
        job.watch = watch
    with pytest.raises(RankFailed, match=r"no snapshot of the state is left; dead: process 0 .* died; process 1"):
        raise run_fleet(job, body)[2]["error"]


def test_errors_that_caused_each_other_lose_their_frames():
    first, second = RankFailed("first"), RankFailed("second")
    first.__cause__, second.__context__ = second, first
    with pytest.raises(RankFailed) as caught:
        raise first
    assert _without_frames(caught.value).__traceback__ is None


def test_a_rendezvous_needs_no_communicator_for_devices_and_large_arrays(monkeypatch):
    made, connect = [], ThreadFleet.connect

    def note(fleet, members, *, control=False):
        made.append((fleet.me, list(members), control))
        return connect(fleet, members, control=control)

    monkeypatch.setattr(ThreadFleet, "connect", note)
    job = ThreadJob(3, wanted=2)
    run_fleet(job, counting(job, kills=[(1, 4)]))
    # The first rendezvous is the exception: so spares have made such a communicator once.
    first = [(me, [0, 1, 2], False) for me in (0, 1, 2)] + [(me, [0, 1], False) for me in (0, 1)]
    second = [(me, [0, 2], control) for me in (0, 2) for control in (True, False)]
    assert sorted(made) == sorted(first + second)


def test_collections_after_a_death_skip_what_was_there_before_the_training(monkeypatch):
    """Imports of PyTorch alone are 360,000 objects, which took 0.3 s of each recovery."""
    job, counts = ThreadJob(1), []

    def body(fleet):
        monkeypatch.setattr(loop.start, "start", lambda timeout_s: fleet)
        run(State(step=0))(lambda comm: counts.append(gc.get_freeze_count()))
        counts.append(gc.get_freeze_count())

    gc.unfreeze()  # the suite has frozen what it imports
    try:
        assert "error" not in run_fleet(job, body)[0]
    finally:
        gc.freeze()
    assert counts[0] > 10_000
    assert counts[1] == 0


class Misuse(ArrayError, RuntimeError):
    """As errors of bagua_torch, which PyTorch's users catch as a RuntimeError."""


@pytest.mark.parametrize("kind", [ArrayError, Misuse, FileNotFoundError, KeyError])
def test_a_rank_whose_peer_has_ended_by_the_same_error_does_not_train_again(kind):
    job, entries, first_ended = ThreadJob(2), [], threading.Event()

    def body(fleet):
        def train(comm):
            entries.append(fleet.me)
            assert fleet.me == 1 or first_ended.wait(20)
            raise kind("the model has another shape on all ranks")

        try:
            run(State(step=0), fleet=fleet)(train)
        finally:
            if fleet.me == 1:
                first_ended.set()

    errors = [outcome.get("error") for outcome in run_fleet(job, body)]
    assert [error.args for error in errors] == [("the model has another shape on all ranks",)] * 2
    assert sorted(entries) == [0, 1]


class Kept:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_an_object_that_is_not_made_again_is_forgotten_at_the_next_commit():
    def body(fleet):
        state, entered = State(step=0), []

        @run(state, fleet=fleet)
        def found(comm):
            entered.append(None)
            kept = Kept()
            if len(entered) != 2:
                comm.engine_registry.keep(kept)
            if len(entered) == 1:
                kept.value = 7
            if len(entered) < 3:
                state.commit()
                raise CommAborted("once more")
            return kept.value, len(entered)

        return found

    outcomes = run_fleet(ThreadJob(2), body)
    assert [each.get("result") for each in outcomes] == [(0, 3)] * 2, outcomes
