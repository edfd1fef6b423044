"""The benchmark of codecs, run as its users would."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from bagua_comm import kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_codec_has_a_row_with_figures_beside_a_copy(tmp_path):
    path = tmp_path / "codecs.json"
    command = [sys.executable, "-m", "benchmarks.codecs", "-b", "64K", "-e", "64K", "-n", "3", "-w", "1"]
    command += ["--json", str(path)]

    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout

    rows = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    modules = ["host", "compiled"] if kernels.numba_is_installed() else ["host"]
    expected = product(
        ["float32", "float16", "bfloat16"], ["minmax", "bagua", "int4", "float16", "bfloat16"], modules
    )
    assert [tuple(row[1:4]) for row in rows] == list(expected)
    assert all(len(row) == 13 for row in rows)
    results = json.loads(path.read_text())["results"]
    for result in results:
        assert set(result["gb_per_s"]) == {"copy", "encode", "decode", "combine"}
        assert result["gb_per_s"]["encode"]["median"] > 0
        assert 0 <= result["error"] < 0.11  # of four bits
        assert result["error"] > 0 or result["datatype"] != "float32"
        assert 0 < result["error_of_mean"] < 0.2
    assert results[0]["wire_bytes_per_element"] == 1 + 8 / 512
