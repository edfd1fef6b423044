"""The Communicator over threads: the conformance kit, and what it does not cover."""

import inspect
import json
import os
import sys
import threading
import time

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    CommError,
    CommMismatch,
    CommTimeout,
    Communicator,
    UnsupportedError,
    quantized_allreduce,
)
from bagua_comm.testing import Recording, check_transport, run_ranks
from bagua_comm.timeline.reading import read_timeline
from bagua_comm.transports import LocalTransport, Transport


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4, 8))])
def test_conformance(ranks):
    run_ranks(ranks, check_transport)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_conformance_with_every_call_checked(ranks):
    run_ranks(ranks, check_transport, check=True)


@pytest.mark.slow
def test_conformance_on_emulated_nodes():
    run_ranks(4, check_transport, nodes=["a", "b", "a", "a"])


def test_allreduce_avg_is_exact_for_integers():
    results = run_ranks(4, lambda comm: comm.allreduce(np.array([4 * comm.rank, -4, 8]), op="avg"))
    assert [result.tolist() for result in results] == [[6, -4, 8]] * 4


def test_average_of_integers_is_truncated_towards_zero():
    results = run_ranks(2, lambda comm: comm.allreduce(np.array([3, -3]) * comm.rank, op="avg"))
    assert results[0].tolist() == [1, -1]


def test_float16_is_added_in_float32():
    """In float16, 2048 + 1 + 1 is 2048: its spacing there is 2."""
    results = run_ranks(3, lambda comm: comm.allreduce(np.array([[2048, 1, 1][comm.rank]], np.float16)))
    assert results[0].tolist() == [2050]


def test_an_input_is_never_changed():
    def body(comm):
        x = np.arange(4.0) + comm.rank
        x.flags.writeable = False
        comm.allreduce(x)
        comm.allgather(x)
        comm.alltoall(x)
        comm.reduce_scatter(x)
        return x

    assert run_ranks(2, body)[1].tolist() == [1, 2, 3, 4]


def test_results_land_in_any_array_of_fitting_size():
    def body(comm):
        out = np.empty(6)
        assert comm.allgather(np.full((3,), float(comm.rank)), out=out) is out
        return out

    assert run_ranks(2, body)[0].tolist() == [0, 0, 0, 1, 1, 1]


def test_only_the_root_gets_what_is_gathered_and_reduced():
    def body(comm):
        x = np.array([comm.rank])
        return comm.gather(x, root=1), comm.reduce(x, root=1)

    nothing, (gathered, total) = run_ranks(2, body)
    assert nothing == (None, None)
    assert (gathered.tolist(), total.tolist()) == ([[0], [1]], [1])


