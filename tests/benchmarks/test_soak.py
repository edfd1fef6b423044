"""The soak: its disturbances, what counts as growth, and what it calls wrong."""

import itertools
import re

import numpy as np
import pytest

from benchmarks.faults.events import Event
from benchmarks.soak import job, report
from benchmarks.soak.resources import Limit

EXPECTED = ["zero", "one", "two", "three"]


def a_soak(**changes):
    """Two processes that train three steps, and nothing happens."""
    seen = job.Soak(began=100.0)
    for pid in (10, 11):
        seen.take(Event(100.0, pid, "hello", {}))
        seen.take(Event(100.5, pid, "enter", {"rank": pid - 10, "size": 2, "step": 0}))
    for step, pid in itertools.product((1, 2, 3), (10, 11)):
        digest = changes.get("digests", EXPECTED)[step]
        seen.take(Event(100.0 + step, pid, "commit", {"step": step, "digest": digest}))
        seen.take(Event(100.0 + changes.get("times", (0, 1, 2, 3))[step], pid, "committed", {"step": step}))
    for pid in (10, 11):
        seen.take(Event(104.0, pid, "done", {"step": 3, "digest": changes.get("final", "three")}))
    seen.exit_code, seen.seconds = changes.get("exit_code", 0), changes.get("seconds", 4.0)
    seen.files = [(float(t), 1.0 + t * changes.get("mib", 0.0), 10) for t in range(30)]
    seen.left = changes.get("left", [])
    return seen


def test_nothing_is_wrong_with_a_run_in_which_nothing_happens():
    seen = a_soak()
    assert list(report.problems(seen, EXPECTED, [], Limit())) == []
    assert (seen.last_step(), seen.members) == (3, {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit_code": 3}, "exit code 3 at step 3"),
        ({"exit_code": None, "seconds": 90.0}, "it stalled at step 3"),
        ({"times": (0, 1, 70, 71), "seconds": 72.0}, "69 s passed without a step"),
        ({"digests": ["zero", "one", "other", "three"]}, "1 commits have other bytes .* the first at step 2"),
        ({"final": "other"}, r"ranks ended with the bytes \[\(3, 'other'\)\], expected three of step 3"),
        ({"mib": 0.5}, "/dev/shm has 10.0 MiB and 0 files more"),
        ({"left": ["process 10"]}, "left process 10"),
    ],
)
def test_each_thing_that_is_wrong_is_named(changes, problem):
    found = list(report.problems(a_soak(**changes), EXPECTED, [], Limit()))
    assert any(re.match(problem, each) for each in found), found


def test_the_expected_bytes_are_those_of_any_number_of_ranks(tmp_path):
    images = np.random.default_rng(0).random((960, 64), dtype=np.float32)
    np.savez(tmp_path / "digits.npz", images=images, labels=np.arange(960) % 10)
    digests = job.undisturbed(tmp_path / "digits.npz", 3)
    assert len(set(digests)) == 4
    assert digests == job.undisturbed(tmp_path / "digits.npz", 3)
