"""Distributed checkpoints by names that leave wrappers out: saved by one wrapper, and loaded across the other."""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP


class Application(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def make(wrapper, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = wrapper(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, seed):
    torch.manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 5)), torch.randint(3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    wrappers = [DDP, nn.parallel.DistributedDataParallel]
    keys = []
    for saving, loading in (wrappers, wrappers[::-1]):
        folder = os.path.join(shared[0], f"{len(keys)}")
        model, optimizer = make(saving, seed=1)
        train(model, optimizer, steps=3, seed=2)
        dcp.save({"app": Application(model, optimizer)}, checkpoint_id=folder)
        again, optimizer = make(loading, seed=3)
        dcp.load({"app": Application(again, optimizer)}, checkpoint_id=folder)
        loss = train(again, optimizer, steps=3, seed=4)
        state = get_state_dict(again, optimizer)
        keys.append([loss, *sorted(state[0]), *sorted(state[1]["state"])])
    if dist.get_rank() == 0:
        print("result:", json.dumps({"keys": keys}))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