def test_scatter_needs_its_arguments():
    def body(comm):
        with pytest.raises(ArrayError, match="x is None" if comm.rank == 0 else "out is None"):
            comm.scatter(None, root=0)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda comm: comm.allreduce(np.zeros(12), out=np.zeros(3)),
            ArrayError,
            r"allreduce: out has shape \(3,\), expected \(12,\)",
        ),
        (
            lambda comm: comm.allreduce(np.zeros(2), out=np.zeros(2, np.float32)),
            ArrayError,
            "allreduce: out has dtype float32, expected float64",
        ),
        (
            lambda comm: comm.allreduce(np.zeros(2), op="mean"),
            ArrayError,
            "op is 'mean', expected one of sum",
        ),
        (lambda comm: comm.allreduce(np.zeros(2), op="bor"), UnsupportedError, "no op='bor' for float64"),
        (
            lambda comm: comm.allreduce(np.zeros(2, complex), op="max"),
            UnsupportedError,
            "no op='max' for complex128; reduce magnitudes, or a view of its real",
        ),
        (
            lambda comm: comm.broadcast(np.zeros(2), root=2),
            ArrayError,
            "root is 2, expected a rank from 0 to 1",
        ),
        (lambda comm: comm.broadcast(np.zeros(2), root="0"), ArrayError, "root is '0'"),
        (lambda comm: comm.send(np.zeros(2), dest=-1), ArrayError, "send: peer is -1"),
        (lambda comm: comm.allreduce([1, 2]), UnsupportedError, "x: .*list; wrap it with numpy.asarray"),
        (lambda comm: comm.allreduce(object()), UnsupportedError, "got builtins.object"),
        (lambda comm: comm.allreduce(np.array(["a"])), UnsupportedError, "dtype <U1"),
        (
            lambda comm: comm.reduce_scatter(np.zeros(3)),
            ArrayError,
            r"shape \(3,\), expected a first dimension divisible by 2",
        ),
        (lambda comm: comm.alltoall(np.zeros(5)), ArrayError, "divisible by 2 ranks"),
        (
            lambda comm: comm.allgatherv(np.zeros(3), np.zeros(3), [1, 2]),
            ArrayError,
            r"x has 3 elements, expected counts\[[01]\] = [12]",
        ),
        (
            lambda comm: comm.alltoallv(np.zeros(2), [1, 1], np.zeros(5), [2, 3]),
            ArrayError,
            "own part",
        ),
        (
            lambda comm: comm.scatter(np.zeros(3), np.zeros(2), root=comm.rank),
            ArrayError,
            r"expected \(2, ...\)",
        ),
        (lambda comm: comm.split("red"), ArrayError, "color is 'red'"),
    ],
)
def test_wrong_arguments_are_named_on_every_rank_and_do_no_harm(call, error, message):
    def body(comm):
        with pytest.raises(error, match=message):
            call(comm)
        return comm.allreduce(np.array(1))

    assert run_ranks(2, body) == [2, 2]


def test_overlapping_arrays_are_refused():
    def body(comm):
        x = np.zeros(10)
        with pytest.raises(ArrayError, match="out overlaps x; pass out=x"):
            comm.allreduce(x[:8], out=x[2:])
        with pytest.raises(ArrayError, match="out overlaps x outside of this rank's own chunk"):
            comm.reduce_scatter(x, out=x[1:6])
        with pytest.raises(ArrayError, match="overlaps another array"):
            comm.sendrecv(x, x, dest=0, source=0)

    run_ranks(2, body)


def test_a_closed_communicator_says_so():
    def body(comm):
        comm.close()
        comm.close()
        with pytest.raises(CommError, match="allreduce: this communicator is closed"):
            comm.allreduce(np.zeros(1))

    run_ranks(2, body)


def test_different_sizes_are_noticed():
    def body(comm):
        with pytest.raises(CommError):
            comm.allreduce(np.zeros(1000 + comm.rank))

    run_ranks(2, body, timeout_s=0.5)


def test_call_check_names_both_calls():
    def body(comm):
        with pytest.raises(CommMismatch, match=r"rank 0 called allreduce\(float64\[2\], op=sum\), but rank 1"):
            comm.allreduce(np.zeros(2), op="sum" if comm.rank == 0 else "max")
        with pytest.raises(CommMismatch, match=r"rank 0 called barrier\(\), but rank 1 called allgather"):
            comm.barrier() if comm.rank == 0 else comm.allgather(np.zeros(2))
        comm.barrier()

    run_ranks(2, body, check=True)


def test_consistency_check_says_who_agrees():
    def body(comm):
        x = np.zeros(3)
        comm.check_consistency(x)
        x[0] = comm.rank == 1
        with pytest.raises(CommMismatch, match=r"ranks \[0, 2\]; ranks \[1\]"):
            comm.check_consistency(x)

    run_ranks(3, body)


def test_wire_bytes_are_those_handed_to_others():
    def body(comm):
        x = np.zeros((4, 256), np.float32)  # 4 chunks of 1 KiB
        comm.allreduce(x)
        comm.allgather(x[0])
        comm.alltoall(x)
        comm.reduce_scatter(x)
        return {name: (c.payload_bytes, c.wire_bytes) for name, c in comm.counters.by_operation.items()}

    assert run_ranks(4, body)[0] == {
        "allreduce": (4096, 6144),
        "allgather": (1024, 3072),
        "alltoall": (4096, 3072),
        "reduce_scatter": (4096, 3072),
    }


