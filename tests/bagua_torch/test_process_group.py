"""torch.distributed as transport: on threads where that will do, and under torchrun, as users start it."""

import gc
import math
import re
import signal
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.call_checks import check_calls
from support.gloo import run_threads
from support.launch import environment_of_a_world, run_by_hand, torchrun
from support.waiting import until

import bagua_comm
import bagua_torch
from bagua_comm import BootstrapError, CommAborted, CommError, CommMismatch, CommTimeout, Communicator, RankFailed
from bagua_comm.errors import WHICH_CALLS
from bagua_comm.flight import diagnose, read_folder
from bagua_comm.testing import check_transport, reduced, sample
from bagua_comm.transports.flow import COLLECTIVE
from bagua_comm.transports.labels import Receive, label
from bagua_torch import ProcessGroupTransport
from bagua_torch.process_group import bootstrap
from bagua_torch.process_group.frames import BODY_BYTES
from bagua_torch.process_group.transport import RendezvousInfo
from bagua_torch.process_group.wire import UNSENT_FRAMES

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def error_of(call, *arguments, **options):
    """The type of `CommError` that a call raises; None if it succeeds."""
    try:
        call(*arguments, **options)
    except CommError as error:
        return type(error)
    return None


# Arrays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_it_keeps_the_contract(size):
    def body(transport):
        check_transport(transport)
        check_calls(Communicator([transport], check=True))

    run_threads(size, body)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [1, 1000, 100_000, 700_001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_are_the_same_bytes_on_all_ranks_in_and_out_of_place(size, count, dtype):
    def body(transport):
        x = sample(transport.rank, (count,), dtype)
        out, copy = np.empty_like(x), x.copy()
        transport.allreduce(x, out, "sum")
        assert x.tobytes() == copy.tobytes()
        transport.allreduce(copy, copy, "sum")
        assert copy.tobytes() == out.tobytes()
        transport.allreduce(x, x, "avg")
        return out, x

    results = run_threads(size, body)

    xs = [sample(rank, (count,), dtype) for rank in range(size)]
    for out, mean in results:
        assert out.tobytes() == results[0][0].tobytes()
        assert mean.tobytes() == results[0][1].tobytes()
        np.testing.assert_allclose(out, reduced(xs, "sum"), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mean, reduced(xs, "avg"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_reductions_that_gloo_does_otherwise(count):
    def body(transport):
        half = np.full(count, 2048 if transport.rank == 0 else 1, np.float16)  # 2048 + 1 is 2048 in float16
        transport.allreduce(half, half, "sum")
        nan = np.full(count, np.nan if transport.rank == 1 else 0, np.float32)
        transport.allreduce(nan, nan, "max")
        small = np.full(count, 100, np.int8)  # the sum is beyond int8
        transport.allreduce(small, small, "avg")
        return half, nan, small

    for half, nan, small in run_threads(3, body):
        assert (half == 2050).all()
        assert np.isnan(nan).all()
        assert (small == 100).all()


def test_messages_to_oneself_match_in_order_by_tag():
    def body(transport):
        me, out = transport.rank, np.zeros(4)
        transport.exchange([(me, np.array([1.0])), (me, np.array([2.0]))], [])
        transport.exchange([(me, np.array([3.0]))], [(me, out[0:1])], tag=COLLECTIVE)
        transport.exchange([(me, np.array([4.0]))], [(me, out[1:2]), (me, out[2:3]), (me, out[3:4])])
        long = np.zeros(5000)
        transport.exchange([(me, np.ones(5000))], [(me, long)], tag=COLLECTIVE)
        assert long.all()
        return out.tolist()

    assert run_threads(2, body) == [[3, 1, 2, 4]] * 2


@pytest.mark.parametrize("nbytes", [0, 1, BODY_BYTES, BODY_BYTES + 1, 100_000])
def test_several_messages_between_two_ranks_arrive_in_order(nbytes):
    def body(transport):
        peer = 1 - transport.rank
        sends = [(peer, np.full(nbytes, k, np.uint8)) for k in range(3)]
        recvs = [(peer, np.empty(nbytes, np.uint8)) for _ in range(3)]
        for tag in (COLLECTIVE, COLLECTIVE, 0, 0):
            transport.exchange(sends, recvs, tag=tag)
            assert all((out == k).all() for k, (_, out) in enumerate(recvs))
        return transport.sent_bytes

    assert run_threads(2, body) == [12 * nbytes] * 2


def test_sent_bytes_are_those_of_the_arrays():
    def body(transport):
        counts = []
        for count in (10, 400_000):  # at once; along a ring
            before = transport.sent_bytes
            transport.allreduce(np.ones(count), np.empty(count), "sum")
            counts.append(transport.sent_bytes - before)
        return counts

    assert run_threads(3, body) == [[160, 2 * 3_200_000 * 2 // 3]] * 3


def test_a_sent_array_may_be_read_only():
    def body(transport):
        x = np.frombuffer(b"a" * 50_000, np.uint8) if transport.rank == 1 else np.zeros(50_000, np.uint8)
        transport.broadcast(x, 1)
        return x.tobytes()

    assert run_threads(3, body) == [b"a" * 50_000] * 3


def test_tensors_are_arrays_here_too():
    def body(transport):
        x = torch.full((5,), 1.0 + transport.rank, dtype=torch.bfloat16)
        array = bagua_torch.as_array(x)
        Communicator([transport]).allreduce(array, out=array)
        return x.tolist()

    assert run_threads(2, body) == [[3.0] * 5] * 2


def test_short_messages_leave_before_they_are_received_and_survive_close():
    def body(transport):
        out = np.zeros(UNSENT_FRAMES, int)
        if transport.rank == 0:
            for k in range(UNSENT_FRAMES):
                transport.exchange([(1, np.array([k]))], [])
        transport.barrier()
        if transport.rank == 1:
            for k in range(UNSENT_FRAMES):
                transport.exchange([], [(0, out[k : k + 1])])
        return out.tolist()

    assert run_threads(2, body)[1] == list(range(UNSENT_FRAMES))


def test_short_messages_survive_a_group_that_its_sender_drops_unclosed():
    dropped = threading.Event()

    def body(transport):
        group = transport.dup()
        if transport.rank == 0:
            group.exchange([(1, np.arange(4.0)) for _ in range(3)], [])
            del group
            gc.collect()
            dropped.set()
            return True
        dropped.wait(30)
        outs = [np.zeros(4) for _ in range(3)]
        group.exchange([], [(0, out) for out in outs])
        return all(out.tolist() == [0, 1, 2, 3] for out in outs)

    assert run_threads(2, body) == [True, True]


# Device arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "name"), [("auto", "nccl"), ("staged", "staged")])
def test_device_arrays_are_carried_beside_it(device, gpu, name):
    import cupy

    device.count = 2

    def body(transport):
        with bagua_comm.connect(transport=transport, gpu=gpu) as comm:
            assert [each.name for each in comm.transports] == ["torch", name]
            return comm.allreduce(cupy.asarray(np.full(3, comm.rank + 1.0))).get().tolist()

    assert run_threads(2, body) == [[3.0] * 3] * 2


# Groups and threads -----------------------------------------------------------------------------------------


def test_groups_have_the_order_asked_for():
    def body(transport):
        group = transport.split(transport.rank % 2, -transport.rank)
        rows = np.empty((group.size, 1), int)
        group.allgather(np.array([transport.rank]), rows)
        large = np.full(700_000, transport.rank, np.float32)
        group.allreduce(large, large, "sum")
        group.close()
        transport.barrier()
        return group.rank, rows[:, 0].tolist(), large[-1]

    assert run_threads(4, body) == [(1, [2, 0], 2), (1, [3, 1], 4), (0, [2, 0], 2), (0, [3, 1], 4)]


def test_several_threads_use_a_duplicate_each_and_make_groups_meanwhile():
    def work(comm, seed):
        random = np.random.default_rng(seed)
        for step in range(10):
            x = np.full(int(random.integers(1, 600_000)), comm.rank + step, np.float32)
            comm.allreduce(x, out=x)
            assert x[0] == x[-1] == 1 + 2 * step
            assert comm.allgather(np.array(step)).tolist() == [step, step]
            if step % 5 == 0:
                with comm.split(0, key=-comm.rank) as group:
                    assert group.allgather(np.array(comm.rank)).tolist() == [1, 0]

    def body(transport):
        comm = Communicator([transport])
        lanes = [comm.lane() for _ in range(3)]
        for seed, lane in enumerate(lanes):
            lane.submit(work, lane.comm, seed)
        work(comm, 3)
        for lane in lanes:
            lane.close()

    run_threads(2, body)


# Failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        ("allreduce", (1, 2)),
        ("allreduce", (0, 1)),
        ("allreduce", (100, 150_000)),
        ("allreduce", (20_000, 20_001)),
        ("allreduce", (700_000, 700_001)),
        ("allreduce", (1, 700_000)),
        ("allgather", (3, 4)),
        ("allgather", (3, 5000)),
        ("allgather", (5001, 5000)),
        ("broadcast", (3, 5000)),
        ("broadcast", (5000, 3)),
        ("broadcast", (5000, 6000)),
    ],
)
def test_different_sizes_are_a_mismatch_and_never_write_beyond_our_arrays(call, counts):
    def body(transport):
        count = counts[transport.rank]
        guarded = np.full(2 * count + 64, 7.0)
        out = guarded[32 : 32 + count * (2 if call == "allgather" else 1)]
        comm = Communicator([transport])
        if call == "broadcast":
            error = error_of(comm.broadcast, out, root=0)
        else:
            error = error_of(getattr(comm, call), np.ones(count), out=out)
        assert (guarded[:32] == 7).all()
        assert (guarded[32 + out.size :] == 7).all()
        if error is not None:
            assert error_of(comm.barrier) is CommAborted
        return error

    assert run_threads(2, body) == [CommMismatch] * 2


def test_the_sender_gets_an_error_with_the_size_that_its_peer_expected():
    def body(transport):
        sent, expected = ((2000, 3000), (3000, 1000))[transport.rank]
        peer = 1 - transport.rank
        with pytest.raises(CommMismatch) as caught:
            transport.exchange(
                [(peer, np.zeros(sent, np.uint8))], [(peer, np.empty(expected, np.uint8))], tag=COLLECTIVE
            )
        return str(caught.value)

    assert run_threads(2, body) == [
        f"rank 0 sent 2000 bytes to rank 1, which expected 1000; {WHICH_CALLS}",
        f"rank 1 expected 1000 bytes from rank 0, which sent 2000; {WHICH_CALLS}",
    ]


def test_messages_to_oneself_are_checked_as_well():
    def body(transport):
        me = transport.rank
        assert error_of(transport.exchange, [(me, np.ones(2))], [(me, np.ones(3))]) is CommMismatch
        assert error_of(transport.exchange, [], [(me, np.ones(3))]) is CommTimeout
        assert error_of(transport.barrier) is (CommAborted if transport.size > 1 else None)

    for size in (1, 2):
        run_threads(size, body)


@pytest.mark.parametrize("sent", [1, 200, 5000])
@pytest.mark.parametrize("expected", [2, 300, 6000])
def test_after_a_mismatch_the_next_message_is_the_next(sent, expected):
    def body(transport):
        comm = Communicator([transport])
        if comm.rank == 0:
            comm.send(np.ones(sent), dest=1)
            comm.send(np.array([42.0]), dest=1)
            return
        out = np.full(expected + 64, 7.0)
        with pytest.raises(CommMismatch, match=rf"expected float64\[{expected}\] .* sent float64\[{sent}\]"):
            comm.recv(out[32:-32], source=0)
        assert (out == 7).all()
        assert comm.recv(np.empty(1), source=0).tolist() == [42]

    run_threads(2, body)


def test_a_missing_rank_is_a_timeout_on_all_its_peers():
    given_up = threading.Barrier(3)

    def body(transport):
        comm = Communicator([transport])
        comm.barrier()
        if comm.rank == 2:
            given_up.wait(30)
            with pytest.raises(CommTimeout, match=r"rank 2 lost rank [01], .*: rank [01] of 3 waited 2 s"):
                comm.allreduce(np.ones(5))
            return
        with pytest.raises(CommTimeout) as caught:  # the first rank closes the connections
            comm.allreduce(np.ones(5))
        given_up.wait(30)
        assert str(caught.value).startswith(f"allreduce(float64[5], op=sum) #2: rank {comm.rank} ")
        assert "waited 2 s for rank 2" in str(caught.value)
        with pytest.raises(CommAborted, match="a call failed earlier"):
            comm.barrier()

    run_threads(3, body, timeout_s=2)


@pytest.mark.parametrize("count", [10, 700_000])
def test_a_timeout_in_gloos_own_reduction(count):
    given_up = threading.Event()

    def body(transport):
        if transport.rank == 1:
            # It says how much it will reduce, and does not.
            peers = [(0, np.empty(0, np.uint8))]
            if count > 10:
                transport.agree_on_call("allreduce sum", np.ones(count))
                transport.exchange(peers, peers, tag=COLLECTIVE)
            assert given_up.wait(30)
            return None
        error = error_of(transport.allreduce, np.ones(count), np.ones(count), "sum")
        given_up.set()
        return error

    assert run_threads(2, body, timeout_s=0.5)[0] is CommTimeout


def test_abort_wakes_peers_and_groups_split_off():
    def body(transport):
        group = transport.split(0, transport.rank)
        inner = group.dup()
        for each in (transport, group, inner):
            each.barrier()
        if transport.rank == 0:
            transport.abort()
            return error_of(inner.barrier)
        start = time.monotonic()
        errors = [error_of(each.barrier) for each in (inner, group, transport)]
        assert time.monotonic() - start < 50
        return errors

    assert run_threads(2, body, timeout_s=60) == [CommAborted, [RankFailed] * 3]


def test_abort_wakes_a_thread_of_this_rank():
    def body(transport):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(error_of, transport.exchange, [], [(1 - transport.rank, np.empty(1))])
            time.sleep(0.2)  # sleeps: the other thread waits by then
            if transport.rank == 0:
                transport.abort()
            return waiting.result()

    assert run_threads(2, body, timeout_s=60) == [CommAborted, RankFailed]


def test_a_rendezvous_without_other_ranks_is_a_timeout():
    rendezvous = RendezvousInfo(dist.HashStore(), "test", 0, 2)
    with pytest.raises(CommTimeout, match=r"rank 0 of 2 waited 0\.5 s for its peers"):
        ProcessGroupTransport(timeout_s=0.5, rendezvous=rendezvous)


# connect ----------------------------------------------------------------------------------------------------


def test_without_a_launcher_the_world_is_one_rank_and_needs_no_process_group():
    with bagua_torch.connect() as comm:
        assert (comm.size, comm.transports[0].name) == (1, "local")
        assert not dist.is_initialized()
    with pytest.raises(BootstrapError, match=r"not initialised; call bagua_torch.connect\(\)"):
        ProcessGroupTransport()


def test_alone_is_a_world_of_one_rank_whatever_started_it(monkeypatch):
    for name, value in {**environment_of_a_world(2), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with bagua_torch.connect(alone=True) as comm:
        assert (comm.rank, comm.size, comm.transports[0].name) == (0, 1, "local")
        with pytest.raises(BootstrapError, match="connected already"):
            bagua_torch.connect()
        assert not dist.is_initialized()


def test_a_rank_whose_store_nobody_serves_waits_as_long_as_it_may(monkeypatch):
    for name, value in {**environment_of_a_world(2), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bootstrap, "_joined", None)  # as in a separate process
    started_s = time.monotonic()
    with pytest.raises(BootstrapError, match="cannot join its world"):
        bagua_torch.connect(timeout_s=0.5)
    assert time.monotonic() - started_s < 30


def test_connect_replaces_a_communicator_that_default_has_made():
    implicit = bagua_torch.process_group.default()
    with implicit, bagua_torch.connect() as comm:
        assert comm is not implicit
        assert bagua_torch.process_group.default() is comm
        with pytest.raises(BootstrapError, match="connected already"):
            bagua_comm.connect()


def test_record_is_the_folder_of_the_flight_records(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(bagua_comm, "connect", lambda **options: given.update(options) or bagua_comm.default())
    with bagua_torch.connect(record=tmp_path):
        assert given["record"] == tmp_path
    with bagua_torch.connect():
        assert given["record"] is None


TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({"gpu": "cuda"}, {}, "gpu is 'cuda', expected one of auto, nccl"),
        *(
            ({"timeout_s": wrong}, {}, "timeout_s is .*, expected seconds")
            for wrong in (-1, math.nan, 1e10, True, "3")
        ),
        *(({}, TWO | {name: "abc"}, f"{name} is 'abc', expected ") for name in TWO),
        ({}, TWO, "cannot join its world: .*MASTER_ADDR"),
    ],
)
def test_what_connect_cannot_use_is_refused(monkeypatch, options, variables, message):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BootstrapError, match=message):
        bagua_torch.connect(**options)


def test_a_process_group_that_is_there_is_used_and_left_as_it_is(gloo):
    for _ in range(2):
        with bagua_torch.connect(timeout_s=7, trace=False) as comm:
            assert (comm.size, comm.timeout_s, comm.transports[0].name) == (1, 7, "torch")
            assert bagua_comm.default() is comm
            assert comm.allreduce(np.array(3)) == 3
    assert dist.is_initialized()


def test_a_launcher_may_start_one_rank(monkeypatch):
    for name, value in {**environment_of_a_world(1), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bootstrap, "_joined", None)  # as in a separate process
    for _ in range(2):
        with bagua_torch.connect(timeout_s=10) as comm:
            assert (comm.rank, comm.size, comm.transports[0].name) == (0, 1, "torch")
            assert comm.allreduce(np.array(3)) == 3
        assert not dist.is_initialized()


# Processes --------------------------------------------------------------------------------------------------


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.slow
def test_under_torchrun_the_world_is_that_of_torchrun(tmp_path):
    program = """
        from pathlib import Path

        import numpy as np, torch.distributed as dist
        import bagua_torch
        from bagua_comm.testing import check_transport

        with bagua_torch.connect(timeout_s=60, record=Path(__file__).with_name("records")) as comm:
            assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
            assert comm.flight.folder.parent.name == "records"
            assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
            check_transport(comm)
        for _ in range(3):  # again, with nothing left of the world before
            assert not dist.is_initialized()
            with bagua_torch.connect(timeout_s=60, check=True, node=comm.rank % 2) as comm:
                assert comm.node == comm.rank % 2
                mean = comm.allreduce(np.full(700_000, comm.rank, np.float32), op="avg")
                comm.check_consistency(mean)
        print(f"rank {comm.rank} of {comm.size} is done", flush=True)
        """
    result = torchrun(3, script(tmp_path, program))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(3):
        assert f"rank {rank} of 3 is done" in result.stdout


@pytest.mark.slow
def test_under_torchrun_a_rank_that_does_not_come_is_explained(tmp_path):
    program = f"""
        import time
        from bagua_comm import Engine, GradientAllReduce, Plan, Point, TensorSpec
        import bagua_torch

        comm = bagua_torch.connect(record={str(tmp_path / "records")!r})
        comm.timeout_s = 8  # from now on: ranks start at different times
        plan = Plan.pack([TensorSpec("a", (4,), "float32")])
        engine = Engine(comm, GradientAllReduce(), plan, plan.allocate())
        for step in range(2):
            if step == comm.rank == 1:  # it hangs
                time.sleep(60)
            engine.at(Point.FORWARD)
            engine.ready("a")
            engine.at(Point.BACKWARD)
            engine.at(Point.STEP)
        """
    assert torchrun(2, script(tmp_path, program)).returncode == 1
    (job,) = (tmp_path / "records").iterdir()
    found = str(diagnose(read_folder(job)))
    for text in ("rank 1 has not come to allreduce #2 of world.1", ", in <module>: time.sleep(60)"):
        assert text in found
    assert "no record" not in found


@pytest.mark.slow
def test_a_dead_rank_is_named_within_seconds(tmp_path):
    program = """
        import os, signal, time
        import numpy as np
        import bagua_torch
        from bagua_comm import RankFailed

        comm = bagua_torch.connect(timeout_s=60)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            while True:
                comm.allreduce(np.ones(700_000))
        except RankFailed as error:
            print("lost", error.ranks, "before the timeout:", time.monotonic() - start < 50)
        """
    codes, output = run_by_hand(2, script(tmp_path, program))
    assert codes == [0, -signal.SIGKILL], output
    assert re.search(r"lost \((1,)?\) before the timeout: True", output[0])


@pytest.mark.slow
def test_torchs_own_ddp_and_ours_share_one_world(tmp_path):
    program = """
        import sys
        import numpy as np, torch, torch.distributed as dist
        from torch import nn
        import bagua_comm, bagua_torch

        dist.init_process_group("gloo")
        theirs, ours = (nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 1)) for _ in range(2))
        theirs = nn.parallel.DistributedDataParallel(theirs)
        with bagua_torch.connect(timeout_s=60) as comm:
            exact = bagua_comm.GradientAllReduce()
            for algorithm in (exact, bagua_comm.ByteGrad()):
                ours.load_state_dict(theirs.module.state_dict())
                wrapped = bagua_torch.DistributedDataParallel(ours, algorithm=algorithm, bucket_bytes=4096)
                models = [theirs, wrapped]
                optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
                generator = torch.Generator().manual_seed(comm.rank)
                for _ in range(5):
                    x = torch.randn(16, 8, generator=generator)
                    for model, optimizer in zip(models, optimizers):
                        optimizer.zero_grad()
                        model(x).square().mean().backward()
                        optimizer.step()
                for a, b in zip(theirs.parameters(), ours.parameters()):
                    comm.check_consistency(bagua_torch.as_array(b))
                    torch.testing.assert_close(a, b, **({} if algorithm is exact else dict(rtol=0, atol=1e-2)))
                wrapped.close()
            if comm.rank == 0:
                print("the same weights", flush=True)

        total = torch.ones(1)
        dist.all_reduce(total)  # the world is still there
        assert total == dist.get_world_size()
        group = dist.new_group([1])
        if dist.get_rank() == 0:
            try:
                bagua_torch.ProcessGroupTransport(group)
            except bagua_comm.BootstrapError as error:
                assert "not in the group" in str(error)
        else:
            alone = bagua_torch.ProcessGroupTransport(group)
            assert alone.size == 1
            alone.close()
        del theirs, models, model  # before the group that it works on
        dist.destroy_process_group()
        """
    result = torchrun(2, script(tmp_path, program))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same weights" in result.stdout


@pytest.mark.parametrize("count", [4, 4000, 1_000_000])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x: comm.allreduce(x.view("i4" if comm.rank else "f4")),
        lambda comm, x: comm.allreduce(x, op="max" if comm.rank else "min"),
        lambda comm, x: comm.allgather(x) if comm.rank else comm.alltoall(np.repeat(x, 2)),
    ],
    ids=["dtype", "op", "call"],
)
def test_calls_that_differ_raise_where_their_sizes_agree(call, count):
    def body(transport):
        with pytest.raises(CommMismatch):
            call(Communicator([transport]), np.zeros(count, np.float32))

    run_threads(2, body)


