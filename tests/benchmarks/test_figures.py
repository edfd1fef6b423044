"""The commands that measure all figures again."""

import fnmatch
import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks import figures
from benchmarks.bench import RESULTS

PROGRAMS = {
    "benchmarks.collectives": "benchmarks.collectives.run",
    "benchmarks.training": "benchmarks.training.run",
    "benchmarks.training.tuner": "benchmarks.training.tuner",
    "benchmarks.training.links": "benchmarks.training.links",
    "benchmarks.training.scaling": "benchmarks.training.scaling",
    "benchmarks.codecs": "benchmarks.codecs",
    "benchmarks.convergence": "benchmarks.convergence.run",
    "benchmarks.first_run": "benchmarks.first_run",
}


JOBS = [job for jobs in figures.JOBS.values() for job in jobs]


def program_of(job):
    """The program that a job runs in the end, and its arguments."""
    words = [str(word) for word in job]
    start = len(words) - words[::-1].index("-m")
    return words[start], words[start + 1 :]


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_programs_take_the_arguments_and_write_to_the_results(number):
    job = JOBS[number]
    program, arguments = program_of(job)
    if program not in PROGRAMS:  # a report, of records of earlier jobs
        assert importlib.util.find_spec(program) is not None
        files = [word for word in arguments if word.endswith(".json")]
        written = {str(job[-1]) for job in JOBS}
        assert files
        assert all(fnmatch.filter(written, name) for name in files)
        return
    options = importlib.import_module(PROGRAMS[program]).parse_arguments(arguments)
    assert (getattr(options, "json", None) or options.out).parent == RESULTS


def test_a_command_that_fails_ends_the_others(monkeypatch, capsys):
    codes = iter([0, 3])
    monkeypatch.setattr(figures.subprocess, "run", lambda command, cwd: SimpleNamespace(returncode=next(codes)))
    assert figures.main(["--only", "network", "shared"]) == 3
    assert capsys.readouterr().out.count(" -m benchmarks.netlab run ") == 2
