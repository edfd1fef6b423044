"""The benchmark of calls beside mpi4py's: both sides have the same results, and the report has every row."""

import json

import pytest
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks import latency


@pytest.mark.slow
@pytest.mark.timeout(330)  # three ranks that poll share two cores with other tests
@pytest.mark.parametrize("ranks", [1, 3])
def test_both_sides_of_every_call_agree_and_have_their_times(tmp_path, ranks):
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    path = tmp_path / "latency.json"
    done = run_python(
        ranks, "-m", "benchmarks.latency", "-s", "4", "5000", "-n", "3", "--json", path, timeout_s=300
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    found = [(result["call"], result["bytes"]) for result in record["results"]]
    assert found == [("barrier", 0)] + [(name, size) for name in latency.CALLS[1:] for size in (4, 5000)]
    for result in record["results"]:
        assert result["wrong"] == 0
        assert result["more_us"]["q1"] <= result["more_us"]["median"] <= result["more_us"]["q3"]
    text = latency.markdown([record])
    assert all(f"| {name} |" in text for name in latency.CALLS)
    record["results"][3]["wrong"] = 1
    with pytest.raises(ValueError, match="1 elements are wrong"):
        latency.markdown([record])


def test_arguments_that_cannot_be_are_refused(capsys):
    with pytest.raises(SystemExit):
        latency.parse_arguments(["allreduces"])
    assert "call is 'allreduces', expected any of barrier" in capsys.readouterr().err
