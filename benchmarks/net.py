"""The network plugin beside the scheme of NCCL's own sockets, on flows that are capped each, and on others.

    python -m benchmarks.net                     # all, about five minutes; as root
    python -m benchmarks.net --only capped slow
    python -m benchmarks.net --report            # writes the table and the figure from the record again

Two emulated hosts (see netlab.py), and on the link between them one class of tc's htb for each source port, so
that a flow has a rate of its own: `capped`, all alike; `free`, the link's; `slow`, four flows of which one is ten
times slower; `uneven`, rates from a quarter of the cap to all of it, so that flows overtake each other.

Schemes: `plugin`, this library's; `one flow`, the same with BAGUA_NET_FLOWS=1; `TxS`, NCCL's scheme with T
threads (NCCL_SOCKET_NTHREADS) and S sockets each (NCCL_NSOCKS_PERTHREAD), from stock_net.c; `default`, without
threads. All of them are connected at the same time, and take turns at each size, in the same two processes.

A round sends so many bytes one way, in messages of at most 1 MiB, four of them on their way, as NCCL does in its
rings; then 8 bytes come back. The last round of each is compared byte by byte. Figures are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from bagua_comm.arrays import Array
from bagua_comm.net import build as build_plugin
from bagua_comm.net import building
from bagua_comm.net.binding import HANDLE_BYTES, Plugin

from . import netlab
from .bench import RESULTS
from .bench.record import Record, begin_record, write_json
from .bench.report import machine_of, markdown_table, write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (8, 512, 4096, 32_768, 131_072, 524_288, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
SLICE, OUTSTANDING = 1 << 20, 4
REPLY = 8
READY, END = b".", -1
"""What the receiver says before each series, and what ends them in place of a scheme."""

PORTS = 2048
"""Classes of a link, and source ports that a host may use: each has a class of its own."""

FIRST_PORT = 32_768
CONTROL_PORT = 29_398
GRID = ((1, 1), (1, 4), (1, 16), (2, 4), (2, 16), (4, 1), (4, 4), (4, 16), (8, 4), (16, 1), (16, 4))
"""Threads and sockets each, for NCCL's scheme."""


@dataclass(frozen=True)
class Scenario:
    """A link, and what is compared on it. Rates as tc writes them."""

    name: str
    text: str
    link: str
    flows: tuple[str, ...]
    """The rates of flows, in turn by source port."""
    schemes: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    most_flows: int = 64
    slow: str = ""
    """The rate of the second flow that carries data, of each scheme, once all are connected."""
    warm_s: float = 3.0
    budget_s: float = 0.25
    """For one scheme at one size; at least three rounds are timed, after one that is not."""
    line_mb_s: float = 0.0
    """The data that the link carries in a second, where the link holds the flows, not their caps."""


ALL = ("plugin", "one flow", "default", *(f"{t}x{s}" for t, s in GRID))
LARGE = (1 << 20, 4 << 20, 16 << 20)

SCENARIOS = {
    one.name: one
    for one in (
        Scenario("capped", "each flow at 100 Mbit/s, the link at 3 Gbit/s", "3gbit", ("100mbit",), ALL),
        Scenario(
            "free",
            "the link at 1 Gbit/s, flows not capped",
            "1gbit",
            ("1gbit",),
            ALL,
            line_mb_s=125 * 1448 / 1514,  # what Ethernet, IP and TCP leave
        ),
        Scenario(
            "slow",
            "four flows at 100 Mbit/s, one of them at 10 Mbit/s",
            "3gbit",
            ("100mbit",),
            ("plugin", "1x4", "2x2", "4x1"),
            LARGE,
            most_flows=4,
            slow="10mbit",
            budget_s=1.5,
        ),
        Scenario(
            "uneven",
            "flows at 25, 50, 75 and 100 Mbit/s, the link at 3 Gbit/s",
            "3gbit",
            ("25mbit", "50mbit", "75mbit", "100mbit"),
            ("plugin", "default", "4x1", "4x4", "4x16", "16x4"),
            LARGE,
            budget_s=1.0,
        ),
    )
}


# ---------------------------------------------------------------------------------------------------
# The link
# ---------------------------------------------------------------------------------------------------


