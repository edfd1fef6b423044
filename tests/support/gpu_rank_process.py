"""One of several processes on a GPU. Each runs all bodies; rank 0 writes the errors of all ranks.

Usage:

    python tests/support/gpu_rank_process.py OUT        started by `gpu_world.launch`
"""

import json
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

from gpu_world import joined  # noqa: E402

from support.gpu_bodies import bodies_of  # noqa: E402


def main():
    with joined("none") as comm:
        (host,) = comm.transports
        outcomes = {}
        for body in bodies_of(comm.size):
            error = None
            try:
                body(host)
            except Exception:
                error = traceback.format_exc()
            errors = comm.allgather_object(error)
            outcomes[body.__name__] = {rank: error for rank, error in enumerate(errors) if error is not None}
            if comm.rank == 0:
                Path(sys.argv[1]).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
