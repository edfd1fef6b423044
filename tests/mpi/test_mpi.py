"""The same contracts as over threads, over MPI processes. Run by tests/test_mpirun.py."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support.call_checks import check_calls

import bagua_comm
from bagua_comm import BFloat16, ByteGrad, CommMismatch, MinMaxUInt8, Plan, TensorSpec, quantized_allreduce
from bagua_comm.arrays import dtype_named
from bagua_comm.bucket import make_buckets
from bagua_comm.kernels import host
from bagua_comm.testing import check_transport, run_ranks, sample
from bagua_comm.timeline.reading import read_timeline
from bagua_comm.transports import derived
from bagua_comm.transports.mpi import link_speed, tuning
from bagua_comm.transports.mpi import shared_window as window
from bagua_comm.transports.pipeline import LAG

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("call", "few"),
    [
        (lambda comm, x, out: comm.allreduce(x, x), 15),
        (lambda comm, x, out: comm.sendrecv(x, out, dest=comm.rank, source=comm.rank, tag="x"), 18),
    ],
)
def test_a_small_call_that_was_made_before_crosses_few_functions(comm, call, few):
    """In Python, without those that only wait."""
    if comm.size == 1 or comm.transports[0]._endpoint.window is None:
        return
    x, out, crossed = np.ones(1), np.ones(1), []

    def look(frame, event, _):
        inner = frame
        while frame is not None and frame.f_code.co_name != "poll":
            frame = frame.f_back
        ours = inner.f_code.co_filename != __file__ and inner.f_code.co_name != "wait_outside_mpi"
        if event == "call" and frame is None and ours:
            crossed[-1].append(inner.f_code.co_name)

    call(comm, x, out)
    for _ in range(3):  # a finalizer may run beside one of them
        crossed.append([])
        comm.barrier()
        sys.setprofile(look)
        try:
            call(comm, x, out)
        finally:
            sys.setprofile(None)
    assert min(map(len, crossed)) <= few, crossed


def test_conformance(comm):
    assert comm.transports[0].name == "mpi"
    few = tuning.EAGER_BYTES, tuning.NATIVE_BYTES, tuning.PIECE_BYTES
    many = tuning.SHARED_BYTES, tuning.SHARED_BYTES + 64 * comm.size
    check_transport(comm, sizes=few if comm.size > 3 else (*few, *many))
    check_calls(comm)


@pytest.mark.slow
def test_conformance_with_every_message_split_and_every_rank_on_a_node_of_its_own(comm, monkeypatch):
    monkeypatch.setattr(tuning, "MESSAGE_BYTES", 101)
    monkeypatch.setattr(tuning, "NATIVE_BYTES", 0)
    monkeypatch.setattr(tuning, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tuning, "FAST_PIECE_BYTES", 1000)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, node=comm.rank) as nodes:
        assert (nodes.node, nodes.local_size) == (comm.rank, 1)
        check_transport(nodes, sizes=[101, 1000, tuning.EAGER_BYTES])


@pytest.mark.slow
def test_conformance_through_shared_memory(comm, monkeypatch):
    if comm.size > 3:
        return  # more ranks and pieces are in tests/transports/test_shared_window.py
    monkeypatch.setattr(tuning, "SHARED_BYTES", 0)
    monkeypatch.setattr(window, "SLOT_BYTES", 1 << 12)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as small:
        assert (small.transports[0]._endpoint.window is not None) == (comm.size > 1)
        one_round = (1 << 12) // comm.size // 64 * 64 * comm.size
        check_transport(small, sizes=[one_round, 2 * one_round])


def test_messages_as_long_as_the_parts_of_split_ones_are_not_taken_for_one(comm, monkeypatch):
    monkeypatch.setattr(tuning, "MESSAGE_BYTES", 64)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as split:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x, out = np.arange(64, dtype=np.uint8), np.zeros(128, np.uint8)
        with pytest.raises(CommMismatch, match=r"expected uint8\[128\] from rank \d, which sent uint8\[64\]"):
            split.exchange([(after, x), (after, x)], [(before, out)])


def test_large_allreduce_through_shared_memory_gives_the_bytes_that_threads_give(comm):
    def body(world):
        return world.allreduce(sample(world.rank, (tuning.SHARED_BYTES // 4 + 5,), "float32"), op="avg")

    expected = run_ranks(comm.size, body)[comm.rank]
    before = comm.counters.total().wire_bytes
    assert expected.tobytes() == body(comm).tobytes()
    sent = comm.counters.total().wire_bytes - before
    assert sent == 2 * expected.nbytes * (comm.size - 1) // comm.size


def test_without_memory_to_share_on_one_rank_all_do_without(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(window, "_map", lambda *place: None)
    x = np.full(tuning.SHARED_BYTES, comm.rank, np.int8)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as without:
        assert without.transports[0]._endpoint.window is None
        assert (without.allreduce(x) == sum(range(comm.size))).all()


@pytest.mark.slow
@pytest.mark.parametrize("colors", [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2]])
def test_conformance_on_emulated_nodes(comm, colors):
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, node=f"node {colors[comm.rank]}") as nodes:
        assert nodes.node == colors[comm.rank]
        assert nodes.local_size == colors[: comm.size].count(colors[comm.rank])
        check_transport(nodes, sizes=[])


def test_other_calls_on_arrays_of_one_size_raise_on_all_ranks(comm):
    if comm.size == 1:
        return  # nobody to differ from
    x = np.zeros((comm.size, 100_000), np.float32)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as world:
        call = world.alltoall if comm.rank == 0 else world.reduce_scatter
        with pytest.raises(CommMismatch, match=r"rank 0 called alltoall .* called reduce_scatter sum"):
            call(x)


@pytest.mark.parametrize("codec", [MinMaxUInt8(), MinMaxUInt8(block=100), MinMaxUInt8.bagua(), BFloat16()])
def test_a_quantized_allreduce_in_pieces_gives_the_bytes_of_one_that_goes_at_once(comm, codec, monkeypatch):
    def body(world):
        return quantized_allreduce(
            world, sample(world.rank, (world.size * 20_000 + 1,), "float32"), codec=codec, op="avg"
        )

    monkeypatch.setattr(comm.transports[0], "coded_piece_bytes", lambda nbytes: 1000)
    at_once = run_ranks(comm.size, body)[comm.rank]  # over threads
    assert body(comm).tobytes() == at_once.tobytes()
    if comm.size > 1 and codec.granule is not None:
        (span,) = [span for span in comm.tracer.spans() if span.name == "quantized_allreduce"][-1:]
        assert span.args["pieces"] > 2 * LAG


def test_longer_arrays_go_in_longer_messages_on_slow_networks(comm, monkeypatch):
    transport, long = comm.transports[0], tuning.LONG_BYTES
    monkeypatch.setattr(transport._agreement, "_coded_piece_bytes", None)
    found = [transport.coded_piece_bytes(nbytes) for nbytes in (long, long + 1)]
    assert found == [tuning.PACED_CODED_BYTES, tuning.LONG_PIECE_BYTES]


def test_a_network_stays_fast_for_some_calls_in_which_a_rank_is_slow(comm, monkeypatch):
    if comm.size == 1:
        return  # nobody to wait for
    monkeypatch.setattr(window, "_map", lambda *place: None)  # ranks that share memory do not ask
    monkeypatch.setattr(tuning, "FAST_CALLS", 2)
    monkeypatch.setattr(tuning, "FAST_BYTES_S", 2e6)
    x, found, pauses_s = np.ones(100_000, np.float32), [], [0, 0.5, 0.5]
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as apart:
        transport = apart.transports[0]
        at_once = derived.allreduce

        def allreduce(*arguments):
            pause_s = pauses_s.pop(0)
            time.sleep(pause_s if comm.rank == 0 else 0)  # sleeps: one slow rank
            at_once(*arguments)

        monkeypatch.setattr(derived, "allreduce", allreduce)
        while pauses_s:
            apart.allreduce(x)
            found.append(transport.agree_on_call("a call", x).piece_bytes)
    fast, slow = tuning.FAST_PIECE_BYTES, tuning.PACED_BYTES
    assert found == [fast, fast, slow]


@pytest.mark.parametrize("count", [20_000, 20_001])
def test_error_feedback_in_pieces_gives_the_bytes_of_one_piece(comm, count, monkeypatch):
    def body(world):
        x = sample(world.rank, (world.size * count + count % 2,), "float32")
        residual = sample(world.rank, x.shape, "float32", seed=1)
        mean = quantized_allreduce(world, x, op="avg", residual=residual)
        return mean.tobytes(), residual.tobytes()

    monkeypatch.setattr(comm.transports[0], "coded_piece_bytes", lambda nbytes: 1000)
    at_once = run_ranks(comm.size, body)[comm.rank]
    assert body(comm) == at_once


MOST_CALLS = 122
"""Of our own functions on the lane, for a bucket of 1 MiB of ByteGrad on two ranks, which goes in two pieces."""


def test_a_bucket_of_bytegrad_takes_few_calls_of_ours_from_the_second_step_on(comm):
    if comm.size != 2:
        return
    ours, counted = str(Path(bagua_comm.__file__).parent), []
    numpys = str(Path(host.__file__).parent)  # the kernels of a machine without Numba call each other
    x = sample(comm.rank, (1 << 18,), "float32")
    (bucket,) = make_buckets(Plan.pack([TensorSpec("x", x.shape, "float32")], bucket_bytes=x.nbytes), [x])

    def count(frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ours) and not file.startswith(numpys):
            counted.append(frame.f_code.co_name)

    algorithm = ByteGrad()
    state = algorithm.init(bucket, comm)
    algorithm.exchange(bucket, comm, state)
    sys.setprofile(count)
    try:
        algorithm.exchange(bucket, comm, state)
    finally:
        sys.setprofile(None)
    waiting = "poll", "deadline_s", "advance", "ended", "<genexpr>", "<lambda>"  # as often as the peer has it
    counted = [name for name in counted if not any(part in name for part in waiting)]
    assert 20 < len(counted) <= MOST_CALLS, " ".join(counted)


def test_ranks_on_one_machine_share_a_node(comm):
    assert (comm.node, comm.local_rank, comm.local_size) == (0, comm.rank, comm.size)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantized_allreduce_gives_the_bytes_that_threads_give(comm, dtype):
    def body(world):
        x = sample(world.rank, (3, 1001), dtype)
        return bagua_comm.quantized_allreduce(world, x, op="avg")

    expected = run_ranks(comm.size, body)[comm.rank]

    assert expected.tobytes() == body(comm).tobytes()


def test_golden_allreduce(comm):
    golden = Path(__file__).parent.parent / "golden"
    cases = json.loads((golden / "minmax.json").read_text())
    for case in cases:
        if case["kind"] != "allreduce" or case["n"] != comm.size:
            continue
        dtype = dtype_named(case["dtype"])
        inputs = np.frombuffer((golden / case["files"]["input"]).read_bytes(), dtype).reshape(comm.size, -1)
        codec = MinMaxUInt8(block=case["block"], eps=case["eps"])

        actual = bagua_comm.quantized_allreduce(comm, inputs[comm.rank], codec=codec, op=case["op"])

        assert (golden / case["files"]["output"]).read_bytes() == actual.tobytes(), case["name"]


def test_trace_has_every_rank(comm, shared_folder):
    path = f"{shared_folder}/trace.json"
    with bagua_comm.connect(
        comm=MPI.COMM_WORLD, timeout_s=30
    ) as traced:  # its trace has nothing of the other tests
        traced.allreduce(np.ones(10))
        traced.trace(path)

    ranks = read_timeline(path).ranks
    assert ranks.keys() == set(range(comm.size))
    assert all("allreduce" in {span.name for span in rank.spans} for rank in ranks.values())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_more_than_two_to_the_31_elements(comm):
    if comm.size != 2:
        return  # one world of processes is enough for gigabytes
    count = 2**31 + 3
    x = np.zeros(count, np.uint8)
    if comm.rank == 0:
        x[:3] = 1, 2, 3
        x[-3:] = 4, 5, 6

    comm.broadcast(x, root=0)
    assert x[:3].tolist() + x[-3:].tolist() == [1, 2, 3, 4, 5, 6]

    rows = x[1:].reshape(2, -1)
    rows[comm.rank, [0, -1]] = 7 + comm.rank
    comm.allgather(rows[comm.rank], out=rows)
    assert rows[:, [0, -1]].tolist() == [[7, 7], [8, 8]]


@pytest.mark.parametrize("nbytes", [2**8, 2**14, 2**18, 2**21])
def test_in_place_may_differ_between_ranks(comm, nbytes):
    """MPI itself wants IN_PLACE on all ranks or on none."""
    p, count = comm.size, nbytes // 8 // comm.size
    chunks = np.arange(float(p * count)).reshape(p, count)
    x = chunks + comm.rank
    total = p * chunks + sum(range(p))

    def out(x):
        return x if comm.rank == 0 else None

    np.testing.assert_array_equal(comm.allreduce(x.copy() if comm.rank else x, out=out(x)), total)
    x = chunks + comm.rank
    mine = x[comm.rank] if comm.rank == 0 else None
    result = comm.reduce_scatter(x.reshape(-1), out=mine)
    np.testing.assert_array_equal(result, total[comm.rank])
    x = chunks + comm.rank
    expected = np.stack([chunks[comm.rank] + r for r in range(p)])
    np.testing.assert_array_equal(comm.alltoall(x, out=out(x)), expected)


def test_all_ranks_agree_from_which_size_on_arrays_are_quantized_between_hosts(comm):
    transport = comm.transports[0].dup()
    hosts = [str(rank % 2) for rank in range(comm.size)]
    speed = link_speed.measure_links(transport._endpoint, transport._messages, hosts)
    assert (speed.bytes_s < np.inf) == (comm.size > 1)
    assert len(set(comm.allgather_object(speed))) == 1
    transport.close()
