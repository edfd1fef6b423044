import itertools
from types import SimpleNamespace

import pytest

from support.selection import covering, left_out

pytest_plugins = "pytester"

POLICIES = ("lazy", "main-first", "side-first")


def case(marks=(), **values):
    """A stand-in for a case of a test."""
    found = {mark.name: mark for mark in marks}
    return SimpleNamespace(callspec=SimpleNamespace(params=values), get_closest_marker=found.get)


def cases(*marks, **lists):
    rows = itertools.product(*lists.values())
    return [case([mark.mark for mark in marks], **dict(zip(lists, row, strict=True))) for row in rows]


def stay(found):
    out = [*left_out("test.py::test", found)]
    return [each.callspec.params for each in found if each not in out]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_of_so_many_values_occur_in_few_rows(strength):
    rows = [*itertools.product("abcd", "123", "xy")]
    chosen = [rows[place] for place in covering(rows, strength)]
    for columns in itertools.combinations(range(3), strength):
        of_all, of_chosen = ({tuple(row[c] for c in columns) for row in some} for some in (rows, chosen))
        assert of_all == of_chosen
    assert len(chosen) == {1: 4, 2: 12, 3: 24}[strength]


def test_combinations_that_no_row_has_are_not_missed():
    rows = [("a", 1), ("a", 2), ("b", 1)]
    assert covering(rows, 2) == [0, 1, 2]


def test_without_marks_only_policies_are_thinned_and_they_take_turns():
    kept = stay(cases(device=POLICIES, ranks=(1, 2, 3), codec="ab"))
    assert {(each["ranks"], each["codec"]) for each in kept} == {*itertools.product((1, 2, 3), "ab")}
    assert len(kept) == 6
    assert {each["device"] for each in kept} == {*POLICIES}
    assert len(stay(cases(ranks=(1, 2, 3), codec="ab"))) == 6
    assert len(stay(cases(device=("lazy", "real")))) == 2


def test_marks_say_what_stays():
    assert len(stay(cases(pytest.mark.every_policy, device=POLICIES, ranks=(1, 2)))) == 6
    kept = stay(cases(pytest.mark.covering(1), device=POLICIES, ranks=(1, 2, 3), codec="ab"))
    assert len(kept) == 3
    assert {each["ranks"] for each in kept} == {1, 2, 3}
    assert {each["codec"] for each in kept} == {"a", "b"}


def test_of_many_algorithms_a_part_stays_and_tests_take_turns():
    found = cases(algorithm=range(7), ranks=(1, 2))
    kept = []
    for number in range(30):
        out = [*left_out(f"test.py::test_{number}", found)]
        kept.append({each.callspec.params["algorithm"] for each in found if each not in out})
        assert len(found) - len(out) == 2 * len(kept[-1])
    assert {len(some) for some in kept} <= {1, 2}
    assert set().union(*kept) == {*range(7)}
    assert len(stay(cases(algorithm=range(5)))) == 5


def test_cases_with_the_same_values_are_several():
    assert len(stay(cases(value=["a", "a"]))) == 2
    assert len(stay(cases(device=POLICIES, value=["a", "a"]))) == 2


def test_pytest_itself_leaves_one_policy_of_each_case(pytester):
    """Its own numbers of parameters begin anew with each policy, which no stand-in shows."""
    pytester.makeconftest(
        """
        import pytest
        from support import selection

        @pytest.fixture(params=selection.POLICIES)
        def device(request):
            return request.param

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            selection.mark_what_others_cover(items)
        """
    )
    pytester.makeini("[pytest]\nmarkers = slow\n    every_policy")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x", [1, 2])
        @pytest.mark.parametrize("y", "ab")
        def test_some(device, x, y):
            pass

        @pytest.mark.every_policy
        def test_all(device):
            pass
        """
    )
    result = pytester.inline_run("-m", "not slow", "-p", "no:cacheprovider")
    assert len(result.listoutcomes()[0]) == 4 + 3
