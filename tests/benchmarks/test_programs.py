"""Programs of others, with their parts and with ours."""

import copy

import pytest
import torch

from benchmarks.programs.__main__ import Run, compare
from benchmarks.programs.changes import CHANGES, LOOPS, WRAPPER, Change


def test_every_program_has_a_change_and_every_change_fits_its_program():
    assert {path.stem for path in LOOPS.glob("*.py")} == set(CHANGES)
    for program, changes in CHANGES.items():
        for change in changes:
            changed = change.apply((LOOPS / f"{program}.py").read_text())
            compile(changed, program, "exec")
            assert "bagua_torch" in changed


def test_a_change_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="is not in the program"):
        WRAPPER.apply("import torch\n")


def made(*, ranks=(0, 1), result="{}"):
    return Run(
        {rank: [[torch.ones(3), torch.zeros(2)], [torch.full((3,), 2.0), torch.ones(2)]] for rank in ranks},
        result,
    )


def test_one_bit_of_one_rank_in_one_step_is_a_difference():
    ours = copy.deepcopy(made())
    ours.steps[1][0][0][2] += 2**-23
    found = compare(made(), ours, WRAPPER)
    assert (found["steps"], found["equal"], found["result"]) == (2, 1, "different")
    assert compare(made(), made(), WRAPPER)["result"] == "equal"


def test_what_rank_0_printed_errors_and_a_missing_step_count():
    short = made()
    short.steps[1].pop()
    for ours, result in [
        (made(result="{1}"), "different"),
        (Run({}, "", "exit status 1"), "failed"),
        (short, "different"),
    ]:
        assert compare(made(), ours, WRAPPER)["result"] == result


def test_a_change_with_a_tolerance_is_compared_with_one_process():
    change = Change("sync", {}, alone=True, tolerance=1e-3)
    ours = made()
    for rank in ours.steps:
        ours.steps[rank][1][0] += 1e-3
    assert compare(made(ranks=(0,)), ours, change)["result"] == "equal"
    ours.steps[1][1][0] += 1e-2
    assert compare(made(ranks=(0,)), ours, change)["result"] == "different"
