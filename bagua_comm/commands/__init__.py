"""The commands of `python -m bagua_comm`, one module each: `add_arguments(parser)` and `run(options)`.

`run` starts ranks, by the mpirun that `mpirun` finds, and `write` writes the same job for Slurm or Kubernetes;
`info` describes this machine, `doctor` all ranks together; `net` builds NCCL's
network plugin; `completion` is for shells.
"""
