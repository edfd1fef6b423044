"""Emulated hosts on one Linux machine: network namespaces joined by a bridge, each link held to a rate.

    python -m benchmarks.netlab run --hosts 4 --rate 1gbit -m benchmarks.collectives --beside gloo
    python -m benchmarks.netlab run --hosts 2 --ranks-per-host 2 --rate 500mbit examples/train.py
    python -m benchmarks.netlab run --launcher torchrun --hosts 4 --rate 1gbit examples/train.py
    python -m benchmarks.netlab run --flow-bandwidth 100mbit --mpirun=--mca --mpirun=btl_tcp_links --mpirun=8 a.py
    python -m benchmarks.netlab run --hosts 4 --rate 200mbit --latency 50ms -m benchmarks.convergence --task text
    python -m benchmarks.netlab rate --rate 1gbit
    python -m benchmarks.netlab clean

Each host has a namespace with one interface, eth0 at 10.99.0.1, 10.99.0.2, ..., a host name and a /dev/shm of its
own, so that MPI takes them for machines and talks TCP between them. Both ends of a link pass a token bucket
(tc's tbf), so that no host sends or receives faster than the rate. The script joins mpirun's world; MASTER_ADDR,
MASTER_PORT and GLOO_SOCKET_IFNAME are set as well, so that it can open a gloo group of torch.distributed over
the same links, and time the two in turn. `--launcher torchrun` starts it as torchrun would instead, without
MPI.

`--flow-bandwidth` also holds every flow (a TCP connection in one direction) to a rate, as clouds do. What a host
sends passes htb, with a class for each hash of addresses and ports. There are 1,024 classes; with 48 flows, one
pair of them on average meets in a class, which then holds both to the rate of one.

`--latency` is the time that a packet takes from one host to another, one way: a round trip takes twice as long. A
process delays the packets, since not every kernel has netem (latency.py). TCP behaves as on a long line: a
connection that was idle begins with ten packets, and doubles them with each round trip.

This needs root, iproute2, and a kernel with network namespaces, veth, bridges and tbf, and TAP for `--latency`.
It removes everything when it ends, also after an error or Ctrl-C; `clean` removes what a killed run has left.
"""

from .lab import PREFIX, Direction, Lab, build, check_machine, remove
from .rate import measure_rate, measure_round_trip
from .tools import LabError

__all__ = [
    "PREFIX",
    "Direction",
    "Lab",
    "LabError",
    "build",
    "check_machine",
    "measure_rate",
    "measure_round_trip",
    "remove",
]
