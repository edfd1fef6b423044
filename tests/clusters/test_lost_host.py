"""A host dies in the middle of training: `run --restarts` continues from memory on the other hosts."""

import sys

import pytest
from support.waiting import until

from bagua_comm.bootstrap.job import entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = """
import os, sys, time
import numpy as np
import bagua_comm
from bagua_comm import elastic

state = elastic.State(weights=np.zeros(1000), step=0)

@elastic.run(state, timeout_s=60)
def train(comm):
    print("enters at step", state.step, "with", comm.size, "ranks", flush=True)
    while state.step < 60:
        state.weights += comm.allreduce(np.full(1000, state.step, float), op="avg")
        state.step += 1
        state.commit()
        if state.step == 10:
            print("is at step 10", flush=True)
        time.sleep(0.1)
    return state.weights

if train is not None:
    assert (train == sum(range(60))).all()
    print("all 60 steps are done", flush=True)
"""


def test_training_continues_from_memory_when_a_host_dies(pods, tmp_path):
    program, record, out = tmp_path / "program.py", tmp_path / "record", tmp_path / "out"
    program.write_text(PROGRAM)
    run = [sys.executable, "-m", "bagua_comm", "run", "-v", "--hostfile", str(pods.hostfile)]
    run += ["--restarts", "2", "--min-ranks", "2", "--interface", "eth0", "--env", "PYTHONPATH"]
    with open(out, "w") as file:
        job = pods.start([*run, "--record", str(record), str(program)], stdout=file, stderr=file)
        try:
            until(lambda: "at step 10" in out.read_text() or job.poll() is not None, limit_s=300)
            pods.kill(pods.names[1])
            code = job.wait(timeout=300)
        finally:
            job.kill()
    told = out.read_text()
    assert code == 0, told
    told_of = list(entries(record.read_text().splitlines()))
    assert [entry["kind"] for entry in told_of].count("attempt") == 2, told
    again = [line for line in told.splitlines() if line.startswith("enters at step") and "with 2 ranks" in line]
    assert int(again[0].split()[3]) > 0, told  # from memory, not from the start
    assert told.count("all 60 steps are done") == 2, told
    assert [entry["number"] for entry in told_of if entry["kind"] == "commit"] > [60]
    assert "did not answer within 5 s, and is left out" in told
