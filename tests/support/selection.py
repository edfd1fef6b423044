"""Which tests the default run makes, and which it leaves to `-m slow`.

A test with several parameters has a case for each combination of their values, and a test on `device` has each
case three times, once for each policy of the streams. Many of these cases would fail for the same mistakes. So
the default run takes a part of them, the same part each time, and the others are marked `slow`:

* `@pytest.mark.covering(2)` at a test: any two values of two parameters occur together in one of the cases that
  stay. With `covering(1)` each value of each parameter occurs in one.
* Of a test with at least `MANY` values of `algorithm`, every sixth of them stays: not the same as in the next
  test. So each algorithm goes through a sixth of the tests.
* Each case of a test on `device` runs under one policy, and the cases of a test run under all of them in turn.
  `@pytest.mark.every_policy` keeps all three: for tests of the order in which streams do their work.

`pytest -m slow` runs exactly the cases that the default run leaves out.
"""

import itertools
import zlib
from collections import Counter, defaultdict

import pytest
from cuda_on_cpu.machine import POLICIES

POLICY = "device"
"""The parameter that says under which policy the streams of a device run."""

ALGORITHM, MANY = "algorithm", 6


def mark_what_others_cover(items):
    """Mark as slow the cases of `items` that the default run can do without."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        for case in left_out(name, cases):
            case.add_marker(pytest.mark.slow)


def left_out(name, cases):
    """The cases of the test `name` that others cover."""
    groups, earlier = defaultdict(list), Counter()  # of cases that differ only in the policy
    for case in cases:
        params = {**case.callspec.params}
        policy = params.get(POLICY)
        if policy in POLICIES and not case.get_closest_marker("every_policy"):
            del params[POLICY]
        same = tuple((name, id(value)) for name, value in params.items())
        earlier[same, policy] += 1  # several cases may have the same values
        groups[same, earlier[same, policy]].append(case)
    stay, cover = list(groups), cases[0].get_closest_marker("covering")
    if cover:
        rows = [values_of(policies[0]) for policies in groups.values()]
        stay = [stay[place] for place in covering(rows, *cover.args)]

    start = zlib.crc32(name.encode())
    stay = in_turn(start, stay, groups)
    for place in groups.keys() - set(stay):
        yield from groups[place]
    for turn, place in enumerate(stay):
        policies = groups[place]
        chosen = (start + turn + turn // len(policies)) % len(policies)
        yield from (case for number, case in enumerate(policies) if number != chosen)


def in_turn(start, places, groups):
    """The `places` whose algorithm's turn it is, counted from `start`; all where there are few algorithms."""
    texts = {place: repr(groups[place][0].callspec.params.get(ALGORITHM)) for place in places}
    different = [*dict.fromkeys(texts.values())]
    if len(different) < MANY:
        return places
    return [place for place in places if (different.index(texts[place]) + start) % 6 == 0]


def values_of(case):
    """The parameters of a case, without the policy, as text: two lists may name one value in two places."""
    return tuple((name, repr(value)) for name, value in case.callspec.params.items() if name != POLICY)


def covering(rows, strength):
    """Choose rows, by their places: any `strength` things that occur together in a row do so in a chosen one.

    Greedy: the next row is the one with the most new combinations; of several, the one whose things have occurred
    least.
    """
    together = [{*itertools.combinations(row, min(strength, len(row)))} for row in rows]
    wanted, occurred, chosen = set().union(*together), Counter(), []
    while wanted:
        best = max(
            range(len(rows)),
            key=lambda place: (len(together[place] & wanted), -sum(occurred[thing] for thing in rows[place])),
        )
        chosen.append(best)
        wanted -= together[best]
        occurred.update(rows[best])
    return chosen
