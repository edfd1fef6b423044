"""The benchmark of first runs, as its users would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.needs("numba", "sklearn", "torch")
def test_each_kind_of_run_has_its_figures(tmp_path):
    path = tmp_path / "first_run.json"
    command = [sys.executable, "-m", "benchmarks.first_run", "-n", "1", "--rounds", "1", "--epochs", "1"]
    quickly = {**os.environ, "NUMBA_OPT": "0"}
    subprocess.run([*command, "--json", str(path)], cwd=ROOT, env=quickly, timeout=200, check=True)
    results = {result["run"]: result for result in json.loads(path.read_text())["results"]}
    assert results.keys() == {"without", "first", "later"}
    for result in results.values():
        assert result["images_per_s"]["median"] > 0
        assert result["seconds"]["median"] > 0
    assert results["without"]["of_without"] == 1