def test_trace_file_has_a_process_per_rank_and_a_row_per_thread(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        with comm.lane() as lane:
            lane.submit(lane.comm.allreduce, np.zeros(4))
            comm.allgather(np.zeros(2))
        comm.trace(path)

    run_ranks(2, body)

    ranks = read_timeline(path).ranks
    assert ranks.keys() == {0, 1}
    spans = {span.name: span for span in ranks[1].spans}
    assert spans["allreduce"].thread != spans["allgather"].thread
    assert spans["allreduce"].args == {"op": "sum", "dtype": "float64", "bytes": 32, "wire_bytes": 32}


def test_a_transport_needs_only_exchange():
    """Whoever brings exchange, moves and split has all collectives."""

    class Minimal(Transport):
        name = "minimal"

        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.rank, self.size, self.timeout_s = inner.rank, inner.size, inner.timeout_s

        def moves(self, x):
            return self.inner.moves(x)

        def exchange(self, sends, recvs, *, tag=0):
            self.inner.exchange(sends, recvs, tag=tag)

        def split(self, color, key):
            return Minimal(self.inner.split(color, key))

        def abort(self, exit_code=1):
            self.inner.abort(exit_code)

    run_ranks(3, check_transport, wrap=Minimal)


def test_recording_sees_the_calls_of_derived_groups():
    def body(comm):
        twin = comm.dup()
        twin.barrier()
        return [call.name for call in twin.transports[0].calls]

    assert run_ranks(2, body, wrap=Recording)[0] == ["allgather", "barrier"]


def test_host_arrays_need_a_transport_that_moves_them():
    class DeviceOnly(LocalTransport):
        def moves(self, x):
            return False

    comm = Communicator([DeviceOnly()])
    with pytest.raises(UnsupportedError, match=r"numpy array, but .* transports \(local\) do not move"):
        comm.allreduce(np.zeros(1))


def test_shrinking_needs_help_from_below():
    with pytest.raises(UnsupportedError, match="local: cannot go on"):
        run_ranks(1, lambda comm: comm.shrink())


# Found by trying: what used to go wrong


def test_average_of_small_integers_does_not_overflow():
    results = run_ranks(2, lambda comm: comm.allreduce(np.full(3, 100, np.int8), op="avg"))
    assert results[0].tolist() == [100, 100, 100]


def test_average_of_small_integers_over_more_ranks_than_they_can_count():
    results = run_ranks(130, lambda comm: comm.allreduce(np.full(1, -128, np.int8), op="avg"))
    assert results[0].tolist() == [-128]


def test_numpy_scalars_are_read_but_never_written_to():
    def body(comm):
        assert comm.allreduce(np.float64(comm.rank)) == 1
        for call in (
            lambda: comm.allreduce(np.array(1.0), out=np.float64(0)),
            lambda: comm.recv(np.float64(0), source=0),
        ):
            with pytest.raises(ArrayError, match="NumPy scalar, which cannot be written to"):
                call()

    run_ranks(2, body)


def test_a_trace_can_hold_any_argument_and_every_rank_hears_of_a_bad_path(tmp_path):
    def body(comm):
        comm.broadcast(np.zeros(1), root=np.int64(0))
        comm.trace(tmp_path / "trace.json")
        with pytest.raises(OSError, match="no_such_folder"):
            comm.trace(tmp_path / "no_such_folder" / "trace.json")
        with pytest.raises(ValueError, match="null byte"):
            comm.trace("a\0b")
        comm.tracer.add("odd", 0, 1, {"shapes": {(1, 2): 3}})
        with pytest.raises(ArrayError, match="keys must be str"):
            comm.trace(tmp_path / "odd.json")
        comm.barrier()

    run_ranks(2, body)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_close_closes_the_last_transport_first_and_all_though_one_fails():
    closed = []

    class Closing(LocalTransport):
        def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise CommError("told late")

    transports = [Closing(), Closing()]
    comm = Communicator(transports)
    with pytest.raises(CommError, match="told late"):
        comm.close()
    comm.close()
    assert closed == transports[::-1]


def test_two_threads_on_one_communicator_are_refused():
    tried = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert tried.wait(20)
            comm.send(np.ones(3), dest=0)
            return
        x = np.ones(3, np.float32)
        thread = threading.Thread(target=comm.recv, args=(np.zeros(3),), kwargs={"source": 1})
        thread.start()
        while comm.guard.is_free:
            time.sleep(0.001)  # sleeps: until the thread is in its call
        for call in (
            comm.barrier,
            lambda: comm.allreduce(x),
            lambda: comm.send(x, dest=1),
            lambda: quantized_allreduce(comm, x),
            comm.dup,
        ):
            with pytest.raises(CommError, match="another thread is in a call of this communicator; give each"):
                call()
        tried.set()
        thread.join()

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about threads and fork
def test_a_forked_child_cannot_use_its_parents_communicator():
    comm = Communicator([LocalTransport()])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.allreduce(np.ones(3))
        except CommError as exc:
            os.write(writer, str(exc).encode())
        comm.close()  # leaves the parent's alone
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as text:
        assert f"was forked off process {os.getpid()}, rank 0; a child cannot use" in text.read()
    assert comm.allreduce(np.ones(3)).sum() == 3


def test_leaving_by_sys_exit_without_an_error_closes():
    comm = Communicator([LocalTransport()])
    with pytest.raises(SystemExit), comm:
        sys.exit(0)
    with pytest.raises(CommError, match="closed"):
        comm.barrier()


# A timeout of a call's own


def test_a_call_waits_as_long_as_it_says_and_the_next_as_long_as_the_communicator_does():
    def body(comm):
        start = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"waited 0\.1 s"):
                comm.recv(np.ones(1), source=1, timeout_s=0.1)
        return time.monotonic() - start, comm.transports[0].limit_s

    waited_s, limit_s = run_ranks(2, body, timeout_s=20)[0]
    assert 0.1 <= waited_s < 10
    assert limit_s == 20


