"""The benchmark of samplers and caches, run as its users would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("lmdb", "msgpack", "redis", "xxhash")
@pytest.mark.slow
def test_every_sampler_and_store_has_a_row(tmp_path):
    path = tmp_path / "data.json"
    command = [sys.executable, "-m", "benchmarks.data", "--samples", "128", "--batch-size", "2", "--rounds", "1"]
    command += ["--ranks", "2", "--images", "8", "--workers", "0", "--repeats", "1", "--json", str(path)]

    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout

    rows = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == [
        *["pytorch", "bagua", "balanced", "tokens"],
        *["none", "lmdb", "redis", "memory"],
    ]
    record = json.loads(path.read_text())
    uneven = {row["sampler"]: row["uneven_tokens"] for row in record["samplers"]}
    assert 1 <= uneven["balanced"] < uneven["pytorch"]
    assert all(row["tokens_per_s"]["median"] > 0 and 0 <= row["padding"] < 1 for row in record["samplers"])
    assert [row["wrong"] for row in record["cache"]] == [0] * 4
    assert [row["hits"] for row in record["cache"]] == [0, 8, 8, 8]
