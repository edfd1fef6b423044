"""The record of the simulator: what it was calibrated on, how far it is right, and the page that shows it."""

import json

import pytest
from support.pages import ROOT

from bagua_comm.planning.costmodel import Rates
from bagua_comm.planning.simulator import VERSION, simulate
from benchmarks.training import at_scale, simulator

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "how-it-works" / "at-scale.md").read_text()
RECORD = json.loads((RESULTS / "simulator.json").read_text())


def test_the_page_has_the_tables_of_the_record():
    assert RECORD["simulator"] == VERSION
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
    for what, name in (("steps", "steps"), ("steps on 8 ranks", "eight_ranks"), ("single calls", "calls")):
        found = RECORD["summary"][name]
        wanted = f"{found['within']} of {found['predicted']} {what} within 15 % ({found['share']:.0%}"
        assert wanted in text


def test_the_record_is_that_of_the_committed_files_and_this_simulator():
    names = ["scaling-100-2x1", "scaling-100-8x1"]
    rates = Rates.from_dict(RECORD["rates"])
    rows = {(row["file"], row["algorithm"]): row for row in RECORD["results"]}
    for name, point in simulator.read_points([RESULTS / f"{each}.json" for each in names]):
        method, job, cluster, measured_s = point.measurement
        row = rows[name, point.row["algorithm"]]
        assert row["measured_s"] == measured_s
        assert row["predicted_s"] == pytest.approx(simulate(method, job, cluster, rates).step_s, rel=1e-6)
        assert row["calibrated"] == (cluster.size == 2 and point.row["algorithm"] in ("exact", "bytegrad"))


@pytest.mark.needs("matplotlib")
def test_a_report_is_made_of_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulator, "simulate_scale", lambda rates: RECORD["at_scale"][:1])
    files = [str(RESULTS / "scaling-100-2x1.json"), "--calls", str(RESULTS / "few_bits-network-100mbit.json")]
    out = tmp_path / "simulator"
    rates = ["--rates", str(RESULTS / "simulator.json"), "--out", str(out)]
    assert simulator.main([*files, *rates]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["summary"]["steps"]["predicted"] == 4
    assert "| scaling-100-2x1 | 4 buckets | 2 x 1, 100 Mbit/s | exact |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_files_that_are_no_records_are_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert simulator.main([str(path)]) == 2
    assert "expected JSON files of benchmarks.training" in capsys.readouterr().err
