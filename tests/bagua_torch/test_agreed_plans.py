"""Plans of calls over gloo: no message before a call, and an error on all ranks if one makes another call."""

import threading

import numpy as np
import pytest
from support.gloo import run_threads

from bagua_comm import Communicator
from bagua_torch.process_group.wire import FramedTransport

MIB = 1 << 20

FOLLOWED = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "allreduce, avg, in place": lambda comm, x: comm.allreduce(x, op="avg", out=x),
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "alltoall, in place": lambda comm, x: comm.alltoall(x, out=x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter, in place, avg": lambda comm, x: comm.reduce_scatter(
        x, op="avg", out=x[comm.rank : comm.rank + 1]
    ),
}
"""Calls that no frame precedes once they have repeated; the array has a mebibyte for each of three ranks."""


@pytest.fixture
def frames(monkeypatch):
    """The ranks that have sent frames, in order."""
    found, send = [], FramedTransport._send_frame

    def note(self, *arguments):
        found.append(self.rank)
        send(self, *arguments)

    monkeypatch.setattr(FramedTransport, "_send_frame", note)
    return found


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_planned_call_sends_no_frame_and_has_the_same_bytes(name, frames):
    barrier = threading.Barrier(3)

    def body(transport):
        comm, results, sent = Communicator([transport]), [], []
        for _ in range(4):
            x = np.random.default_rng(comm.rank).normal(size=(3, MIB // 4)).astype("f4")
            before = transport.sent_bytes
            results.append(FOLLOWED[name](comm, x))
            sent.append(transport.sent_bytes - before)
            if barrier.wait() == 0:
                counts.append(len(frames))
            barrier.wait()
        for x in results:
            np.testing.assert_array_equal(x, results[0])
        assert len(set(sent)) == 1
        assert transport.plan.in_force

    counts = []
    run_threads(3, body)
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 3
