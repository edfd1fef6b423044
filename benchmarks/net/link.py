"""The emulated links: scenarios, and a class of tc's htb for each source port."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass

from .. import netlab

SIZES = (8, 512, 4096, 32_768, 131_072, 524_288, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
PORTS = 2048
"""Classes of a link, and source ports that a host may use: each has a class of its own."""

FIRST_PORT = 32_768

GRID = ((1, 1), (1, 4), (1, 16), (2, 4), (2, 16), (4, 1), (4, 4), (4, 16), (8, 4), (16, 1), (16, 4))
"""Threads and sockets each, for NCCL's scheme."""


@dataclass(frozen=True)
class Scenario:
    """A link, and the schemes that are compared on it. Rates as tc writes them."""

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
            line_mb_s=125 * 1448 / 1514,  # without the headers of Ethernet, IP and TCP
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


def shape(lab: netlab.Lab, scenario: Scenario) -> None:
    """Give each source port of host 0 a class of its own, by its lowest bits."""
    space = f"{lab.prefix}-h0"
    run_tool(*f"ip netns exec {space} sysctl -qw".split(), port_range())
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
        run_tool("tc", "-n", space, "-batch", batch.name)
    run_tool(*f"tc -n {space} filter add dev eth0 parent 1: protocol ip prio 1 bpf bytecode".split(), program)


def port_range() -> str:
    return f"net.ipv4.ip_local_port_range={FIRST_PORT} {FIRST_PORT + PORTS - 1}"


def class_line(verb: str, port: int, rate: str) -> str:
    number = 0x10 + port % PORTS
    sizes = "burst 16k cburst 16k quantum 3000"
    return f"class {verb} dev eth0 parent 1:1 classid 1:{number:x} htb rate 64kbit ceil {rate} {sizes}"


def run_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise netlab.LabError(f"{' '.join(command)[:120]}: {done.stderr.strip()[-300:]}")
