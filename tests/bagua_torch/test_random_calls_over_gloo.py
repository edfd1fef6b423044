"""Random calls over torch.distributed, on threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from random_calls import RandomCalls

from bagua_comm import Communicator
from bagua_torch import ProcessGroupTransport
from bagua_torch.process_group.frames import BODY_BYTES
from bagua_torch.process_group.transport import AT_ONCE_BYTES, RING_CHUNK_BYTES, RendezvousInfo


@pytest.mark.parametrize(("ranks", "numbers"), [(2, range(25)), (3, range(50, 75))])
def test_random_calls_give_the_results_of_numpy(ranks, numbers):
    store = dist.HashStore()
    sizes = BODY_BYTES, AT_ONCE_BYTES, ranks * RING_CHUNK_BYTES

    def run(rank):
        transport = ProcessGroupTransport(timeout_s=30, rendezvous=RendezvousInfo(store, "random", rank, ranks))
        with RandomCalls(Communicator([transport]), seed=2026, sizes=sizes) as calls:
            calls.run(numbers)
        transport.close()

    with ThreadPoolExecutor(ranks) as pool:
        for done in [pool.submit(run, rank) for rank in range(ranks)]:
            done.result(timeout=100)
