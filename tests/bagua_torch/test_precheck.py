"""`precheck`: calls that differ between ranks are found at the end of a step, in any communicator."""

import re
import threading

import numpy as np
import pytest
import torch
from support.gloo import run_threads
from support.launch import run_python, torchrun

from bagua_comm import CommAborted, CommError, CommMismatch, Communicator
from bagua_comm.testing import run_ranks
from bagua_torch import precheck
from bagua_torch.backend.group import BaguaGroup
from bagua_torch.backend.start import lane_of
from bagua_torch.process_group.wire import FramedTransport

X = np.ones(4, np.float32)


def broadcasts(comm, a, b, _):
    """Rank 0 sends in `a`, then receives in `b`; rank 1 sends in `b`, then receives in `a`."""
    for each in (a, b) if comm.rank == 0 else (b, a):
        each.broadcast(X.copy(), root=0 if each is a else 1)


def on_rank_0(call):
    return lambda comm, a, b, lane: call(comm, a, b, lane) if comm.rank == 0 else None


DIFFERENT = {
    "a message that nobody receives": (
        on_rank_0(lambda comm, *_: comm.send(X, dest=1)),
        "rank 0 sent 1 message to rank 1 in world, which received 0",
    ),
    "one more gather": (
        lambda comm, a, *_: [a.gather(X, root=0) for _ in range(1 + (comm.rank == 1))],
        "rank 0 called barrier.. in world, rank 1 called gather.float32, root=0. in world.1",
    ),
    "the order of two communicators": (
        broadcasts,
        "rank 0 called broadcast.float32, root=0. of 4 elements in world.1, rank 1 called .*root=1.* in world.2",
    ),
}


def train(comm, a, b, lane, different=lambda *_: None):
    comm.allreduce(X)
    future = lane.submit(lane.comm.allreduce, X)
    a.alltoall(X)
    b.sendrecv(X, np.empty_like(X), dest=1 - comm.rank, source=1 - comm.rank)
    different(comm, a, b, lane)
    future.result()
    lane.submit(lane.comm.barrier)
    comm.barrier()


def test_steps_that_are_equal_pass():
    def body(comm):
        a, b = comm.dup(), comm.split(0)
        with comm.lane() as lane:
            for _ in range(2):
                with precheck(comm):
                    train(comm, a, b, lane)

    run_ranks(2, body)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named_on_all_ranks(name):
    different, text = DIFFERENT[name]

    def body(comm):
        a, b = comm.dup(), comm.split(0)
        with comm.lane() as lane:
            with pytest.raises(CommMismatch, match=text) as caught, precheck(comm):
                train(comm, a, b, lane, different)
            comm.barrier()
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]


def test_a_call_that_one_rank_of_a_subgroup_makes_alone_is_named_on_all_ranks():
    def body(comm):
        ends = comm.subgroup([0, 2], "ends") if comm.rank != 1 else None
        text = "rank 0 called gather.float32, root=1. in world/ends, rank 2 made no other call"
        with pytest.raises(CommMismatch, match=text):
            run_block(comm, (lambda: ends.gather(X, root=1)) if comm.rank == 0 else None)

    run_ranks(3, body)


def test_blocks_are_not_nested():
    def body(comm):
        with precheck(comm), pytest.raises(CommError, match="inside of another"), precheck(comm):
            pass
        with precheck(comm):
            comm.barrier()

    run_ranks(3, body)


def run_block(comm, call=None):
    with precheck(comm):
        if call is not None:
            call()


def test_an_exception_on_one_rank_ends_the_block_on_all():
    def body(comm):
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError):
                run_block(comm, lambda: 1 / 0)
        else:
            with pytest.raises(
                CommAborted, match="on rank 1, the block ended by an exception, ZeroDivisionError"
            ):
                run_block(comm)
        run_block(comm, comm.barrier)

    run_ranks(3, body)


def test_a_rank_that_ends_early_made_no_other_call():
    def body(comm):
        text = r"rank 0 called broadcast.* in world, rank 1 made no other call$"
        with pytest.raises(CommMismatch, match=text):
            run_block(comm, (lambda: comm.broadcast(X, root=0)) if comm.rank == 0 else None)

    run_ranks(2, body)


def test_a_step_that_passes_is_the_agreed_plan(monkeypatch):
    """The calls of the next step send no frame."""
    x, barrier, frames, send = (
        np.ones((3, 1 << 18), np.float32),
        threading.Barrier(2),
        [],
        FramedTransport._send_frame,
    )
    monkeypatch.setattr(FramedTransport, "_send_frame", lambda *of: frames.append(1) or send(*of))

    def step(*comms):
        for rows in (x, x[:2]):
            for each in comms:
                each.allreduce(rows)

    def body(transport):
        with Communicator([transport]) as world, world.dup() as comm, comm.dup() as other:
            with precheck(world):
                step(comm, other)
            counts = []
            for _ in range(2):
                barrier.wait()
                counts.append(len(frames))
                barrier.wait()
                step(comm, other)
            barrier.wait()
            assert counts[0] == counts[1] > 0
            assert all(each.host.plan.in_force and len(each.host.plan.calls) == 2 for each in (comm, other))

    run_threads(2, body)


