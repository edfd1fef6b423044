"""A sampler follows the communicator that is open: ranks may change, and nothing is lost or seen twice."""

import bagua_comm
from bagua_comm import bootstrap
from bagua_comm.data import PlainSampler


class Ranks:
    """Stands for the default communicator."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_a_new_sampler_has_a_state_without_a_communicator():
    sampler = PlainSampler(8, batch_size=2)
    assert sampler.state_dict()["consumed"] == 0
    assert bootstrap.current() is None


def test_after_a_change_of_ranks_the_rest_is_dealt_again(monkeypatch):
    seen = []
    samplers = [PlainSampler(24, batch_size=2) for _ in range(3)]
    for rank, sampler in enumerate(samplers):
        monkeypatch.setattr(bagua_comm.data.sampler, "current", lambda rank=rank: Ranks(rank, 3))
        batches = iter(sampler)
        seen += [*next(batches), *next(batches)]
    kept = samplers[0].state_dict()
    for rank, sampler in enumerate(samplers[:2]):
        monkeypatch.setattr(bagua_comm.data.sampler, "current", lambda rank=rank: Ranks(rank, 2))
        sampler.load_state_dict(kept)
        seen += [index for batch in sampler for index in batch]
    assert sorted(seen) == list(range(24))
