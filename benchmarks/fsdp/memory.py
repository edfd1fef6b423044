"""The most memory that a rank of a sharded model needs, by each method: each in processes of its own.

    python -m benchmarks.fsdp.memory --model gpt-120m --json benchmarks/results/fsdp-memory-120m.json

A rank is a process of `benchmarks.fsdp`, started by torchrun, that makes two steps with this method alone. Its
memory is the peak of its resident set size, less what it had before it made the model: parameters, gradients and
activations, what PyTorch and this library allocate for exchanges, and the memory of connections. There is no
optimizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.arguments import add_json_argument, at_least
from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table, number
from .methods import METHODS
from .models import MODELS

TABLE = Table((Column("method", width=23), Column("memory", "(MB)", 9), Column("ratio", width=6)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt", help="the model of benchmarks.fsdp")
    parser.add_argument("--ranks", type=at_least(2), default=4, help="processes")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    record = begin_record("FSDP2 memory", options, packages=("torch",))
    names = [name for name, each in METHODS.items() if not each.by_host]
    record["results"] = [measured(name, options) for name in names]
    print(*header_lines(record), *TABLE.header(), sep="\n")
    first = record["results"][0]["peak_rss_bytes"]
    for result in record["results"]:
        found = result["peak_rss_bytes"]
        print(TABLE.row([result["method"], number(found / 1e6), number(found / first)]))
    if options.json is not None:
        write_json(options.json, record)


def measured(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """The memory of a method."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        program = ["-m", "benchmarks.fsdp", "--model", options.model, "--method", method, "-n", "2", "-w", "0"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(options.ranks), *program, "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        (result,) = json.loads(path.read_text())["results"]
        return {"method": method, "peak_rss_bytes": result["peak_rss_bytes"]}


if __name__ == "__main__":
    main()
