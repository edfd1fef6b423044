"""The benchmark of fused optimizers: what it times is right, and its table says so."""

import json
import sys

import torch

from benchmarks import fused


def test_it_times_all_ways_and_finds_no_wrong_bytes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "fused.json"
    arguments = "-t 20 -e 5 -n 3 -w 1 --optimizer adam rmsprop"
    monkeypatch.setattr(sys, "argv", ["fused", *arguments.split(), "--json", str(path)])
    monkeypatch.setattr(fused.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(fused.torch, "set_num_threads", lambda _: None)
    fused.main()

    results = json.loads(path.read_text())["results"]
    assert [(r["optimizer"], r["gradients"], r["wrong"]) for r in results] == [
        (name, kind, 0) for name in ("adam", "rmsprop") for kind in ("stay", "new")
    ]
    assert set(results[0]["ratio"]) == {"plain", "foreach", "fused"}
    assert set(results[2]["ratio"]) == {"plain", "foreach"}
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line and line[0] != "#"]
    assert [row[:2] for row in rows] == [[r["optimizer"], r["gradients"]] for r in results]
    assert rows[2][5] == rows[2][8] == "-"


def test_a_wrong_step_is_counted(monkeypatch):
    monkeypatch.setattr(fused, "fuse", lambda optimizer: torch.optim.SGD(optimizer.param_groups[0]["params"]))
    options = fused.parse_arguments(["-t", "10", "-e", "3", "-n", "2", "-w", "0"])
    assert fused.measured("adam", "stay", options)["wrong"] > 0
