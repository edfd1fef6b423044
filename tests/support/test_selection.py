import itertools
from types import SimpleNamespace

import pytest

from support.selection import MANY, covering, extra, left_out
from support.torch_training import CHANGING_ALGORITHMS, GRADIENT_ALGORITHMS, WEIGHT_ALGORITHMS

pytest_plugins = "pytester"

POLICIES = ("lazy", "main-first", "side-first")


def case(marks=(), **values):
    """A stand-in for a case of a test."""
    found = {mark.name: mark for mark in marks}
    return SimpleNamespace(callspec=SimpleNamespace(params=values), get_closest_marker=found.get)


def cases(*marks, **lists):
    rows = itertools.product(*lists.values())
    return [
        case([getattr(mark, "mark", mark) for mark in marks], **dict(zip(lists, row, strict=True)))
        for row in rows
    ]


def stay(found):
    out = [*left_out("test.py::test", found)]
    return [each.callspec.params for each in found if each not in out]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_of_this_many_values_occur_in_few_rows(strength):
    rows = [*itertools.product("abcd", "123", "xy")]
    chosen = [rows[index] for index in covering(rows, strength)]
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


def test_marks_determine_the_cases_that_stay():
    assert len(stay(cases(pytest.mark.every_policy, device=POLICIES, ranks=(1, 2)))) == 6
    kept = stay(cases(pytest.mark.covering(1), device=POLICIES, ranks=(1, 2, 3), codec="ab"))
    assert len(kept) == 3
    assert {each["ranks"] for each in kept} == {1, 2, 3}
    assert {each["codec"] for each in kept} == {"a", "b"}


ALGORITHMS = [*WEIGHT_ALGORITHMS, *GRADIENT_ALGORITHMS, *CHANGING_ALGORITHMS]


def names(kept):
    return [type(each["algorithm"]).__name__ for each in kept]


def test_a_sample_of_algorithms_is_the_same_in_each_test():
    kept = stay(cases(pytest.mark.algorithms("sample"), algorithm=ALGORITHMS, ranks=(1, 2)))
    assert names(kept) == [name for name in ("LowPrecisionDecentralized", "GradientAllReduce") for _ in "12"]
    assert names(stay(cases(pytest.mark.algorithms("sample"), algorithm=ALGORITHMS[:3]))) == ["Decentralized"]
    assert len(stay(cases(pytest.mark.algorithms("all"), algorithm=ALGORITHMS))) == len(ALGORITHMS)


def test_many_algorithms_need_the_mark():
    assert len(stay(cases(algorithm=ALGORITHMS[: MANY - 1]))) == MANY - 1
    assert len(stay(cases(pytest.mark.slow, algorithm=ALGORITHMS))) == len(ALGORITHMS)
    with pytest.raises(
        pytest.UsageError,
        match=rf'{len(ALGORITHMS)} algorithms; mark it with @pytest.mark.algorithms\("sample"\)',
    ):
        stay(cases(algorithm=ALGORITHMS))
    with pytest.raises(pytest.UsageError, match="'some'"):
        stay(cases(pytest.mark.algorithms("some"), algorithm=ALGORITHMS))


def test_the_sample_is_covered_together_with_other_values():
    marks = pytest.mark.algorithms("sample"), pytest.mark.covering(2)
    kept = stay(cases(*marks, algorithm=ALGORITHMS, codec="abc"))
    assert {(name, each["codec"]) for name, each in zip(names(kept), kept, strict=True)} == {
        *itertools.product(("LowPrecisionDecentralized", "GradientAllReduce"), "abc")
    }


def test_cases_with_the_same_values_are_several():
    assert len(stay(cases(value=["a", "a"]))) == 2
    assert len(stay(cases(device=POLICIES, value=["a", "a"]))) == 2


def test_of_the_slow_cases_those_that_add_no_pair_of_values_are_extra():
    def rows_that_run(found):
        out = extra(found)
        return [tuple(each.callspec.params.values()) for each in found if each not in out]

    slow = pytest.mark.slow
    rows = rows_that_run(cases(slow, device=POLICIES, ranks=(1, 2, 3), codec="abc"))
    for first, second in itertools.combinations(range(3), 2):
        assert len({(row[first], row[second]) for row in rows}) == 9
    assert len(rows) < 15
    assert len(rows_that_run(cases(slow, device=POLICIES, codec="abc"))) == 9
    assert len(rows_that_run(cases(slow, value=["a", "a"]))) == 2
    by_default = cases(device=POLICIES, codec="ab")
    assert len(rows_that_run([*by_default, case([slow], device="lazy", codec="a")])) == 6
    assert len(rows_that_run([*by_default, case([slow], device="lazy", codec="c")])) == 7


def test_pytest_itself_leaves_one_policy_of_each_case(pytester, capsys):
    """Numbers of parameters in pytest's ids begin anew with each policy; no fake shows that."""
    pytester.makeconftest(
        """
        import pytest
        from support import selection

        @pytest.fixture(params=selection.POLICIES)
        def device(request):
            return request.param

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            selection.mark_slow_cases(items)
            print(*selection.summary(items), sep="\\n")
            print(*selection.summary(items, verbose=2), sep="\\n")
        """
    )
    pytester.makeini("[pytest]\nmarkers = slow\n    extra\n    every_policy")
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
    printed = capsys.readouterr().out
    assert "slow: 8 of 12 cases of test_pytest_itself_leaves_one_policy_of_each_case.py::test_some\n" in printed
    assert printed.count("slow: test_pytest_itself_leaves_one_policy_of_each_case.py::test_some[") == 8
