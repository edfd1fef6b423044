"""Hooks on the calls of communicators, and the one that looks for NaN."""

import logging
import threading

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    ByteGrad,
    CommTimeout,
    Communicator,
    Engine,
    GradientAllReduce,
    NanWatch,
    Plan,
    Point,
    TensorSpec,
)
from bagua_comm.bootstrap.world import World
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def alone():
    return Communicator([LocalTransport()])


def test_hooks_see_the_calls_of_survivors():
    class Last(LocalTransport):
        """The last rank that is alive."""

        def shrink(self, host=None):
            return LocalTransport()

    world, seen = World([Last()], exit_handler=None, op_order="any"), []
    world.on(before=lambda call: seen.append(f"{call.name} of {call.group}"))
    world.on(before=NanWatch())
    survivors = world.shrink()
    assert type(survivors) is World
    assert (survivors.op_order, survivors.tracer, survivors.flight) == ("any", world.tracer, world.flight)
    with pytest.raises(ArrayError, match="rank 0 is about to send nan"):
        survivors.allreduce(np.array([np.nan]))
    assert seen == ["allreduce of world.1"]


def test_hooks_see_inputs_and_results():
    def body(comm):
        seen = []
        comm.on(before=seen.append, after=seen.append)
        comm.allreduce(np.full(2, comm.rank + 1.0), op="max")
        return seen

    before, after = run_ranks(2, body)[0]
    assert (before.name, before.number, before.group, dict(before.detail)["op"]) == (
        "allreduce",
        1,
        "world",
        "max",
    )
    assert before.x.tolist() == [1, 1]
    assert (before.result, before.seconds, before.error) == (None, None, None)
    assert after.result.tolist() == [2, 2]
    assert 0 < after.seconds < 60


def test_a_failure_is_shown_with_its_error():
    def body(comm):
        seen = []
        comm.on(failed=seen.append)
        if comm.rank == 0:
            with pytest.raises(CommTimeout) as raised:
                comm.barrier(timeout_s=0.05)
            (view,) = seen
            assert view.error is raised.value
            assert view.name == "barrier"
            assert view.x is None

    run_ranks(2, body)


def test_a_removed_hook_is_not_called():
    comm, seen = alone(), []
    first, second = (comm.on(before=lambda call, i=i: seen.append(i)) for i in range(2))
    comm.barrier()
    first.remove()
    first.remove()
    comm.barrier()
    second.remove()
    comm.barrier()
    assert seen == [0, 1, 1]
    assert comm.hooks.all == ()


def test_hooks_see_communicators_made_from_theirs_and_no_others():
    comm, seen = alone(), []
    part, beside = comm.dup(), comm.dup()
    part.on(before=lambda call: seen.append(call.group))
    comm.barrier()
    beside.barrier()
    part.barrier()
    part.split(0).barrier()
    with part.lane() as lane:
        lane.submit(lane.comm.barrier).result(20)
    assert seen == ["world.1", "world.1", "world.1.1:0", "world.1", "world.1.2"]


def test_an_error_of_before_ends_the_call_and_leaves_the_communicator_usable():
    comm = alone()

    def refuse(call):
        raise ValueError("no")

    hook = comm.on(before=refuse)
    with pytest.raises(ValueError, match="no"):
        comm.allreduce(np.ones(1))
    hook.remove()
    assert comm.allreduce(np.ones(1)).tolist() == [1]
    assert comm.flight.entries()[0].state == "failed"


def test_an_error_of_after_goes_to_the_caller():
    comm, out = alone(), np.zeros(1)
    hook = comm.on(after=lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        comm.allreduce(np.ones(1), out=out)
    hook.remove()
    assert out.tolist() == [1]  # the call was over
    comm.barrier()


def test_an_error_of_failed_is_a_warning_and_the_error_of_the_call_is_raised():
    def body(comm):
        comm.on(failed=lambda call: 1 / 0)
        if comm.rank == 0:
            comm.barrier(timeout_s=0.05)

    with pytest.warns(RuntimeWarning, match="a hook failed after barrier"), pytest.raises(CommTimeout):
        run_ranks(2, body)


def test_a_hook_may_make_calls_which_no_hook_sees():
    def body(comm):
        seen = []

        def add_up(call):
            seen.append((call.name, call.number, comm.allreduce(np.array(1)).item()))

        comm.on(before=add_up)
        total = comm.allreduce(np.array(5)).item()
        comm.barrier()
        return seen, total

    assert run_ranks(3, body)[2] == ([("allreduce", 1, 3), ("barrier", 3, 3)], 15)


def test_a_hook_may_make_calls_after_one_has_failed():
    def body(comm):
        totals = []

        def refuse(call):
            raise ValueError("no")

        comm.on(before=refuse, failed=lambda call: totals.append(comm.allreduce(np.array(1)).item()))
        with pytest.raises(ValueError, match="no"):
            comm.barrier()
        return totals, comm.guard.is_free

    assert run_ranks(3, body) == [([3], True)] * 3


@pytest.mark.parametrize("functions", [{}, {"before": 3}])
def test_a_hook_that_cannot_be_called_is_refused(functions):
    with pytest.raises(ArrayError, match="on: "):
        alone().on(**functions)


SENT = {
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None, np.zeros(()), root=0),
    "allgather by counts": lambda comm, x: comm.allgather(x, np.zeros(4), counts=[2, 2]),
    "sendrecv": lambda comm, x: comm.sendrecv(x, np.zeros(2), dest=1 - comm.rank, source=1 - comm.rank),
    "allreduce_many": lambda comm, x: comm.allreduce_many([x, x]),
}