def test_a_call_of_many_waits_has_one_deadline():
    def body(transport):
        if transport.rank == 1:
            for _ in range(20):
                time.sleep(0.15)  # sleeps: each message is in time, all together are not
                if error_of(transport.exchange, [(0, np.ones(1))], []):
                    return None
            return None
        transport.begin_call("several", collective=False)
        errors = [error_of(transport.exchange, [], [(1, np.ones(1))]) for _ in range(20)]  # each in time, alone
        return next(error for error in errors if error is not None)

    assert run_threads(2, body, timeout_s=0.5)[0] is CommTimeout


def test_an_interrupt_of_one_rank_ends_the_call_on_the_others_at_once():
    known = threading.Barrier(3)  # no rank leaves before

    def interrupt(*_):
        raise KeyboardInterrupt

    def body(transport):
        comm = Communicator([transport])
        comm.barrier()
        if comm.rank == 0:
            transport.allreduce = interrupt
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce(np.ones(3))
        else:
            start = time.monotonic()
            # A rank that gets the notice from another rank names that one.
            with pytest.raises(RankFailed, match=r"rank [012]: it died, left, or gave up after an error"):
                comm.allreduce(np.ones(3))
            assert time.monotonic() - start < 10
        known.wait(timeout=15)
        with pytest.raises(CommAborted):
            comm.barrier()

    run_threads(3, body, timeout_s=20)


