"""A long trial of the network plugin: many messages of random sizes, every byte compared, in several builds.

    python -m benchmarks.net_check --json benchmarks/results/net_check.json    # a million messages
    python -m benchmarks.net_check --messages 20000 --builds plain

Builds: `plain`; `short`, whose every read and write moves at most 1000 bytes; `eager`, which opens up to 64 flows
at once and cuts messages into pieces of 4 KiB; `address` and `thread`, under GCC's sanitizers. The plain one gets
most of the messages, from 0 B to 64 MiB; half of the others' go through four connections in as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bagua_comm.net import building, counters
from bagua_comm.net.binding import Plugin

from .bench import ROOT
from .bench.record import Record, begin_record, write_json
from .net_traffic import connect_pair, exchange, make_pool, random_sizes

EAGER = ("-DGAIN=0.0", "-DWINDOW_S=1e-6", "-DCHUNK=4096")
SHORT = ("-DBAGUA_NET_MOVE_AT_MOST=1000",)

BUILDS: dict[str, tuple[Sequence[str], str, float]] = {
    "plain": ((), "", 0.96),
    "short": (SHORT, "", 0.01),
    "eager": (EAGER, "", 0.01),
    "address": ((*EAGER, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"), "libasan.so", 0.01),
    "thread": ((*EAGER, "-g", "-fsanitize=thread"), "libtsan.so", 0.01),
}
"""Flags, the runtime that must be there before Python, and its share of the messages."""

LARGEST, MEAN = 64 << 20, 16_000.0
CONNECTIONS = 4


def traffic(library: Path, messages: int, seed: int) -> Record:
    """Send the messages, half of them over one connection, half over several at a time."""
    plugin, pool = Plugin(library), make_pool(LARGEST)
    plugin.start()
    start, faults = time.monotonic(), []
    sent = [0] * (CONNECTIONS + 1)

    def work(which: int, count: int, largest: int) -> None:
        try:
            sizes = random_sizes(np.random.default_rng([seed, which]), count, largest, MEAN)
            pair = connect_pair(plugin)
            sent[which] = exchange(pair, sizes, pool, seed=seed + which, timeout_s=120.0, room=64)
            pair.close()
        except Exception as exc:
            faults.append(f"{type(exc).__name__}: {exc}")

    work(0, messages // 2, LARGEST)
    share = (messages - messages // 2) // CONNECTIONS
    threads = [threading.Thread(target=work, args=(i + 1, share, LARGEST // 16)) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "messages": messages // 2 + share * CONNECTIONS,
        "bytes": sum(sent),
        "flows": len(counters(library)),
        "seconds": round(time.monotonic() - start, 1),
        "faults": faults,
    }


def trial(name: str, messages: int, seed: int, folder: Path) -> Record:
    """Compile a build, and run its part in a process of its own."""
    flags, runtime, share = BUILDS[name]
    compiler = next(building.compilers())
    library = building.compile_to(compiler, folder / f"{name}.so", flags)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAME": "lo"}
    environment |= {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 halt_on_error=1"}
    if runtime:
        found = subprocess.run(
            [*compiler, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
        )
        environment["LD_PRELOAD"] = found.stdout.strip()
    count = max(40, int(messages * share))
    arguments = ["--library", str(library), "--messages", str(count), "--seed", str(seed)]
    command = [sys.executable, "-m", "benchmarks.net_check", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    result: Record = {"build": name, "flags": list(flags), "exit code": done.returncode}
    try:
        return result | json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return result | {"faults": [(done.stderr or done.stdout)[-3000:]]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the builds; the exit code is 0 if none had a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--builds", nargs="+", choices=[*BUILDS], default=[*BUILDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the record; results of other builds in it are kept")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.library is not None:
        print(json.dumps(traffic(options.library, options.messages, options.seed)))
        return 0
    record = begin_record("net_check", options)
    kept = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else []
    results = {result["build"]: result for result in kept}
    with tempfile.TemporaryDirectory(prefix="bagua-net-") as folder:
        for name in options.builds:
            results[name] = trial(name, options.messages, options.seed, Path(folder))
            print(json.dumps({key: value for key, value in results[name].items() if key != "flags"}), flush=True)
    record["results"] = [results[name] for name in BUILDS if name in results]
    if options.json is not None:
        write_json(options.json, record)
    return int(any(results[name]["faults"] or results[name]["exit code"] for name in options.builds))


if __name__ == "__main__":
    sys.exit(main())
