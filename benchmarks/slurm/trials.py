"""What a user of Slurm types, what happens to the job then, and what should come out."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bagua_comm.live.status import live_folder

from .cluster import NODES, Cluster

HERE = Path(__file__).parent
RUN = "python -m bagua_comm run"
LIMIT_S = 300.0

TWO, FOUR = r"2, n1 0/1 x\w+, n2 0/1 x\w+\n", r"4, n1 0/2 x\w+, n1 1/2 x\w+, n2 0/2 x\w+, n2 1/2 x\w+\n"
LOST_HALF_WAY = r".*rank 0 of 2 begins at step 10, .*20 steps, right.*: the job succeeded \(2 attempts, 1 death.*"


class Trial(NamedTuple):
    """One trial. Commands run by sh in the folder of the programs; `python` is the environment of the MPI."""

    name: str
    command: str
    """Started by itself; or, with `then`, the job script, which sbatch gets."""
    expected: str
    """A regular expression that the whole output matches, stdout before stderr."""
    code: int = 0
    """Of the command, or of the job."""
    options: str = ""
    """Of sbatch."""
    then: str = ""
    """A command, once all four ranks of the job JOB have begun."""
    mpi: str = "Open MPI"
    leaves: tuple[str, ...] = ()
    """What stays in /dev/shm of the nodes."""


def of_a_job(name: str, then: str, expected: str, **more: Any) -> Trial:
    """A trial of a supervised job by the script that `run --write slurm` writes, four ranks on two nodes."""
    arguments = more.pop("arguments", "--steps 60 --pause-s 0.15")
    write = f"{RUN} --host n1:2,n2:2 --restarts 1 --write slurm job.sh --force steps.py {arguments}"
    return Trial(name, write, expected, then=then, **more)


ON = "srun --quiet --overlap --jobid=$JOB --nodes=1 --ntasks=1 --nodelist"
STEP = "$(squeue --steps --noheader --job=$JOB --format='%i %j' | sed -n 's/ prted$//p')"
DOWN = "scontrol update NodeName=n2 State=DOWN Reason=trial"
SAVED = "until ls checkpoints | grep -q 2; do sleep 0.2; done"
SOON = (
    "until squeue --noheader --states=PENDING --job=$JOB | grep -q .; do sleep 0.2; done; "
    "scontrol update JobId=$JOB StartTime=now"
)

TRIALS = [
    Trial("srun with PMIx", "srun --mpi=pmix -N 2 -n 2 python where.py", TWO),
    Trial(
        "srun without PMI",
        "srun --mpi=none -N 2 -n 2 python where.py",
        r"(?=.*mpi4py's Open MPI 5\S+ cannot reach the others without PMI.*start it with srun --mpi=pmix ).*",
        code=1,
        leaves=("n1: sm_segment", "n2: sm_segment"),
    ),
    Trial(
        "a heterogeneous step",
        "srun -Q --mpi=pmix -n 1 -w n1 python where.py : -n 1 -w n2 python where.py",
        TWO,
    ),
    Trial("salloc --exclusive without tasks", f"salloc -Q -N 2 --exclusive {RUN} where.py", FOUR),
    Trial(
        "cores of a task",
        f"salloc -Q -n 2 --cpus-per-task=2 env -u OMP_NUM_THREADS {RUN} where.py && "
        "OMP_NUM_THREADS=2 srun -Q --mpi=pmix -n 2 --cpus-per-task=2 python where.py",
        r"(2, n1 0/1 x2, n2 0/1 x2\n){2}",
    ),
    Trial(
        "a heterogeneous job, without srun",
        f"salloc -Q -n 1 -w n1 : -n 1 -w n2 {RUN} where.py",
        r".*does not see the nodes of a heterogeneous job.* srun --mpi=pmix --het-group=0,1 python where.py\n",
        code=2,
    ),
    Trial(
        "a written script, as an array",
        f"{RUN} --host n1:2,n2:2 --write slurm job.sh --force where.py && "
        "sbatch -Q --wait --array=0-1 --output=array-%a.out job.sh && cat array-0.out array-1.out",
        "".join(FOUR.replace(r"\w+", f"1 of run {number}") for number in range(2)),
    ),
    Trial(
        "torchrun on each node",
        "srun -N 2 -n 2 python -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-endpoint=n1:29511 --rdzv-id=1 where.py torch",
        r"2, n\d 0/1 x\w+, n\d 0/1 x\w+\n.*",
    ),
    Trial(
        "a rank dies, a spare is there",
        f"salloc -Q -N 2 --ntasks-per-node=2 {RUN} --spares 1 steps.py --kill 1",
        r".*rank 1 of 3 begins at step 10, .*20 steps, right, 1 deaths.*succeeded \(1 attempt, 1 death.*",
    ),
    Trial(
        "a rank dies, too few are left",
        f"salloc -Q -N 2 --ntasks-per-node=1 {RUN} --restarts 1 steps.py --kill 1",
        LOST_HALF_WAY,
    ),
    Trial(
        "a rank dies, and no restart is left",
        f"salloc -Q -N 2 --ntasks-per-node=1 {RUN} --restarts 0 steps.py --kill 1",
        r".*the job failed: rank 0 ended with RankFailed.*\(1 attempt, 1 death\)\n",
        code=1,
    ),
    of_a_job(
        "a rank is killed",
        f"{ON}=n2 pkill -KILL -n -f steps.py",
        r".*rank 2 of 3 begins at .*60 steps, right, 1 deaths survived\n.*succeeded \(1 attempt, 1 death.*",
    ),
    of_a_job(
        "scancel --signal=KILL of the step of mpirun",
        f"scancel --signal=KILL {STEP} || true",
        r".*attempt 1 is lost.*on 4 ranks\n.*60 steps, right.*succeeded \(2 attempts.*",
    ),
    of_a_job(
        "the slurmstepd of mpirun's step is killed",
        f'{ON}=n2 pkill -KILL -f "slurmstepd: .{STEP}"',
        r".*60 steps, right, 0 deaths survived\n.*succeeded \(1 attempt, 0 deaths\)\n",
    ),
    of_a_job(
        "scancel",
        "scancel $JOB",
        r".*CANCELLED.*the job failed: SIGTERM has ended this job.*n2: no answer at the end.*",
        code=143,
        leaves=("n2: bagua_comm-job",),
    ),
    of_a_job(
        "scancel --batch --signal=TERM",
        "scancel --batch --signal=TERM $JOB",
        r".*the job failed: SIGTERM has ended this job \(1 attempt, 0 deaths.*\)\n",
        code=143,
    ),
    of_a_job(
        "the end of the time",
        "true",
        r".*the job failed: SIGTERM has ended this job \(1 attempt, 0 deaths.*\)\n",
        code=143,
        arguments="--steps 2000 --pause-s 0.15",
        options="--time=2",
    ),
    of_a_job(
        "scontrol requeue",
        f"{SAVED}; scontrol requeue $JOB; {SOON}",
        r".*JOB REQUEUE.*rank 0 of 4 begins at step [1-9].*20 steps, right.*the job succeeded.*",
        arguments="--pause-s 0.3 --checkpoints checkpoints",
        options="--requeue --open-mode=append",
        leaves=("n2: bagua_comm-job",),
    ),
    of_a_job(
        "a node goes down",
        f"{SAVED}; {DOWN}; scontrol update NodeName=n2 State=RESUME; {SOON}",
        r".*rank 0 of 4 begins at step [1-9].*20 steps, right.*the job succeeded.*",
        arguments="--pause-s 0.3 --checkpoints checkpoints",
        options="--requeue --open-mode=append",
        leaves=("n2: bagua_comm-job",),
    ),
    of_a_job(
        "a node goes down, --no-kill",
        DOWN,
        r".*n2 stopped answering.*n2 did not answer within \S+ s, and is left out\n(?=.*on 2 ranks\n).*"
        r"60 steps, right.*succeeded \(2 attempts.*",
        options="--no-kill",
        leaves=("n2: bagua_comm-job", "n2: sm_segment"),
    ),
]

OF_MPICH = [
    Trial("MPICH: srun with PMI2", "srun --mpi=pmi2 -N 2 -n 2 python where.py", TWO),
    Trial(
        "MPICH: srun with PMIx",
        "srun --mpi=pmix -N 2 -n 2 python where.py",
        r".*unsupported PMI version PMIx.*",
        16,
    ),
    Trial("MPICH: salloc --exclusive without tasks", f"salloc -Q -N 2 --exclusive {RUN} where.py", FOUR),
    Trial(
        "MPICH: a written script",
        f"{RUN} --host n1:2,n2:2 --write slurm job.sh --force where.py && "
        "sbatch -Q --wait --output=job.out job.sh && cat job.out",
        FOUR,
    ),
    Trial(
        "MPICH: supervised",
        f"salloc -Q -N 2 --ntasks-per-node=1 {RUN} --restarts 1 steps.py",
        r".*--restarts needs Open MPI, and \S+ belongs to MPICH.*",
        code=2,
    ),
]


def run(cluster: Cluster, trial: Trial, python: str = sys.executable) -> dict[str, Any]:
    """Run a trial on idle nodes; returns what was run, expected and seen, and whether that is equal."""
    start = time.monotonic()
    _left(cluster)  # what others have left
    with tempfile.TemporaryDirectory(dir=cluster.folder) as name:
        folder = Path(name)
        for program in ("where.py", "steps.py"):
            shutil.copy(HERE / program, folder)
        shell = _Shell(cluster, folder, python)
        code, seen = shell(trial.command)
        if trial.then and code == 0:
            code, seen = _submit(shell, trial)
        left, processes = _left(cluster), _processes(folder)
    is_equal = code == trial.code and re.fullmatch(trial.expected, seen, re.DOTALL) is not None
    return {
        "trial": trial.name,
        "command": trial.command,
        **({"sbatch": trial.options, "then": trial.then} if trial.then else {}),
        "expected": [trial.code, trial.expected, list(trial.leaves)],
        "seen": [code, seen.replace(name, ".").replace(f"{Path(python).parent}", "bin").splitlines(), left],
        "faults": processes,
        "result": "equal" if is_equal and left == list(trial.leaves) else "differs",
        "seconds": round(time.monotonic() - start, 1),
    }


class _Shell(NamedTuple):
    cluster: Cluster
    folder: Path
    python: str

    def __call__(self, command: str, job: str = "") -> tuple[int, str]:
        """Run a command; returns its exit code and its output."""
        path = os.pathsep.join([str(Path(self.python).parent), os.environ["PATH"]])
        env = {"PATH": path, "JOB": job}
        done = self.cluster.run("sh", "-c", f"cd {self.folder}; {command}", timeout_s=LIMIT_S, env=env)
        return done.returncode, done.stdout + done.stderr


def _submit(shell: _Shell, trial: Trial) -> tuple[int, str]:
    """Submit the script that the command has written, do `then`, wait for the end; returns code and output."""
    output = shell.folder / "job.out"
    code, job = shell(f"sbatch --parsable --output={output} {trial.options} job.sh")
    if code:
        return code, job
    deadline = time.monotonic() + LIMIT_S
    has_begun = False
    while time.monotonic() < deadline:
        if not has_begun and output.exists() and output.read_text().count("begins at step") >= 4:
            has_begun = True
            code, said = shell(trial.then, job.strip())
            if code:
                return code, said
        found = shell("scontrol show job --oneliner $JOB", job.strip())[1]
        if not found or re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", found):
            break
        time.sleep(0.3)  # sleeps: between two questions to Slurm
    ended = re.search(r"ExitCode=(\d+):(\d+)", found)
    said = output.read_text() if output.exists() else ""
    if not has_begun:
        raise RuntimeError(f"{trial.name}: the ranks have not begun: {said}\n{found}\n{shell.cluster.logs()}")
    return (int(ended[1]) or int(ended[2])) if ended else -1, said


def _left(cluster: Cluster) -> list[str]:
    """Bring all nodes up, empty their /dev/shm, and return which files were there."""
    cluster.run("scontrol", "update", f"NodeName={','.join(NODES)}", "State=RESUME")
    look = f"ls -A -I {live_folder().name} /dev/shm; rm -rf /dev/shm/*"  # files of what each process did stay
    step = ["srun", "--quiet", "-N1", "-n1"]
    files = {node: cluster.run(*step, "-w", node, "sh", "-c", look).stdout.split() for node in NODES}
    return sorted({f"{node}: {re.split('[.]|-[0-9a-f]{16}', file)[0]}" for node in NODES for file in files[node]})


def _processes(folder: Path) -> list[str]:
    """The processes that still run in a folder, which are killed."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_left = os.readlink(directory / "cwd") == str(folder)
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if is_left:
            os.kill(int(directory.name), signal.SIGKILL)
            found.append(line)
    return found
