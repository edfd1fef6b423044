"""The benchmark of sharded training, run as its users would."""

import argparse
import json
from pathlib import Path

import pytest
from support.launch import torchrun
from support.pages import ROOT

from benchmarks.bench import RESULTS
from benchmarks.fsdp import memory
from benchmarks.fsdp.loss import main, summarize
from benchmarks.fsdp.methods import METHODS, TRAINED


@pytest.mark.slow
def test_it_prints_and_writes_the_steps_of_all_methods(tmp_path):
    path = tmp_path / "fsdp.json"
    result = torchrun(2, "-m", "benchmarks.fsdp", "--width", 256, "--layers", 2, "-n", 3, "--json", path)
    assert result.returncode == 0, result.stderr
    found = {each["method"]: each for each in json.loads(path.read_text())["results"]}
    assert list(found) == [name for name, each in METHODS.items() if not each.by_host]
    assert found["PyTorch"]["ratio"] == 1
    for each in found.values():
        assert f"{1e3 * each['median_s']:.2f}" in result.stdout
    weights = 2 * (256 * 256 + 256) * 4
    assert found["exact"]["wire_bytes"] == 3 * weights // 2
    assert 3.8 < found["exact"]["wire_bytes"] / found["eight bits"]["wire_bytes"] < 4
    for name in ("exact", "eight bits"):
        assert found[f"{name}, overlap"]["wire_bytes"] == found[name]["wire_bytes"]


@pytest.mark.slow
def test_losses_of_one_rank_are_those_of_pytorch(tmp_path, capsys):
    path = tmp_path / "loss.json"
    small = "--width 64 --layers 1 --steps 3 --batch-size 1 --windows 8 --seeds 0,5"
    main([*small.split(), "--json", str(path)])
    found = json.loads(path.read_text())["results"]
    assert [(each["seed"], each["method"]) for each in found] == [(s, name) for s in (0, 5) for name in TRAINED]
    for seed in (0, 5):
        (loss,) = {each["held_out"] for each in found if each["seed"] == seed}
        assert 3 < loss < 6
    assert "error feedback" in capsys.readouterr().out


def test_memory_runs_a_method_alone(monkeypatch):
    def run(command, **settings):
        assert settings["check"]
        *_, json_flag, path = command
        assert json_flag == "--json"
        assert command[command.index("--method") + 1] == "eight bits"
        Path(path).write_text(json.dumps({"results": [{"method": "eight bits", "peak_rss_bytes": 7}]}))

    monkeypatch.setattr(memory.subprocess, "run", run)
    found = memory.measured("eight bits", argparse.Namespace(model="linear", ranks=2))
    assert found == {"method": "eight bits", "peak_rss_bytes": 7}


def test_the_table_of_losses_compares_each_seed_with_pytorch():
    results = [
        {"method": name, "seed": seed, "held_out": loss}
        for name, losses in {"PyTorch": (2.0, 4.0), "exact": (2.02, 4.0)}.items()
        for seed, loss in enumerate(losses)
    ]
    assert summarize(results) == [
        ["PyTorch", "3.0000", "2.0000", "4.0000", "+0.00"],
        ["exact", "3.0100", "2.0200", "4.0000", "+0.50"],
    ]


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
