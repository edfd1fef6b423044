"""Train a character-level transformer between sites by MuLoCo: DiLoCo with Muon in the local steps.

    bagua run -n 2 examples/muloco.py
    torchrun --nproc-per-node 2 examples/muloco.py --inner adamw --streaming

Muon is for the matrices of hidden layers; its rule lets AdamW train embeddings, the head, norms and biases. The
text is that of some modules of Python's standard library.
"""

from __future__ import annotations

import argparse
import inspect
import json

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bagua_torch
from bagua_comm import Algorithm, DiLoCo, StreamingDiLoCo

MODULES = (argparse, inspect, json.decoder, json.encoder)
CONTEXT, WIDTH, HEADS, SYMBOLS = 32, 64, 4, 128


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--inner", choices=("muon", "adamw"), default="muon", help="the optimizer of hidden layers"
    )
    parser.add_argument("--streaming", action="store_true", help="exchange a fragment at a time, beside training")
    parser.add_argument("--local-steps", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of each rank in a step")
    parser.add_argument("--lr", type=float, default=4e-3)
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

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the symbols that follow."""
        logits: Tensor = self.head(
            self.layers(self.symbols(x) + self.positions(torch.arange(CONTEXT)), mask=self.mask)
        )
        return logits


def make_optimizer(model: Transformer, inner: str, lr: float) -> torch.optim.Optimizer:
    """Adjusted so, the updates of Muon are as large as those of AdamW, with the same rate.

    Sites have weights of their own, so each of them orthogonalizes all matrices: `distribute` is not called.
    """
    if inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def adam(name: str, parameter: Tensor) -> dict[str, float] | None:
        return None if name.startswith("layers.") and parameter.ndim == 2 else {"weight_decay": 0.01}

    return bagua_torch.Muon(model.named_parameters(), lr, adjust_lr_fn="match_rms_adamw", adam=adam)


def main() -> None:
    options = parse_arguments()
    comm = bagua_torch.connect(timeout_s=120)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = load_text()
    training, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]

    model = Transformer()
    optimizer = make_optimizer(model, options.inner, options.lr)
    if options.streaming:
        algorithm: Algorithm = StreamingDiLoCo(options.local_steps, delay=2, outer_momentum=0.5)
    else:
        algorithm = DiLoCo(options.local_steps)
    ddp = bagua_torch.DistributedDataParallel(model, [optimizer], algorithm, bucket_bytes=64 * 1024)

    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(options.steps):
        x, y = windows(training, options.batch_size, generator)
        optimizer.zero_grad()
        cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    ddp.stop()
    sent_bytes = ddp.engine.counter.wire_bytes
    ddp.average_weights()  # steps after the last exchange, and other fragments, are of each rank alone

    with torch.no_grad():
        x, y = windows(held_out, 64, torch.Generator().manual_seed(0))
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    for parameter in model.parameters():
        comm.check_consistency(bagua_torch.as_array(parameter))
    if comm.rank == 0:
        result = {
            "ranks": comm.size,
            "inner": options.inner,
            "streaming": options.streaming,
            "loss": round(loss, 4),
            "wire_bytes": sent_bytes,
        }
        print(f"loss {loss:.4f} after {options.steps} steps on {comm.size} ranks")
        print(f"result: {json.dumps(result)}", flush=True)
    ddp.close()
    comm.close()


if __name__ == "__main__":
    main()
