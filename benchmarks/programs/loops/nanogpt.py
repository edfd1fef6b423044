"""A character model in the style of nanoGPT: accumulation by attribute, evaluation and saving on rank 0."""

import json
import math
import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, BATCH, WIDTH, VOCABULARY = 16, 4, 32, 27
STEPS, EVALUATE_EVERY = 8, 3
gradient_accumulation_steps = 4 * int(os.environ.get("WORLD_SIZE", 1))

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % world == 0
    gradient_accumulation_steps //= world
else:
    master_process, seed_offset = True, 0
torch.manual_seed(1337)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.token.weight = self.head.weight  # tied

    def forward(self, index, targets):
        x = self.token(index) + self.position(torch.arange(index.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def get_batch(generator):
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    text = (
        start + 3 * torch.arange(BLOCK + 1) + torch.randint(2, (BATCH, BLOCK + 1), generator=generator)
    ) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def learning_rate(step):
    return 1e-3 * (step + 1) / 3 if step < 2 else 1e-4 + 0.5 * (1 + math.cos(math.pi * step / STEPS)) * 9e-4


data = torch.Generator().manual_seed(1337 + seed_offset)
held_out = torch.Generator().manual_seed(7)
model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers()
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(held_out))[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


losses = []
x, y = get_batch(data)
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % EVALUATE_EVERY == 0 and master_process:
        losses.append(estimate_loss())
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
        torch.save(state, os.path.join(tempfile.gettempdir(), f"nanogpt-{os.getpid()}.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with nullcontext():
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch(data)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

if master_process:
    print("result:", json.dumps({"losses": losses, "saved": sorted(state["model"])}))
if ddp:
    dist.destroy_process_group()