def test_a_call_may_wait_longer_than_the_communicator():
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.4)  # sleeps: longer than the limit of the communicator
        with comm.lane() as lane:
            lane.submit(lane.comm.allreduce, np.ones(2), timeout_s=20)
            lane.wait()
        return comm.allreduce(np.ones(2), timeout_s=20).tolist()

    assert run_ranks(2, body, timeout_s=5) == [[2, 2]] * 2


CALLS_WITH_LIMITS = sorted(
    name
    for name, method in inspect.getmembers(Communicator, inspect.isfunction)
    if "timeout_s" in inspect.signature(method).parameters and not name.startswith("_")
)


def test_every_call_that_moves_data_has_a_limit_of_its_own():
    assert {"allreduce", "barrier", "broadcast_object", "exchange", "recv", "scatterv"} <= set(CALLS_WITH_LIMITS)
    assert len(CALLS_WITH_LIMITS) == 28


def test_a_new_timeout_of_a_communicator_counts_for_calls_and_lanes_and_what_is_made_from_it():
    def body(comm):
        nodes = comm.by_node()
        comm.timeout_s = 0.05
        assert nodes.intra.timeout_s == comm.dup().timeout_s == 0.05
        with comm.lane() as lane:
            assert lane._limit_s() == 0.1
            lane.comm.timeout_s = 20
            assert lane._limit_s() == 25
            lane.submit(lane.comm.barrier).result()
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"waited 0\.05 s"):
                comm.recv(np.ones(1), source=1)

    run_ranks(2, body, timeout_s=30)


@pytest.mark.parametrize("timeout_s", [0, "soon", None])
def test_a_communicator_refuses_a_timeout_that_is_no_time(timeout_s):
    comm = Communicator([LocalTransport(timeout_s=7)])
    with pytest.raises(ArrayError, match=r"Communicator: timeout_s is .*, expected seconds"):
        comm.timeout_s = timeout_s
    assert comm.timeout_s == 7


@pytest.mark.parametrize("timeout_s", [0, -1, "soon", float("inf"), float("nan")])
def test_a_limit_that_is_no_time_is_refused(timeout_s):
    with pytest.raises(ArrayError, match=r"allreduce: timeout_s is .*, expected seconds"):
        Communicator([LocalTransport()]).allreduce(np.ones(1), timeout_s=timeout_s)
