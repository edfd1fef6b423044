"""`python -m bagua_comm advise --simulate`."""

import json

import pytest

from bagua_comm import __main__ as cli
from bagua_comm.commands import advise_simulated
from bagua_comm.planning.costmodel import Cluster, Job
from bagua_comm.planning.simulator import simulate

SIMULATE = ["advise", "--simulate", "--nodes", "2", "--ranks-per-node", "4", "--bandwidth", "10gbit"]
SIMULATE += ["--model-bytes", "100M", "--step-time", "300ms", "--algorithms", "exact,hierarchical-bytes"]
DEATHS = ["--failures", "mtbf_hours=100,spares=2", "--variation", "compute=0.1"]


def test_it_prints_steps_and_goodput_on_more_and_more_ranks(capsys):
    assert cli.main([*SIMULATE, *DEATHS, "--most-ranks", "64"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err.splitlines() == [f"simulating 2 algorithms on {size} ranks" for size in (8, 16, 64)]
    assert lines[0].startswith("Simulated, seed 0: 100 MB, 300.0 ms a step alone; 2 x 4 ranks, 10 Gbit/s")
    header = lines.index(next(line for line in lines if line.startswith("Goodput on ranks")))
    assert lines[header].split()[3:] == ["8", "16", "64"]
    shares = {line.split()[0]: line.split()[1:] for line in lines[header + 1 : header + 3]}
    assert sorted(shares) == ["exact", "hierarchical-bytes"]
    assert all(0 < float(share.rstrip("%")) < 100 for row in shares.values() for share in row)


def test_json_holds_what_the_simulator_says(capsys):
    assert cli.main([*SIMULATE, "--json", "--most-ranks", "8", "--device", "cpu", "--latency", "1ms"]) == 0
    record = json.loads(capsys.readouterr().out)
    job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(2, 4, 10.0, 1e-3)
    found = {row["algorithm"]: row for row in record["results"]}
    exact = simulate(advise_simulated.METHODS["exact"], job, cluster)
    assert found["exact"]["step_s"] == pytest.approx(exact.step_s)
    assert found["exact"]["goodput"] is None
    assert [row["ranks"] for row in record["results"]] == [8, 8]


@pytest.mark.needs("matplotlib")
def test_the_figure_is_drawn(capsys, tmp_path):
    path = tmp_path / "steps.png"
    assert cli.main([*SIMULATE, "--most-ranks", "16", "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert f"{path} shows it." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failures", "mtbf=3"], "'mtbf=3' is not a setting; expected mtbf_hours=..., recovery=..."),
        (["--failures", "spares=two"], "'spares=two': expected an integer"),
        (["--failures", "mtbf_hours=-1"], "mtbf_hours is -1.0, expected a number from 0.001"),
        (["--variation", "compute=9"], "compute is 9.0, expected a number from 0 to 2"),
        (["--algorithms", "exakt"], "there is no 'exakt'"),
        (["--algorithms", "shift-one", "--nodes", "3", "--ranks-per-node", "1"], "no algorithm applies"),
        (["--seed", "-1"], "--seed is -1, expected an integer from 0"),
        (["--sharded"], "--simulate knows no sharded models"),
    ],
)
def test_bad_input_is_named(capsys, options, message):
    try:
        code = cli.main([*SIMULATE, "--most-ranks", "4", *options])
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_settings_without_simulate_are_refused(capsys):
    without = [option for option in SIMULATE if option != "--simulate"]
    assert cli.main(without) == 2
    assert "--algorithms is for a simulation; add --simulate" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--most-ranks", "64"], ["--seed", "0"]])
def test_numbers_without_simulate_are_refused_also_if_they_are_the_defaults(capsys, option):
    assert cli.main([*SIMULATE[:1], *SIMULATE[2:-2], *option]) == 2
    assert f"{option[0]} is for a simulation; add --simulate" in capsys.readouterr().err
