"""Kill a rank while a sharded model is trained: the others go on from their memory, and end with the same bytes.

    bagua run -n 2 examples/elastic_fsdp.py --steps 20
    bagua run -n 3 --spares 1 examples/elastic_fsdp.py --steps 20 --kill 1
    bagua run -n 4 --spares 0 examples/elastic_fsdp.py --steps 20 --kill 1

All print the same hash, and so does any other number of ranks that divides 12, with or without spares. With
--kill the given rank kills itself half-way. Or do it yourself: ranks print their process ids for `kill -9`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import bagua_torch.fsdp
from bagua_comm import Communicator, Reproducible, elastic

MICROBATCHES, IMAGES = 12, 8  # of a step, over all ranks; of a microbatch

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--kill", type=int, metavar="RANK", help="the rank that kills itself half-way")
options = parser.parse_args()

pixels, digits = load_digits(return_X_y=True)  # (1797, 64), from 0 to 16
images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits)

torch.set_num_threads(1)
state = elastic.State(step=0)


@elastic.run(state, min_ranks=2)
def weights(comm: Communicator) -> bytes | None:
    """Train from the last commit to the last step; rank 0 returns the weights."""
    print(f"rank {comm.rank} of {comm.size}, process {os.getpid()}, begins at step {state.step}", flush=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 130), torch.nn.ReLU(), torch.nn.Linear(130, 10))
    bagua_torch.fsdp.renew_group(comm)
    fully_shard(model[0])
    fully_shard(model)
    bagua_torch.fsdp.attach(model, Reproducible(addends=MICROBATCHES), comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    state.register(model=model, optimizer=optimizer)
    while state.step < options.steps:
        optimizer.zero_grad()
        for i in elastic.share(MICROBATCHES, comm):
            at = (state.step * MICROBATCHES + i) * IMAGES % (len(labels) - IMAGES)
            cross_entropy(model(images[at : at + IMAGES]), labels[at : at + IMAGES]).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == options.steps // 2 and comm.rank == options.kill and not elastic.history():
            os.kill(os.getpid(), signal.SIGKILL)
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]  # by all ranks
    return b"".join(each.numpy().tobytes() for each in whole) if comm.rank == 0 else None


if weights is not None:
    for change in elastic.history():
        print(f"{change}; that took {change.recovery_s:.3f} s")
    commits = state.commits
    print(f"a commit took {commits.total_ms / commits.count:.1f} ms, and copied {commits.nbytes} bytes")
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
