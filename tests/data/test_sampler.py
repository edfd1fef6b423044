"""Samplers: no sample is lost or repeated, ranks make equal numbers of steps, any number of them resumes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bagua_comm
from bagua_comm import ArrayError
from bagua_comm.data import BalancedSampler, PlainSampler
from bagua_comm.testing import run_ranks

lengths_of = st.lists(st.integers(0, 50), max_size=120)
sizes = st.integers(1, 9)
LOGNORMAL = np.ceil(np.random.default_rng(0).lognormal(4, 0.8, 20000))


@st.composite
def makers(draw):
    """(make(size, rank), lengths): a sampler of any kind, for any ranks."""
    lengths = draw(lengths_of)
    common = {"seed": draw(st.integers(0, 3)), "shuffle": draw(st.booleans()), "drop_last": draw(st.booleans())}
    kind = draw(st.sampled_from(["plain", "balanced", "tokens"]))
    if kind == "plain":
        batch_size = draw(st.integers(1, 8))
        return lambda p, r: PlainSampler(len(lengths), batch_size=batch_size, size=p, rank=r, **common), lengths
    common["noise"] = draw(st.sampled_from([0.0, 0.3]))
    if kind == "tokens":
        budget = draw(st.integers(max([1, *lengths]), 200))
        return lambda p, r: BalancedSampler(lengths, max_tokens=budget, size=p, rank=r, **common), lengths
    common |= {"batch_size": draw(st.integers(1, 8)), "chunk": draw(st.integers(1, 12))}
    return lambda p, r: BalancedSampler(lengths, size=p, rank=r, **common), lengths


def taken(samplers):
    """The batches of all ranks: (steps, ranks) lists of indices. Fails unless all have `len(sampler)`."""
    said = {len(sampler) for sampler in samplers}
    batches = [list(sampler) for sampler in samplers]
    assert {len(each) for each in batches} == said
    assert len(said) == 1
    return list(zip(*batches, strict=True))


def flat(steps):
    return [index for step in steps for batch in step for index in batch]


@given(makers(), sizes)
@settings(max_examples=50, deadline=None)
def test_every_sample_is_used_once_except_padding_and_dropped_ones(maker, p):
    make, lengths = maker
    samplers = [make(p, r) for r in range(p)]
    steps = taken(samplers)
    assert all(batch for step in steps for batch in step)  # no rank ever has an empty batch
    found, n = flat(steps), len(lengths)
    first = samplers[0]
    assert len(found) - len(set(found)) == first.padding
    assert n - len(set(found)) == first.dropped
    assert first.padding < p
    if not first.drop_last:
        assert set(found) == set(range(n))
    else:
        assert first.padding == 0
    if isinstance(first, BalancedSampler) and first.max_tokens is not None:
        for batch in (batch for step in steps for batch in step):
            assert len(batch) * max(lengths[i] for i in batch) <= first.max_tokens
    elif steps:
        assert max(len(batch) for step in steps for batch in step) <= first.batch_size


@given(makers(), sizes, sizes)
@settings(max_examples=30, deadline=None)
def test_the_global_order_does_not_depend_on_the_number_of_ranks(maker, p, q):
    make, _ = maker
    orders = [make(n, 0).order for n in (p, q)]
    assert np.array_equal(orders[0].indices, orders[1].indices)
    assert np.array_equal(orders[0].offsets, orders[1].offsets)
    for step, batches in enumerate(taken([make(p, r) for r in range(p)])):
        expected = orders[0].samples(step * p, min(step * p + p, orders[0].batches))
        assert set(expected) == {index for batch in batches for index in batch}


@given(makers(), sizes, sizes, st.data())
@settings(max_examples=50, deadline=None)
def test_a_state_in_mid_epoch_continues_with_any_number_of_ranks(maker, p, q, data):
    make, lengths = maker
    first = [make(p, r) for r in range(p)]
    for sampler in first:
        sampler.set_epoch(2)
    stop = data.draw(st.integers(0, len(first[0])))
    ahead = data.draw(st.integers(stop, len(first[0])))  # as a DataLoader prefetches batches
    seen, states = [], []
    for sampler in first:
        batches = iter(sampler)
        mine = [next(batches) for _ in range(ahead)]
        seen += [index for batch in mine[:stop] for index in batch]
        states.append(json.loads(json.dumps(sampler.state_dict(stop))))
    assert all(state == states[0] for state in states)
    padding = len(seen) - len(set(seen))  # only if all was taken
    assert states[0]["consumed"] == len(seen) - padding
    then = [make(q, r) for r in range(q)]
    for sampler in then:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)  # the same, as a loop over epochs says again
        assert sampler.state_dict() == states[0]
    rest = flat(taken(then))
    assert not set(seen) & set(rest)
    if not first[0].drop_last:
        assert set(seen) | set(rest) == set(range(len(lengths)))
    assert sorted(flat(taken(then))) == sorted(flat(taken([fresh(make, q, r) for r in range(q)])))


def fresh(make, p, r):
    sampler = make(p, r)
    sampler.set_epoch(2)
    return sampler


def test_epochs_differ_and_repeat():
    sampler = BalancedSampler(np.arange(200) % 17, batch_size=4, size=2, rank=0, seed=5)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    other = BalancedSampler(np.arange(200) % 17, batch_size=4, size=2, rank=0, seed=6)
    assert list(other) != first


@pytest.mark.parametrize("p", [2, 3, 8])
def test_ranks_wait_for_each_other_less_than_five_percent_on_a_lognormal_set(p):
    samplers = [BalancedSampler(LOGNORMAL, batch_size=16, size=p, rank=r) for r in range(p)]
    costs = np.array([[LOGNORMAL[batch].sum() for batch in sampler] for sampler in samplers])  # (ranks, steps)
    found = costs.max(axis=0).sum() / costs.mean(axis=0).sum()
    assert found <= 1.05
    assert samplers[0].imbalance() == pytest.approx(found, rel=1e-12)


def test_batches_within_a_budget_of_tokens_are_nearly_full():
    sampler = BalancedSampler(LOGNORMAL, max_tokens=4096, size=4, rank=0)
    padded = np.array([len(batch) * LOGNORMAL[batch].max() for batch in sampler])
    assert padded.max() <= 4096
    assert np.median(padded) > 0.95 * 4096


def test_samples_of_a_batch_are_about_equally_long():
    sampler = BalancedSampler(LOGNORMAL, batch_size=16, size=4, rank=0)
    padded = sum(len(batch) * LOGNORMAL[batch].max() for batch in sampler)
    assert sum(LOGNORMAL[batch].sum() for batch in sampler) > 0.95 * padded


def test_size_and_rank_are_those_of_the_default_communicator(monkeypatch):
    from bagua_comm.data import sampler as module

    made = PlainSampler(8, batch_size=2)

    class Comm:
        size, rank = 4, 3

    monkeypatch.setattr(module, "default", Comm)
    assert (made.size, made.rank, len(made)) == (4, 3, 1)
    assert bagua_comm.default is not Comm


def test_size_and_rank_are_those_of_the_communicator_that_is_given():
    lengths = [5, 1, 4, 2, 3, 6, 8, 7, 2]

    def body(comm):
        half = comm.split(comm.rank % 2)
        for each in (comm, half):
            for make, arguments in ((PlainSampler, len(lengths)), (BalancedSampler, lengths)):
                given = make(arguments, batch_size=2, comm=each)
                same = make(arguments, batch_size=2, size=each.size, rank=each.rank)
                assert (given.size, given.rank) == (each.size, each.rank)
                assert list(given) == list(same)
        half.close()
        return given.size

    assert run_ranks(4, body) == [2] * 4


def test_a_communicator_beside_size_and_rank_is_refused():
    def body(comm):
        for arguments in ({"size": 1, "rank": 0}, {"rank": 0}):
            with pytest.raises(ArrayError, match=r"comm is given, .*rank is 0; give comm, or size and rank"):
                PlainSampler(8, batch_size=2, comm=comm, **arguments)

    run_ranks(1, body)
    with pytest.raises(ArrayError, match="BalancedSampler: comm is 2, expected a Communicator"):
        BalancedSampler([1, 2], batch_size=1, comm=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_pytorchs_dataloader_accepts_it_and_its_state_counts_trained_samples(workers):
    data = torch.arange(40)

    def make(p, r):
        return BalancedSampler(np.arange(40) % 7, batch_size=3, size=p, rank=r, chunk=4)

    sampler = make(2, 1)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
    expected = list(make(2, 1))
    assert len(loader) == len(expected)
    seen = []
    for step, batch in enumerate(loader, 1):
        seen.append(batch.tolist())
        if step == 3:
            state = sampler.state_dict(step)
            break
    assert seen == expected[:3]
    assert state["consumed"] == 3 * 3 * 2
    assert sampler.state_dict()["consumed"] == (3 * 3 * 2 if workers == 0 else 40)  # 2 workers x 2 ahead: all
    sampler = make(2, 1)
    sampler.load_state_dict(state)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=0)
    assert [batch.tolist() for batch in loader] == expected[3:]


def loader_of(sampler, workers, ahead, persistent):
    settings = {"prefetch_factor": ahead, "persistent_workers": persistent} if workers else {}
    data = torch.arange(48)
    return torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers, **settings)


def by_steps(sampler, loader):
    for step, batch in enumerate(loader, 1):
        yield batch, lambda step=step: sampler.state_dict(step)


def by_counting(sampler, loader):
    for batch in sampler.counted(loader):
        yield batch, sampler.state_dict


LOADERS = [(0, None, False), (1, 1, False), (1, 4, True)]
LOADERS += [pytest.param(each, marks=pytest.mark.slow) for each in [(4, 1, True), (4, 4, False), (4, 4, True)]]
"""How many workers, how many batches each takes ahead, and whether workers live on after an epoch."""


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("train", [by_steps, by_counting])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3)])
@pytest.mark.parametrize("workers", LOADERS, ids=str)
def test_an_epoch_that_workers_resume_gives_each_sample_once(workers, ranks, train):
    before, after = ranks
    seen, states = [], []
    for rank in range(before):
        sampler = PlainSampler(48, batch_size=2, size=before, rank=rank)
        for step, (batch, state) in enumerate(train(sampler, loader_of(sampler, *workers)), 1):
            seen += batch.tolist()
            if step == 3:
                states.append(state())
                break
    assert states == [states[0]] * before
    assert len(seen) == states[0]["consumed"] == 3 * 2 * before

    again = []
    for rank in range(after):
        sampler = PlainSampler(48, batch_size=2, size=after, rank=rank)
        sampler.load_state_dict(states[0])
        loader = loader_of(sampler, *workers)
        for batch, _ in train(sampler, loader):
            seen += batch.tolist()
        sampler.set_epoch(1)
        for batch, state in train(sampler, loader):
            again += batch.tolist()
            consumed = state()["consumed"]
        assert consumed == 48
    assert sorted(seen) == sorted(again) == list(range(48))


def test_a_second_iterator_takes_nothing_from_the_first():
    """A DataLoader with workers makes two, and asks one of them."""
    sampler = PlainSampler(12, batch_size=2, size=1, rank=0, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "consumed": 8})
    unused, used = iter(sampler), iter(sampler)
    assert sampler.state_dict()["consumed"] == 8
    assert list(used) == [[8, 9], [10, 11]]
    del unused


def test_samples_that_workers_have_prefetched_do_not_count_as_trained():
    sampler = PlainSampler(48, batch_size=2, size=1, rank=0, shuffle=False)
    loader = loader_of(sampler, 2, 4, False)
    counts = [sampler.state_dict()["consumed"] for _, _ in zip(sampler.counted(loader), range(3), strict=False)]
    assert counts == [2, 4, 6]
    assert len(list(sampler)) == 24  # another iteration, which counts all batches
    assert sampler.state_dict()["consumed"] == 48


WRONG = [
    ({"batch_size": 0}, "batch_size is 0"),
    ({"batch_size": 2.5}, "batch_size is 2.5"),
    ({}, "give either batch_size or max_tokens"),
    ({"batch_size": 2, "max_tokens": 9}, "give either batch_size or max_tokens"),
    ({"max_tokens": 5}, r"lengths\[2\] is 7, more than max_tokens=5"),
    ({"max_tokens": float("nan")}, "max_tokens is nan"),
    ({"max_tokens": 9, "chunk": 3}, "chunk is for batch_size"),
    ({"batch_size": 2, "noise": 1.5}, "noise is 1.5"),
    ({"batch_size": 2, "chunk": 0}, "chunk is 0"),
    ({"batch_size": 2, "rank": 3}, "size is 2 and rank is 3|rank is 3"),
    ({"batch_size": 2, "rank": -1}, "rank is -1"),
    ({"batch_size": 2, "rank": None}, "give both, or neither"),
    ({"batch_size": 2, "seed": -1}, "seed is -1"),
    ({"batch_size": 2, "lengths": [1, -2]}, r"lengths\[1\] is -2"),
    ({"batch_size": 2, "lengths": [1, np.nan]}, r"lengths\[1\] is nan"),
    ({"batch_size": 2, "lengths": [[1]]}, r"shape \(1, 1\)"),
    ({"batch_size": 2, "lengths": ["a"]}, "lengths are not numbers"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ArrayError, match=message):
        BalancedSampler(**{"lengths": [1, 2, 7], "size": 2, "rank": 0, **arguments})


def test_pytorchs_own_sampler_takes_the_ranks_too():
    """As docs/quickstart/coming-from.md has it; without them it wants a process group of torch.distributed."""

    def body(comm):
        given = torch.utils.data.DistributedSampler(range(12), comm.size, comm.rank)
        with pytest.raises((RuntimeError, ValueError), match="process group"):
            torch.utils.data.DistributedSampler(range(12))
        return list(given)

    assert sorted(index for mine in run_ranks(3, body) for index in mine) == list(range(12))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    sampler = BalancedSampler(np.arange(30), batch_size=3, size=2, rank=0)
    state = BalancedSampler(np.arange(30), batch_size=3, size=2, rank=0, seed=1).state_dict()
    expected = list(sampler)
    for wrong, message in [
        ({"epoch": 0}, "no \\['consumed', 'order', 'seed'\\]"),
        ({**state, "order": 1}, "another order of samples"),
        ({**state, "consumed": 4}, "no batch of the epoch ends"),
        ({**state, "consumed": 31}, "no batch of the epoch ends"),
        ({**state, "epoch": -1}, "epoch is -1"),
    ]:
        with pytest.raises(ArrayError, match=message):
            sampler.load_state_dict(wrong)
    other = BalancedSampler(np.arange(30), batch_size=4, size=2, rank=0, seed=1)
    with pytest.raises(ArrayError, match="batch_size"):
        other.load_state_dict(state)
    assert list(sampler) == expected
    with pytest.raises(ArrayError, match=r"only 5 batches .* since this iteration began; count from"):
        sampler.state_dict(6)


def test_the_dropped_samples_are_not_always_the_longest():
    lengths = np.arange(101)
    missing = set()
    for epoch in range(20):
        sampler = BalancedSampler(lengths, batch_size=10, size=1, rank=0, drop_last=True, chunk=2)
        sampler.set_epoch(epoch)
        missing |= set(range(101)) - {i for batch in sampler for i in batch}
    assert len(missing) > 10
