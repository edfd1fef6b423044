"""The benchmark of sharded training: losses, and the figures that the guide gives."""

import json

import pytest
from support.pages import ROOT

from benchmarks.bench import RESULTS
from benchmarks.fsdp.loss import main
from benchmarks.fsdp.methods import TRAINED


@pytest.mark.slow
def test_losses_of_one_rank_are_those_of_pytorch(tmp_path):
    path = tmp_path / "loss.json"
    small = "--width 64 --layers 1 --steps 3 --batch-size 1 --windows 8 --seeds 0,5"
    main([*small.split(), "--json", str(path)])
    found = json.loads(path.read_text())["results"]
    assert len(found) == 2 * len(TRAINED)
    for seed in (0, 5):
        (loss,) = {each["held_out"] for each in found if each["seed"] == seed}
        assert 3 < loss < 6


@pytest.mark.parametrize("rate", ["200mbit", "1gbit"])
def test_the_ratios_of_the_guide_are_those_that_were_measured(rate):
    results = json.loads((RESULTS / f"fsdp-{rate}.json").read_text())["results"]
    ratios = {each["method"]: f"{each['ratio']:.2f}" for each in results}
    text = (ROOT / "docs" / "guides" / "sharded.md").read_text().replace("\n", " ")
    if rate == "200mbit":
        assert f"took {ratios['exact']} of its time and eight bits {ratios['eight bits']};" in text
    else:
        assert f"over 1 Gbit/s, {ratios['exact']} and {ratios['eight bits']}." in text


@pytest.mark.parametrize(
    "path",
    sorted([*RESULTS.glob("fsdp-gpt-*.json"), *RESULTS.glob("fsdp-120m-*.json")]),
    ids=lambda path: path.stem,
)
def test_the_table_of_the_guide_has_what_was_measured(path):
    record = json.loads(path.read_text())
    gbit, hosts = record["arguments"]["gbit"], "2 x 2" if path.stem.endswith("-2x2") else "4"
    rate = f"{gbit:g} Gbit/s" if gbit >= 1 else f"{1000 * gbit:g} Mbit/s"
    text = (ROOT / "docs" / "guides" / "sharded.md").read_text()
    for each in record["results"]:
        figures = f"{each['ratio']:.2f} | {each['link_bytes'] / 1e6:.0f} MB | {each['share']:.2f}"
        assert f"| {hosts} | {rate} | {each['method']} | {figures} |" in text


def test_the_guide_says_how_much_faster_a_large_model_trains_and_what_it_needs():
    text = " ".join((ROOT / "docs" / "guides" / "sharded.md").read_text().split())
    ratios = {"eight bits, overlap": [], "four bits, overlap": []}
    for path in RESULTS.glob("fsdp-120m-*.json"):
        for each in json.loads(path.read_text())["results"][1:]:
            ratios[each["method"]].append(1 / each["ratio"])
    eight, four = (f"{min(found):.1f} to {max(found):.1f} times" for found in ratios.values())
    assert f"Eight bits train {eight} as fast there, four bits {four}." in text
    memory = json.loads((RESULTS / "fsdp-memory-120m.json").read_text())["results"]
    peak = {each["method"]: f"{each['peak_rss_bytes'] / 1e9:.1f} GB" for each in memory}
    said = (
        f"{peak['PyTorch']} with PyTorch, {peak['eight bits']} with eight bits, and {peak['eight bits, overlap']}"
    )
    assert f"{said} with overlap" in text


def test_eight_bits_send_what_the_goal_says():
    for path in RESULTS.glob("fsdp-gpt-*.json"):
        sent = {each["method"]: each["link_bytes"] for each in json.loads(path.read_text())["results"]}
        assert sent["exact"] > 3.8 * sent["eight bits"]
