"""The benchmark of reproducible sums, run as its users would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench import RESULTS
from benchmarks.reproducible import DISTRIBUTIONS, errors

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_prints_and_writes_errors_and_costs(tmp_path):
    path = tmp_path / "reproducible.json"
    command = [sys.executable, "-m", "benchmarks.reproducible", "-b", "64K", "-e", "64K", "-n", "2", "-w", "1"]
    printed = subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    ).stdout
    record = json.loads(path.read_text())
    for found in record["errors"]:
        assert f"{found['reproducible']:.2e}" in printed
    (result,) = record["results"]
    assert result["nbytes"] == 65536
    assert f"{result['ratio']:.2f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_committed_errors_are_those_of_today_and_mostly_below_those_of_float32(name):
    (known,) = (found for found in committed()["errors"] if found["values"] == name)
    today = errors(name, 128)
    assert today.keys() == known.keys()
    assert today["reproducible"] == pytest.approx(known["reproducible"], rel=1e-3)
    assert today["float32"] == pytest.approx(known["float32"], rel=1e-3)
    heavy = name == "lognormal scales(3)"  # most values are far below the largest of their block
    assert (known["reproducible"] < known["float32"]) is not heavy


def test_the_committed_bytes_are_those_of_float32_and_a_byte_a_block():
    for result in committed()["results"]:
        wire = result["wire_bytes"]
        assert wire["reproducible"] == wire["exact"] * (1 + 1 / 512)


def committed():
    return json.loads((RESULTS / "reproducible.json").read_text())
