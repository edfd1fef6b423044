"""The network plugin, called as NCCL calls it: messages, failures, strangers, threads."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import net_peer
from support.net_builds import built
from support.net_peer import address_of, meet
from support.waiting import until

from bagua_comm import net
from bagua_comm.net import binding
from bagua_comm.net.binding import Plugin, PluginError
from benchmarks.net_traffic import connect_pair, exchange, make_pool, random_sizes

POOL = make_pool(8 << 20)
WAIT_S = 30.0
"""How long what must happen may take on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("net")


@pytest.fixture(scope="module")
def library(folder):
    return built(folder)


@pytest.fixture(scope="module")
def short(folder):
    """A build whose every read and write moves at most 1000 bytes."""
    return built(folder, "short", ["-DBAGUA_NET_MOVE_AT_MOST=1000"])


VARIABLES = "".join(
    f'__attribute__((visibility("default"))) double {one};\n' for one in ("gain", "trial_s = 1e9")
)
STEERED = ["-DGAIN=gain", "-DTRIAL_S=trial_s", "-DWINDOW_S=1e-6", "-DREST_S=1e-3", "-DCHUNK=4096"]


@pytest.fixture(scope="module")
def eager(folder):
    """A build that opens more flows whenever it has measured anything, and cuts messages small."""
    return built(folder, "steered", STEERED, header=VARIABLES, copied_as="eager")


@pytest.fixture(scope="module")
def steered(folder):
    """A build where more flows pay if they make it `gain` times as fast, and trials last `trial_s`."""
    return built(folder, "steered", STEERED, header=VARIABLES)


@pytest.fixture
def plugin(library):
    plugin = Plugin(library)
    plugin.start()
    return plugin


@pytest.fixture
def pair(library):
    with connected(library) as pair:
        yield pair


@contextlib.contextmanager
def connected(library):
    """A connection of a plugin to itself."""
    plugin = Plugin(library)
    plugin.start()
    pair = connect_pair(plugin)
    yield pair
    pair.close()


@contextlib.contextmanager
def failing(code):
    """The body of `with` raises an error of the plugin with this code."""
    with pytest.raises(PluginError) as raised:
        yield
    assert raised.value.code == code


def threads():
    return len(os.listdir("/proc/self/task"))


def files():
    return len(os.listdir("/proc/self/fd"))


def finish(plugin, *requests):
    """Test requests until all are done."""
    for request in requests:
        until(lambda request=request: plugin.finished(request) is not None)


def receive_all(plugin, comm, receive, out):
    """Receive until that fails."""
    while True:
        finish(plugin, receive)
        receive = plugin.receive(comm, out.ctypes.data, out.size)


def test_messages_of_all_sizes_arrive_whole(pair):
    sizes = [0, 1, 15, 16, 17, 4079, 4080, 4081, 65_535, 65_536, 65_537, 8 << 20, 0, 0, 5]
    sizes += random_sizes(np.random.default_rng(0), 150, 1 << 20, 8000)
    exchange(pair, sizes, POOL, room=100)


def test_a_table_lists_its_functions(plugin):
    assert plugin.table.name == b"bagua"
    optional = {"regMrDmaBuf", "getDeviceMr", "irecvConsumed", "makeVDevice"}
    assert {name for name in binding.FUNCTIONS if not getattr(plugin.table, name)} == optional
    assert ctypes.sizeof(plugin.table) == 160
    assert ctypes.sizeof(binding.Properties) == 104
    seen = set()
    for device in range(plugin.count()):
        properties = plugin.properties(device)
        seen.add(properties.guid)
        assert properties.name.decode() in {name for _, name in socket.if_nameindex()}
        assert (properties.ptrSupport, properties.maxRecvs, properties.netDeviceType) == (1, 1, 0)
        assert properties.speed > 0
        assert (properties.ndevs, properties.devs[0]) == (1, device)
        assert properties.maxP2pBytes == properties.maxCollBytes == 1 << 40
    assert len(seen) == plugin.count()
    with pytest.raises(PluginError):
        plugin.properties(plugin.count())


def test_only_host_memory_can_be_registered(plugin):
    handle = ctypes.c_void_p(1)
    plugin.regMr(None, None, 8, binding.PTR_HOST, ctypes.byref(handle))
    assert handle.value is None
    for kind in (binding.PTR_CUDA, 4):
        with pytest.raises(PluginError):
            plugin.regMr(None, None, 8, kind, ctypes.byref(handle))


