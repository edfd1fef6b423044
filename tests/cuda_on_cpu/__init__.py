"""A GPU for machines without one: kernels on the CPU, and a CuPy that models the order of work."""
