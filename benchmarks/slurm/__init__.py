"""A real Slurm on this machine: two emulated nodes, and trials of how it starts and ends jobs."""