def test_short_reads_and_writes(short):
    with connected(short) as pair:
        exchange(pair, [0, 1, 1000, 1016, *random_sizes(np.random.default_rng(0), 80, 1 << 18, 6000)], POOL)


def test_many_flows_carry_messages_in_their_order(eager):
    with connected(eager) as pair:
        exchange(pair, [8 << 20] * 10 + random_sizes(np.random.default_rng(0), 100, 1 << 20, 50_000), POOL)
        assert len(net.counters(eager)) >= 4  # the number that it could open meanwhile


@pytest.fixture(params=[1e9])
def of_two_flows(request, steered, monkeypatch):
    """A connection that has found that two flows pay, its plugin, and how many flows carry an exchange.

    The parameter is the length of trials, in seconds.
    """
    monkeypatch.setenv("BAGUA_NET_FLOWS", "2")
    with connected(steered) as pair:

        def flows_of_an_exchange():
            before = [*net.counters(steered), 0, 0]
            exchange(pair, [2 << 20] * 4, POOL)
            return sum(now > then for now, then in zip(net.counters(steered), before, strict=False))

        for name, value in (("gain", -2.0), ("trial_s", request.param)):  # two flows pay, however slow
            ctypes.c_double.in_dll(pair.plugin.library, name).value = value
        until(lambda: flows_of_an_exchange() == 2)
        yield pair.plugin, flows_of_an_exchange


def test_flows_that_no_longer_pay_are_dropped(of_two_flows):
    plugin, flows_of_an_exchange = of_two_flows
    ctypes.c_double.in_dll(plugin.library, "gain").value = 1e9
    until(lambda: flows_of_an_exchange() == 1)


@pytest.mark.parametrize("of_two_flows", [-1.0], indirect=True)
def test_a_trial_of_fewer_flows_that_does_not_end_in_time_gives_none_up(of_two_flows):
    plugin, flows_of_an_exchange = of_two_flows
    connections = sockets()
    ctypes.c_double.in_dll(plugin.library, "gain").value = 1e9
    for _ in range(30):
        flows_of_an_exchange()
    assert sockets() == connections  # one that was given up would be a new one, if it came back


def sockets():
    """The sockets that this process has open."""
    return {file for file in map(os.path.realpath, Path("/proc/self/fd").glob("*")) if "socket:" in file}


WITHOUT_FILES = """
import ctypes, os, resource, sys
from pathlib import Path
from bagua_comm import net
from bagua_comm.net.binding import Plugin, PluginError
from benchmarks.net_traffic import connect_pair, exchange, make_pool
plugin = Plugin(Path(sys.argv[1]))
plugin.start()
pair = connect_pair(plugin)
handle, listener = plugin.listener(0)
late = ctypes.create_string_buffer(bytes(handle), len(handle))
made = [plugin.connected(0, handle)]
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
free = [os.dup(0) for _ in range(3)]  # one flow, whose ends both are here, and no whole second one
resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, usual[1]))
for number in free:
    os.close(number)
exchange(pair, [1 << 20] * 40, make_pool(1 << 20))
print(len(net.counters(Path(sys.argv[1]))))
hoard = []
try:
    while True:
        hoard.append(os.dup(0))
except OSError:
    pass
for call in (lambda: plugin.accepted(listener), lambda: plugin.connected(0, late)):
    try:
        call()
        print("no error")
    except PluginError as exc:
        print(exc.code)
exchange(pair, [1 << 20] * 4, make_pool(1 << 20))
resource.setrlimit(resource.RLIMIT_NOFILE, usual)
receiver = None
while not (receiver and made[0]):
    receiver = receiver or plugin.accepted(listener)
    made[0] = made[0] or plugin.connected(0, handle)
exchange(net.checking.ConnectedPair(plugin, made[0], receiver), [1000], make_pool(1000))
print("there")
"""


