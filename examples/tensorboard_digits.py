"""Train on scikit-learn's digits, and show the cost of communication in TensorBoard.

    pip install tensorboard                     # or tensorboardX, which is smaller and only writes
    bagua run -n 2 examples/tensorboard_digits.py --logdir runs
    tensorboard --logdir runs

Each rank writes its own run. Ranks wait for each other: the one that waits least is the slow one.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bagua_torch
from bagua_comm import ByteGrad

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # TensorBoard itself is not installed
    from tensorboardX import SummaryWriter


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logdir", default="runs", help="the folder that TensorBoard is given")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps from one point to the next")
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)

    with bagua_torch.connect() as comm, SummaryWriter(f"{options.logdir}/rank-{comm.rank}") as writer:
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        ddp = bagua_torch.DistributedDataParallel(model, [optimizer], ByteGrad())
        before = ddp.counters.as_dict()
        for step in range(1, options.steps + 1):
            batch = torch.randint(len(images), (32,))
            loss = cross_entropy(ddp(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % options.every == 0:
                now = ddp.counters.as_dict()  # they only grow: show the difference since the last point
                writer.add_scalar("loss", loss.item(), step)
                for name, value in now.items():
                    writer.add_scalar(f"{name}_per_step", (value - before[name]) / options.every, step)
                before = now
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
        ddp.close()
        if comm.rank == 0:
            print(f"{comm.size} ranks: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
