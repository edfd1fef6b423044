"""Print where all ranks are: python where.py, or python where.py torch, by bagua_torch."""

import importlib
import os
import socket
import sys

import numpy as np

library = importlib.import_module("bagua_torch" if "torch" in sys.argv else "bagua_comm")
with library.connect(timeout_s=60) as comm:
    total = comm.allreduce(np.ones(300_000))
    assert (total == comm.size).all()
    threads = os.environ.get("OMP_NUM_THREADS", "any")
    of_array = f" of run {os.environ['SLURM_ARRAY_TASK_ID']}" if "SLURM_ARRAY_TASK_ID" in os.environ else ""
    places = comm.allgather_object(
        f"{socket.gethostname()} {comm.local_rank}/{comm.local_size} x{threads}{of_array}"
    )
    if comm.rank == 0:
        print(comm.size, *places, sep=", ")
