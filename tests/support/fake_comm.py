"""A stand-in for a communicator, for tests of lanes alone."""

from types import SimpleNamespace

from bagua_comm.trace import NULL, Counters

PATIENCE_S = 30


class FakeComm:
    """All that a lane wants of a communicator."""

    def __init__(self, device=None, timeout_s=PATIENCE_S, tracer=NULL):
        self.device, self.timeout_s, self.tracer = device, timeout_s, tracer
        self.counters = Counters()
        self.guard, self.group = SimpleNamespace(limit_s=None), "world.1"
        self.closed = 0

    def close(self):
        self.closed += 1