def test_an_interrupted_call_closes_its_connections_so_that_gloo_sends_no_more_and_the_peer_learns_of_it(
    monkeypatch,
):
    interrupted = threading.Event()

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    def body(transport):
        comm, x = Communicator([transport]), np.ones(1 << 20)
        if comm.rank == 0:
            monkeypatch.setattr(transport, "_wait_watched", interrupt)
            with pytest.raises(Interrupt):
                comm.send(x, dest=1)
            monkeypatch.undo()
            interrupted.set()
            x[:] = 2
            with pytest.raises(CommAborted, match="interrupted"):
                comm.send(x, dest=1)
        else:
            assert interrupted.wait(20)
            with pytest.raises(RankFailed, match="rank 1 lost rank 0"):
                comm.recv(x, source=0)

    run_threads(2, body, timeout_s=20)


def loops():
    """How many threads of gloo's connections this process has."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # another thread, which has ended
            found += path.read_text() == "gloo_tcp_loop\n"
    return found


def test_the_threads_of_connections_end_with_the_transport():
    """A thread that still ran while Python ended has ended a program by SIGABRT."""
    gc.collect()
    kept, before = [], loops()

    def body(transport):
        kept.append(transport)
        peer, x, of = 1 - transport.rank, np.zeros(3), label(0, np.dtype(float), 3)
        transport.exchange_labelled([(peer, np.ones(3), of)], [Receive((peer,), x, of)])
        transport.allreduce(x, x, "sum")
        assert x.tolist() == [2.0] * 3
        assert loops() > before

    run_threads(2, body)
    until(lambda: loops() <= before)
