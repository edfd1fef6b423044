"""Job scripts for Slurm, which `bagua run --write KIND FILE` writes.

A script calls `run` on the hosts of its allocation, so the arguments of `run` have the same meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

from .cli import CommandError, parse_variable
from .hosts import is_supervised, named_hosts, ranks_of

KIND = "slurm"
"""The cluster that scripts are for."""

SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}{per_node}
#SBATCH --cpus-per-task=1           # cores, and threads, of a rank
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out{in_good_order}
# For GPUs, one to a rank, remove the first "# " of the next line.
# #SBATCH --gpus-per-node={slots}
#
# Submit it by: sbatch {file}, or for several jobs, which read their numbers from SLURM_ARRAY_TASK_ID, by
# sbatch --array=0-3 {file}
# All nodes must see {python} and {place}.

set -euo pipefail
cd {folder}
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
# The rendezvous of torch.distributed is on the first node, that of rank 0, at a port that other jobs do not use.
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"

{execute}{command}
"""

IN_GOOD_ORDER = "\n#SBATCH --signal=B:TERM@60         # a minute for run to empty /dev/shm on all nodes"
"""For a supervised job: once its time is over, Slurm starts nothing on its nodes."""

EXECUTE = "# The shell becomes run, which then gets Slurm's signal: lines below it never run.\nexec "
"""The beginning of the command of a supervised job."""


def job_script(options: argparse.Namespace, kind: str, file: str) -> str:
    """Return the text of a job script.

    Args:
        options: The arguments of `run`.
        kind: `KIND`.
        file: The name of the file that the text is for; "-" if it is printed.

    Raises:
        CommandError: There is no such kind, or it does not support these arguments.
    """
    if kind != KIND:
        raise CommandError(f"--write {kind}: expected {KIND}, and a file")
    hosts = named_hosts(options)
    ranks, nodes = ranks_of(options, hosts), max(1, len(hosts))
    slots = -(-ranks.started // nodes)
    is_even = ranks.started % nodes == 0 and len({host.slots for host in hosts}) <= 1
    given = {parse_variable(text)[0] for text in options.env}
    variables = [name for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT") if name not in given]
    forwarded = [word for name in variables for word in ("--env", name)]
    # The number of tasks is Slurm's, so that `sbatch --ntasks=16 FILE` starts 16 ranks, spares included.
    number_of_ranks = f"$((SLURM_NTASKS - {ranks.spares}))" if ranks.spares else "$SLURM_NTASKS"
    start = f'{shlex.quote(sys.executable)} -m bagua_comm run -n "{number_of_ranks}"'
    in_array = "${SLURM_ARRAY_TASK_ID:+--env SLURM_ARRAY_TASK_ID}"
    return SLURM.format(
        name=_name(options.script),
        nodes=nodes,
        ranks=ranks.started,
        per_node=f"\n#SBATCH --ntasks-per-node={slots}" if is_even else "",
        in_good_order=IN_GOOD_ORDER if is_supervised(options) else "",
        execute=EXECUTE if is_supervised(options) else "",
        slots=slots,
        file="FILE" if file == "-" else _comment(file),
        python=_comment(sys.executable),
        place=_comment(os.getcwd()),
        folder=shlex.quote(os.getcwd()),
        command=f"{start} {in_array} {shlex.join([*forwarded, *_arguments(options)])}",
    )


def _arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of `run` that are the same in the script."""
    words = [word for text in options.env for word in ("--env", text)]
    words += ["--interface", options.interface] if options.interface else []
    words += ["--links", str(options.links)] if options.links else []
    words += ["--net", options.net] if options.net else []
    words += [f"--mpirun={text}" for text in options.mpirun]
    words += ["--ulfm"] if options.ulfm else []
    for name in ("spares", "restarts", "min_ranks", "record"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    words += ["-m"] if options.module else []
    return [*words, options.script, *options.args]


def _comment(text: str) -> str:
    """A word of the shell for a comment, on one line."""
    return shlex.quote(text) if text.isprintable() else json.dumps(text)


def _name(script: str) -> str:
    """A name of the job: the last part of the path, at most 50 letters, digits and hyphens, a letter first."""
    stem = script.rpartition(".")[2] if "/" not in script and not script.endswith(".py") else Path(script).stem
    words = re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")
    return ("job-" * (not words[:1].isalpha()) + words)[:50].strip("-")
