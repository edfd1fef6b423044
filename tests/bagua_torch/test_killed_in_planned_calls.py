"""A rank is killed while all are within calls that follow a plan: the others raise at once, and name it."""

import json
import signal

import pytest
from support.launch import run_by_hand, run_python

RANKS, VICTIM, AT_ONCE_S = 3, 1, 3.0

PROGRAM = """
import json, os, pathlib, signal, sys, threading, time
import numpy as np
from bagua_comm import RankFailed

if sys.argv[1] == "gloo":
    import bagua_torch
    comm = bagua_torch.connect(timeout_s=60)
else:
    import bagua_comm
    from bagua_comm.transports.mpi import transport
    transport.open_window = lambda *_: None  # as between hosts
    comm = bagua_comm.connect(timeout_s=60)
calls = {
    "allreduce": lambda: comm.allreduce(x, out=x),
    "alltoall": lambda: comm.alltoall(x),
    "alltoall with counts": lambda: comm.alltoall(x, counts=[700_000] * 3, out_counts=[700_000] * 3),
}
x, call = np.ones((3, 700_000)), calls[sys.argv[2]]
for _ in range(8):
    call()
assert comm.host.plan.in_force
record = pathlib.Path(__file__).parent / f"{comm.rank}.json"


def die():
    record.write_text(json.dumps({"at": time.time()}))
    os.kill(os.getpid(), signal.SIGKILL)


if comm.rank == 1:
    threading.Timer(0.2, die).start()
try:
    while True:
        call()
except RankFailed as error:
    record.write_text(json.dumps({"at": time.time(), "ranks": list(error.ranks), "text": str(error)}))
    while not all(record.with_name(f"{rank}.json").exists() for rank in range(comm.size)):
        time.sleep(0.01)  # sleeps: until the others have raised; rank 0 serves their store
    os._exit(0)
"""


def check(folder):
    """Whether all others have raised within the bound, and named the rank that was killed."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for rank in {*range(RANKS)} - {VICTIM}:
        assert found[rank]["at"] - found[VICTIM]["at"] < AT_ONCE_S
        assert VICTIM in found[rank]["ranks"], found[rank]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["allreduce", "alltoall", "alltoall with counts"])
def test_over_gloo(call, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    codes, output = run_by_hand(RANKS, path, "gloo", call)
    assert codes == [0, -signal.SIGKILL, 0], output
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["allreduce", "alltoall"])
def test_over_mpi_that_survives_deaths(call, tmp_path):
    run_python(RANKS, "mpi", call, script=(tmp_path / "train.py", PROGRAM), flags=["--ulfm"])
    check(tmp_path)


@pytest.mark.slow
def test_over_mpi_that_does_not_all_ranks_end_and_the_dead_one_is_named(tmp_path):
    done = run_python(RANKS, "mpi", "allreduce", script=(tmp_path / "train.py", PROGRAM))
    assert done.returncode != 0
    assert "rank 1 of 3" in done.stderr
    assert "has died" in done.stderr
