"""The record of the simulator: what it was calibrated on, how far it is right, and the page that shows it."""

import json

import pytest
from support.pages import ROOT

from bagua_comm.planning.costmodel import Rates
from bagua_comm.planning.simulator import replay, simulate
from benchmarks import figures
from benchmarks.training import at_scale, simulator

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "how-it-works" / "at-scale.md").read_text()
RECORD = json.loads((RESULTS / "simulator.json").read_text())


def test_the_page_has_the_tables_of_the_record():
    for scale in RECORD["at_scale"]:
        _, after = PAGE.split(f"### {at_scale.heading(scale)}\n\n")
        assert after.startswith("\n".join(at_scale.table(scale)) + "\n")
    assert "\n".join(at_scale.disagreements(RECORD["at_scale"])) in PAGE


def test_the_advice_has_the_figures_of_the_record():
    text = " ".join(PAGE.split())
    fast, slow, hosts = RECORD["at_scale"]

    def step_s(scale, ranks, name):
        (row,) = (row for row in scale["results"] if (row["ranks"], row["algorithm"]) == (ranks, name))
        return row["varied_s"]

    def ratio(scale, ranks, name):
        return f"{step_s(scale, ranks, 'exact') / step_s(scale, ranks, name):.1f} times as fast"

    assert f"`ByteGrad()` is {ratio(hosts, 8, 'bytegrad')}" in text
    assert f"`GradientAllReduce(Hierarchical(Quantized()))` is {ratio(slow, 64, 'hierarchical-bytes')}" in text
    assert f"at 100 Gbit/s {ratio(fast, 64, 'hierarchical-bytes')}" in text
    assert f'`by_node(Decentralized("shift_one"))` is {ratio(fast, 512, "shift-one-by-node")}' in text
    assert f"no more than {ratio(fast, 4096, 'hierarchical-bytes')}" in text
    assert f"`DiLoCo(100)` is {ratio(fast, 4096, 'diloco-100')}" in text


def test_the_page_says_how_far_the_simulator_is_right():
    text = " ".join(PAGE.split())
    for claim, name in (
        ("{} steps within", "steps"),
        ("{} steps on 8 ranks within", "eight_ranks"),
        ("Of the part that is communication, {} within", "communication"),
        ("Without the constant: {} within", "without_whole"),
    ):
        found = RECORD["summary"][name]
        counted = claim.format(f"{found['within']} of {found['predicted']}")
        assert f"{counted} 15 % ({found['share']:.0%}" in text
    assert f"The cost model, by the same rates: {RECORD['summary']['costmodel']['within']}." in text
    assert f"WHOLE = {replay.WHOLE}" in text


def configuration(row):
    return tuple(row[each] for each in ("model", "batch", "hosts", "ranks_per_host", "rate_mbit", "algorithm"))


def test_a_stranger_who_counts_the_rows_of_the_record_finds_what_is_claimed():
    """No row counts that repeats a configuration to which rates or a constant were fitted."""
    (command,) = (job for job in figures.JOBS["scaling"] if "benchmarks.training.simulator" in job)
    patterns = [path.name for path in command[2 : command.index("--out")]]
    files = sorted(path for pattern in patterns for path in RESULTS.glob(pattern))
    measured = simulator.read_points([*reversed(files)])
    rows = RECORD["results"]
    assert [name for name, _ in measured] == [row["file"] for row in rows]
    for (name, point), row in zip(measured, rows, strict=True):
        assert configuration(point.row) == configuration(row)
        assert (point.measurement.step_s, point.measurement.job.compute_s) == (row["measured_s"], row["alone_s"])
        fitted = name in ("scaling-100-2x1", "scaling-100-4x1") and row["algorithm"] == "low-precision-ring"
        assert row["calibrated"] == (simulator.is_seen(name, point) or fitted)
    seen = {configuration(row) for row in rows if row["calibrated"]}
    left = [row for row in rows if configuration(row) not in seen]

    def within(errors):
        return sum(abs(error) <= 0.15 for error in errors), len(left)

    counted = {
        "steps": within(row["predicted_s"] / row["measured_s"] - 1 for row in left),
        "communication": within(
            (row["predicted_s"] - row["alone_s"]) / (row["measured_s"] - row["alone_s"]) - 1 for row in left
        ),
        "costmodel": within(row["costmodel_s"] / row["measured_s"] - 1 for row in left),
        "without_whole": within(row["without_whole_error"] for row in left),
    }
    claimed = {name: RECORD["summary"][name] for name in counted}
    assert counted == {name: (each["within"], each["predicted"]) for name, each in claimed.items()}


def test_the_record_is_that_of_the_committed_files_and_this_simulator():
    names = ["scaling-100-2x1", "scaling-100-8x1"]
    rates = Rates.from_dict(RECORD["rates"])
    rows = {(row["file"], row["algorithm"]): row for row in RECORD["results"]}
    for name, point in simulator.read_points([RESULTS / f"{each}.json" for each in names]):
        method, job, cluster, measured_s = point.measurement
        row = rows[name, point.row["algorithm"]]
        assert row["measured_s"] == measured_s
        assert row["predicted_s"] == pytest.approx(simulate(method, job, cluster, rates).step_s, rel=1e-6)
        seen = ("exact", "bytegrad", "low-precision-ring")
        assert row["calibrated"] == (cluster.size == 2 and point.row["algorithm"] in seen)


def test_a_report_is_made_of_records(tmp_path, monkeypatch):
    monkeypatch.setattr(simulator, "simulate_scale", lambda rates: RECORD["at_scale"][:1])  # takes minutes
    files = [str(RESULTS / "scaling-100-2x1.json"), "--rates", str(RESULTS / "simulator.json")]
    assert simulator.main([*files, "--out", str(tmp_path / "simulator")]) == 0
    record = json.loads((tmp_path / "simulator.json").read_text())
    assert record["summary"]["steps"]["predicted"] == 3
    assert "| scaling-100-2x1 | 4 buckets |" in (tmp_path / "simulator.md").read_text()
