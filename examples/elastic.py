"""Kill a rank during training: training continues, and ends with the same bytes.

    bagua run -n 2 examples/elastic.py --steps 40
    bagua run -n 3 --spares 1 examples/elastic.py --steps 40 --kill 1
    bagua run -n 3 --spares 0 examples/elastic.py --steps 40 --kill 0

All print the same hash, and so does any other number of ranks up to 12, with or without spares. With --kill
the given rank kills itself half-way. Or do it yourself: ranks print their process ids for `kill -9`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from bagua_comm import Communicator, GradientAllReduce, Reproducible, elastic
from bagua_torch import DistributedDataParallel

MICROBATCHES, IMAGES = 12, 8  # of a step, over all ranks; of a microbatch

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--kill", type=int, metavar="RANK", help="the rank that kills itself half-way")
options = parser.parse_args()

pixels, digits = load_digits(return_X_y=True)  # (1797, 64), from 0 to 16
images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits)

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer, step=0)


@elastic.run(state, min_ranks=2)
def rank(comm: Communicator) -> int:
    """Train from the last commit to the last step; called again whenever the ranks have changed."""
    print(f"rank {comm.rank} of {comm.size}, process {os.getpid()}, begins at step {state.step}", flush=True)
    ddp = DistributedDataParallel(
        model, [optimizer], GradientAllReduce(Reproducible(addends=MICROBATCHES)), comm=comm
    )
    while state.step < options.steps:
        optimizer.zero_grad()
        for i in ddp.microbatches():
            at = (state.step * MICROBATCHES + i) * IMAGES % (len(labels) - IMAGES)
            cross_entropy(ddp(images[at : at + IMAGES]), labels[at : at + IMAGES]).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == options.steps // 2 and comm.rank == options.kill and not elastic.history():
            os.kill(os.getpid(), signal.SIGKILL)
    return comm.rank


if rank == 0:
    for change in elastic.history():
        print(f"{change}; that took {change.recovery_s:.3f} s")
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
