"""The values that users put into a state, and those that they find there."""

import collections
import itertools
import threading

import numpy as np
import pytest
from support.waiting import until

from bagua_comm import ArrayError, CommAborted, CommError, Own, Plan, TensorSpec, UnsupportedError
from bagua_comm.elastic import State, run
from bagua_comm.elastic.session import Session
from bagua_comm.elastic.snapshot.restore import Content, Restore
from bagua_comm.elastic.snapshot.snapshots import Buffer
from bagua_comm.testing.fleets import ThreadJob, run_fleet


class Counter:
    """An object with a state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, saved):
        self.count = saved["count"]


def test_plain_values_are_replaced_and_others_are_not():
    state = State(step=0, weights=np.zeros(2), counter=Counter())
    state.step += 2
    state.weights += 1  # in place
    assert state.step == 2
    np.testing.assert_array_equal(np.ones(2), state.weights)
    with pytest.raises(ArrayError, match="weights is a ndarray, which cannot be replaced"):
        state.weights = np.zeros(2)
    with pytest.raises(ArrayError, match="counter is a Counter, which cannot be replaced; load another state"):
        state.counter = Counter()
    with pytest.raises(AttributeError, match="State has no part 'epoch', only 'step', 'weights', 'counter'"):
        state.epoch = 1
    with pytest.raises(AttributeError, match="no part 'epoch'"):
        state.epoch  # noqa: B018


@pytest.mark.parametrize("name", ["commit", "history", "on_change", "_parts"])
def test_names_of_the_class_are_refused(name):
    with pytest.raises(ArrayError, match=f"State: '{name}' cannot be the name of a part"):
        State(**{name: 0})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "x cannot be kept: tree is a builtins.object"),
        ({"a": [1, {2}]}, r"x cannot be kept: tree\['a'\]\[1\] is a builtins.set"),
        (Counter, "x is the class Counter; give an object of it"),
        (np.array(["a"]), "x cannot be kept: tree is an array of <U1"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_by_name(value, text):
    with pytest.raises(UnsupportedError, match=f"State: {text}"):
        State(x=value)


def test_an_own_needs_a_rule():
    with pytest.raises(ArrayError, match="x is an Own without a rule, but the number of ranks may change"):
        State(x=Own(1))
    with pytest.raises(ArrayError, match="x cannot be kept: it has an Own inside"):
        State(x=[Own(1, "first")])


def test_a_commit_outside_of_a_training_is_an_error():
    with pytest.raises(CommError, match=r"there is no training; call it in the function that elastic.run calls"):
        State(step=0).commit()


def test_all_ranks_begin_with_the_values_of_rank_0_except_per_rank_state():
    def body(fleet):
        counter = Counter()
        counter.count = fleet.me
        state = State(step=fleet.me, x=np.full(3, fleet.me), counter=counter, own=Own(fleet.me, "first"))

        @run(state, fleet=fleet)
        def train(comm):
            return state.step, state.x.tolist(), counter.count, state.own

        return train

    results = [outcome["result"] for outcome in run_fleet(ThreadJob(3), body)]
    assert results == [(0, [0, 0, 0], 0, n) for n in range(3)]


def test_a_later_value_that_cannot_be_stored_is_an_error_on_all_ranks():
    def body(fleet):
        state = State(step=0, notes=[])

        @run(state, fleet=fleet)
        def train(comm):
            if comm.rank == 1:
                state.notes = [object()]
            with pytest.raises(UnsupportedError, match=r"commit: rank 1: tree.*'notes'.*object.*is still there"):
                state.commit()
            state.notes = []
            state.commit()
            return True

        return train

    assert all(outcome["result"] for outcome in run_fleet(ThreadJob(2), body))


def rules(body_of):
    """Four ranks train, one dies after its first commit; what the three others have then."""
    job = ThreadJob(4)

    def body(fleet):
        state = body_of(fleet)

        @run(state, fleet=fleet)
        def train(comm):
            if comm.size == 4:
                state.commit()
                if comm.rank == 2:
                    job.kill(2)
                comm.barrier()
            return {name: state.__getattr__(name) for name in state._internals.parts}

        return train

    first, second, _, fourth = run_fleet(job, body)
    return [each["result"] for each in (first, second, fourth)]


def test_per_rank_state_moves_to_another_number_of_ranks_by_its_rule():
    def state(fleet):
        x = np.array([1.0, 2.0**fleet.me])
        return State(
            mean=Own(x.copy(), "mean"),
            sum=Own(x.copy(), "sum"),
            first=Own([fleet.me], "first"),
            drop=Own(x.copy(), "drop"),
            gone=Own(fleet.me, "drop"),
        )

    for n, found in zip((0, 1, 3), rules(state), strict=True):
        np.testing.assert_allclose([1, 15 / 4], found["mean"])
        np.testing.assert_allclose([4 / 3, 15 / 3], found["sum"])
        assert found["first"] == [0]
        np.testing.assert_array_equal([1, 2.0**n], found["drop"])  # arrays stay as they are
        assert found["gone"] is None


def test_survivors_keep_their_state_when_a_rank_and_its_buddy_die():
    job = ThreadJob(5, wanted=3)

    def body(fleet):
        own = {rule: Own(np.zeros(2), rule) for rule in ("mean", "sum", "first", "drop")}
        state = State(weights=np.zeros(2), step=0, **own)

        @run(state, fleet=fleet)
        def train(comm):
            if not state.history:
                for x in (state.weights, state.mean, state.sum, state.first, state.drop):
                    x[...] = fleet.me + 1.0
                state.commit()
                comm.barrier()  # all have committed
                job.kill(1, 2)
                comm.barrier()
            return comm.rank, {name: getattr(state, name)[0] for name in ("weights", *own)}

        return train

    found = dict(each["result"] for each in run_fleet(job, body) if each.get("result"))
    # Rank 1 had its own snapshot and rank 2's; another one of rank 2 is on rank 0, its buddy.
    assert set(found[0].values()) == {1.0}
    assert set(found[2].values()) == {3.0}
    assert found[1] == {"weights": 2.0, "mean": 2.0, "sum": 0.0, "first": 1.0, "drop": 0.0}


def test_arrays_of_other_shapes_on_each_rank_are_those_of_one_rank_on_fewer():
    def state(fleet):
        return State(rows=Own([np.full(2 + fleet.me, fleet.me, np.float64)], "mean"))

    for found in rules(state):
        np.testing.assert_array_equal(found["rows"][0], [0, 0])


def test_a_value_that_differs_without_a_mark_is_found():
    def state(fleet):
        return State(weights=np.zeros(3), count=np.zeros(2, np.int64), text="")

    def body_of(fleet):
        made = state(fleet)
        commit = made.commit

        def differ():
            made.weights[...] = fleet.me
            made.count[...] = fleet.me + 5
            made.text = f"rank {fleet.me}"
            commit()

        made.__dict__["commit"] = differ
        return made

    for found in rules(body_of):
        np.testing.assert_array_equal(np.full(3, 6 / 4), found["weights"])
        np.testing.assert_array_equal([5, 5], found["count"])
        assert found["text"] == "rank 0"


def test_a_callback_is_called_before_training_is_entered_again():
    job, seen = ThreadJob(2), []

    def body(fleet):
        state = State(step=0, rate=0.5)

        @state.on_change
        def adapt(change):
            seen.append((fleet.me, len(change.before), len(change.after), state.step))
            state.rate = 0.1 * len(change.after)

        @run(state, fleet=fleet)
        def train(comm):
            state.step += 1
            state.commit()
            if fleet.me == 0 and comm.size == 2:
                job.kill(0)
            comm.barrier()
            return state.rate

        return train

    assert run_fleet(job, body)[1]["result"] == 0.1
    assert seen == [(1, 2, 1, 1)]


def test_a_process_that_waits_is_admitted_at_the_next_rendezvous():
    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet)
        def train(comm):
            while not (state.step > 5 and comm.size == 3):
                state.step += 1
                if fleet.me == 1 and state.step == 3:
                    job.kill(1)
                state.commit()
                if state.step == 5 and comm.size == 2:
                    if comm.rank == 0:
                        job.start(body, 3)
                    until(lambda: job.joining)
                    raise CommAborted("another waits to join")
            return comm.rank, comm.size

        return train, [len(change.after) for change in state.history]

    job = ThreadJob(3)
    first, _, third = run_fleet(job, body)
    assert first["result"] == ((0, 3), [2, 3])
    assert third["result"] == ((1, 3), [2, 3])


def test_all_ranks_begin_with_the_values_of_rank_0_also_when_they_read_its_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))
    written, hold, read = threading.Event(), Session.hold_initial, Session.snapshots
    calls = collections.Counter()

    def hold_initial(self, run):
        problem = hold(self, run)
        written.set()
        return problem

    def snapshots(self):
        calls[self] += 1
        if calls[self] == 2:  # a process that reads again, while rank 0 writes
            written.wait(10)
        return read(self)

    monkeypatch.setattr(Session, "hold_initial", hold_initial)
    monkeypatch.setattr(Session, "snapshots", snapshots)

    def body(fleet):
        state = State(x=np.full(2, 7.0 * (fleet.me + 1)), mark=fleet.me)
        return run(state, fleet=fleet)(lambda comm: (state.x.tolist(), state.mark))

    assert [outcome["result"] for outcome in run_fleet(ThreadJob(3), body)] == [([7.0, 7.0], 0)] * 3


def test_a_training_continues_from_the_files_of_one_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))

    def body(fleet):
        state = State(step=0, x=np.zeros(4), own=Own(np.zeros(2), "first"))

        @run(state, fleet=fleet)
        def train(comm):
            begun = state.step
            while state.step < 5:
                state.step += 1
                state.x[...] += 1
                state.own[...] += comm.rank
                state.commit()
                if begun == 0 and state.step == 3:
                    job.kill(0, 1, 2)
            return begun, state.x.tolist(), state.own.tolist()

        return train

    job = ThreadJob(3)
    assert all("killed" in outcome for outcome in run_fleet(job, body))
    again = run_fleet(ThreadJob(3), body)
    assert [outcome["result"] for outcome in again] == [(3, [5.0] * 4, [5.0 * n] * 2) for n in range(3)]
    assert not list(tmp_path.glob("slot*"))


def test_a_commit_of_a_process_declared_dead_is_not_that_of_the_others(tmp_path, monkeypatch):
    """It is written late, with the number of a commit of the ranks that continued without it."""
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))
    went_on = threading.Event()

    buffer_write = Buffer.write
    its_writes = itertools.count(1)

    def write(self, packed, layout):
        if threading.current_thread().name == "process 1" and next(its_writes) == 4:  # the commit of step 3
            job.kill(1)
            assert went_on.wait(20)
        return buffer_write(self, packed, layout)

    monkeypatch.setattr(Buffer, "write", write)

    def body(fleet):
        state = State(step=0, x=np.zeros(4))

        @run(state, fleet=fleet)
        def train(comm):
            if comm.size == 1:  # the state that it continues from is committed
                went_on.set()
                job.threads[1].join(20)
                job.kill(0)
            begun = state.step
            while state.step < 5:
                state.step += 1
                state.x += 1
                if state.step == 3 and begun == 0 and fleet.me == 0:
                    comm.barrier()  # the other one is gone
                state.commit()
            return begun, state.x.tolist()

        return train

    job = ThreadJob(2)
    assert all("killed" in outcome for outcome in run_fleet(job, body))
    job = ThreadJob(2)
    again = run_fleet(job, body)
    assert [outcome["result"] for outcome in again] == [(2, [5.0] * 4)] * 2


def test_nothing_is_read_of_another_process_once_it_may_write_again(tmp_path, monkeypatch):
    """Process 0 writes its first commit, and its file makes no sense, while process 1 takes what it found."""
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))
    writes, has_taken = threading.Event(), threading.Event()
    restored, tree, buffer_write = Restore.run, Content.tree, Buffer.write

    def late(self):
        content = restored(self)
        assert threading.current_thread().name == "process 0" or writes.wait(20)
        return content

    def take(self):
        found = tree(self)
        if threading.current_thread().name == "process 1":
            has_taken.set()
        return found

    def write(self, packed, count):
        pending = buffer_write(self, packed, count)
        if threading.current_thread().name == "process 0" and not writes.is_set():
            self.local.finish(99, {"no": "header"}, pending.size)
            writes.set()
            assert has_taken.wait(20)
        return pending

    def body(fleet):
        state = State(step=0, x=np.zeros(4))

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < 3:
                state.step += 1
                state.x += 1
                state.commit()
                if state.step == 2 and not again:
                    job.kill(0, 1)
            return state.x.tolist()

        return train

    again = False
    job = ThreadJob(2)
    assert all("killed" in outcome for outcome in run_fleet(job, body))
    monkeypatch.setattr(Restore, "run", late)
    monkeypatch.setattr(Content, "tree", take)
    monkeypatch.setattr(Buffer, "write", write)
    again = True
    assert [outcome["result"] for outcome in run_fleet(ThreadJob(2), body)] == [[3.0] * 4] * 2


def test_device_arrays_come_back_in_place(device):
    import cupy

    def body(fleet):
        cupy.cuda.Device(0).use()
        x = cupy.zeros(5, np.float32)
        state = State(x=x, step=0)

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < 6:
                x.set(x.get() + 1)
                state.step += 1
                if fleet.me == 0 and state.step == 4:
                    job.kill(0)
                state.commit()
            return x.get().tolist(), x is state.x

        return train

    job = ThreadJob(2)
    outcome = run_fleet(job, body)[1]
    assert outcome == {"result": ([6.0] * 5, True)}


def test_the_memory_of_a_plan_and_its_views_are_restored_in_place():
    job = ThreadJob(3)
    plan = Plan.pack([TensorSpec("a", (3,), "float32"), TensorSpec("b", (2, 2), "float64")])

    def body(fleet):
        flats, others = plan.allocate(), plan.allocate()
        views = plan.cut(others)
        state = State(flats=flats, views=views, step=0)

        @run(state, fleet=fleet)
        def train(comm):
            while state.step < 4:
                flats[0] += 1
                views["b"] += 2
                state.step += 1
                if fleet.me == 1 and state.step == 3:
                    job.kill(1)
                state.commit()
            same = state.flats[0] is flats[0], state.views["b"] is views["b"]
            return flats[0].tolist(), views["b"].tolist(), same

        return train

    first, _, third = run_fleet(job, body)
    assert first == third == {"result": ([4.0] * 3, [[8.0] * 2] * 2, (True, True))}


def test_a_spare_gets_the_mean_of_the_others_where_the_copy_of_its_rank_is_damaged(caplog):
    """Not the same restore again and again, with the same damaged copy."""
    job, found = ThreadJob(4, wanted=3), {}

    def body(fleet):
        own = np.zeros(2)
        state = State(own=Own(own, "mean"), step=0)

        @run(state, fleet=fleet)
        def train(comm):
            found[fleet.me] = own.copy()
            if state.step == 0:
                own[...] = comm.rank + 1
                state.step += 1
                state.commit()
                for snapshot in state._internals.session._newest.snapshots():
                    if not snapshot.whole:  # that of another rank
                        for array in snapshot.arrays.values():
                            array[0] = 7
                comm.barrier()
                if fleet.me == 1:
                    job.kill(1)
                comm.barrier()

    run_fleet(job, body)
    assert {number: value.tolist() for number, value in found.items() if number != 1} == {
        0: [1, 1],
        2: [3, 3],
        3: [2, 2],  # of ranks 0 and 2
    }
    assert "the private state of ranks [1] in commit" in caplog.text
