"""How many flows a connection of the network plugin uses, on links that are numbers here: no byte is sent."""

import ctypes
import socket

import numpy as np
import pytest

from bagua_comm.net import building

WINDOW_S = 0.02

DRIVER = """
#include "{source}"

EXPORT struct comm *begin(int port) {{
  atomic_store(&all.most_sockets, 1000);
  all.chunk = CHUNK;
  union address address = {{.in = {{.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}}}};
  struct comm *comm = make_comm(true, &address);
  add_flow(comm, make_socket(AF_INET), OPEN);
  comm->most = FLOWS;
  return comm;
}}

/* A window in which so many bytes were sent; returns how many flows are used in the next one. */
EXPORT int window(struct comm *comm, double seconds, double bytes) {{
  comm->growth.seconds = seconds;
  comm->growth.bytes = (uint64_t)bytes;
  end_window(comm);
  for (int i = 0; i < comm->opened; i++) comm->flows[i].state = OPEN; /* all that were opened are welcome */
  if (comm->growth.phase == OPENING) use_more(comm);
  return comm->active;
}}

EXPORT int own_port(struct comm *comm, int flow) {{
  union address own;
  socklen_t length = sizeof own;
  getsockname(comm->flows[flow].fd, &own.any, &length);
  return ntohs(own.in.sin_port);
}}

EXPORT void end(struct comm *comm) {{ free_comm(comm); }}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growth")
    source = folder / "driver.c"
    source.write_text(DRIVER.format(source=building.SOURCE))
    library = ctypes.CDLL(
        str(building.compile_to(next(building.compilers()), folder / "driver.so", source=source))
    )
    library.begin.restype = ctypes.c_void_p
    library.window.argtypes = (ctypes.c_void_p, ctypes.c_double, ctypes.c_double)
    library.own_port.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.end.argtypes = (ctypes.c_void_p,)
    return library


@pytest.fixture
def follow(driver):
    """Follows a connection for a while, at `rate(flows, window, ports)` in MB/s; gives the flows by window."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        comms = []

        def follow(rate, seconds):
            comm = driver.begin(server.getsockname()[1])
            comms.append(comm)
            used = [1]
            for number in range(int(seconds / WINDOW_S)):
                ports = [driver.own_port(comm, flow) for flow in range(used[-1])]
                used.append(driver.window(comm, WINDOW_S, rate(used[-1], number, ports) * 1e6 * WINDOW_S))
            return used

        yield follow
        for comm in comms:
            driver.end(comm)


def test_one_slow_window_does_not_end_growth(follow):
    """Flows are capped, and one window in five is a stall."""
    for first in range(5):
        used = follow(lambda flows, number, _, first=first: 12 * flows * (0.1 if number % 5 == first else 1), 2)
        assert max(used[:100]) == 64


@pytest.mark.parametrize("seed", range(3))
def test_chance_adds_few_flows_where_they_do_not_pay(follow, seed):
    rng = np.random.default_rng(seed)
    used = follow(lambda *_: 118 * rng.uniform(0.8, 1.1), 20)
    assert np.mean(used) < 2
    assert max(used) <= 8


def test_flows_that_share_a_path_are_replaced_by_others(follow):
    """Of four paths one is slow; the first flows all take it, and flows opened later take others."""
    path_of = {}

    def rate(flows, number, ports):
        for port in ports:
            path_of.setdefault(port, 0 if len(path_of) < 4 else len(path_of) % 4)
        return sum((3, 31, 31, 31)[path] for path in {path_of[port] for port in ports})

    used = follow(rate, 8)
    assert np.mean([flows >= 4 for flows in used[-200:]]) > 0.8


def test_flows_that_pay_a_little_stay(follow):
    """Eight flows are 8 % faster than four: not enough to be opened for, but enough to be kept."""
    used = follow(lambda flows, number, _: {1: 10, 2: 20, 4: 40}.get(flows, 80 if number < 100 else 43.2), 20)
    assert used[-1] >= 8
