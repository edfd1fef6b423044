"""The balance of work between ranks by each sampler, and the time that a cache saves.

    python -m benchmarks.data                       # both tables, a few minutes on two cores
    python -m benchmarks.data samplers --ranks 8

**Samplers.** Lengths are lognormal. "uneven" is the sum over the epoch's steps of the largest rank's cost,
divided by the mean over ranks: how much longer an epoch is than if the work were shared out evenly. Costs are
tokens, and tokens with padding (samples x longest). A small transformer is trained on one core, one rank after
another. A step takes as long as its slowest rank, in seconds of the processor, so that other programs matter
little. Tokens/s are real ones, without padding. Samplers take turns.

    pytorch    torch.utils.data.DistributedSampler, batches of b
    bagua      the method of Bagua's LoadBalancingDistributedSampler: chunks of p samples of similar length, in
               any order, dealt to the p ranks; batches of b
    balanced   BalancedSampler(batch_size=b)
    tokens     BalancedSampler(max_tokens=...), with about as many steps as the others

**Cache.** Each sample is a JPEG that is decoded and made smaller. An epoch reads all of them, by the program
itself or by workers of a DataLoader; the second one finds them. Every sample is compared with what was decoded at
first. "cpu ms" are the processor's milliseconds for each sample, without those of workers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_comm.arrays import Array
from bagua_comm.data import BalancedSampler, Cached, LMDBStore, MemoryStore, RedisStore, local_redis
from bagua_comm.data.sampler import Sampler

from .bench import RESULTS
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Spread

Steps = list[list[Array]]
"""An epoch: for each step, the samples of every rank."""

SAMPLERS = Table(
    (
        Column("sampler", width=9),
        Column("ranks", width=5),
        Column("steps", width=6),
        Column("repeated", "samples", 8),
        *(Column(title, "uneven", 7) for title in ("tokens", "padded")),
        Column("padding", "share", 7),
        *(Column(title, "tokens/s", 9) for title in ("median", "q1", "q3")),
        Column("of", "pytorch", 7),
    )
)

CACHE = Table(
    (
        Column("store", width=8),
        Column("workers", width=7),
        Column("epoch 1", "(/s)", 8),
        Column("epoch 2", "(/s)", 8),
        Column("epoch 1", "of none", 7),
        Column("epoch 2", "of none", 7),
        Column("epoch 1", "cpu ms", 7),
        Column("epoch 2", "cpu ms", 7),
        Column("hits", "2nd", 6),
        Column("written", "(MB)", 7),
        Column("#wrong", width=6),
    )
)


def main() -> None:
    """Run the benchmark."""
    options = parse_arguments()
    record = begin_record("data", options, packages=["torch", "pillow", "lmdb", "redis", "msgpack", "xxhash"])
    print(*header_lines(record), sep="\n")
    torch.set_num_threads(1)
    if "samplers" in options.tables:
        record["samplers"] = compare_samplers(options)
    if "cache" in options.tables:
        record["cache"] = compare_caches(options)
    if options.json:
        write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", nargs="*", default=["samplers", "cache"], help="samplers, cache")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--samples", type=int, default=1000, help="how many have lengths")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the lengths")
    parser.add_argument("--rounds", type=int, default=2, help="epochs of each sampler")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=3, help="times that each cache is filled and read")
    parser.add_argument("--json", type=Path, default=RESULTS / "data.json")
    options = parser.parse_args(argv)
    if wrong := set(options.tables) - {"samplers", "cache"}:
        parser.error(f"unknown tables: {', '.join(sorted(wrong))}")
    return options


# ---------------------------------------------------------------------------------------------------
# Samplers
# ---------------------------------------------------------------------------------------------------


def compare_samplers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on the epochs of each sampler in turn."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.ceil(rng.lognormal(3.5, options.sigma, options.samples)), 1, 512).astype(np.int64)
    about = f"mean {lengths.mean():.1f}, median {np.median(lengths):.0f}, largest {lengths.max()}"
    print(f"#\n# {len(lengths)} lengths: {about}")
    print(*SAMPLERS.header(), sep="\n")
    results = []
    for ranks in options.ranks:
        kinds = epochs(lengths, ranks, options.batch_size)
        train(kinds["pytorch"](0)[:3], lengths)  # warm up
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        for epoch in range(options.rounds):
            for name, kind in kinds.items():
                speeds[name].append(lengths.sum() / train(kind(epoch), lengths))
        base = float(np.median(speeds["pytorch"]))
        for name, kind in kinds.items():
            result = {"sampler": name, "ranks": ranks, **balance(kind(0), lengths)}
            result["tokens_per_s"] = asdict(Spread.of(np.array(speeds[name])))
            result["of_pytorch"] = result["tokens_per_s"]["median"] / base
            results.append(result)
            print(SAMPLERS.row(sampler_cells(result)), flush=True)
    return results


def epochs(lengths: Array, ranks: int, batch_size: int) -> dict[str, Any]:
    """For each sampler, a function from the epoch to its steps."""
    steps = len(lengths) / ranks / batch_size
    budget = float(lengths.max())
    while (found := BalancedSampler(lengths, max_tokens=budget, size=ranks, rank=0)) and len(found) > steps:
        budget *= 1.02

    def ours(epoch: int, **how: Any) -> Steps:
        made: list[Sampler] = [BalancedSampler(lengths, size=ranks, rank=rank, **how) for rank in range(ranks)]
        for sampler in made:
            sampler.set_epoch(epoch)
        return [[np.array(batch) for batch in step] for step in zip(*made, strict=True)]

    return {
        "pytorch": lambda epoch: pytorch_steps(len(lengths), ranks, batch_size, epoch),
        "bagua": lambda epoch: bagua_steps(lengths, ranks, batch_size, epoch),
        "balanced": lambda epoch: ours(epoch, batch_size=batch_size),
        "tokens": lambda epoch: ours(epoch, max_tokens=budget),
    }


def pytorch_steps(samples: int, ranks: int, batch_size: int, epoch: int) -> Steps:
    """Batches of PyTorch's DistributedSampler."""
    shares = []
    for rank in range(ranks):
        sampler = torch.utils.data.DistributedSampler(range(samples), ranks, rank)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    return in_batches(np.array(shares).T, batch_size)