@pytest.mark.parametrize("name", SENT)
def test_x_is_the_array_that_this_rank_sends(name):
    def body(comm):
        seen = []
        comm.on(before=lambda call: seen.append(None if call.x is None else call.x.tolist()))
        SENT[name](comm, np.full(2, comm.rank + 1.0))
        return seen[0]

    first, second = run_ranks(2, body)
    assert first == ([1, 1, 1, 1] if name == "allreduce_many" else [1, 1])
    assert second == {"broadcast": None, "scatter": None, "allreduce_many": [2, 2, 2, 2]}.get(name, [2, 2])


# NaN and infinity


def train(comm, algorithm, *, bad, steps=3):
    """Exchange two parameters; in the last step, rank 1 puts `bad` into the second."""
    plan = Plan.pack([TensorSpec("a", (4,), "float32"), TensorSpec("b", (2, 2), "float32")], bucket_bytes=16)
    storage = plan.allocate()
    with Engine(comm, algorithm, plan, storage) as engine:
        for step in range(steps):
            for flat in storage:
                flat[...] = 1
            if step == steps - 1 and comm.rank == 1:
                storage[1][2] = bad
            engine.at(Point.FORWARD)
            engine.ready("a")
            engine.ready("b")
            engine.at(Point.BACKWARD)
            engine.at(Point.STEP)


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), ByteGrad()])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_all_ranks_raise_and_name_rank_bucket_parameter_and_step(algorithm, bad):
    def body(comm):
        comm.on(before=NanWatch())
        with pytest.raises(ArrayError) as raised:
            train(comm, algorithm, bad=bad)
        return str(raised.value)

    first, second = run_ranks(2, body)
    words = f"rank 1 is about to send {bad}, in parameter 'b', element 2 of shape [2, 2], of bucket 1 in step 2"
    assert words in first
    assert first == second


def test_a_log_entry_names_the_first_and_training_continues(caplog):
    watches = [NanWatch("log"), NanWatch("log")]

    def body(comm):
        comm.on(before=watches[comm.rank])
        train(comm, GradientAllReduce(), bad=np.nan)

    with caplog.at_level(logging.ERROR, "bagua_comm"):
        run_ranks(2, body)
    assert watches[0].found is None
    assert "of bucket 1 in step 2" in watches[1].found
    assert [message for message in caplog.messages if "is about to send" in message] == [watches[1].found]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "int32"])
def test_every_dtype_is_looked_at(dtype):
    from bagua_comm.arrays import dtype_named

    comm, x = alone(), np.ones(5, dtype_named(dtype))
    watch = NanWatch()
    comm.on(before=watch)
    comm.allreduce(x)
    assert watch.found is None
    if dtype == "int32":
        return
    x[3] = np.inf
    with pytest.raises(ArrayError, match="in element 3 of an array of shape"):
        comm.allreduce(x)


def test_a_message_with_nan_is_refused_by_its_sender():
    def body(comm):
        comm.on(before=NanWatch())
        if comm.rank == 0:
            with pytest.raises(ArrayError, match="rank 0 is about to send nan"):
                comm.send(np.array([np.nan]), dest=1)
            comm.send(np.array([1.0]), dest=1)
            return []
        return comm.recv(np.array([np.nan]), source=0).tolist()

    assert run_ranks(2, body)[1] == [1]


def test_hooks_of_two_threads_do_not_hide_each_others_calls():
    comm, seen, go = alone(), [], threading.Barrier(2)
    with comm.lane() as lane:
        hook = comm.on(before=lambda call: (go.wait(20), seen.append(call.group)))
        future = lane.submit(lane.comm.barrier)
        comm.barrier()
        future.result(20)
        hook.remove()
    assert sorted(seen) == ["world", "world.1"]


def test_an_action_that_is_none_is_refused():
    with pytest.raises(ArrayError, match="NanWatch: action is 'print'"):
        NanWatch("print")
