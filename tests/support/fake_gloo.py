"""Gloo as far as transports use it, in memory: what its sends, receives and sums do, and how they end."""

import threading
import time
from collections import defaultdict, deque
from functools import partialmethod

import torch.distributed as dist

from bagua_torch import ProcessGroupTransport
from bagua_torch.process_group.transport import RendezvousInfo
from bagua_torch.process_group.verdicts import Verdict


class Network:
    """The messages and sums between ranks."""

    def __init__(self, size, random):
        self.size, self.random = size, random
        self.changed, self.store = threading.Condition(), dist.HashStore()
        self.halves = defaultdict(lambda: (deque(), deque()))
        """By (source, dest, tag): sends, and receives, of which at most one has elements."""
        self.sums = defaultdict(list)
        self.closed = set()


class Work:
    """An operation among some ranks; that of two closes the connections of its rank if a wait times out."""

    def __init__(self, network, tensor, *ranks, late=None):
        self.network, self.tensor, self.ranks, self.has_ended = network, tensor, ranks, False
        self.late = late  # of a sum: how many waits time out before it seems to have ended

    def is_completed(self):
        return not self.late and (self.has_ended or bool(self.network.closed.intersection(self.ranks)))

    def wait(self, timeout=None):
        if self.late:
            time.sleep(timeout.total_seconds())  # sleeps: gloo waits for the timeout
            self.late -= 1
            raise RuntimeError("Timed out")
        with self.network.changed:
            in_time = self.network.changed.wait_for(self.is_completed, timeout and timeout.total_seconds())
            if not in_time and self.late is None:
                self.network.closed.add(self.ranks[0])
                self.network.changed.notify_all()
            if not self.has_ended:
                raise RuntimeError("Connection closed by peer" if in_time else "Timed out")


class Gloo:
    """One rank's connections."""

    def __init__(self, network, rank):
        self.network, self.rank, self.sums = network, rank, 0

    def _message(self, side, tensors, peer, tag):
        work, network = Work(self.network, tensors[0], self.rank, peer), self.network
        key = (self.rank, peer, tag) if side == 0 else (peer, self.rank, tag)
        with network.changed:
            if network.closed.intersection(work.ranks):
                raise RuntimeError("Connection closed by peer")
            halves = network.halves[key]
            if halves[1 - side]:
                pair = [work, halves[1 - side].popleft()]
                sent, received = [each.tensor for each in (pair if side == 0 else pair[::-1])]
                received[: len(sent)] = sent
                pair[0].has_ended = pair[1].has_ended = True
                network.changed.notify_all()
            else:
                halves[side].append(work)
        return work

    send, recv = partialmethod(_message, 0), partialmethod(_message, 1)

    def allreduce(self, tensors, options):
        network = self.network
        with network.changed:
            works = network.sums[self.sums]
            late = network.random.choice([0, 0, 0, 2, 3])
            works.append(Work(network, tensors[0], *range(network.size), late=late))
            self.sums += 1
            if len(works) == network.size:
                total = sum(each.tensor.clone() for each in works)
                for each in works:
                    each.tensor.copy_(total)
                    each.has_ended = True
                network.changed.notify_all()
            return next(work for work in works if work.tensor is tensors[0])


def connected(network, rank, timeout_s):
    """A transport over a `Network`."""
    info = RendezvousInfo(network.store, "test", rank, network.size)
    made = ProcessGroupTransport(timeout_s=timeout_s, rendezvous=info, guard=lambda _: Gloo(network, rank))
    made._verdict = Verdict(network.store)
    made._verdict._ask = lambda request: request()  # it always answers
    return made
