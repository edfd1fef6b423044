"""Train from start to end: sampler, mixed precision, accumulation, evaluation, checkpoints, early stop, a log.

    bagua run -n 2 examples/train_complete.py
    bagua run -n 2 examples/train_complete.py --folder runs/killed --epochs 2
    bagua run -n 3 examples/train_complete.py --folder runs/killed

Started again, it resumes, also on another number of ranks. docs/guides/train.md explains each part;
its code is this program.
"""

import argparse
import contextlib
import logging
import os
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bagua_comm
import bagua_torch
from bagua_comm.data import PlainSampler

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="runs/digits", help="where checkpoints are")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--patience", type=int, default=3, help="epochs without a better accuracy")
options = parser.parse_args()

comm = bagua_torch.connect()
device = torch.device("cpu" if comm.device is None else f"cuda:{comm.device}")
torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.local_size))
torch.manual_seed(0)
logging.basicConfig(level=logging.INFO if comm.rank == 0 else logging.WARNING, format="%(message)s")
log = logging.getLogger("train")
log.info("%d ranks on %s", comm.size, device.type)

pixels, digits = load_digits(return_X_y=True)  # (1797, 64), from 0 to 16
images = torch.from_numpy(pixels.astype("float32").reshape(-1, 1, 8, 8) / 16)
labels = torch.from_numpy(digits)
train_set = TensorDataset(images[:-360], labels[:-360])
test_images, test_labels = images[-360:], labels[-360:]

BATCH = 16  # of a rank, in a pass
sampler = PlainSampler(len(train_set), batch_size=BATCH, seed=0)
loader = DataLoader(train_set, batch_sampler=sampler)

STEP = 64  # samples of a step, over all ranks
accumulate = max(1, STEP // (BATCH * comm.size))

model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
ddp = bagua_torch.DistributedDataParallel(model, [optimizer], bagua_comm.ByteGrad())

half = torch.float16 if device.type == "cuda" else torch.bfloat16
scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)


def train_epoch() -> float:
    """Train on all samples once; returns this rank's mean loss."""
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(loader, 1):
        last = i % accumulate == 0 or i == len(loader)
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast(device.type, half):
                loss = cross_entropy(ddp(x.to(device)), y.to(device))
            scaler.scale(loss / accumulate).backward()
        total += loss.detach()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return float(total) / i


def evaluate() -> float:
    """The accuracy on the test images; the same on all ranks."""
    ddp.eval()
    mine = slice(comm.rank, None, comm.size)
    with torch.no_grad():
        guesses = ddp(test_images[mine].to(device)).argmax(1).cpu()
    ddp.train()
    counts = np.array([(guesses == test_labels[mine]).sum(), len(guesses)], np.float64)
    comm.allreduce(counts, out=counts)
    return float(counts[0] / counts[1])


checkpoints = bagua_torch.Checkpoints(options.folder, comm, keep=2)
objects: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
progress = {"best": 0.0, "bad_epochs": 0}
first = 0
if checkpoints.latest() is not None:
    loaded = checkpoints.load(**objects)
    first, progress = loaded.step, loaded.tree["progress"]
    log.info("resuming after epoch %d, which %d ranks saved", first, loaded.ranks)

for epoch in range(first, options.epochs):
    if progress["bad_epochs"] >= options.patience:
        log.info("no better accuracy in %d epochs: stopping", options.patience)
        break
    sampler.set_epoch(epoch)
    loss = train_epoch()
    scheduler.step()
    accuracy = evaluate()
    better = accuracy > progress["best"]
    progress = {
        "best": max(accuracy, progress["best"]),
        "bad_epochs": 0 if better else progress["bad_epochs"] + 1,
    }
    checkpoints.save(epoch + 1, **objects, progress=progress)
    log.info("epoch %2d: loss %.3f, accuracy %.3f", epoch + 1, loss, accuracy)

checkpoints.close()
for parameter in model.parameters():
    comm.check_consistency(bagua_torch.as_array(parameter))  # all ranks hold the same weights
if comm.rank == 0:
    torch.save(ddp.module.state_dict(), os.path.join(options.folder, "model.pt"))
log.info("best accuracy %.3f; rank 0 sent %d bytes", progress["best"], ddp.engine.counter.wire_bytes)
ddp.close()
comm.close()
