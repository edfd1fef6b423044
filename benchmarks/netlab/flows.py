"""A rate for every flow that a host sends: classes of tc's htb, and a hash of addresses and ports."""

from __future__ import annotations

from collections.abc import Iterator

FLOW_CLASS_BITS, FLOW_BURST_BYTES = 10, 1 << 17
"""Flows are hashed into 2**10 classes; each sends so much at once, faster than its rate."""

FLOW_MAJOR, FIRST_FLOW_CLASS = 2, 16
"""The numbers of these classes are 2:10, 2:11 and so on, as tc writes them, in hexadecimal."""


def flow_commands(rate: str) -> Iterator[str]:
    """The tc queues that limit each flow, below the token bucket of eth0."""
    number = FLOW_MAJOR
    yield f"qdisc add dev eth0 parent 1:1 handle {number:x}: htb"
    for minor in range(FIRST_FLOW_CLASS, FIRST_FLOW_CLASS + (1 << FLOW_CLASS_BITS)):
        limits = f"rate {rate} burst {FLOW_BURST_BYTES} cburst {FLOW_BURST_BYTES} quantum {1 << 16}"
        yield f"class add dev eth0 parent {number:x}: classid {number:x}:{minor:x} htb {limits}"
    code = hash_of_flow()
    program = ",".join([str(len(code)), *(" ".join(map(str, step)) for step in code)])
    yield f"filter add dev eth0 parent {number:x}: protocol ip prio 1 bpf bytecode {program!r}"


def hash_of_flow() -> list[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter: the class of a TCP packet, by receiver and ports; 0 for others.

    The ports alone differ between the connections of two hosts, and only the client's: so both count, and all of
    their bits, since Linux gives a client's connections to one server even ports alone.
    """
    load_half, load_byte, load_word = 0x28, 0x30, 0x20
    multiply, add_x, shift_right, add, to_x = 0x24, 0x0C, 0x74, 0x04, 0x07
    if_equal, give_a, give = 0x15, 0x16, 0x06
    golden = 0x9E3779B1  # 2**32 divided by the golden ratio: the upper bits of a product depend on all bits below
    return [
        (load_half, 0, 0, 12),
        (if_equal, 0, 11, 0x0800),  # IPv4
        (load_byte, 0, 0, 23),
        (if_equal, 0, 9, 6),  # TCP
        (load_word, 0, 0, 30),  # the receiver's address
        (multiply, 0, 0, golden),
        (to_x, 0, 0, 0),
        (load_word, 0, 0, 34),  # both ports
        (add_x, 0, 0, 0),
        (multiply, 0, 0, golden),
        (shift_right, 0, 0, 32 - FLOW_CLASS_BITS),
        (add, 0, 0, (FLOW_MAJOR << 16) + FIRST_FLOW_CLASS),
        (give_a, 0, 0, 0),
        (give, 0, 0, 0),
    ]
