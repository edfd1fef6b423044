"""Elastic training with a DataLoader: a rank dies within an epoch, and each image is still used once an epoch.

    bagua run -n 2 --spares 1 examples/elastic_data.py --kill 1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_data.py

Both print how many images were used in all. docs/guides/elastic.md explains the program.
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bagua_comm import ByteGrad, Communicator, Own, elastic
from bagua_comm.data import PlainSampler
from bagua_torch import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--kill", type=int, metavar="RANK", help="the rank that kills itself in the second epoch")
options = parser.parse_args()

pixels, digits = load_digits(return_X_y=True)  # (1797, 64), from 0 to 16
dataset = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits))

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
sampler = PlainSampler(len(dataset), batch_size=16)  # made once; it follows the communicator of training
used = torch.zeros(1, dtype=torch.float64)  # images on which this rank has trained
state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, used=Own(used, "sum"))


@state.on_change
def report(change: elastic.Change) -> None:
    """Called in each process that trains, after every change of the ranks."""
    print(f"process {os.getpid()}: {change}", flush=True)


@elastic.run(state, min_ranks=2)
def total(comm: Communicator) -> int | None:
    """Train from the last commit to the end; rank 0 returns on how many images all ranks have trained."""
    ddp = DistributedDataParallel(model, [optimizer], ByteGrad(), comm=comm)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(sampler.counted(loader)):
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
            used.add_(len(y))
            state.commit()
            if epoch == 1 and step == 10 and comm.rank == options.kill and not elastic.history():
                os.kill(os.getpid(), signal.SIGKILL)  # stands for a machine that fails
    ddp.close()
    images = int(comm.allreduce(used, op="sum"))
    return images if comm.rank == 0 else None


if total is not None:  # on rank 0; a spare that was not needed has None, too
    accuracy = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
    print(f"{options.epochs} epochs of {len(dataset)} images: {total} used, accuracy {accuracy:.3f}", flush=True)
