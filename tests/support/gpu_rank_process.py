"""One of several processes on a GPU. Each runs all bodies; rank 0 writes the errors of all ranks.

`benchmarks.gpu.world.launch` starts it: `python -m support.gpu_rank_process OUT`.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu.world import joined
from support.gpu_bodies import bodies_of


def main():
    with joined("none") as comm:
        (host,) = comm.transports
        outcomes = {}
        for body in bodies_of(comm.size):
            error, start = None, time.monotonic()
            try:
                body(host)
            except Exception:
                error = traceback.format_exc()
            errors = comm.allgather_object(error)
            outcomes[body.__name__] = {rank: error for rank, error in enumerate(errors) if error is not None}
            if comm.rank == 0:
                print(f"{body.__name__}: {time.monotonic() - start:.1f} s", flush=True)
                Path(sys.argv[1]).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
