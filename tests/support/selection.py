"""Choose the cases of the default run; `pytest -m slow` runs the others.

A test with several parameters has a case for each combination of their values, and a test on `device` has each
case three times, once for each policy of the streams. Three marks say which cases the default run keeps:

* `@pytest.mark.algorithms("sample")`: the algorithms of `SAMPLE`. With `"all"`, all of them. A test with `MANY`
  algorithms or more must have one of the two.
* `@pytest.mark.covering(2)`: as few cases as contain each pair of values of two parameters (pairwise testing).
  With `covering(1)`, as few as contain each value.
* `@pytest.mark.every_policy`: each case under each policy, for tests of the order in which streams work. Without
  the mark, a case runs under one policy: the cases of a test take the policies in turn, and the name of the test
  says which is first.

All other cases get the mark `slow`. `pytest --collect-only -v` prints how many cases of each test those are, and
`-vv` their names. Of these, the cases that contain no pair of values, policies among them, which no other case
contains get the mark `extra`, too, and run by `pytest -m extra` alone.
"""

import itertools
import zlib
from collections import Counter, defaultdict

import pytest
from cuda_on_cpu.machine import POLICIES

SAMPLE = ("GradientAllReduce(average=Quantized(", "LowPrecisionDecentralized(")
"""The prefixes of the `repr` of the sampled algorithms; of several with a prefix, the first is sampled.

The first averages gradients; the second exchanges weights and keeps state. A test of a list with neither keeps
the first algorithm of the list.
"""

MANY = 6
"""A test of this many algorithms must have the mark `algorithms(...)`."""

ALGORITHM, POLICY = "algorithm", "device"
"""The parameters that hold the algorithm, and the policy of a device's streams."""


def mark_slow_cases(items):
    """Mark as slow the cases of `items` that the default run leaves out."""
    for name, cases in by_test(items).items():
        for case in left_out(name, cases):
            case.add_marker(pytest.mark.slow)


def mark_extra_cases(items):
    """Mark as extra the slow cases that add no pair."""
    for cases in by_test(items).values():
        for case in extra(cases):
            case.add_marker(pytest.mark.extra)


def summary(items, verbose=1):
    """Return the lines that say which cases of `items` are slow: a line for each test, or for each case."""
    lines = []
    for name, cases in by_test(items).items():
        slow = [case for case in cases if case.get_closest_marker("slow")]
        if slow and verbose > 1:
            lines += [f"slow: {case.nodeid}" for case in slow]
        elif slow:
            lines.append(f"slow: {len(slow)} of {len(cases)} cases of {name}")
    return lines


def by_test(items):
    """Group items by their test."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def left_out(name, cases):
    """Return the cases of the test `name` that its marks leave out."""
    cases = [case for case in cases if hasattr(case, "callspec")]
    groups, earlier = defaultdict(list), Counter()  # of cases that differ only in the policy
    for case in cases:
        params = {**case.callspec.params}
        policy = params.get(POLICY)
        if policy in POLICIES and not case.get_closest_marker("every_policy"):
            del params[POLICY]
        same = tuple((name, id(value)) for name, value in params.items())
        earlier[same, policy] += 1  # several cases may have the same values
        groups[same, earlier[same, policy]].append(case)

    kept = [*groups]
    sampled = sampled_algorithms(name, cases)
    if sampled is not None:
        kept = [key for key in kept if repr(groups[key][0].callspec.params[ALGORITHM]) in sampled]
    cover = cases[0].get_closest_marker("covering") if cases else None
    if cover:
        chosen = covering([values_of(groups[key][0]) for key in kept], *cover.args)
        kept = [kept[index] for index in chosen]

    for key in groups.keys() - {*kept}:
        yield from groups[key]
    start = zlib.crc32(name.encode())
    for turn, key in enumerate(kept):
        policies = groups[key]
        chosen = (start + turn + turn // len(policies)) % len(policies)
        yield from (case for number, case in enumerate(policies) if number != chosen)


def extra(cases):
    """Return the slow cases of a test that contain no pair of values which the others do not contain."""
    slow, given = [], []
    for case in cases:
        if hasattr(case, "callspec"):
            (slow if case.get_closest_marker("slow") else given).append(case)
    if not slow:
        return []
    rows, given = ([values_of(case, but=()) for case in some] for some in (slow, given))
    chosen = {rows[index] for index in covering(rows, 2, given)}  # several cases may have the same values
    return [case for case, row in zip(slow, rows, strict=True) if row not in chosen]


def sampled_algorithms(name, cases):
    """Return the `repr` of each algorithm that the default run tests, or None where it tests all."""
    texts = [*dict.fromkeys(repr(case.callspec.params.get(ALGORITHM)) for case in cases)]
    mark = cases[0].get_closest_marker("algorithms") if cases else None
    if mark is None:
        if len(texts) >= MANY and not all(case.get_closest_marker("slow") for case in cases):
            raise pytest.UsageError(
                f'{name} has {len(texts)} algorithms; mark it with @pytest.mark.algorithms("sample") or ("all")'
            )
        return None
    if mark.args == ("all",):
        return None
    if mark.args != ("sample",):
        raise pytest.UsageError(f'{name}: algorithms{mark.args} is not algorithms("sample") or algorithms("all")')
    found = [next((text for text in texts if text.startswith(start)), None) for start in SAMPLE]
    return {text for text in found if text} or {texts[0]}


def values_of(case, but=(POLICY,)):
    """Return the parameters of a case, except for some, as text, since two lists may hold equal values."""
    return tuple((name, repr(value)) for name, value in case.callspec.params.items() if name not in but)


def covering(rows, strength, given=()):
    """Choose rows, by index, that contain every combination of `strength` values that any row contains.

    Greedy: the next row is the one with the most new combinations; of several, the one whose values have occurred
    least.

    Args:
        given: Rows whose combinations need not be contained.
    """

    def combinations(row):
        return {*itertools.combinations(row, min(strength, len(row)))}

    together = [combinations(row) for row in rows]
    wanted, occurred, chosen = set().union(*together).difference(*map(combinations, given)), Counter(), []
    while wanted:
        best = max(
            range(len(rows)),
            key=lambda index: (len(together[index] & wanted), -sum(occurred[value] for value in rows[index])),
        )
        chosen.append(best)
        wanted -= together[best]
        occurred.update(rows[best])
    return chosen
