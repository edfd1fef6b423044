"""Change points in rows of noisy times: found soon, and not in noise."""

import random
import statistics

import pytest

from bagua_comm.health.change_points import ROWS, Series, relative_to_others

STEPS = 5
"""The steps of a row."""


def series():
    return Series(1.25, 1.25, 1.3)


def row(random, rank, slow=None, factor=1.0):
    """The median time of a rank in a row: of steps with noise, and now and then an outlier."""
    steps = [random.lognormvariate(0, 0.1) * (3 if random.random() < 0.03 else 1) for _ in range(STEPS)]
    return statistics.median(steps) * (factor if rank == slow else 1)


def changes(seed, ranks, rows, slow=None, factor=1.0, begin=0, end=None):
    """(row, rank, is_slow) of each change in a simulated run."""
    rng, watched, found = random.Random(seed), [series() for _ in range(ranks)], []
    for at in range(rows):
        is_slow = slow if begin <= at < (rows if end is None else end) else None
        times = [row(rng, rank, is_slow, factor) for rank in range(ranks)]
        for rank, (each, value) in enumerate(zip(watched, relative_to_others(times), strict=True)):
            if each.add(value):
                found.append((at, rank, each.is_slow))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_slowed_by_half_is_named_within_twenty_steps(ranks):
    named = 0
    for seed in range(100):
        slow, begin = seed % ranks, 10 + seed % 30
        found = changes(seed, ranks, begin + 20 // STEPS, slow, 1.5, begin)
        named += [(rank, is_slow) for _, rank, is_slow in found] == [(slow, True)]
    assert named >= 95


@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_alone_is_no_change(ranks):
    assert changes(1, ranks, 2000) == []  # 10,000 steps


def test_a_rank_that_was_slow_is_no_longer():
    found = changes(3, 4, 60, slow=2, factor=1.6, begin=20, end=35)
    assert found == [(22, 2, True), (37, 2, False)]


def test_a_rank_that_is_slow_from_the_start_is_named():
    assert changes(4, 4, 30, slow=1, factor=1.6) == [(ROWS - 1, 1, True)]


def test_one_long_row_is_no_change():
    watched = series()
    values = [1.0] * 20 + [5.0, 5.0] + [1.0] * 5
    assert not any(map(watched.add, values))


def test_the_limit_of_restless_values_is_higher():
    restless, quiet, rng = series(), series(), random.Random(1)
    for _ in range(40):
        restless.add(rng.choice([0.8, 1.0, 1.2]))
        quiet.add(1.0)
    assert quiet.limit == 1.25
    assert restless.limit > 1.5


def test_a_change_needs_as_many_rows_as_the_caller_asks_for():
    watched = series()
    assert [watched.add(2.0, rows=6) for _ in range(6)] == [0, 0, 0, 0, 0, 6]
