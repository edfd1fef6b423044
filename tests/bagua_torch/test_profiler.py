"""Spans in PyTorch's profiler, and the counters of DistributedDataParallel."""

import threading

import numpy as np
import pytest
import torch
from support.gloo import run_threads
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bagua_comm
from bagua_comm import ByteGrad, Communicator, GradientAllReduce, trace
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.training.profiler import RANGES


def config(all_threads):
    return torch.profiler._ExperimentalConfig(profile_all_threads=all_threads)


def ranges_of(profiler):
    return [(event.name, event.thread) for event in profiler.events() if event.name.startswith("bagua_comm: ")]


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_sees_exchanges_on_the_threads_where_they_happen(all_threads):
    def body(comm):
        ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), comm=comm)
        ddp(torch.ones(2, 3)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config(all_threads)) as profiler:
            ddp(torch.ones(2, 3)).sum().backward()
        ddp.close()
        return ranges_of(profiler), ddp.engine.plan.buckets[0].nbytes

    ((found, nbytes),) = run_ranks(1, body)
    threads = dict(found)
    lane = {f"bagua_comm: exchange bucket=0 bytes={nbytes}", f"bagua_comm: allreduce bytes={nbytes}"}
    assert threads.keys() == {"bagua_comm: wait for exchanges"} | (lane if all_threads else set())
    assert len(set(threads.values())) == 1 + all_threads


def test_nothing_is_recorded_while_no_profiler_runs():
    assert RANGES in trace.listeners
    assert not trace.wanted()
    with profile(activities=[ProfilerActivity.CPU]):
        assert trace.wanted()
    assert not trace.wanted()


def test_counters_continue_when_the_algorithm_is_switched():
    def body(comm):
        ddp = DistributedDataParallel(nn.Linear(3, 1), comm=comm)
        ddp(torch.ones(2, 3)).sum().backward()
        before = ddp.counters.as_dict()
        ddp.switch(ByteGrad())
        ddp(torch.ones(2, 3)).sum().backward()
        after = ddp.counters.as_dict()
        nbytes = ddp.engine.plan.buckets[0].nbytes
        ddp.close()
        return before, after, nbytes

    before, after, nbytes = run_ranks(2, body)[0]
    assert (before["exchange/calls"], before["exchange/payload_bytes"]) == (1, nbytes)
    assert (after["exchange/calls"], after["exchange/payload_bytes"]) == (2, 2 * nbytes)
    assert after["wait/seconds"] > before["wait/seconds"] > 0
    assert after.keys() == before.keys()


def test_a_switch_is_logged(caplog):
    caplog.set_level("INFO", "bagua_comm")
    with bagua_comm.connect() as comm:
        ddp = DistributedDataParallel(nn.Linear(3, 1), comm=comm)
        ddp.switch(ByteGrad())
        ddp.close()
    assert f"switch: from {GradientAllReduce()} to {ByteGrad()}" in caplog.messages


@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("count", [1, 100_000])
def test_no_operation_of_gloo_is_in_a_profile_which_it_may_outlast(count, all_threads):
    """Its end would write into the freed memory of the profile: messages are posted ahead, for a later call."""

    def body(transport):
        comm, x = Communicator([transport]), np.ones(count, np.float32)
        lane = comm.lane()

        def calls():
            comm.allreduce(x)
            comm.sendrecv(x, np.empty_like(x), dest=1 - comm.rank, source=1 - comm.rank)
            lane.submit(lane.comm.allreduce, x).result()

        names = None
        if comm.rank == 1:
            calls()
        else:
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config(all_threads)) as profiler:
                calls()
                torch.ones(1).add_(1)
            names = {event.name for event in profiler.events()}
        lane.close()
        return names

    names = run_threads(2, body)[0]
    assert "aten::add_" in names  # the profiler records this thread, after the messages as well
    assert not [name for name in names if name.startswith("gloo")]


def test_a_range_that_is_open_when_its_profile_ends_does_not_end_in_the_next_one(monkeypatch):
    """Its end would write into the freed memory of the first profile."""
    ended = []
    end = torch.autograd.profiler.record_function.__exit__
    monkeypatch.setattr(
        torch.autograd.profiler.record_function,
        "__exit__",
        lambda self, *args: (ended.append(self.name), end(self, *args)),
    )

    def body(comm):
        lane, begun, go_on = comm.lane(), threading.Event(), threading.Event()

        def task():
            with comm.tracer.span("across"):
                begun.set()
                go_on.wait(30)
            with comm.tracer.span("within"):
                pass

        with profile(activities=[ProfilerActivity.CPU], experimental_config=config(True)) as first:
            task_of_lane = lane.submit(task)
            begun.wait(30)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config(True)) as second:
            go_on.set()
            task_of_lane.result()
        return [[name for name, _ in ranges_of(each)] for each in (first, second)]

    assert run_ranks(1, body) == [[["bagua_comm: across"], ["bagua_comm: within"]]]
    assert ended == ["bagua_comm: within"]
