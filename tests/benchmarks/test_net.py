"""The benchmark of the network plugin: its classes, its tables, and a short trial of every byte."""

import numpy as np

from benchmarks.net import link, report
from benchmarks.net_traffic import random_sizes


def result(name="capped", line_mb_s=0.0, **scale):
    """Rates in MB/s of schemes, at two sizes."""
    results = [
        {"scheme": scheme, "bytes": size, "median_s": size / 1e6 / rate, "rounds": 3}
        for scheme, rate in scale.items()
        for size in (8, 1 << 20)
    ]
    return {"scenario": name, "text": "a link", "line_mb_s": line_mb_s, "wrong": 0, "results": results}


def test_the_table_compares_with_the_default_and_with_the_best_of_the_grid():
    lines = report.table(result(plugin=80.0, default=10.0, **{"4x1": 40.0, "one flow": 11.0}))
    assert lines[2] == "| 8 | 80 | 11 | 10 | 40 (4x1) | 8.00 | 2.00 |"


def test_a_burst_above_the_rate_of_the_link_counts_as_that_rate():
    lines = report.table(result(plugin=80.0, default=10.0, **{"4x1": 160.0}, line_mb_s=100.0))
    assert lines[2] == "| 8 | 80 | - | 10 | 160 (4x1) | 8.00 | 0.80 |"


def test_each_source_port_has_a_class_of_its_own():
    lines = [
        link.class_line("add", port, "1mbit") for port in range(link.FIRST_PORT, link.FIRST_PORT + link.PORTS)
    ]
    assert len({*lines}) == link.PORTS
    assert "classid 1:10 " in lines[0]


def test_sizes_reach_from_nothing_to_the_largest_and_have_the_mean():
    sizes = random_sizes(np.random.default_rng(0), 200_000, 64 << 20, 16_000.0)
    assert min(sizes) == 0
    assert max(sizes) == 64 << 20
    assert 8_000 < np.mean(sizes) < 32_000