def bagua_steps(lengths: Array, ranks: int, batch_size: int, epoch: int) -> Steps:
    """Batches as Bagua's sampler deals: sorted, in chunks of p, which are permuted; the last one wraps around."""
    ranked = np.argsort(lengths, kind="stable")
    count = -(-len(ranked) // ranks)
    chunks = np.resize(ranked, (count, ranks))
    return in_batches(chunks[np.random.default_rng(epoch).permutation(count)], batch_size)


def in_batches(shares: Array, batch_size: int) -> Steps:
    """Steps of batches, from (samples of a rank, ranks)."""
    return [list(shares[start : start + batch_size].T) for start in range(0, len(shares), batch_size)]


def balance(steps: Steps, lengths: Array) -> dict[str, Any]:
    """The balance of an epoch, and its share of padding."""
    real = np.array([[lengths[batch].sum() for batch in step] for step in steps], np.float64)
    padded = np.array([[len(batch) * lengths[batch].max() for batch in step] for step in steps], np.float64)
    given = np.concatenate([batch for step in steps for batch in step])
    assert len(set(given.tolist())) == len(lengths)
    return {
        "steps": len(steps),
        "repeated": len(given) - len(lengths),
        "uneven_tokens": float(real.max(axis=1).sum() / real.mean(axis=1).sum()),
        "uneven_padded": float(padded.max(axis=1).sum() / padded.mean(axis=1).sum()),
        "padding": float(1 - real.sum() / padded.sum()),
    }


class Transformer(nn.Module):
    """Two layers of width 64 over 512 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 512)

    def forward(self, words: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Scores of words, (samples, longest, 512)."""
        found: torch.Tensor = self.head(self.layers(self.embedding(words), src_key_padding_mask=padding))
        return found


def train(steps: Steps, lengths: Array) -> float:
    """Seconds of an epoch, if ranks worked at the same time: the sum of the slowest rank's in each step."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0.0
    for step in steps:
        optimizer.zero_grad()
        seconds = []
        for batch in step:
            start = time.process_time()
            sizes = torch.from_numpy(lengths[batch])
            longest = int(sizes.max())
            padding = torch.arange(longest)[None] >= sizes[:, None]
            words = (torch.arange(longest)[None] * 7 + sizes[:, None]) % 512
            out = model(words, padding)
            nn.functional.cross_entropy(out[~padding], words[~padding]).backward()
            seconds.append(time.process_time() - start)
        optimizer.step()
        total += max(seconds)
    return total


def sampler_cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    speed = result["tokens_per_s"]
    return [
        result["sampler"],
        str(result["ranks"]),
        str(result["steps"]),
        str(result["repeated"]),
        f"{result['uneven_tokens']:.3f}",
        f"{result['uneven_padded']:.3f}",
        f"{result['padding']:.1%}",
        *(f"{speed[name]:.0f}" for name in ("median", "q1", "q3")),
        number(result["of_pytorch"]),
    ]


# ---------------------------------------------------------------------------------------------------
# Caches
# ---------------------------------------------------------------------------------------------------


class Photos(torch.utils.data.Dataset[Any]):
    """JPEGs of smooth noise, 800 x 600; a sample is one decoded, made smaller to 224 x 224, and its number."""

    def __init__(self, count: int) -> None:
        from PIL import Image

        rng = np.random.default_rng(0)
        self._files = []
        for _ in range(count):
            small = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
            file = io.BytesIO()
            small.resize((800, 600), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self._files[index])) as image:
            return np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)), index


def compare_caches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Read two epochs through each store, stores in turn."""
    photos = Photos(options.images)
    expected = [photos[i][0] for i in range(len(photos))]
    nbytes = sum(image.nbytes for image in expected)
    print(f"#\n# {len(photos)} images, decoded {nbytes / 1e6:.0f} MB")
    print(*CACHE.header(), sep="\n")
    results = []
    for workers in options.workers:
        # A store in memory is each worker's own, so that with workers it saves nothing.
        names = ["none", "lmdb", "redis"] + ["memory"] * (workers == 0)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name in names:
                with store_named(name) as store:
                    found[name].append(two_epochs(photos, store, workers, expected))
        base = [float(np.median([run[f"epoch_{e}"] for run in found["none"]])) for e in (1, 2)]
        for name in names:
            result: dict[str, Any] = {"store": name, "workers": workers}
            for e in (1, 2):
                result[f"epoch_{e}"] = asdict(Spread.of(np.array([run[f"epoch_{e}"] for run in found[name]])))
                result[f"cpu_ms_{e}"] = float(np.median([run[f"cpu_ms_{e}"] for run in found[name]]))
                result[f"epoch_{e}_of_none"] = result[f"epoch_{e}"]["median"] / base[e - 1]
            result |= {key: found[name][-1][key] for key in ("hits", "written_bytes")}
            result["wrong"] = sum(run["wrong"] for run in found[name])
            results.append(result)
            print(CACHE.row(cache_cells(result)), flush=True)
    return results


@contextlib.contextmanager
def store_named(name: str) -> Iterator[Any]:
    """An empty store; None for "none"."""
    with contextlib.ExitStack() as stack:
        if name == "lmdb":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            yield stack.enter_context(LMDBStore(folder))
        elif name == "redis":
            yield stack.enter_context(RedisStore(stack.enter_context(local_redis(capacity_bytes=4 << 30))))
        else:
            yield MemoryStore() if name == "memory" else None


def two_epochs(photos: Photos, store: Any, workers: int, expected: list[Array]) -> dict[str, float]:
    """Images a second in both epochs, and the counters of the cache."""
    data: Any = photos if store is None else Cached(photos, store)
    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=workers, collate_fn=list)
    result: dict[str, float] = {"wrong": 0}
    for epoch in (1, 2):
        start, cpu = time.perf_counter(), time.process_time()
        seen = [sample for batch in loader for sample in batch]
        if store is not None:
            data.flush()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        result[f"epoch_{epoch}"], result[f"cpu_ms_{epoch}"] = len(seen) / seconds, cpu * 1e3 / len(seen)
        result["wrong"] += sum(not np.array_equal(image, expected[index]) for image, index in seen)
    stats = None if store is None else data.stats()
    return result | {
        "hits": 0 if stats is None else stats.hits,
        "written_bytes": 0 if stats is None else stats.written_bytes,
    }


def cache_cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    return [
        result["store"],
        str(result["workers"]),
        *(number(result[f"epoch_{e}"]["median"]) for e in (1, 2)),
        *(number(result[f"epoch_{e}_of_none"]) for e in (1, 2)),
        *(number(result[f"cpu_ms_{e}"]) if result["workers"] == 0 else "-" for e in (1, 2)),
        str(result["hits"]),
        f"{result['written_bytes'] / 1e6:.0f}",
        str(result["wrong"]),
    ]


if __name__ == "__main__":
    main()
