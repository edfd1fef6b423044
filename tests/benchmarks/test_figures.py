"""The commands that measure all figures again."""

import fnmatch
import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks import figures
from benchmarks.bench import RESULTS
from benchmarks.netlab import run

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


def test_a_pattern_selects_the_files_that_match(tmp_path):
    for name in ("b-2.json", "b-1.json", "a-1.json"):
        (tmp_path / name).touch()
    assert figures.expanded(tmp_path / "b-*.json") == [f"{tmp_path}/b-1.json", f"{tmp_path}/b-2.json"]
    assert figures.expanded(4) == ["4"]


def test_hosts_are_those_of_netlab(monkeypatch):
    seen = []
    monkeypatch.setattr(run, "_run_command", lambda options: seen.append(options) or 0)
    for job in (figures.network("1gbit"), figures.training("vgg16", 500)):
        assert [*job[:2], run.main(list(map(str, job[2:])))] == ["-m", "benchmarks.netlab", 0]
    assert [(options.hosts, options.rate, options.module, options.script) for options in seen] == [
        (4, "1gbit", True, "benchmarks.collectives"),
        (4, "500mbit", True, "benchmarks.training"),
    ]


def test_a_command_that_fails_ends_the_others(monkeypatch, capsys):
    codes = iter([0, 3])
    monkeypatch.setattr(figures.subprocess, "run", lambda command, cwd: SimpleNamespace(returncode=next(codes)))
    assert figures.main(["--only", "network", "shared"]) == 3
    assert capsys.readouterr().out.count(" -m benchmarks.netlab run ") == 2
