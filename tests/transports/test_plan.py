"""Agreed plans, without communication: what is learned, who follows, and that no other call ends."""

import ast
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_comm.transports import plan as plan_of_calls
from bagua_comm.transports.plan import MAX_CALLS, Plan


class World:
    """Ranks with a plan each. As over a transport, a rank that follows its plan shows its call to nobody."""

    def __init__(self, size):
        self.plans = [Plan() for _ in range(size)]
        self.compared = 0

    def call(self, *calls):
        """Whether the call ends; it does only if all follow, or if all have compared it."""
        followed = [plan.note(call) for plan, call in zip(self.plans, calls, strict=True)]
        if all(followed):
            return True
        self.compared += 1
        offers = [plan.offer() for plan in self.plans]
        for plan in self.plans:
            plan.settle(offers)
        return len(set(calls)) == 1

    def run(self, program):
        """Let all ranks make these calls; return how many are compared."""
        assert all(self.call(*[call] * len(self.plans)) for call in program)
        return self.compared


TRAINING, EVALUATION = "aaaab", "xyz"

PROGRAMS = {
    "one call": ("a" * 10, 2),
    "steps": (TRAINING * 4, 6),  # `a` has a plan of its own, which `b` ends
    "steps of other calls": ("abcab" * 4, 10),
    "never again": ("abcdefghij", 10),
    "evaluation": (TRAINING * 4 + EVALUATION * 4 + TRAINING * 3, 6 + 6 + 2),
    "evaluation again": ((TRAINING * 4 + EVALUATION * 4) * 3, 6 + 6 + 2 + 1 + 2 + 1),
    "evaluation after a long training": (TRAINING * 150 + EVALUATION * 4 + TRAINING * 3, 6 + 6 + 2),
    "a period with a long plan in it": (("a" * 100 + "b") * 4, 2 + 1 + 2 + 1 + 0),
    "a step of the longest": ([str(n) for n in range(MAX_CALLS)] * 3, 2 * MAX_CALLS),
    "a step that is too long": ([str(n) for n in range(MAX_CALLS + 1)] * 3, 3 * (MAX_CALLS + 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_that_repeat_are_compared_no_more(name):
    program, compared = PROGRAMS[name]
    assert World(2).run(program) == compared


def test_an_offer_names_the_next_call_and_all_others():
    plans = {program: Plan() for program in ("ab", "abab", "ababa", "baba", "abcabc", "aa")}
    followed = [plan.note(call) for program, plan in plans.items() for call in program]
    none, *offers = [plan.offer() for plan in plans.values()]
    assert (none, any(followed)) == (0, False)
    assert 0 < min(offers) <= max(offers) < 1 << 63
    assert len(set(offers)) == len(offers)


@given(
    period=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    periods=st.integers(0, 5),
    more=st.integers(0, 5),
    others=st.lists(st.sampled_from("abcx"), min_size=4, max_size=4),
)
def test_no_call_ends_unless_all_ranks_make_it(period, periods, more, others):
    """Four ranks, in any place of a program that repeats, make calls of which any may be another one."""
    world = World(4)
    world.run((period * (periods + 1))[: len(period) * periods + more % len(period)])
    assert world.call(*others) == (len(set(others)) == 1)


def test_a_step_that_was_compared_as_a_whole_is_followed_at_once():
    world = World(2)
    world.run("xabc")
    for plan in world.plans:
        assert plan.noted == 4
        plan.adopt(plan.latest(3))
    assert world.run("abcabc") == 4
    assert not world.call("a", "b")


@given(
    period=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    more=st.lists(st.sampled_from("abc"), max_size=90),
)
def test_calls_that_follow_a_plan_are_counted_at_once_as_one_after_the_other(period, more):
    plans = [Plan(), Plan()]
    for call in period * 60 + more:
        for plan in plans:
            plan.note(call)
        plans[0]._period()  # has read each
    assert plans[0]._period() == plans[1]._period()
    with mock.patch.object(plan_of_calls, "_MAX_UNREAD", -1):
        assert plans[0]._period() == plans[1]._period()


ENDS = {
    "end_plan": "of `split` and `dup`, after a call that all ranks have made",
    "split": "after a call that all ranks have made",
    "_compare_sizes": "as all ranks raise",
    "drop": "as the connections are closed",
}


def test_a_call_that_one_rank_took_for_another_one_does_not_delay_the_next_plan():
    world = World(2)
    world.run("aaa")
    world.call("a", "b")
    world.plans[0].correct("b")
    assert world.run("aaaa") == 2 + 1 + 2


def test_no_rank_ends_a_plan_alone():
    """A function that ends it is added here if all ranks call it between the same calls; see `Plan.end`."""
    root = Path(plan_of_calls.__file__).parents[2]
    found = {
        function.name
        for package in ("bagua_comm", "bagua_torch")
        for path in (root / package).rglob("*.py")
        if "plan.end()" in (text := path.read_text())
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and "plan.end()" in ast.unparse(function)
    }
    assert found == ENDS.keys()
