"""CuPy arrays, averaged over all ranks: exactly, in eight bits, and on a lane while the program computes.

    bagua run -n 2 examples/allreduce_cupy.py

Start one rank for each GPU; they use NCCL. Ranks that share a GPU use host memory, with a warning.
"""

import sys

import numpy as np

import bagua_comm

with bagua_comm.connect() as comm:  # connect first: this chooses each rank's GPU
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
    with comm.lane() as lane:  # on a separate stream
        lane.submit(lane.comm.allreduce, z, out=z, op="avg")
        x.copy()  # this runs at the same time
        lane.wait()  # work that you enqueue from here on comes after the average

    comm.check_consistency(y)  # the same bytes on all ranks
    first = [float(array[0].get()) for array in (x, y, z)]  # here the host waits for the GPU
    print(f"rank {comm.rank} of {comm.size}, GPU {comm.device}, over {comm.transports[-1].name}:", end=" ")
    print("exact {:.1f}, quantized {:.4f}, on a lane {:.1f}".format(*first))