def test_a_block_of_some_ranks_passes_though_they_make_calls_with_others():
    x = np.ones((3, 1 << 18), np.float32)

    def body(transport):
        with Communicator([transport]) as world, world.dup() as comm:
            with comm.subgroup([comm.rank], f"alone-{comm.rank}") as own, precheck(own):
                own.barrier()
                comm.allreduce(x)
            assert not comm.host.plan.in_force

    run_threads(2, body)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun", "mpirun"])
def test_groups_of_torch_distributed_are_compared(start, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = torchrun(2, path) if start == "torchrun" else run_python(2, path)
    assert done.stdout.count("equal;") == 4
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert re.search(r"rank 0 called broadcast\(.* in world.1, rank 1 made no other call$", text)


def of_groups(rank, group):
    """Rank 0 sends rank 1 a tensor, and receives two."""
    x, y = torch.ones(4), torch.ones(3, dtype=torch.int64)
    if rank == 0:
        return [group.send([x], 1, 7), group.recv([x.clone()], 1, 0), group.recv([y.clone()], 1, 0)]
    return [group.send([x], 0, 0), group.send([y], 0, 0), group.recv([x.clone()], 0, 7)]


DIFFERENT_MESSAGES = {
    "a message that nobody receives": (
        lambda rank, group: [] if rank else [group.send([torch.ones(5)], 1, 0)],
        r"rank 0 sent 1 message of float32\[5\] with tag 0 to rank 1 in world.1, which received 0",
    ),
    "a receive without a message": (
        lambda rank, group: [] if rank else [group.recv([torch.ones(5)], 1, 2)],
        r"rank 1 sent 0 messages of float32\[5\] with tag 2 to rank 0 in world.1, which received 1",
    ),
    "another order of sizes": (
        lambda rank, group: (
            [group.recv([torch.ones(size)], 0, 3) for size in (5, 3)]
            if rank
            else [group.send([torch.ones(size)], 1, 3) for size in (3, 5)]
        ),
        "rank 1 receives the messages with tag 3 from rank 0 in world.1 in another order of dtypes and sizes",
    ),
    "another dtype": (
        lambda rank, group: (
            [group.recv([torch.ones(2, dtype=torch.int32)], 0, 0)]
            if rank
            else [group.send([torch.ones(2)], 1, 0)]
        ),
        r"rank 0 sent 1 message of float32\[2\] .* which received 0, "
        r"rank 0 sent 0 messages of int32\[2\] .* which received 1",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT_MESSAGES)
def test_messages_of_process_groups_that_differ_are_named_on_all_ranks(name):
    different, text = DIFFERENT_MESSAGES[name]

    def body(comm):
        group = BaguaGroup(lane_of(comm.dup(), 20.0), comm)
        with precheck(comm):
            works = of_groups(comm.rank, group)
        for work in works:
            work.wait()
        with pytest.raises(CommMismatch, match=text) as caught, precheck(comm):
            works = of_groups(comm.rank, group) + different(comm.rank, group)
        group.abort()
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]


def test_messages_of_other_groups_are_no_part_of_a_block():
    def body(comm):
        group, part = BaguaGroup(lane_of(comm.dup(), 20.0), comm), comm.dup()
        with precheck(part):
            works = [group.send([torch.ones(2)], 1, 0)] if comm.rank == 0 else []
        works += [group.recv([torch.ones(2)], 0, 0)] if comm.rank == 1 else []
        for work in works:
            work.wait()
        group.shutdown()

    run_ranks(2, body)


def test_a_message_of_any_rank_is_no_difference():
    def body(comm):
        group = BaguaGroup(lane_of(comm.dup(), 20.0), comm)
        with precheck(comm):
            works = [group.recv_anysource([torch.ones(2)], 0)] if comm.rank == 0 else []
            works += [group.send([torch.ones(2)], 0, 0)] if comm.rank == 2 else []
        for work in works:
            work.wait()
        group.shutdown()

    run_ranks(3, body)


PROGRAM = """
import pathlib
import torch, bagua_torch
import torch.distributed as dist

dist.init_process_group("bagua")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
half = dist.new_group([0, 1])
x, y = torch.ones(4), torch.ones(4)
for different in (False, False, True):
    try:
        with bagua_torch.precheck():
            ddp(torch.ones(2, 300)).sum().backward()
            dist.all_reduce(torch.ones(2), group=half)
            other = 1 - dist.get_rank()
            messages = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            if different and dist.get_rank() == 0:
                dist.broadcast(torch.ones(2), src=0, async_op=True)
        print("equal;", flush=True)
    except Exception as error:
        (pathlib.Path(__file__).parent / str(dist.get_rank())).write_text(str(error))
        while not all((pathlib.Path(__file__).parent / str(rank)).exists() for rank in range(2)):
            pass
        raise
"""
