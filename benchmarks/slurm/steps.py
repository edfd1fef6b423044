"""Steps that survive deaths: python steps.py --steps 20 --pause-s 0.1 --kill 1 --checkpoints FOLDER."""

import argparse
import os
import signal
import time

import numpy as np

from bagua_comm import Checkpoints, Communicator, elastic

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause-s", type=float, default=0.05)
parser.add_argument("--kill", type=int, metavar="RANK", help="the rank that kills itself half-way")
parser.add_argument("--checkpoints", metavar="FOLDER")
options = parser.parse_args()
state = elastic.State(x=np.zeros(1000), step=0)


@elastic.run(state, min_ranks=2)
def rank(comm: Communicator) -> int:
    """Run from the last commit, or the last checkpoint, to the last step."""
    checkpoints = Checkpoints(options.checkpoints, comm) if options.checkpoints else None
    if checkpoints and state.step == 0 and checkpoints.latest() is not None:
        loaded = checkpoints.load()
        state.step, state.x[:] = loaded.step, loaded.tree
    print(f"rank {comm.rank} of {comm.size} begins at step {state.step}, process {os.getpid()}", flush=True)
    while state.step < options.steps:
        state.x += comm.allreduce(np.ones(1000), op="avg")
        state.step += 1
        state.commit()
        if checkpoints:
            checkpoints.save(state.step, state.x, wait=True)
        time.sleep(options.pause_s)  # sleeps: stands for the computation
        if state.step == options.steps // 2 and comm.rank == options.kill and not elastic.history():
            os.kill(os.getpid(), signal.SIGKILL)
    if checkpoints:
        checkpoints.close()
    return comm.rank


if rank == 0:
    right = bool((state.x == options.steps).all())
    print(f"{state.step} steps, {'right' if right else 'wrong'}, {len(elastic.history())} deaths survived")
