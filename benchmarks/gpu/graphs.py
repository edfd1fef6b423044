"""Why the host takes long to launch a CUDA graph of a quantized_allreduce.

On two ranks that share an H100, a replay took the host 1.8 ms, an eager call 0.1 ms, and the device 4.5 ms either
way: means over 20 calls behind a held stream. So `launch_times` notes the time of each of 20 launches, of graphs
with only some of the work, and the nodes of each graph. What would show each reason:

    queue       Only so many launches may wait for the device. Then those of every graph are short up to some
                number, and each later one takes as long as the device takes for one.
    itself      A graph waits for its own launch before. Then the second launch is long; of "two graphs in turn",
                the third.
    host        NCCL has a proxy thread for messages over the network. In each replay a function of the host, a
                node of the graph, wakes it. Then launches of "kernels" and "one rank", which have no such node,
                are short, and those of "kernels and host functions" as long as those of "messages".
    events      NCCL orders graphs and other calls by events; with NCCL_GRAPH_MIXING_SUPPORT=0 it does not. Then
                launches are short in processes with that setting.
    upload      The first launch takes the graph to the device. Then it is long, unless `Graph.upload` came first.
    each        A launch takes long by itself. Then it does so on an idle stream, too.

On an H200 it was the queue: of graphs with messages 14 launches were short, 10 to 20 us each, and each later one
waited 4.5 ms for the device, with the setting too. The mean of 20 had been 1.8 ms. The events do take part of the
queue: without messages, on one rank, 18 launches were short with them, and all 20 without. Of two graphs in turn
19 were short, and 11 with the setting; why was not found.

Source: NVIDIA's user guide of NCCL, "Using NCCL with CUDA Graphs" and "Environment Variables".
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bagua_comm import Communicator
from bagua_comm.arrays import Array

from .device import Hold

HOLD_S = 0.01
BATCH = 20
"""Launches that are enqueued while the device is held."""

ROUNDS = 3
"""How often each type of launch is timed; the medians go into the record."""

LONG_US = 1000.0
"""A launch that takes longer has waited for something."""

_TYPES = (
    *("kernel", "copy", "memset", "host function", "graph", "empty", "wait for an event", "record of an event"),
    *("semaphore signal", "semaphore wait", "allocation", "free", "memory operations", "conditional"),
)
"""The types of nodes, in the order of CUDA's enum CUgraphNodeType."""

Calls = Sequence[Callable[[], object]]
"""Calls that are made in turn."""


def launch_times(comm: Communicator, calls: Mapping[str, Callable[[], object]], hold: Hold) -> dict[str, Any]:
    """Host times of launches of graphs of some calls, each of which has been made before. Collective.

    Those of "whole" are also launched on an idle stream, by two graphs in turn, and for the first time.
    """
    import cupy

    cuda = cupy.cuda
    stream = cuda.Stream(non_blocking=True)
    stream.wait_event(cuda.get_current_stream().record())
    with stream:
        graphs = {name: captured(stream, call) for name, call in calls.items()}
        result: dict[str, Any] = {name: {"nodes": nodes(graph)} for name, graph in graphs.items()}
        try:
            graphs[_HOST] = captured(stream, lambda: between_host_functions(stream, calls["kernels"]))
            result[_HOST] = {"nodes": nodes(graphs[_HOST])}
        except (AttributeError, KeyError, OSError, RuntimeError) as exc:
            result[_HOST] = {"left_out": f"{type(exc).__name__}: {exc}"}
        firsts: dict[str, list[float]] = {"first launch": [], "first launch, uploaded": []}
        for name, found in firsts.items():
            for _ in range(ROUNDS):
                graph = captured(stream, calls["whole"])
                if name.endswith("uploaded"):
                    graph.upload()
                found += batch(comm, [graph.launch], stream, count=1).tolist()
        turns: dict[str, Calls] = {name: [graph.launch] for name, graph in graphs.items()}
        turns["whole, two graphs in turn"] = [graphs["whole"].launch, graph.launch]
        turns["whole, eager"] = [calls["whole"]]
        for name, launches in turns.items():
            batch(comm, launches, stream, count=len(launches))  # warms up
            times = [batch(comm, launches, stream, hold=hold) for _ in range(ROUNDS)]
            result.setdefault(name, {}).update(described(np.median(times, axis=0)))
        idle = [batch(comm, turns["whole"], stream, count=1) for _ in range(BATCH)]
        result["whole, on an idle stream"] = described(np.concatenate(idle))
        stream.synchronize()
    return {**result, **{name: rounded(found) for name, found in firsts.items()}}


_HOST = "kernels and host functions"


def batch(
    comm: Communicator, launches: Calls, stream: Any, *, count: int = BATCH, hold: Hold | None = None
) -> Array:
    """Microseconds of the host for each of some launches in turn; waits for them. Collective."""
    comm.transports[0].barrier()
    if hold is not None:
        hold(HOLD_S)
    times = [time.perf_counter()]
    for i in range(count):
        launches[i % len(launches)]()
        times.append(time.perf_counter())
    stream.synchronize()
    return 1e6 * np.diff(times)


def described(us: Array) -> dict[str, Any]:
    """The times of launches, in order, and how many of them come before one that has waited."""
    waited = np.flatnonzero(us > LONG_US)
    return {
        "before_a_wait": int(waited[0]) if waited.size else len(us),
        "median_us": rounded([np.median(us)])[0],
        "us": rounded(us),
    }


def rounded(us: Sequence[float] | Array) -> list[float]:
    """Times to a tenth of a microsecond."""
    return [round(float(each), 1) for each in us]


def captured(stream: Any, call: Callable[[], object]) -> Any:
    """The graph of a call on `stream`, the current one."""
    stream.begin_capture()
    try:
        call()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            stream.end_capture()
        raise
    return stream.end_capture()


# The driver ----------------------------------------------------------------------------------------------


def between_host_functions(stream: Any, call: Callable[[], object]) -> None:
    """Enqueue a function of the host that does nothing, a call, and the function again."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    launch.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of no memory
    _check("cuLaunchHostFunc", launch(stream.ptr, nothing, None))
    call()
    _check("cuLaunchHostFunc", launch(stream.ptr, nothing, None))


def nodes(graph: Any) -> dict[str, int] | str:
    """The number of nodes of each type in a graph of CuPy; why it is not known, if it is not."""
    try:
        cuda, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.graph), ctypes.c_size_t()
        if not handle:
            return "CuPy has destroyed the graph after its instantiation"
        _check("cuGraphGetNodes", cuda.cuGraphGetNodes(handle, None, ctypes.byref(count)))
        found = (ctypes.c_void_p * count.value)()
        _check("cuGraphGetNodes", cuda.cuGraphGetNodes(handle, found, ctypes.byref(count)))
        types: Counter[str] = Counter()
        for node in found:
            kind = ctypes.c_int()
            _check("cuGraphNodeGetType", cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
            types[_TYPES[kind.value] if kind.value < len(_TYPES) else str(kind.value)] += 1
        return dict(types)
    except (AttributeError, OSError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} returned {status}")
