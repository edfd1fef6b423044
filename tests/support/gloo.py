"""Ranks as threads, each with a transport over gloo."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from bagua_torch import ProcessGroupTransport
from bagua_torch.process_group.transport import RendezvousInfo


def run_threads(size, body, *, timeout_s=30.0, store=None, server=None, close=True):
    """Return `body(transport)` of each rank. Ranks are threads; their store is that of rank `server`."""
    store = dist.HashStore() if store is None else store

    def run(rank):
        rendezvous = RendezvousInfo(store, "test", rank, size, server)
        transport = ProcessGroupTransport(timeout_s=timeout_s, rendezvous=rendezvous)
        result = body(transport)
        if close:
            transport.close()
        return result

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        return [rank.result(timeout=100) for rank in ranks]
