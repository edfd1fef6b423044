"""CuPy arrays, averaged over all ranks: as they are, in eight bits, and beside your own work.

    python -m bagua_comm run -n 2 examples/allreduce_cupy.py

One rank for each GPU, over NCCL; ranks that share a GPU go through host memory, with a warning that says so.
"""

import sys

import numpy as np

import bagua_comm

with bagua_comm.connect() as comm:  # before anything is put on a GPU: each rank gets its own
    if comm.device is None:
        if comm.rank == 0:
            print("CuPy finds no GPU here, so nothing was done; examples/allreduce_numpy.py runs without one.")
        sys.exit()

    import cupy

    x = cupy.full(1_000_000, comm.rank, np.float32)
    comm.allreduce(x, out=x, op="avg")  # returns once the work is enqueued on CuPy's current stream

    y = cupy.full(1_000_000, 2 * comm.rank, np.float32)
    y = bagua_comm.quantized_allreduce(comm, y, op="avg")  # a quarter of the bytes on the wire

    z = cupy.full(1_000_000, 3 * comm.rank, np.float32)
    with comm.lane() as lane:  # on a stream of its own
        lane.submit(lane.comm.allreduce, z, out=z, op="avg")
        x.copy()  # your own work goes on meanwhile
        lane.wait()  # what you enqueue from here on comes after it

    comm.check_consistency(y)  # the same bytes on all ranks
    first = [float(array[0].get()) for array in (x, y, z)]  # here the host waits for the GPU
    print(f"rank {comm.rank} of {comm.size}, GPU {comm.device}, over {comm.transports[-1].name}:", end=" ")
    print("exact {:.1f}, quantized {:.4f}, on a lane {:.1f}".format(*first))