def shape(lab: netlab.Lab, scenario: Scenario) -> None:
    """Give each source port of host 0 a class of its own, by its lowest bits."""
    space = f"{lab.prefix}-h0"
    _do(*f"ip netns exec {space} sysctl -qw".split(), port_range())
    lines = [
        "qdisc delete dev eth0 root",
        "qdisc add dev eth0 root handle 1: htb default 1",
        f"class add dev eth0 parent 1: classid 1:1 htb rate {scenario.link} burst 64k cburst 64k quantum 60000",
    ]
    lines += [class_line("add", port, scenario.flows[port % len(scenario.flows)]) for port in range(PORTS)]
    program = f"4,40 0 0 34,84 0 0 {PORTS - 1},4 0 0 {0x10010},22 0 0 0"  # class 1:10 + (source port & 2047)
    with tempfile.NamedTemporaryFile("w", suffix=".tc") as batch:
        batch.write("\n".join(lines) + "\n")
        batch.flush()
        _do("tc", "-n", space, "-batch", batch.name)
    _do(*f"tc -n {space} filter add dev eth0 parent 1: protocol ip prio 1 bpf bytecode".split(), program)


def port_range() -> str:
    return f"net.ipv4.ip_local_port_range={FIRST_PORT} {FIRST_PORT + PORTS - 1}"


def class_line(verb: str, port: int, rate: str) -> str:
    number = 0x10 + port % PORTS
    sizes = "burst 16k cburst 16k quantum 3000"
    return f"class {verb} dev eth0 parent 1:1 classid 1:{number:x} htb rate 64kbit ceil {rate} {sizes}"


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise netlab.LabError(f"{' '.join(command)[:120]}: {done.stderr.strip()[-300:]}")


# ---------------------------------------------------------------------------------------------------
# One end
# ---------------------------------------------------------------------------------------------------


@dataclass
class Scheme:
    """A connection each way by one scheme, at one end."""

    name: str
    plugin: Plugin
    context: Any
    handle: Any = None
    listener: Any = None
    sender: Any = None
    receiver: Any = None
    ports: tuple[int, ...] = ()
    """Those of the flows by which this end sends, in the order in which they were opened."""