def test_open_connections_continue_where_no_more_files_may_be_opened(eager):
    command = [sys.executable, "-c", WITHOUT_FILES, str(eager)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert said.returncode == 0, said.stderr
    flows, *errors = said.stdout.split()
    assert int(flows) <= 2
    assert errors == [str(binding.SYSTEM_ERROR)] * 2 + ["there"]


def test_a_receive_posted_long_after_the_data_came(pair):
    plugin = pair.plugin
    data = POOL[:100_000]
    sends = [plugin.send(pair.sender, data.ctypes.data, size) for size in (100_000, 0, 10, 100_000)]
    for request in sends[:1]:  # on its way, in the kernel or not
        plugin.finished(request)
    outs = [np.zeros(100_000, np.uint8) for _ in sends]
    for out in outs:
        receive = plugin.receive(pair.receiver, out.ctypes.data, 100_000)
        size = until(lambda receive=receive: (found := plugin.finished(receive)) is not None and (found,))[0]
        np.testing.assert_array_equal(out[:size], data[:size])
    for request in sends[1:]:
        finish(plugin, request)


def test_at_most_64_requests_are_taken_and_a_request_that_is_not_taken_is_null(pair):
    receives = [pair.plugin.receive(pair.receiver, POOL.ctypes.data, 0) for _ in range(65)]
    assert receives[64] is None
    assert None not in receives[:64]


def test_a_message_larger_than_its_receive_is_an_error_and_no_byte_is_written_behind(pair):
    plugin, out = pair.plugin, np.zeros(200, np.uint8)
    receive = plugin.receive(pair.receiver, out.ctypes.data, 100)
    plugin.send(pair.sender, POOL.ctypes.data, 101)
    with failing(binding.INVALID_USAGE):
        finish(plugin, receive)
    assert not out.any()
    with pytest.raises(PluginError):  # later ones, too
        plugin.receive(pair.receiver, out.ctypes.data, 100)


def test_a_request_that_was_done_cannot_be_tested_again(pair):
    request = pair.plugin.send(pair.sender, POOL.ctypes.data, 8)
    finish(pair.plugin, request)
    with failing(binding.INVALID_USAGE):
        pair.plugin.finished(request)


def test_flush_is_done_at_once_and_test_takes_no_sizes(pair):
    plugin, request, done = pair.plugin, ctypes.c_void_p(1), ctypes.c_int(-1)
    plugin.iflush(pair.receiver, 1, None, None, None, ctypes.byref(request))
    assert request.value is None
    sent = plugin.send(pair.sender, POOL.ctypes.data, 8)
    until(lambda: plugin.test(sent, ctypes.byref(done), None) or done.value)
    assert done.value == 1


def test_several_receives_in_one_are_refused(pair):
    with failing(binding.INVALID_ARGUMENT):
        pair.plugin.irecv(pair.receiver, 2, None, None, None, None, None, ctypes.byref(ctypes.c_void_p()))


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_killed_peer_is_a_remote_error_at_once_on_all_requests_and_on_new_ones(plugin, library, role):
    size = 64 << 20
    out = np.zeros(size, np.uint8)
    if role == "receiver":
        peer = net_peer.start(library, "receiver", size, 1)
        handle = ctypes.create_string_buffer(bytes.fromhex(peer.stdout.readline()), binding.HANDLE_BYTES)
        comm = until(lambda: plugin.connected(0, handle))
        post, close = plugin.send, plugin.closeSend
    else:
        handle, listener = plugin.listener(0)
        peer = net_peer.start(library, "sender", bytes(handle).hex(), size, 10)
        comm = until(lambda: plugin.accepted(listener))
        plugin.closeListen(listener)
        post, close = plugin.receive, plugin.closeRecv
    with peer:
        requests = [post(comm, out.ctypes.data, size) for _ in range(4)]
        finish(plugin, requests[0])
        plugin.finished(requests[1])
        peer.kill()
        for request in requests[1:]:
            with failing(binding.REMOTE_ERROR):
                finish(plugin, request)
        with failing(binding.REMOTE_ERROR):
            post(comm, out.ctypes.data, size)
    close(comm)


def test_a_handle_without_a_listener_is_an_error_and_leaves_nothing(plugin):
    before = files()
    handle, listener = plugin.listener(0)
    plugin.closeListen(listener)
    with failing(binding.REMOTE_ERROR):
        until(lambda: plugin.connected(0, handle))
    assert files() == before


def test_strangers_are_dropped_and_the_peer_is_still_admitted(plugin):
    handle, listener = plugin.listener(0)
    strangers = [socket.create_connection(address_of(handle), timeout=WAIT_S) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(bytes(handle)[:4])  # and no more
    sender, receiver, _ = meet(plugin, handle, listener)
    with pytest.raises(ConnectionResetError):
        strangers[0].recv(1)
    exchange(net.checking.ConnectedPair(plugin, sender, receiver), [1000] * 10, POOL)
    plugin.closeSend(sender)
    plugin.closeRecv(receiver)
    plugin.closeListen(listener)
    assert strangers[1].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_a_listener_is_used_again(plugin):
    handle, listener = plugin.listener(0)
    for _ in range(3):
        copy = ctypes.create_string_buffer(bytes(handle), len(handle))
        sender, receiver, _ = meet(plugin, copy, listener)
        exchange(net.checking.ConnectedPair(plugin, sender, receiver), [0, 70_000], POOL)
        plugin.closeSend(sender)
        plugin.closeRecv(receiver)
    plugin.closeListen(listener)


def test_closing_with_requests_in_flight_ends_the_other_side_with_an_error_and_no_thread_or_file_stays(plugin):
    net.check(Path(plugin.library._name))  # files that stay open are open
    before = threads(), files()
    for first in ("sender", "receiver"):
        pair = connect_pair(plugin)
        assert threads() > before[0]
        out = np.zeros(8 << 20, np.uint8)
        receive = plugin.receive(pair.receiver, out.ctypes.data, out.size)
        sends = [plugin.send(pair.sender, POOL.ctypes.data, out.size) for _ in range(9)]
        plugin.finished(receive)
        if first == "sender":
            plugin.closeSend(pair.sender)
            with pytest.raises(PluginError):
                receive_all(plugin, pair.receiver, receive, out)
            plugin.closeRecv(pair.receiver)
        else:
            plugin.closeRecv(pair.receiver)
            with failing(binding.REMOTE_ERROR):
                finish(plugin, *sends)
            plugin.closeSend(pair.sender)
    until(lambda: (threads(), files()) == before)


def test_all_that_was_sent_arrives_after_the_sender_has_closed(plugin):
    pair = connect_pair(plugin)
    send = plugin.send(pair.sender, POOL.ctypes.data, 100_000)
    finish(plugin, send)
    plugin.closeSend(pair.sender)
    out = np.zeros(100_000, np.uint8)
    receive = plugin.receive(pair.receiver, out.ctypes.data, out.size)
    finish(plugin, receive)
    np.testing.assert_array_equal(out, POOL[:100_000])
    late = plugin.receive(pair.receiver, out.ctypes.data, out.size)
    with pytest.raises(PluginError):
        finish(plugin, late)
    plugin.closeRecv(pair.receiver)


def test_eight_threads_with_two_connections_each(plugin):
    faults = []

    def work(seed):
        try:
            for number in range(2):
                pair = connect_pair(plugin)
                sizes = random_sizes(np.random.default_rng(seed), 60, 1 << 20, 20_000)
                exchange(pair, sizes, POOL, seed=seed + 8 * number)
                pair.close()
        except BaseException as exc:
            faults.append(exc)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert faults == []


@pytest.mark.parametrize("others", [0, 3])
def test_a_neglected_connection_moves_on_by_the_helper_thread_while_others_wait_for_their_peers(pair, others):
    """The sender is never tested, and of the receiver only the last message."""
    plugin, size = pair.plugin, 4 << 20
    waiting = [connect_pair(plugin) for _ in range(others)]
    for one in waiting:
        plugin.receive(one.receiver, POOL.ctypes.data, 0)
    outs = [np.zeros(size, np.uint8) for _ in range(4)]
    receives = [plugin.receive(pair.receiver, out.ctypes.data, size) for out in outs]
    for _ in outs:
        plugin.send(pair.sender, POOL.ctypes.data, size)
    finish(plugin, receives[-1])
    np.testing.assert_array_equal(outs[-1], POOL[:size])
    for one in waiting:
        one.close()


def test_counters_count_sent_bytes(pair, library):
    before = sum(net.counters(library))
    sent = exchange(pair, [0, 10, 100_000], POOL)
    assert sum(net.counters(library)) - before >= sent + 3 * 16
