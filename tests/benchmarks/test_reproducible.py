"""The benchmark of reproducible sums, run as its users would."""

import json

import pytest

from benchmarks.bench import RESULTS
from benchmarks.reproducible import DISTRIBUTIONS, errors


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
