"""A recorder of divergence in a PyTorch training."""

import pytest
import torch

import bagua_torch
from bagua_comm import CommMismatch, GradientAllReduce
from bagua_comm.divergence import DivergenceRecorder, compare_folder
from bagua_comm.testing import run_ranks


def test_a_weight_that_one_rank_changes_by_a_unit_in_the_last_place_is_named(tmp_path):
    def body(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = bagua_torch.DistributedDataParallel(model, [optimizer], GradientAllReduce(), comm=comm)
        with DivergenceRecorder(comm, tmp_path) as recorder:
            for step in range(4):
                optimizer.zero_grad()
                ddp(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()
                optimizer.step()
                if (step, comm.rank) == (2, 1):
                    with torch.no_grad():
                        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
                recorder.record(step, {f"grad {name}": p.grad for name, p in model.named_parameters()})
                recorder.record(step, model.state_dict())

    with pytest.raises(CommMismatch, match=r"step 2: tensor 'weight' \(float32\[2, 3\]\) differs"):
        run_ranks(3, body)
    found = compare_folder(tmp_path)
    assert (found.step, found.tensor, found.groups[1].ranks) == (2, "weight", (1,))
    assert (found.groups[1].difference.index, found.groups[1].difference.ulps) == ((1, 2), 1)
