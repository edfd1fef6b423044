"""Average an array over all ranks, in 15 lines.

Usage:

    bagua run -n 2 examples/allreduce_numpy.py
"""

import numpy as np

import bagua_comm

with bagua_comm.connect() as comm:
    x = np.full(1_000_000, comm.rank, np.float32)
    comm.allreduce(x, out=x, op="avg")
    y = bagua_comm.quantized_allreduce(comm, x + comm.rank, op="avg")
    comm.check_consistency(y)
    print(f"rank {comm.rank} of {comm.size}: exact {x[0]}, quantized {y[0]:.4f}")
