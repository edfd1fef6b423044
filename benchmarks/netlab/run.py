"""The command line of `benchmarks.netlab`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from bagua_comm.commands.quantities import latency

from .lab import PREFIX, build, remove
from .latency import carry
from .rate import ask, echo, measure_rate, measure_round_trip, receive, send
from .tools import LabError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a Python script on emulated hosts")
    run.add_argument("--ranks-per-host", type=int, default=1, metavar="L")
    run.add_argument("--launcher", choices=["mpirun", "torchrun"], default="mpirun")
    run.add_argument("--mpirun", action="append", default=[], metavar="ARG", help="one more argument for mpirun")
    run.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    rate = commands.add_parser("rate", help="print what one TCP stream reaches")
    for command in (run, rate):
        command.add_argument("--hosts", type=_hosts, default=4, metavar="N")
        command.add_argument("--rate", default="1gbit", help="rate of each link, as tc writes it")
        command.add_argument("--flow-bandwidth", metavar="RATE", help="rate of each flow: 100mbit; no limit")
        command.add_argument("--latency", type=latency, default=0.0, metavar="TIME", help="one way: 50ms")
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    commands.add_parser("clean", help="remove what a killed run has left")
    for name, arguments in _PARTS.items():
        part = commands.add_parser(name)
        for argument, kind in arguments.items():
            part.add_argument(argument, type=kind, nargs="+" if argument == "devices" else None)
    options = parser.parse_args(argv)
    act: dict[str, Callable[[argparse.Namespace], object]] = {
        "run": _run_command,
        "rate": _rate_command,
        "clean": lambda _: remove(PREFIX),
        "send": lambda _: send(options.address, options.seconds),
        "receive": lambda _: print(receive()),
        "ask": lambda _: print(ask(options.address, options.count)),
        "echo": lambda _: echo(),
        "switch": lambda _: print(json.dumps(carry(options.latency_s, options.devices))),
    }
    try:
        return int(act[options.command](options) or 0)
    except LabError as exc:
        print(f"netlab: {exc}", file=sys.stderr)
        return 1


_PARTS: dict[str, dict[str, type]] = {
    "send": {"address": str, "seconds": float},
    "receive": {},
    "ask": {"address": str, "count": int},
    "echo": {},
    "switch": {"latency_s": float, "devices": str},
}
"""Commands that the others start, on hosts and beside them."""


def _hosts(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 250:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts; expected 1 to 250")
    return int(text)


def _run_command(options: argparse.Namespace) -> int:
    script = [*(["-m"] if options.module else []), options.script, *options.args]
    with build(options.hosts, options.rate, options.flow_bandwidth, options.latency) as lab:
        ranks = options.ranks_per_host
        if options.launcher == "mpirun":
            commands = [lab.mpirun(script, ranks_per_host=ranks, arguments=options.mpirun)]
        else:
            commands = lab.torchrun(script, ranks_per_host=ranks)
        return lab.run(*commands, timeout_s=options.timeout)


def _rate_command(options: argparse.Namespace) -> int:
    with build(max(2, options.hosts), options.rate, options.flow_bandwidth, options.latency) as lab:
        round_trip_ms = 1e3 * measure_round_trip(lab)
        seconds = 2.0 + 40e-3 * round_trip_ms  # TCP needs some round trips to reach the rate
        print(f"{measure_rate(lab, seconds=seconds) / 1e9:.4f} GB/s, a round trip in {round_trip_ms:.2f} ms")
    return 0
