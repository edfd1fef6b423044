"""The benchmark of training: what it measures and writes, the shapes of its models, and its report."""

import pytest
import torch

from benchmarks.bench.timing import Processors
from benchmarks.training import models, report


def row_of(algorithm, samples_per_s, **more):
    """A row of a record, as if measured."""
    return {
        "algorithm": algorithm,
        "model": "vgg16",
        "samples": "images",
        "parameters": 138357544,
        "model_bytes": 553430176,
        "hosts": 4,
        "ranks_per_host": 1,
        "rate_mbit": 1000,
        "batch": 1,
        "settings": f"{algorithm}()",
        "seconds": [4 / samples_per_s],
        "median_s": 4 / samples_per_s,
        "q1_s": 4 / samples_per_s,
        "q3_s": 4 / samples_per_s,
        "samples_per_s": samples_per_s,
        "samples_per_s_std": 0.0,
        "wire_bytes": None,
        "overlap": None,
        "busy": None,
        "compute": None,
        **more,
    }


def record_of(*rows):
    machine = {"cpu": "a processor", "cores": 2, "cores_per_rank": 2}
    return {"machine": machine, "versions": {"python": "3"}, "ranks": 4, "results": list(rows)}


def test_time_that_a_hypervisor_took_is_neither_work_nor_idleness(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 40 5 6 7 800 9 9\ncpu0 1 2 3 40 5 6 7 800 9 9\n")
    assert Processors.now(stat) == Processors(worked=19, idle=45)
    assert Processors.now(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "parameters"), [("vgg16", 138_357_544), ("resnet50", 25_557_032), ("bert-large", 335_141_888)]
)
def test_models_have_the_published_numbers_of_parameters(name, parameters):
    with torch.device("meta"):
        assert models.count_parameters(models.MODELS[name].make()) == parameters


def test_speedups_are_over_ddp_in_the_same_file_and_network():
    slow = {"rate_mbit": 500}
    one = record_of(row_of("ddp", 0.5), row_of("bytegrad", 1.0), row_of("ddp", 0.25, **slow))
    other = record_of(row_of("exact", 0.75, **slow))

    found = {(row["rate_mbit"], row["algorithm"]): row["speedup"] for row in report.merge([one, other])}

    assert found == {(1000, "ddp"): 1, (1000, "bytegrad"): 2, (500, "ddp"): 1, (500, "exact"): None}


def test_speedups_are_over_the_faster_of_pytorchs_own():
    rows = [row_of("ddp", 0.5), row_of("ddp-view", 1.0), row_of("exact", 0.75), row_of("ddp-fp16", 2.0)]
    found = {row["algorithm"]: row["speedup"] for row in report.merge([record_of(*rows)])}
    assert found == {"ddp": 0.5, "ddp-view": 1, "exact": 0.75, "ddp-fp16": 2}


def test_of_rows_measured_twice_the_last_is_kept():
    first, again = (record_of(row_of("ddp", 0.5), row_of("exact", value)) for value in (1.0, 2.0))

    assert [row["speedup"] for row in report.merge([first, again])] == [1, 4]


def test_a_step_is_compared_with_the_longer_of_computing_and_sending():
    rows = [
        row_of("alone", 2.0),  # 2 s
        row_of("ddp", 0.5),
        row_of("ddp-fp16", 0.5),
        row_of("exact", 1.0, wire_bytes=4e8),
        row_of("bytegrad", 1.0, wire_bytes=1e8),
    ]
    found = {row["algorithm"]: row["of_limit"] for row in report.merge([record_of(*rows)])}
    ring_s = 1.5 * 553430176 * 8 / 1e9
    expected = {"alone": 1, "ddp": ring_s / 8, "ddp-fp16": ring_s / 16, "exact": 3.2 / 4, "bytegrad": 2 / 4}
    assert found == pytest.approx(expected)
    assert report.limit_s({**rows[1], "ranks_per_host": 2}, 2.0) is None  # not all bytes cross the line
    assert report.limit_s({**rows[1], "rate_mbit": None}, 2.0) is None
