"""Programs in orders drawn from seeds; `python tests/random_schedules.py --seeds 10000` tries more."""

import os
import subprocess
import sys
from collections import deque
from math import inf
from pathlib import Path

import pytest
from random_schedules import program_of, run_seed

from bagua_comm.elastic.snapshot import commit
from bagua_comm.testing import SimulationError
from bagua_comm.transports.local import Hub, LocalTransport

PROGRAM = Path(__file__).with_name("random_schedules.py")


@pytest.mark.parametrize("seed", range(8), ids=lambda seed: f"{program_of(seed)}-{seed}")
def test_what_must_hold_in_every_order(seed):
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 96, 22))
def test_what_must_hold_in_more_orders(first):
    for seed in range(first, first + 22):
        run_seed(seed)


@pytest.mark.parametrize("seed", [763, 1002])
def test_elastic_training_does_not_start_again_or_keep_an_undone_step(seed):
    """763: the last holders died after a restore; 1002: private state was lost before the first commit."""
    run_seed(seed, "elastic")


def test_a_new_communicator_is_made_within_the_limit_of_one_call():
    """6041: after a wait for the split, its ranks were gathered within a limit of their own."""
    run_seed(6041, "failing_calls")


@pytest.mark.slow
def test_a_seed_gives_the_same_course_in_every_process():
    command = [sys.executable, str(PROGRAM), "--seeds", "12", "--digests"]
    courses = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": number}, capture_output=True, text=True, check=True
        ).stdout.splitlines()[:12]
        for number in ("1", "2")
    ]
    assert courses[0] == courses[1]
    assert len(courses[0]) == 12


# Planted defects --------------------------------------------------------------------------------------


def first_failure(program, seeds):
    """The first of the seeds with which the program fails, and its error."""
    for seed in seeds:
        try:
            run_seed(seed, program)
        except Exception as exc:
            return seed, exc
    raise AssertionError(f"no seed has found the defect in {program}")


def assert_found(monkeypatch, defect, program, seeds):
    """A seed finds the defect, with the same error each time; without the defect it passes. Return the error."""
    with monkeypatch.context() as patch:
        patch.setattr(*defect)
        seed, error = first_failure(program, seeds)
        again, same = first_failure(program, [seed])
    assert (again, str(same)) == (seed, str(error))
    assert f"seed {seed}" in "".join(getattr(error, "__notes__", [f"seed {seed}"]))
    run_seed(seed, program)
    return error


def test_a_seed_finds_a_commit_without_agreement(monkeypatch):
    write = commit._write

    def hasty(comm, buffer, *rest):
        pending, problem = write(comm, buffer, *rest)
        buffer.local.commit()
        return pending, problem

    assert_found(monkeypatch, (commit, "_write", hasty), "elastic", range(16, 200))


def test_a_seed_finds_a_message_that_is_read_before_an_earlier_one(monkeypatch):
    def newest_first(self, source, dest, tag, message):
        self.mail.setdefault((source, dest, tag), deque()).appendleft(message)

    assert_found(monkeypatch, (Hub, "post", newest_first), "failing_calls", range(100))


def test_a_seed_finds_a_wait_without_limit(monkeypatch):
    error = assert_found(
        monkeypatch, (LocalTransport, "deadline_s", lambda self: inf), "failing_calls", range(1, 40)
    )
    assert isinstance(error, SimulationError) or "the limit is" in str(error)
