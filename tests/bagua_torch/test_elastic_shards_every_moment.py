"""Sharded models whose ranks die at random moments: in steps, commits, restores and while they are registered."""

import functools
import random

import pytest
import torch
from support import thread_groups
from support.elastic_shards import CASES, Training, results

from bagua_comm import RankFailed
from bagua_comm.testing.fleets import ThreadJob

RANKS = 4


@pytest.fixture(autouse=True)
def groups():
    thread_groups.install()
    yield
    thread_groups.uninstall()


@functools.cache
def undisturbed(case):
    """The weights of a training in which nobody dies, and how many calls one of its processes makes."""
    job, calls = ThreadJob(RANKS), []
    job.watch = lambda number, what: calls.append(what) if number == 1 else None
    return results(Training(CASES[case], job).run())[0].weights, len(calls)


def check(case, seed, *, spares):
    """One or two processes die at random moments; none loses a commit but a rank and its buddy together."""
    expected, moments = undisturbed(case)
    chance = random.Random(f"{case} {seed} {spares}")
    victims = chance.sample(range(RANKS), chance.choice([1, 1, 2]))
    together = chance.random() < 0.5
    due = {victim: chance.randrange(1, moments) for victim in victims}
    counts = dict.fromkeys(due, 0)
    job = ThreadJob(RANKS + spares, wanted=RANKS)

    def watch(number, what):
        if number in due:
            counts[number] += 1
            if counts[number] == due[number]:
                job.kill(*(victims if together else [number]))

    job.watch = watch
    how = f"{case}, seed {seed}: victims {due} of {moments} moments, together {together}"
    outcomes = Training(CASES[case], job).run()
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        assert len(victims) == 2, f"{how}: {errors}"
        assert len({str(error) for error in errors}) == 1, f"{how}: {errors}"
        assert isinstance(errors[0], RankFailed), f"{how}: {errors[0]!r}"
        assert "nothing is left of indices" in str(errors[0]), how
        return "lost"
    ended = results(outcomes)
    assert len(ended) >= RANKS - 2, how
    for each in ended:
        for name, value in each.weights.items():
            assert torch.equal(value, expected[name]), f"{how}: {name}"
    return "went on"


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("spares", [0, 1, 2])
@pytest.mark.parametrize("case", ["AdamW", "tied and frozen, SGD", "mixed precision"])
def test_no_commit_is_lost_whenever_ranks_die(case, spares):
    check(case, 1, spares=spares)


def test_a_rank_dies_while_the_others_restore():
    check("tied and frozen, SGD", 355, spares=0)
