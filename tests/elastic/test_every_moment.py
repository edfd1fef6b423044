"""A rank dies at every single moment: in rendezvous, in restores, and in commits before and after the flip."""

import numpy as np
import pytest

from bagua_comm import Own
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet

STEPS = 3


def body(fleet):
    """Each rank adds up its own, and all add up what they share; every second step is committed."""
    shared, own = np.zeros(5), np.zeros(3)
    state = State(shared=shared, own=Own(own, "sum"), log=[], step=0)

    @run(state, fleet=fleet)
    def train(comm):
        while state.step < STEPS:
            own[...] += comm.rank + 1
            shared[...] += comm.allreduce(np.full(5, state.step + comm.rank + 1.0))
            state.step += 1
            state.log = [*state.log, comm.size]
            state.commit()
        return comm.rank, shared.copy(), own.copy(), state.log

    return train


def moments(size, wanted, victim):
    """The operations of the victim in an undisturbed training, in order."""
    done = []
    job = ThreadJob(size, wanted=wanted)
    job.watch = lambda number, what: done.append(what) if number == victim else None
    run_fleet(job, body)
    return done


def train_with_deaths(size, wanted, deaths):
    """Process n dies when it does something for the k-th time, for every (n, k)."""
    job = ThreadJob(size, wanted=wanted)
    job.kill_at(deaths)
    outcomes = run_fleet(job, body)
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return {each["result"][0]: each["result"][1:] for each in outcomes if each.get("result")}


def check_undisturbed(got, size, where):
    """Every result is that of an undisturbed training."""
    assert len(got) >= size - 2, where
    for rank, (shared, own, log) in got.items():
        expected = sum(sum(step + r + 1 for r in range(size)) for step in range(STEPS))
        np.testing.assert_array_equal(np.full(5, float(expected)), shared, err_msg=where)
        np.testing.assert_array_equal(np.full(3, STEPS * (rank + 1.0)), own, err_msg=where)
        assert log == [size] * STEPS, where


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_with_a_spare_nothing_differs_whenever_a_rank_dies(victim):
    names = moments(4, 3, victim)
    for moment in range(1, len(names) + 1):
        got = train_with_deaths(4, 3, [(victim, moment)])
        check_undisturbed(got, 3, f"process {victim} died in call {moment}, {names[moment - 1]}")


def test_with_a_spare_nothing_differs_when_a_rank_dies_around_a_commit():
    first = moments(4, 3, 1).index("allreduce")
    for moment in range(first + 1, first + 8):
        check_undisturbed(train_with_deaths(4, 3, [(1, moment)]), 3, f"process 1 died in call {moment}")


@pytest.mark.slow
def test_without_a_spare_the_sum_of_per_rank_state_is_conserved_whenever_a_rank_dies():
    names = moments(3, 3, 1)
    for moment in range(1, len(names) + 1):
        where = f"process 1 died in call {moment}, {names[moment - 1]}"
        got = train_with_deaths(3, 3, [(1, moment)])
        assert sorted(got) in ([0, 1], [0, 2]), where
        sizes = got[0][2]
        total = sum(own[0] for _, own, _ in got.values())
        if sorted(got) == [0, 1]:
            assert abs(total - sum(sum(range(1, size + 1)) for size in sizes)) < 1e-9, where


@pytest.mark.slow
@pytest.mark.parametrize("second", [1, 9, 18, 27, 36])
def test_a_second_death_while_the_first_is_being_recovered_from(second):
    for moment in range(1 + second % 5, len(moments(6, 4, 0)) + 1, 5):
        got = train_with_deaths(6, 4, [(0, moment), (2, moment + second)])
        check_undisturbed(got, 4, f"{moment} {second}")
