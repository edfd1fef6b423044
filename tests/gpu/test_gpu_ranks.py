"""Ranks on a GPU: threads that copy on it, by way of the host, and over NCCL."""

import functools
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.device_ranks import HostOnly, over
from support.gpu_bodies import bodies_of
from support.launch import TIME_FACTOR, with_tests

from bagua_comm import Communicator, MinMaxUInt8, kernels, quantized_allreduce
from bagua_comm.testing import check_transport, run_ranks
from benchmarks.gpu.world import launch

HERE = Path(__file__).parent


def real(*values):
    """Parameters of a test on a GPU; the ordinary run has fewer ranks."""
    return pytest.param("real", *values, marks=pytest.mark.gpu)


# Threads


@pytest.mark.slow
@pytest.mark.parametrize(("device", "ranks"), [("lazy", 2), *map(real, (1, 2, 4))], indirect=["device"])
def test_conformance_of_threads(device, ranks):
    import cupy

    def body(comm):
        with Communicator(comm.transports, device=0) as on_device:
            check_transport(on_device, asarray=cupy.asarray)

    run_ranks(ranks, body)


@pytest.mark.slow
def test_conformance_by_way_of_the_host(device):
    import cupy

    def body(comm):
        (host,) = comm.transports
        with Communicator([host, over("staged", host)], device=0) as on_device:
            check_transport(on_device, asarray=cupy.asarray)

    run_ranks(2, body, wrap=HostOnly)


@pytest.mark.parametrize("transport", [pytest.param("local", marks=pytest.mark.slow), "staged"])
def test_threads_get_the_bytes_of_the_host(device, transport):
    def values(rank):
        return np.random.default_rng(rank).standard_normal(5001).astype(np.float32)

    def on_host(comm):
        return quantized_allreduce(comm, values(comm.rank), op="avg").tobytes()

    def on_device(comm):
        import cupy

        (host,) = comm.transports
        transports = [host] if transport == "local" else [host, over("staged", host)]
        with Communicator(transports, device=0) as comm:
            return quantized_allreduce(comm, cupy.asarray(values(comm.rank)), op="avg").get().tobytes()

    wrap = HostOnly if transport == "staged" else None
    assert run_ranks(3, on_host) == run_ranks(3, on_device, wrap=wrap)


def test_threads_take_turns_on_one_stream_between_two_passes_of_a_codec(device):
    import cupy

    codec, x = MinMaxUInt8.bagua(), np.random.default_rng(0).standard_normal((2, 1, 20_000)).astype(np.float32)
    run, both, waited = kernels.of(cupy.empty(0)), threading.Barrier(2, timeout=30), []

    def after_the_other_thread(name):
        if name == "encode_segments":
            waited.append(both.wait())

    def body(comm):
        with run.before_launch(after_the_other_thread):
            return codec.encode(cupy.asarray(x[comm.rank])).get().tobytes()

    found = run_ranks(2, body)
    assert sorted(waited) == [0, 1]
    assert found == [codec.encode(chunk).tobytes() for chunk in x]


# NCCL


def run_processes(ranks, **options):
    """What each body raised in processes, by rank, and what they printed."""
    options["env"] = with_tests(options.get("env"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        done = launch(ranks, ["-m", "support.gpu_rank_process", out], timeout_s=TIME_FACTOR * 50, **options)
        found = json.loads(out.read_text()) if out.exists() else {}
    return found, f"exit code {done.returncode}: {done.stdout}"


outcomes_on_gpu = functools.cache(run_processes)


TAKE_SECONDS = {"conformance", "quantized_allreduce_gives_the_bytes_of_the_host"}
"""The same is tested in the default run by transports/test_nccl.py and test_device_collectives.py."""


@pytest.mark.parametrize(
    ("device", "ranks", "body"),
    [
        pytest.param("lazy", 2, body, marks=[pytest.mark.slow] if body.__name__ in TAKE_SECONDS else [])
        for body in bodies_of(2)
    ]
    + [real(ranks, body) for ranks in (1, 2, 4) for body in bodies_of(ranks)],
    indirect=["device"],
)
def test_over_nccl(device, ranks, body):
    if device.real:
        found, printed = outcomes_on_gpu(ranks)
        errors = found.get(body.__name__, {"?": printed})
        assert not errors, "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())
    else:
        device.machine.count = ranks
        run_ranks(ranks, lambda comm: body(comm.transports[0]), wrap=HostOnly)


@pytest.mark.parametrize(("device", "ranks"), [real(1), real(2), real(4)], indirect=["device"])
def test_processes_over_nccl_end_with_0(device, ranks):
    _, printed = outcomes_on_gpu(ranks)
    assert printed.startswith("exit code 0:")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["lazy"], indirect=True)
def test_bodies_run_in_a_process(device):
    """As `test_over_nccl` runs them on a GPU. Processes of the stand-in have no NCCL between them: it is one."""
    found, printed = run_processes(1, env=device.environment, mpi=False)
    assert found == {body.__name__: {} for body in bodies_of(1)}, printed


def test_a_process_that_closes_nothing_ends(device, tmp_path):
    script = """
        import cupy
        from bagua_comm.transports.local import LocalTransport
        from bagua_comm.transports.nccl import NcclTransport

        transport = NcclTransport.connect(LocalTransport())
        x = cupy.zeros(1000)
        transport.allreduce(x, x, "sum")
        print("done")
    """
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=HERE.parents[1],
        env=device.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
    assert time.monotonic() - start < 60


KILLED = """
    import os
    import signal
    import time

    os.environ["NCCL_HOSTID"] = f"host of process {os.getpid()}"

    import cupy

    import bagua_torch
    from bagua_comm import CommError

    comm = bagua_torch.connect(gpu="nccl", timeout_s=10)
    x = cupy.ones(1 << 20, "float32")
    for _ in range(3):
        comm.allreduce(x, out=x, op="avg")
    cupy.cuda.get_current_stream().synchronize()
    comm.transports[0].barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while time.monotonic() - start < 40:
            comm.allreduce(x, out=x, op="avg")
            cupy.cuda.get_current_stream().synchronize()
    except CommError as exc:
        print(f"raised after {time.monotonic() - start:.1f} s: {type(exc).__name__}: {exc}", flush=True)
        os._exit(0)
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("device", [real()], indirect=True)
def test_a_killed_peer_is_an_error_in_seconds(device, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    done = launch(2, [script], timeout_s=45, env=with_tests(), mpi=False, grace_s=20)
    (seconds,) = re.findall(r"raised after (\S+) s", done.stdout) or [done.stdout]
    assert float(seconds) < 15, done.stdout
