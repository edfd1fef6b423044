"""The benchmark of hooks: every way averages, and its table has a row for each."""

import json

import pytest
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks import hooks

ARGUMENTS = ["-t", "6", "-e", "3", "-n", "2", "-s", "2", "-w", "1"]


@pytest.mark.slow
def test_every_way_averages_and_has_its_times(tmp_path):
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    path = tmp_path / "hooks.json"
    done = run_python(2, "-m", "benchmarks.hooks", *ARGUMENTS, "--json", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["ranks"] == 2
    assert [result["way"] for result in record["results"]] == [*hooks.TORCH, *hooks.OURS]
    for result in record["results"]:
        assert (result["tensors"], result["wrong"]) == (6, 0)
        for measure in ("parameter_us", "forward_us", "bucket_us"):
            assert result[measure]["q1"] <= result[measure]["median"] <= result[measure]["q3"]
    rows = [line.split() for line in done.stdout.splitlines() if line and line[0] != "#"]
    assert [row[0] for row in rows[-4:]] == [result["way"] for result in record["results"]]


def test_arguments_that_cannot_be_are_refused(capsys):
    with pytest.raises(SystemExit):
        hooks.parse_arguments(["-t", "1"])
    assert "--tensors" in capsys.readouterr().err
