"""Train a mixture of experts on scikit-learn's digits (1,797 images, 8 x 8), and a dense model.

    torchrun --nproc-per-node 2 examples/moe.py --epochs 4 --balance loss --plot loads.png

Both models have the same layers, except one in the middle: each token passes through k experts out of many, or
through one dense layer k times as wide, and so through equally many weights. The experts are split over the
ranks, and tokens are sent to them; all other gradients are averaged. A token is an image, so that each can choose
different experts. The data are so few that the dense model is faster and more accurate: the program shows how to
use experts, not when.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import bagua_comm
import bagua_torch
from bagua_torch.moe import MoE, clip_grad_norm_

HIDDEN = 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=8, help="on all ranks together")
    parser.add_argument("--k", type=int, default=2, help="how many of them a token is sent to")
    parser.add_argument("--width", type=int, default=32, help="hidden units of an expert")
    parser.add_argument("--balance", choices=("bias", "loss"), default="bias")
    parser.add_argument("--gamma", type=float, default=0.003, help="step of the bias, with --balance bias")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks in a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the experts' loads over the steps")
    return parser.parse_args()


def load_images(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = (digits.data / 16.0).astype("float32")
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(part)
        for part in train_test_split(
            images, digits.target, test_size=360, random_state=seed, stratify=digits.target
        )
    )


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, width), nn.GELU(), nn.Linear(width, HIDDEN))


class Classifier(nn.Module):
    """A residual network around one layer in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN))
        self.middle = middle
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.stem(x)
        out: Tensor = self.head(x + self.middle(x))
        return out


def train(
    comm: bagua_comm.Communicator, model: nn.Module, data: tuple[Tensor, ...], options: argparse.Namespace
) -> tuple[float, float, list[list[int]]]:
    """Train on this rank's share; returns the accuracy, the seconds, and the loads of experts in each step."""
    train_x, test_x, train_y, test_y = data
    layer = model.middle if isinstance(model.middle, MoE) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    ddp = bagua_torch.DistributedDataParallel(model, optimizer, comm=comm)
    shuffle = torch.Generator().manual_seed(options.seed)  # the same order of images on all ranks
    steps = len(train_x) // options.batch_size
    name = "dense" if layer is None else "experts"
    progress = tqdm(total=options.epochs * steps, desc=name, unit="step", disable=comm.rank != 0)
    loads: list[list[int]] = []
    start = time.perf_counter()
    for _ in range(options.epochs):
        order = torch.randperm(len(train_x), generator=shuffle)
        for step in range(steps):
            whole = order[step * options.batch_size : (step + 1) * options.batch_size]
            mine = whole[comm.rank :: comm.size]
            # The mean over the ranks is the mean over all images, also if they do not split evenly.
            loss = cross_entropy(ddp(train_x[mine]), train_y[mine], reduction="sum") * comm.size / len(whole)
            if layer is not None and layer.balance_loss is not None:
                loss = loss + 0.01 * layer.balance_loss
            optimizer.zero_grad()
            loss.backward()
            if layer is not None:
                clip_grad_norm_(model, 1.0)
                loads.append(layer.load.tolist())
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update()
    seconds = time.perf_counter() - start
    progress.close()
    ddp.close()
    model.eval()
    with torch.no_grad():  # every rank calls the experts, so every rank evaluates
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    return accuracy, seconds, loads


def weights_per_token(model: nn.Module, options: argparse.Namespace) -> int:
    """Number of weights that a token passes through: of k experts, not of all."""
    expert = sum(parameter.numel() for parameter in feed_forward(options.width).parameters())
    rest = [p.numel() for name, p in model.named_parameters() if "experts." not in name]
    return sum(rest) + (options.k * expert if isinstance(model.middle, MoE) else 0)


def imbalance(loads: list[list[int]]) -> float:
    """The largest load of an expert over the mean load, on average over the steps."""
    ratios = [max(load) * len(load) / sum(load) for load in loads]
    return sum(ratios) / len(ratios)


def plot(path: str, loads: list[list[int]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shares = torch.tensor(loads, dtype=torch.float64)
    shares = shares / shares.sum(1, keepdim=True)
    window = max(1, len(shares) // 50)
    smooth = shares.unfold(0, window, 1).mean(-1)  # (steps, experts)
    for expert in range(shares.shape[1]):
        axes.plot(range(window - 1, len(shares)), smooth[:, expert], linewidth=1, label=f"expert {expert}")
    axes.axhline(1 / shares.shape[1], color="0.2", linestyle=":", label="equal shares")
    axes.set_xlabel("step")
    axes.set_ylabel(f"share of all choices (mean of {window} steps)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"loads of experts on digits, k={options.k}, balance={options.balance!r}", loc="left")
    axes.grid(color="0.92")
    axes.legend(frameon=False, fontsize=7, ncols=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = parse_arguments()
    with bagua_torch.connect(timeout_s=120) as comm:
        torch.set_num_threads(1)  # all matrices are small
        data = load_images(options.seed)
        results = {}
        for name in ("dense", "experts"):
            torch.manual_seed(options.seed)
            if name == "dense":
                middle = feed_forward(options.k * options.width)
            else:
                middle = MoE(
                    HIDDEN,
                    lambda: feed_forward(options.width),
                    options.experts,
                    options.k,
                    comm=comm,
                    balance=options.balance,
                    gamma=options.gamma,
                    normalize=options.k > 1,
                )
            model = Classifier(middle)
            accuracy, seconds, loads = train(comm, model, data, options)
            results[name] = {
                "accuracy": round(accuracy, 4),
                "weights_per_token": weights_per_token(model, options),
                "seconds": round(seconds, 1),
            }
        late = loads[len(loads) // 2 :]
        result = {"ranks": comm.size, "steps": len(loads), "imbalance": round(imbalance(late), 3), **results}
        if comm.rank == 0:
            for name, found in results.items():
                print(
                    f"{name:<8} test accuracy {found['accuracy']:.4f}, {found['weights_per_token']:,} weights a "
                    f"token, {found['seconds']} s"
                )
            print(f"in the second half of the steps the busiest expert had {result['imbalance']} x the mean load")
            if options.plot:
                plot(options.plot, loads, options)
            print(f"result: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
