"""Stands in for a GPU, CuPy and NCCL: the library's device side runs unchanged, and its mistakes show.

                          with CUDA                          here
    .cu files             NVRTC, then a launch               build.py, cuda_on_cpu.h, grid.cpp
    streams, events,      the driver                         machine.py
    memory, graphs
    import cupy           cupy: arrays                       fake_cupy.py
    import cupy.cuda      streams, events, runtime, driver   fake_cuda.py
    import cupyx          pinned memory                      fake_cupyx.py
    cupy.cuda.nccl        NCCL's calls                       fake_nccl.py (a rank), matching.py (all of them)

* `machine.py` comes first: a `Machine` has devices with streams, and runs what is enqueued in an order that CUDA
  allows, by one of three policies. It poisons memory that nobody has written or that was freed, and raises where
  CUDA would hang, fault or refuse. All other files enqueue their work there.
* `build.py` compiles a .cu file with g++, as it is, with `cuda_on_cpu.h`. `grid.cpp`, compiled once, makes each
  thread of a CTA a fiber, with real barriers and shuffles, and finds those that not all threads reach.
* `fake_cupy.py`, `fake_cuda.py` and `fake_cupyx.py` have the part of CuPy that the library uses. `compare.py`
  looks whether the real one has the same names and arguments.
* `fake_nccl.py` turns a call into an operation on a stream. In `matching.py` it waits for the calls of the other
  ranks, and a call that does not match theirs is an error.
* `install.py` puts all this where `import cupy` finds it: `installed` for a while in this process, which is what
  the fixture `device` does, and `environment` in processes that a test starts.
* `test_fake_cupy.py` holds one mistake of each kind that must be found, beside the same code without it.
"""
