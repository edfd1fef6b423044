"""The effect of `Trainer(sync_batchnorm=True)` on a model; `lightning_programs.py` trains with it."""

import torch
from torch import nn

from bagua_comm.testing import run_ranks
from bagua_torch import SyncBatchNorm
from bagua_torch.lightning.layer_sync import BatchNormOverRanks


def test_batchnorms_are_converted_and_reverted_and_converted_ones_stay():
    def body(comm):
        with comm.split(comm.rank) as mine:
            own = SyncBatchNorm(3, comm=mine)
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), own, nn.SyncBatchNorm(3))
            weight = model[1].weight
            sync = BatchNormOverRanks(comm)
            for _ in range(2):
                assert sync.apply(model) is model
                assert [type(part) for part in model[1:]] == [SyncBatchNorm] * 3
                assert [str(part).rpartition("ranks=")[2] for part in model[1:]] == ["2)", "1)", "2)"]
                assert model[2] is own
                together = model[1](torch.full((2, 3), float(comm.rank)))
                assert torch.allclose(together, torch.full((2, 3), 2.0 * comm.rank - 1), atol=1e-3)
                assert sync.revert(model) is model
                assert [type(part) for part in model[1:]] == [nn.BatchNorm1d, SyncBatchNorm, nn.SyncBatchNorm]
                assert model[1].weight is weight

    run_ranks(2, body)
