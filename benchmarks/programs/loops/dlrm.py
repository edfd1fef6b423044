"""Recommendation as in DLRM: tables divided over ranks by alltoall, sparse gradients, dense parts in DDP."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TABLES, ROWS, WIDTH, LOCAL_BATCH = 5, 20, 8, 6


class Exchange(torch.autograd.Function):
    """From all samples of this rank's tables to this rank's samples of all tables, and back."""

    @staticmethod
    def forward(ctx, own, tables_of):
        rank, size = dist.get_rank(), dist.get_world_size()
        ctx.tables_of = tables_of
        sent = own.reshape(size * LOCAL_BATCH, -1).contiguous()
        out = sent.new_empty(LOCAL_BATCH * sum(tables_of) * WIDTH)
        piece = LOCAL_BATCH * WIDTH
        dist.all_to_all_single(
            out, sent.view(-1), [piece * n for n in tables_of], [piece * tables_of[rank]] * size
        )
        pieces = out.split([piece * n for n in tables_of])
        return torch.cat([p.view(LOCAL_BATCH, -1, WIDTH) for p in pieces], dim=1)

    @staticmethod
    def backward(ctx, grad):
        rank, size = dist.get_rank(), dist.get_world_size()
        piece = LOCAL_BATCH * WIDTH
        sent = torch.cat([g.reshape(-1) for g in grad.split(ctx.tables_of, dim=1)])
        out = sent.new_empty(size * piece * ctx.tables_of[rank])
        dist.all_to_all_single(
            out, sent, [piece * ctx.tables_of[rank]] * size, [piece * n for n in ctx.tables_of]
        )
        return out.view(size * LOCAL_BATCH, ctx.tables_of[rank], WIDTH) / size, None


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tables_of = [TABLES // size + (r < TABLES % size) for r in range(size)]
    torch.manual_seed(0)
    tables = [nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)]
    first = sum(tables_of[:rank])
    mine = nn.ModuleList(tables[first : first + tables_of[rank]])
    bottom = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU()))
    pairs = (TABLES + 1) * TABLES // 2
    top = DDP(nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD([{"params": m.parameters(), "lr": 0.1} for m in (mine, bottom, top)], lr=0.1)
    data = torch.Generator().manual_seed(4)  # all ranks draw the whole batch
    one, other = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
    losses = []
    for _ in range(6):
        dense = torch.randn(size * LOCAL_BATCH, 4, generator=data)
        indices = torch.randint(ROWS, (TABLES, size * LOCAL_BATCH, 3), generator=data)
        clicks = torch.randint(2, (size * LOCAL_BATCH, 1), generator=data).float()
        samples = slice(rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)
        looked_up = torch.stack([table(indices[first + i]) for i, table in enumerate(mine)], dim=1)
        sparse = Exchange.apply(looked_up, tables_of)
        x = bottom(dense[samples])
        together = torch.cat([x.unsqueeze(1), sparse], dim=1)
        interactions = torch.bmm(together, together.transpose(1, 2))[:, one, other]
        loss = nn.functional.binary_cross_entropy_with_logits(
            top(torch.cat([x, interactions], 1)), clicks[samples]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print("result:", json.dumps({"losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
