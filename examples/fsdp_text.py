"""Train a character-level transformer with PyTorch's fully_shard, its shards exchanged in fewer bits.

    torchrun --nproc-per-node 2 examples/fsdp_text.py
    bagua run -n 4 examples/fsdp_text.py --reduce feedback --gather two-levels
    torchrun --nproc-per-node 2 examples/fsdp_text.py --reduce exact --gather exact

The text is that of some modules of Python's standard library. Each rank keeps a shard of all parameters,
gradients and optimizer states.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import ErrorFeedback, Exact, Hierarchical, Quantized, Reproducible

MODULES = (argparse, inspect, json.decoder, json.encoder)
CONTEXT, WIDTH, HEADS, SYMBOLS = 64, 96, 4, 128

EIGHT_BITS = Quantized(min_bytes=0)
GATHER = {"exact": Exact(), "eight-bits": EIGHT_BITS, "two-levels": Hierarchical(EIGHT_BITS)}
REDUCE = {**GATHER, "feedback": ErrorFeedback(), "reproducible": Reproducible()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reduce", choices=REDUCE, default="eight-bits", help="how gradients are reduced")
    parser.add_argument("--gather", choices=GATHER, default="eight-bits", help="how parameters are gathered")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of all ranks in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def load_text() -> Tensor:
    text = "".join(inspect.getsource(module) for module in MODULES)
    return torch.tensor(list(text.encode("ascii", "replace")))


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    rows = text[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


class Transformer(nn.Module):
    """From (n, context) symbols to (n, context, symbols) logits of the next ones."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the symbols that follow."""
        x = self.symbols(x) + self.places(torch.arange(CONTEXT))
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        logits: Tensor = self.head(x)
        return logits


def exact_bytes(model: Transformer, ranks: int) -> int:
    """The bytes that a rank sends in a step exactly, if each rank exchanges with all others."""
    layers = 4 * sum(parameter.numel() for parameter in model.layers.parameters())
    root = 4 * sum(parameter.numel() for parameter in model.parameters()) - layers
    # Gathered in both passes, and reduced; PyTorch keeps the parameters of the root after the forward pass.
    return (3 * layers + 2 * root) * (ranks - 1) // ranks


def main() -> None:
    options = parse_arguments()
    comm = bagua_torch.connect(process_group=True)
    torch.manual_seed(0)
    text = load_text()
    training, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]

    model = Transformer(options.layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    handle = bagua_torch.fsdp.attach(model, REDUCE[options.reduce], GATHER[options.gather])
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    generator, begin = torch.Generator().manual_seed(comm.rank), time.perf_counter()
    for _ in range(options.steps):
        x, y = windows(training, options.batch_size // comm.size, generator)
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    sent, exact = handle.counters.total().wire_bytes, options.steps * exact_bytes(model, comm.size)

    with torch.no_grad():
        x, y = windows(held_out, 64, torch.Generator().manual_seed(0))
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    if comm.rank == 0:
        result = {
            "ranks": comm.size,
            "reduce": options.reduce,
            "gather": options.gather,
            "loss": round(loss, 4),
            "steps_per_s": round(options.steps / seconds, 2),
            "wire_bytes": sent,
            "exact_bytes": exact,
        }
        print("result:", json.dumps(result))
    handle.close()
    comm.close()


if __name__ == "__main__":
    main()
