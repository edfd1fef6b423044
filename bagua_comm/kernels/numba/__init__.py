"""Kernels for Numba, the process that compiles them, and the cache of their object files.

NumPy reads and writes memory once for every operation. These kernels run all operations on a strip of elements
while it is in the first-level cache, so that a call takes about as long as a copy. The bytes are those of `host`:
float32 arithmetic runs in the order written, without fused multiply-adds, and a division stays a division.

Numba needs neither a C compiler on the machine nor a wheel of this library for each platform, and it uses the
vector instructions of the processor: `pip install bagua-comm[fast]` is enough.

Kernels take only integers and floats, among them addresses of contiguous memory. So a compiled function serves
all dtypes, and it needs nothing of Numba or Python when it runs: no objects, no allocation, no errors. The
modules of kernels, of numbers and of code generation import Numba; only the compiler's process imports them.
"""