def load(name: str, most_flows: int, folder: Path) -> Scheme:
    """Load and start a scheme's library, with its settings."""
    if name in ("plugin", "one flow"):
        library = folder / f"{name.replace(' ', '-')}.so"  # a file of its own, so that it has its own settings
        os.environ["BAGUA_NET_FLOWS"] = str(most_flows if name == "plugin" else 1)
        plugin = Plugin(library)
    else:
        threads, sockets = (0, 0) if name == "default" else map(int, name.split("x"))
        os.environ |= {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
        plugin = Plugin(folder / "stock.so", symbol="stockNet_v")
    return Scheme(name, plugin, plugin.start())


def own_sockets() -> dict[int, int]:
    """The sockets by which this process has connected to another: file number and local port."""
    found, listening = {}, set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(one.getsockname()[1])
                elif one.getpeername()[1] != CONTROL_PORT:
                    found[int(name)] = one.getsockname()[1]
        except OSError:
            continue
    return {fd: port for fd, port in found.items() if port not in listening}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def hear() -> dict[str, Any]:
    heard: dict[str, Any] = json.loads(sys.stdin.readline())
    return heard


def connect_schemes(scenario: Scenario, folder: Path) -> list[Scheme]:
    """Connect each scheme both ways; handles pass through the process that started this one."""
    schemes = []
    for name in scenario.schemes:
        scheme = load(name, scenario.most_flows, folder)
        scheme.handle, scheme.listener = scheme.plugin.listener(scheme.context, 0)
        say(handle=bytes(scheme.handle).hex())
        handle = ctypes.create_string_buffer(bytes.fromhex(hear()["handle"]), HANDLE_BYTES)
        before = own_sockets().keys()
        while scheme.sender is None or scheme.receiver is None:
            if scheme.sender is None:
                scheme.sender = scheme.plugin.connected(scheme.context, 0, handle)
                new = own_sockets()
                scheme.ports = tuple(new[fd] for fd in sorted(new.keys() - before))
            if scheme.receiver is None:
                scheme.receiver = scheme.plugin.accepted(scheme.listener)
        schemes.append(scheme)
    return schemes


def slices(size: int) -> list[tuple[int, int]]:
    return [(start, min(SLICE, size - start)) for start in range(0, size, SLICE)]


class Mover:
    """Sends or receives bytes in slices, four on their way, and tests the oldest."""

    def __init__(self, scheme: Scheme, sends: bool) -> None:
        table = scheme.plugin.table
        self.comm = scheme.sender if sends else scheme.receiver
        self.sends, self.test = sends, table.test
        self.isend, self.irecv = table.isend, table.irecv
        self.done, self.size, self.none = c_int(), c_int(), c_void_p()

    def move(self, address: int, size: int) -> None:
        """Move `size` bytes from or to this address."""
        waiting: deque[c_void_p] = deque()
        for start, length in slices(size):
            if len(waiting) == OUTSTANDING:
                self.wait(waiting.popleft())
            waiting.append(self.post(address + start, length))
        for request in waiting:
            self.wait(request)

    def post(self, address: int, size: int) -> c_void_p:
        """Post one message."""
        request = c_void_p()
        while True:
            if self.sends:
                code = self.isend(self.comm, address, size, 0, None, None, byref(request))
            else:
                data, sizes, tag = c_void_p(address), c_size_t(size), c_int()
                none = byref(self.none)
                code = self.irecv(self.comm, 1, byref(data), byref(sizes), byref(tag), none, none, byref(request))
            if code:
                raise RuntimeError(f"result {code}")
            if request.value:
                return request

    def wait(self, request: c_void_p) -> None:
        """Test it until it is done."""
        while True:
            if code := self.test(request, byref(self.done), byref(self.size)):
                raise RuntimeError(f"result {code}")
            if self.done.value:
                return
            os.sched_yield()


def pattern(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def run_end(scenario: Scenario, host: int, folder: Path, address: str) -> None:
    """Host 0 sends and times; host 1 does what it is told over a plain socket."""
    os.environ["STOCK_ADDRESS"] = f"10.99.0.{host + 1}"
    os.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    schemes = connect_schemes(scenario, folder)
    movers = [(Mover(scheme, sends=True), Mover(scheme, sends=False)) for scheme in schemes]
    data, reply = pattern(max(scenario.sizes), 1), np.zeros(REPLY, np.uint8)
    if host == 1:
        serve(movers, data, reply)
        return
    hear()
    stream = netlab_connected(address)

    def tell(*numbers: int) -> None:
        """Say what comes, and wait until the other end is ready for it."""
        order(stream, *numbers)
        stream.recv(len(READY))

    def round_of(which: int, size: int) -> float:
        forth, back = movers[which]
        start = time.perf_counter()
        forth.move(data.ctypes.data, size)
        back.move(reply.ctypes.data, REPLY)
        return time.perf_counter() - start

    for which in range(len(schemes)):
        warm(which, scenario, tell, round_of)
    flows = own_sockets()
    for scheme in schemes:
        if (
            scheme.name == "plugin"
        ):  # has opened more flows while it was warming up: the newest of this end's sockets
            known = {port for one in schemes for port in one.ports}
            later = [port for fd, port in sorted(flows.items()) if port not in known]
            scheme.ports += tuple(later)
    say(ports={scheme.name: scheme.ports for scheme in schemes})
    hear()
    results = []
    warm(0, scenario, tell, round_of)  # once more, with the rates as they are now
    for size in scenario.sizes:
        times: dict[str, list[float]] = {scheme.name: [] for scheme in schemes}
        rounds = []
        for which in range(len(schemes)):
            tell(which, size, 1)
            first = round_of(which, size)
            rounds.append(min(1000, max(1, int(scenario.budget_s / 3 / first))))
        for _ in range(3):
            for which, scheme in enumerate(schemes):
                tell(which, size, rounds[which])
                times[scheme.name] += [round_of(which, size) for _ in range(rounds[which])]
        for scheme in schemes:
            seconds = times[scheme.name]
            results.append(
                {
                    "scheme": scheme.name,
                    "bytes": size,
                    "rounds": len(seconds),
                    "median_s": statistics.median(seconds),
                    "least_s": min(seconds),
                    "most_s": max(seconds),
                }
            )
    order(stream, END, 0, 0)
    wrong = hear_wrong(stream)
    say(results=results, wrong=wrong)


def order(stream: socket.socket, which: int, size: int, rounds: int) -> None:
    """Tell the other end what it will receive: the number of a scheme, bytes, and how many times."""
    stream.sendall(np.array([which, size, rounds], np.int64).tobytes())


def warm(which: int, scenario: Scenario, tell: Any, round_of: Any) -> None:
    """Let a scheme find its pace: large messages for some seconds."""
    size = min(16 << 20, max(scenario.sizes))
    end = time.perf_counter() + (scenario.warm_s if which == 0 else 0.3)
    while time.perf_counter() < end:
        tell(which, size, 1)
        round_of(which, size)


def serve(movers: Sequence[tuple[Mover, Mover]], data: Array, reply: Array) -> None:
    """Receive, and reply; compare the last round of each series with what was sent."""
    wrong = 0
    out = np.zeros(data.size, np.uint8)
    with socket.create_server(("", CONTROL_PORT)) as server:
        say(serving=True)
        stream, _ = server.accept()
    with stream, stream.makefile("rb") as lines:
        while True:
            which, size, rounds = np.frombuffer(lines.read(24), np.int64).tolist()
            if which == END:
                stream.sendall(np.array([wrong], np.int64).tobytes())
                return
            back, forth = movers[which]
            out[:size] = 0
            stream.sendall(READY)
            for _ in range(rounds):
                forth.move(out.ctypes.data, size)
                back.move(reply.ctypes.data, REPLY)
            wrong += int(np.count_nonzero(out[:size] != data[:size]))


def hear_wrong(stream: socket.socket) -> int:
    with stream, stream.makefile("rb") as lines:
        return int(np.frombuffer(lines.read(8), np.int64)[0])


def netlab_connected(address: str) -> socket.socket:
    stream = socket.create_connection((address, CONTROL_PORT), timeout=60)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


# ---------------------------------------------------------------------------------------------------
# Both
# ---------------------------------------------------------------------------------------------------


def run_scenario(scenario: Scenario) -> Record:
    """Measure on two emulated hosts."""
    folder = Path(tempfile.mkdtemp(prefix="bagua-net-"))
    ends: list[subprocess.Popen[str]] = []
    try:
        prepare(folder)
        with netlab.build(2, "10gbit") as lab:
            shape(lab, scenario)
            for host in range(2):
                module = [sys.executable, "-m", "benchmarks.net", "--end", str(host), "--folder", str(folder)]
                command = lab.inside(host, *module, "--only", scenario.name, "--address", lab.address(1))
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                ends.append(subprocess.Popen(command, env=lab.environment(), text=True, **pipes))  # type: ignore[call-overload]
            return talk(lab, scenario, ends)
    finally:
        for end in ends:
            end.kill()
            end.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def prepare(folder: Path) -> None:
    """The libraries, each in a file of its own."""
    plugin = build_plugin()
    for name in ("plugin", "one-flow"):
        shutil.copy(plugin, folder / f"{name}.so")
    source = Path(__file__).with_name("stock_net.c")
    building.compile_to(next(building.compilers()), folder / "stock.so", source=source)


def talk(lab: netlab.Lab, scenario: Scenario, ends: Sequence[subprocess.Popen[str]]) -> Record:
    """Pass handles from end to end, slow a flow down where the scenario has one, and return the results."""
    for _ in scenario.schemes:
        handles = [read(end.stdout) for end in ends]
        for end, handle in zip(ends, reversed(handles), strict=True):
            write(end.stdin, handle)
    write(ends[0].stdin, read(ends[1].stdout))  # host 1 serves from here on
    ports = read(ends[0].stdout)["ports"]
    slowed = {}
    if scenario.slow:
        for name, its in ports.items():
            data = its if name == "plugin" else its[1:]  # NCCL's first socket carries sizes only
            slowed[name] = data[1]
            _do("tc", "-n", f"{lab.prefix}-h0", *class_line("change", data[1], scenario.slow).split())
    write(ends[0].stdin, {"go": True})
    found = read(ends[0].stdout)
    about = {"scenario": scenario.name, "text": scenario.text, "line_mb_s": scenario.line_mb_s}
    return {**about, "slowed": slowed, **found}


def read(pipe: IO[str] | None) -> dict[str, Any]:
    assert pipe is not None
    line = pipe.readline()
    if not line:
        raise netlab.LabError("an end has failed; its error is above")
    heard: dict[str, Any] = json.loads(line)
    return heard


def write(pipe: IO[str] | None, what: dict[str, Any]) -> None:
    assert pipe is not None
    pipe.write(json.dumps(what) + "\n")
    pipe.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--out", type=Path, default=RESULTS / "net", metavar="STEM", help="of the files written")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.end is not None:
        run_end(SCENARIOS[options.only[0]], options.end, options.folder, options.address)
        return 0
    path = options.out.with_suffix(".json")
    record = json.loads(path.read_text()) if path.exists() else begin_record("net", argparse.Namespace())
    record.setdefault("results", [])
    for name in [] if options.report else options.only:
        print(f"# {name}: {SCENARIOS[name].text}", flush=True)
        try:
            result = run_scenario(SCENARIOS[name])
        except netlab.LabError as exc:
            print(f"net: {exc}", file=sys.stderr)
            return 1
        kept = [one for one in record["results"] if one["scenario"] != name]
        record["results"] = sorted([*kept, result], key=lambda one: [*SCENARIOS].index(one["scenario"]))
        write_json(path, record)
        print("\n".join(table(result)), flush=True)
    write_report(options.out, lambda picture: report(record, picture), lambda: draw(record))
    return 0


# ---------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------


def rates(result: Record) -> dict[str, dict[int, float]]:
    """MB/s by scheme and size."""
    found: dict[str, dict[int, float]] = {}
    for one in result["results"]:
        found.setdefault(one["scheme"], {})[one["bytes"]] = one["bytes"] / one["median_s"] / 1e6
    return found


def is_stock(scheme: str) -> bool:
    return scheme not in ("plugin", "one flow")


def table(result: Record) -> list[str]:
    """Ours, one flow, NCCL's default, and the best of its grid, at each size.

    Where the link holds the flows, nothing is compared with more than it carries: that is a burst.
    """
    by = rates(result)
    line = result["line_mb_s"] or float("inf")
    rows = []
    for size, ours in by["plugin"].items():
        stock = {name: its[size] for name, its in by.items() if is_stock(name)}
        best = max(stock, key=lambda name: stock[name])
        default = stock.get("default")
        one = by.get("one flow", {}).get(size)
        rows.append(
            [
                size,
                f"{ours:.3g}",
                f"{one:.3g}" if one else "-",
                f"{default:.3g}" if default else "-",
                f"{stock[best]:.3g} ({best})",
                f"{ours / default:.2f}" if default else "-",
                f"{ours / min(line, stock[best]):.2f}",
            ]
        )
    titles = ["bytes", "plugin", "one flow", "default", "best of the grid", "to default", "to the best"]
    return markdown_table(titles, rows, "r" * len(titles))


def report(record: Record, picture: str | None) -> str:
    """The tables as Markdown."""
    lines = [
        "# The network plugin and NCCL's own scheme",
        "",
        machine_of(record),
        "",
        "MB/s (10**6 bytes a second) of a round: so many bytes one way, in messages of at most 1 MiB, four on",
        "their way, then 8 bytes back. *Default*: NCCL's scheme with one socket. *Grid*: with T threads and S",
        "sockets each, the best at each size. NCCL's scheme is `benchmarks/stock_net.c`, after its published",
        "behaviour. A flow that has rested sends 16 KiB at once, faster than its cap, so a scheme that spreads",
        "small rounds over its flows beats the cap. An idle link lets 64 KiB pass at once; where it is the link",
        "that holds the flows, a best rate above what it carries counts as what it carries. Both hosts are on",
        "the same cores.",
        "",
    ]
    for result in record["results"]:
        others = [name for name in rates(result) if is_stock(name) and name != "default"]
        lines += [f"## {result['text'][0].upper()}{result['text'][1:]}", "", *table(result), ""]
        lines += [f"Grid: {', '.join(others)}. Wrong bytes: {result['wrong']}.", ""]
    if picture:
        lines += [f"![rates]({picture})", ""]
    return "\n".join(lines)


def draw(record: Record) -> Figure:
    """A plot for each link."""
    from matplotlib.figure import Figure

    results = record["results"]
    figure = Figure(figsize=(11, 3.8 * ((len(results) + 1) // 2)), layout="constrained")
    for number, result in enumerate(results, 1):
        axes = figure.add_subplot((len(results) + 1) // 2, 2, number)
        by = rates(result)
        sizes = [*by["plugin"]]
        stock = {name: its for name, its in by.items() if is_stock(name)}
        best = [max(its[size] for its in stock.values()) for size in sizes]
        axes.loglog(sizes, by["plugin"].values(), "o-", label="plugin")
        axes.loglog(sizes, best, "s--", label="best of NCCL's grid")
        for name in ("default", "one flow"):
            if name in by:
                axes.loglog(sizes, by[name].values(), ":", label=name)
        axes.set(title=result["text"], xlabel="bytes", ylabel="MB/s")
        axes.title.set_fontsize(9)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts are removed
    sys.exit(main())
