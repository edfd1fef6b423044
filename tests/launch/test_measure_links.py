"""`run --links auto`: trials, and what is chosen by them."""

import json
import sys
from dataclasses import dataclass, field

import pytest
from support.launch import run_python

from bagua_comm import __main__ as cli
from bagua_comm.commands import run
from bagua_comm.launch import measure_links as links
from bagua_comm.launch.cli import CommandError
from bagua_comm.launch.mpirun import Mpirun

OPEN_MPI = Mpirun("mpirun", "Open MPI", "5.0.11")


@dataclass
class Plan:
    """A trial that prints its time, or does something else."""

    program: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def command(self):
        return [sys.executable, "-c", self.program]


def options(*arguments):
    return cli.make_parser().parse_args(["run", "--links", "auto", *arguments, __file__])


def printing(times):
    """Makes trials that take so long with each number of links; records what they were asked for."""
    asked = []

    def plan(trial, place):
        asked.append((trial.links, place))
        time_s = times[trial.links]
        return Plan(f"print('mpirun says'); print({json.dumps({'seconds': time_s})!r})" if time_s else "exit(3)")

    return plan, asked


@pytest.mark.parametrize(
    ("times", "chosen", "tried"),
    [
        ({1: 0.105, 17: 0.111}, 1, [1, 17]),  # links that carry a whole flow
        ({1: 0.41, 17: 0.12, 3: 0.12}, 3, [1, 17, 3]),
        ({1: 0.41, 17: 0.05, 3: 0.2, 5: 0.1, 9: 0.052}, 9, [1, 17, 3, 5, 9]),
        ({1: 0.41, 17: 0.05, 3: 0.2, 5: 0.1, 9: 0.06}, 17, [1, 17, 3, 5, 9]),
        ({1: 0.41, 17: 0.20, 3: 0.3, 5: 0.1}, 5, [1, 17, 3, 5]),  # too many are slower again
    ],
)
def test_the_fewest_links_that_are_almost_as_fast_as_the_fastest_are_taken(times, chosen, tried):
    number, measured = links.choose(times.__getitem__)
    assert number == chosen
    assert list(measured) == tried


def test_trials_run_on_the_hosts_of_the_job_and_their_results_are_printed(capsys):
    plan, asked = printing({1: 0.4, 17: 0.1, 3: 0.1})
    hosts = ",".join(f"node{number}:2" for number in range(12))
    assert links.measure(options("--host", hosts), False, plan) == 3
    assert [number for number, _ in asked] == [1, 17, 3]
    assert {len(place.hosts) for _, place in asked} == {links.MOST_HOSTS}
    assert {place.ranks.started for _, place in asked} == {2 * links.MOST_HOSTS}
    assert "--links auto: 3; 8 MiB averaged by links: 1: 400 ms, 3: 100 ms, 17: 100 ms" in capsys.readouterr().err


def test_a_number_of_links_that_fails_is_not_taken():
    plan, _ = printing({1: 0.4, 17: None})
    assert links.measure(options("--host", "a:1,b:1"), False, plan) == 1


def test_where_no_trial_succeeds_the_first_error_is_raised():
    plan, _ = printing({1: None, 17: None})
    with pytest.raises(CommandError, match="no trial succeeded; 1 link: the trial ended with exit code 3"):
        links.measure(options("--host", "a:1,b:1"), False, plan)


def test_a_trial_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(links, "TRIAL_S", 0.3)
    with pytest.raises(CommandError, match=r"no trial succeeded; 1 link: the trial did not end within 0.3 s"):
        links.measure(options("--host", "a:1,b:1"), False, lambda *_: Plan("import time; time.sleep(60)"))


@pytest.mark.parametrize("arguments", [(), ("--host", "localhost:4")])
def test_on_one_host_nothing_is_measured(arguments, capsys):
    assert links.measure(options("-n", "4", *arguments), True, None) is None
    assert "on one host, ranks use shared memory, and links have no effect" in capsys.readouterr().err


def test_a_trial_has_the_settings_of_the_job_and_not_its_program():
    asked = options("--host", "a:2,b:2", "--interface", "eth0", "--restarts", "1", "--env", "A=b", "-v")
    made = run.make_plan(links._trial_options(asked, 5), OPEN_MPI)
    text = " ".join(made.command)
    assert "--mca btl_tcp_links 5" in text
    assert "btl_tcp_if_include eth0" in text
    assert made.variables["A"] == "b"
    assert text.endswith("-m bagua_comm.launch.measure_links")
    assert "--with-ft" not in text
    assert asked.links == "auto"


@pytest.mark.slow
def test_ranks_of_a_trial_print_their_time():
    """On one host, where links do nothing; what is printed is what `measure` reads."""
    result = run_python(2, "-m", links.TRIAL)
    assert result.returncode == 0, result.stderr
    assert 0 < json.loads(result.stdout)["seconds"] < 60


def test_auto_measures_so_it_does_not_go_with_a_dry_run(capsys):
    assert cli.main(["run", "-n", "2", "--links", "auto", "--dry-run", __file__]) == 2
    assert "--links auto starts ranks to measure, and --dry-run starts nothing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "many", "1001"])
def test_links_are_a_number_or_auto(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--links", text, __file__])
    assert "expected e.g. 4, or auto" in capsys.readouterr().err
