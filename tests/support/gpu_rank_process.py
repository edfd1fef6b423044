"""One of several processes on a GPU. Each runs all bodies of a subject; rank 0 writes the errors of all ranks.

`benchmarks.gpu.world.launch` starts it: `python -m support.gpu_rank_process OUT`, of NCCL, or
`python -m support.gpu_rank_process OUT DEVICE`, of training.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu.world import joined


def run_bodies(comm, bodies, out, *arguments):
    """Call each body with these arguments. Collective."""
    outcomes = {}
    for body in bodies:
        error, start = None, time.monotonic()
        try:
            body(*arguments)
        except Exception:
            error = traceback.format_exc()
            print(f"{body.__name__}, rank {comm.rank}: {error}", flush=True)
        errors = comm.allgather_object(error)
        outcomes[body.__name__] = {rank: error for rank, error in enumerate(errors) if error is not None}
        if comm.rank == 0:
            print(f"{body.__name__}: {time.monotonic() - start:.1f} s", flush=True)
            Path(out).write_text(json.dumps(outcomes))


def main(out, device=None):
    if device is None:
        from support.gpu_bodies import bodies_of

        with joined("none") as comm:
            run_bodies(comm, bodies_of(comm.size), out, *comm.transports)
        return
    from support.device_training import BODIES

    with joined("nccl" if device == "cuda" else "none", process_group="bagua") as comm:
        run_bodies(comm, BODIES, out, comm, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
