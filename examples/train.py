"""Train a small CNN on scikit-learn's digits (1,797 images, 8 x 8), data-parallel.

    bagua run -n 4 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --algorithm exact --epochs 1
    python examples/train.py --epochs 1

Under mpirun the ranks communicate over MPI, under torchrun over torch.distributed. Without a launcher there is
one rank. Every rank trains on its own part of the images, and the ranks average their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import bagua_comm
import bagua_torch
from bagua_comm.algorithms import from_name

ALGORITHMS: dict[str, dict[str, str]] = {
    "bytegrad": {},
    "bagua": {},
    "exact": {},
    "float16": {},
    "bfloat16": {},
    "hierarchical": {"inner": "quantized"},
}
"""Algorithms that average gradients, and their settings."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="bytegrad")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket-bytes", type=int, default=64 * 1024)
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the last steps")
    return parser.parse_args()


def load_images(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[:, None]
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(part)
        for part in train_test_split(
            images, digits.target, test_size=360, random_state=seed, stratify=digits.target
        )
    )


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    options = parse_arguments()
    comm = bagua_torch.connect(timeout_s=120)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.local_size))
    torch.manual_seed(options.seed)
    train_x, test_x, train_y, test_y = load_images(options.seed)

    model = make_model()
    steps = len(train_x) // (options.batch_size * comm.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr * comm.size**0.5, total_steps=options.epochs * steps
    )
    ddp = bagua_torch.DistributedDataParallel(
        model,
        [optimizer],
        from_name(options.algorithm, **ALGORITHMS[options.algorithm]),
        bucket_bytes=options.bucket_bytes,
    )

    shuffle = torch.Generator().manual_seed(options.seed)  # the same order of images on all ranks
    progress = tqdm(total=options.epochs * steps, unit="step", disable=comm.rank != 0)
    start = time.perf_counter()
    for _ in range(options.epochs):
        order = torch.randperm(len(train_x), generator=shuffle)
        mine = order[comm.rank :: comm.size]  # a different shard for every rank
        for step in range(steps):
            batch = mine[step * options.batch_size : (step + 1) * options.batch_size]
            loss = cross_entropy(ddp(train_x[batch]), train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    seconds = time.perf_counter() - start
    progress.close()

    for parameter in model.parameters():
        comm.check_consistency(bagua_torch.as_array(parameter))
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    report(comm, options, ddp, accuracy, steps * options.epochs, seconds)
    if options.trace:
        comm.trace(options.trace)
    ddp.close()
    comm.close()


def report(
    comm: bagua_comm.Communicator,
    options: argparse.Namespace,
    ddp: bagua_torch.DistributedDataParallel,
    accuracy: float,
    steps: int,
    seconds: float,
) -> None:
    sent = ddp.engine.counter
    result = {
        "algorithm": options.algorithm,
        "ranks": comm.size,
        "accuracy": round(accuracy, 4),
        "images_per_s": round(steps * options.batch_size * comm.size / seconds, 1),
        "wire_bytes": sent.wire_bytes,
        # The least that an allreduce can send: 2 (p - 1) / p of the payload, here float32.
        "exact_bytes": 2 * (comm.size - 1) * sent.payload_bytes // comm.size,
    }
    if comm.rank == 0:
        print(f"test accuracy {accuracy:.4f} after {steps} steps on {comm.size} ranks")
        print(f"{result['images_per_s']} images a second")
        print(
            f"rank 0 sent {sent.wire_bytes:,} bytes for {sent.payload_bytes:,} bytes of gradients; "
            f"exact averaging sends {result['exact_bytes']:,}"
        )
        print(f"result: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
