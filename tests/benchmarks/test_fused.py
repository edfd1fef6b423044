"""The benchmark of fused optimizers: what it times is right, and its table says so."""

import torch

from benchmarks import fused


def test_a_wrong_step_is_counted(monkeypatch):
    monkeypatch.setattr(fused, "fuse", lambda optimizer: torch.optim.SGD(optimizer.param_groups[0]["params"]))
    options = fused.parse_arguments(["-t", "10", "-e", "3", "-n", "2", "-w", "0"])
    assert fused.measured("adam", "stay", options)["wrong"] > 0
