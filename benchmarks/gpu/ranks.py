"""quantized_allreduce between ranks on one GPU: its kernels, its host time, and its duration.

A part of benchmarks.gpu, which starts it on 2 and 4 ranks (`world.launch`); this starts ranks as threads:

    python -m benchmarks.gpu.ranks threads --out threads.jsonl

    costs       kernels, collectives and host time of one call; the same through a CUDA graph
    graphs      host time to launch graphs of the call and of its parts (graphs.py); the end of `costs`
    allreduce   time, bandwidth, bytes and error beside NCCL's own allreduce of float32 and float16
    threads     the same where ranks are threads, whose messages are copies on the device

Bandwidths count the bytes of the float32 array, whatever travels. Errors are relative, in the L2 norm, to the
float64 average. Host times are those of calls that are enqueued while the device is busy with something else.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from bagua_comm import Communicator, Float16, MinMaxUInt8, quantized_allreduce
from bagua_comm.arrays import Array
from bagua_comm.testing import run_ranks

from ..bench.checking import Check, relative_error
from ..bench.timing import Call, Spread, allreduce_factor, bandwidth_gbs, in_us, measure
from .device import Hold, torch_with_cuda
from .graphs import captured, launch_times
from .part import Results, part_parser
from .world import joined

SIZES = (1 << 20, 8 << 20, 64 << 20)
HOLD_S = 0.1
BATCH = 20
"""Calls that are enqueued while the device is held. Their launches must fit into its queue."""

WARMUP_ROUNDS = 2


# ---------------------------------------------------------------------------------------------------
# What one call enqueues
# ---------------------------------------------------------------------------------------------------


class Work:
    """One rank's array, and the parts of a quantized_allreduce of it."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        import cupy

        p = comm.size
        self.comm, self.cupy, self.codec = comm, cupy, MinMaxUInt8()
        count = max(1, nbytes // 4 // p)
        self.given = given(comm.rank, p * count)
        self.x = cupy.empty(p * count, np.float32)
        self.x.set(self.given)
        self.out = cupy.empty(p * count, np.float32)
        self.chunks, self.count = self.x.reshape(p, count), count
        w = self.codec.wire_nbytes(count, self.x.dtype)
        self.wire, self.received = (cupy.zeros((p, w), np.uint8) for _ in range(2))
        self.combined = cupy.zeros((1, w), np.uint8)

    def whole(self) -> Array:
        """The call itself."""
        return quantized_allreduce(self.comm, self.x, self.out, op="avg")

    def kernels(self) -> None:
        """Its three kernels, as the codec launches them."""
        self.codec.encode(self.chunks, self.wire)
        self.codec.combine(self.received, self.combined, op="avg", count=self.count, dtype=self.x.dtype)
        self.codec.decode(self.wire, self.out.reshape(self.chunks.shape))

    def collectives(self) -> None:
        """Its two collectives, as the communicator makes them."""
        self.comm.alltoall(self.wire, self.received)
        self.comm.allgather(self.combined, self.wire)

    def transport(self) -> None:
        """The same, without the communicator's checks, counters and spans."""
        transport = next(each for each in self.comm.transports if each.moves(self.x))
        transport.alltoall(self.wire, self.received)
        transport.allgather(self.combined, self.wire)


def costs(comm: Communicator, results: Results, options: argparse.Namespace) -> None:
    """Kernels of one call, the host time to enqueue them, and their time in a CUDA graph. Collective."""
    hold = Hold()
    works = {f"{nbytes >> 10} KiB": Work(comm, nbytes // options.shrink) for nbytes in (64 << 10, SIZES[0])}
    for name, work in works.items():
        for call in (work.whole, work.kernels, work.transport):
            call()
        work.cupy.cuda.get_current_stream().synchronize()
        results[f"host time, {name}"] = host_times(comm, work, hold, options.iterations)
    for name, work in works.items():
        results[f"graph, {name}"] = graph(comm, work, hold, options.iterations)
    graphs(comm, results, options)
    for name, work in works.items():  # last: once PyTorch's profiler has run, each launch takes longer
        results[f"enqueued, {name}"] = enqueued(comm, work)


def graphs(comm: Communicator, results: Results, options: argparse.Namespace) -> None:
    """Host time to launch graphs of one call and of its parts, also of a rank alone. Collective."""
    nbytes = SIZES[0]
    with comm.split(comm.rank) as one:
        work, alone = (Work(each, nbytes // options.shrink) for each in (comm, one))

        def parts_alone() -> None:
            alone.kernels()
            alone.transport()

        calls = {"whole": work.whole, "kernels": work.kernels, "messages": work.transport}
        calls["one rank"] = parts_alone
        for call in calls.values():
            call()
        work.cupy.cuda.get_current_stream().synchronize()
        results[f"launches of graphs, {nbytes >> 10} KiB"] = launch_times(comm, calls, Hold())


def enqueued(comm: Communicator, work: Work) -> dict[str, Any]:
    """The kernels and collectives of one call, and everything that the profiler sees on the device."""
    before = {name: counter.calls for name, counter in comm.counters.by_operation.items()}
    launched: list[str] = []
    device = import_module("bagua_comm.kernels.device")
    with device.before_launch(launched.append):
        work.whole()
    calls = {name: counter.calls - before.get(name, 0) for name, counter in comm.counters.by_operation.items()}
    result: dict[str, Any] = {
        "kernels": launched,
        "collectives": {name: count for name, count in calls.items() if count},
    }
    try:
        result["on the device"] = profiled(work.whole)
    except Exception as exc:
        result["left_out"] = f"profile: {type(exc).__name__}: {exc}"
    return result


def profiled(call: Callable[[], object]) -> dict[str, int]:
    """Number of times that PyTorch's profiler sees each kernel or copy during a call."""
    torch = torch_with_cuda()
    if torch is None:
        raise RuntimeError("there is no PyTorch with CUDA")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    seen: dict[str, int] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seen[event.name] = seen.get(event.name, 0) + 1
    return seen


def host_times(comm: Communicator, work: Work, hold: Hold, iterations: int) -> dict[str, Any]:
    """Host time to enqueue a call, which replays its steps, and by themselves its parts, which do not.

    `ahead` is True if the host never waited.
    """
    rounds, ahead = max(2, iterations // 2), True
    calls = {
        "whole": work.whole,  # the figure with a target
        "kernels": work.kernels,
        "collectives": work.collectives,
        "transport": work.transport,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-WARMUP_ROUNDS, rounds):
        for name, call in calls.items():
            comm.barrier()
            held = hold(HOLD_S)
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            seconds = (time.perf_counter() - start) / BATCH
            ahead = ahead and not held.done
            work.cupy.cuda.get_current_stream().synchronize()
            if i >= 0:
                found[name].append(seconds)
    return {
        "calls": rounds * BATCH,
        "ahead": ahead,
        "us": {name: in_us(np.array(seconds)) for name, seconds in found.items()},
    }


def graph(comm: Communicator, work: Work, hold: Hold, iterations: int) -> dict[str, Any]:
    """Capture a call, replay it on other values, compare with the eager result; time both. Collective."""
    cuda = work.cupy.cuda
    expected = work.whole().get()
    stream = cuda.Stream(non_blocking=True)
    stream.wait_event(cuda.get_current_stream().record())
    with stream:
        replayed = captured(stream, work.whole)
        stream.synchronize()

        work.x.set(given(comm.rank + comm.size, work.x.size))
        replayed.launch()
        other = work.out.get()
        eager_other = work.whole().get()
        work.x.set(work.given)
        replayed.launch()
        wrong = sum(
            int(np.count_nonzero(actual != wanted))
            for actual, wanted in ((work.out.get(), expected), (other, eager_other))
        )
        times = {
            "eager": partial(enqueue_and_wait, comm, work.whole, hold, stream),
            "replay": partial(enqueue_and_wait, comm, replayed.launch, hold, stream),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in times}
        for _ in range(max(2, iterations // 4)):
            for name, timed in times.items():
                found[name].append(timed())
    result: dict[str, Any] = {"wrong": wrong, "differs_from_other_values": bool((other != expected).any())}
    for name, pairs in found.items():
        host, device = np.array(pairs).T
        result[name] = {"host_us": in_us(host), "device_us": in_us(device)}
    return result


def enqueue_and_wait(
    comm: Communicator, call: Callable[[], object], hold: Hold, stream: Any
) -> tuple[float, float]:
    """Seconds that a call takes the host, and the device: means over a batch. Collective."""
    cuda = hold._cuda
    comm.barrier()
    hold(HOLD_S / 10)
    start, end = cuda.Event(), cuda.Event()
    start.record()
    began = time.perf_counter()
    for _ in range(BATCH):
        call()
    host = time.perf_counter() - began
    end.record()
    stream.synchronize()
    return host / BATCH, cuda.get_elapsed_time(start, end) / 1e3 / BATCH


# ---------------------------------------------------------------------------------------------------
# How long it takes
# ---------------------------------------------------------------------------------------------------


def given(rank: int, count: int) -> Array:
    """Normally distributed numbers, roughly like gradients; different for each rank."""
    return np.random.default_rng(rank).standard_normal(count, np.float32)


def average(size: int, count: int) -> Array:
    """Their float64 average over all ranks."""
    total = np.zeros(count)
    for rank in range(size):
        total += given(rank, count)
    return total / size


def error_on_device(actual: Array | None, expected: Array) -> float:
    """The relative error of a device array."""
    return relative_error(None if actual is None else actual.get().astype(np.float32), expected)


DEVICE_ERROR = Check("error", error_on_device, np.max)


def allreduce(comm: Communicator, results: Results, options: argparse.Namespace) -> None:
    """Time and check averages, ours and NCCL's, in turn. Collective."""
    for nbytes in SIZES:
        results[f"{nbytes >> 20} MiB"] = compared(comm, nbytes // options.shrink, options.iterations)


def compared(comm: Communicator, nbytes: int, iterations: int) -> dict[str, Any]:
    """Averages of one float32 array: quantized, and exact in float32 and float16. Collective."""
    import cupy

    count = max(1, nbytes // 4)
    mine, expected = given(comm.rank, count), average(comm.size, count)
    sources = {dtype: cupy.empty(count, dtype) for dtype in ("float32", "float16")}
    for dtype, source in sources.items():
        source.set(mine.astype(dtype))
    outs = {dtype: cupy.empty(count, dtype) for dtype in sources}

    def enqueue(name: str) -> Array:
        if name.startswith("exact"):
            dtype = name.split()[1]
            return comm.allreduce(sources[dtype], out=outs[dtype], op="avg")
        codec = {"minmax": MinMaxUInt8(), "float16": Float16()}[name.split()[1]]
        return quantized_allreduce(comm, sources["float32"], out=outs["float32"], codec=codec, op="avg")

    def run(name: str) -> Array:
        out = enqueue(name)
        cupy.cuda.get_current_stream().synchronize()
        return out

    def poison() -> None:
        for out in outs.values():
            out.view(np.uint8).fill(0xFF)
        cupy.cuda.get_current_stream().synchronize()

    names = ("quantized minmax", "quantized float16", "exact float32", "exact float16")
    calls = [Call(partial(run, name), poison, expected, DEVICE_ERROR) for name in names]
    warmup, most = rounds(comm.size, nbytes, iterations)
    barrier = comm.transports[0].barrier  # not the communicator's, which counts its bytes
    measured = measure(comm, calls, barrier=barrier, warmup=warmup, iterations=most)
    reference = measured[names.index("exact float32")].seconds
    table: dict[str, Any] = {"bytes": 4 * count, "ranks": comm.size}
    for name, each in zip(names, measured, strict=True):
        algbw = bandwidth_gbs(4 * count, float(np.median(each.seconds)))
        table[name] = {
            "us": in_us(each.seconds),
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * allreduce_factor(comm.size),
            "wire_bytes": each.wire_bytes,
            "error": each.fault,
            "of_exact_float32": asdict(Spread.of(each.seconds / reference)),
        }
    comm.check_consistency(run("quantized minmax"))
    table["same_bytes_on_all_ranks"] = True  # otherwise the line before raises
    return table


def rounds(ranks: int, nbytes: int, iterations: int) -> tuple[int, int]:
    """Numbers of untimed and of timed calls of each kind.

    Every result is compared in float64 on the host, which takes far longer than the call. Where more than two
    processes take turns on the GPU, a large call may take a second.

    >>> rounds(2, 1 << 20, 20), rounds(2, 64 << 20, 20), rounds(4, 64 << 20, 20)
    ((2, 20), (2, 5), (1, 2))
    """
    fewest = min(iterations, 5 if ranks <= 2 else 2)
    timed = max(fewest, iterations * SIZES[0] // max(nbytes, SIZES[0]))
    return min(2, max(1, timed // 2)), timed


def threads(results: Results, options: argparse.Namespace) -> None:
    """Averages between threads, through the transport that copies on the device."""
    for ranks in (2, 4):
        for nbytes in SIZES:

            def body(comm: Communicator, nbytes: int = nbytes) -> dict[str, Any]:
                on_device = Communicator(comm.transports, device=0)
                return compared(on_device, nbytes // options.shrink, options.iterations)

            results[f"{ranks} ranks, {nbytes >> 20} MiB"] = run_ranks(ranks, body)[0]


PARTS: dict[str, Callable[[Communicator, Results, argparse.Namespace], None]] = {
    "costs": costs,
    "graphs": graphs,
    "allreduce": allreduce,
}


def main() -> None:
    """Run one part, on this rank."""
    parser = part_parser(__doc__)
    parser.add_argument("part", choices=[*PARTS, "threads"])
    parser.add_argument("--gpu", choices=["nccl", "staged"], default="nccl", help="what carries device arrays")
    parser.add_argument("--no-mixing", action="store_true", help="with NCCL_GRAPH_MIXING_SUPPORT=0")
    options = parser.parse_args()
    if options.no_mixing:
        os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    if options.part == "threads":
        threads(Results.of(options), options)
        return
    with joined(options.gpu) as comm:
        PARTS[options.part](comm, Results.of(options, rank=comm.rank), options)


if __name__ == "__main__":
    main()
