"""Breaks one line in each of many modules, and shows that tests of the default run notice.

    python tests/support/mutants.py               # all of them, in about ten minutes on two cores
    python tests/support/mutants.py topology      # those of files with this in their path
    python tests/support/mutants.py --check       # only look whether each line is still there

Each mutant is made in a copy of the repository, in a temporary folder, where the tests that concern it run as in
the default run. A mutant that they pass with has survived: then a test is missing. The exit status is 1 if one
has survived, or if its line is not in its file any more (so choose another one in `MUTANTS`).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = [
    "bagua_comm",
    "bagua_torch",
    "benchmarks",
    "examples",
    "tests",
    "pyproject.toml",
    "docs",
    "README.md",
    "LICENSE",
]
LIMIT_S = 400


class Mutant(NamedTuple):
    """One line, and how it is broken."""

    file: str
    before: str
    after: str
    tests: str
    """Arguments of pytest."""


MUTANTS = [
    Mutant(
        "bagua_comm/topology.py",
        "return (rank - half - step) % half",
        "return (rank - half + step) % half",
        "tests/test_topology.py",
    ),
    Mutant(
        "bagua_comm/system/files.py",
        "not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "not found.st_mode & stat.S_IWOTH",
        "tests/system/test_files.py",
    ),
    Mutant(
        "bagua_comm/bucket.py",
        "return -(-sum(tensor.size for tensor in tensors) // alignment) * alignment",
        "return sum(tensor.size for tensor in tensors)",
        "tests/test_bucket.py",
    ),
    Mutant(
        "bagua_comm/arrays.py",
        'return x if is_contiguous(x) else x.copy(order="C")',
        "return x",
        "tests/test_arrays.py",
    ),
    Mutant(
        "bagua_comm/execution/cuda.py",
        "return bool(status == 0)",
        "return True",
        "tests/execution/test_stream_lane.py",
    ),
    Mutant(
        "bagua_comm/kernels/host/sums.py",
        "np.subtract(x, np.fmod(x, x.dtype.type(divisor)), out=x)",
        "pass",
        "tests/kernels/test_host.py tests/comm/test_collectives.py",
    ),
    Mutant(
        "bagua_comm/kernels/device/minmax.cu",
        "decoders[lane] = own",
        "decoders[rows - 1 - lane] = own",
        "tests/kernels/test_device.py",
    ),
    Mutant(
        "bagua_comm/codecs/minmax.py",
        "return block, start, start + padded(count)",
        "return block, start, start + count",
        "tests/codecs/test_minmax.py",
    ),
    Mutant(
        "bagua_comm/codecs/cast.py",
        'return padded(2 * check_count("wire_nbytes", count))',
        'return 2 * check_count("wire_nbytes", count)',
        "tests/codecs/test_cast.py",
    ),
    Mutant(
        "bagua_comm/transports/local.py",
        "members.index(self.rank)",
        "sorted(members).index(self.rank)",
        "tests/transports/test_local.py tests/comm/test_communicator.py",
    ),
    Mutant(
        "bagua_comm/transports/mpi/shared_window.py",
        "slot[: values.size] = values",
        "slot[: values.size - 1] = values[:-1]",
        "tests/transports/test_shared_window.py",
    ),
    Mutant("bagua_comm/transports/mpi/messages.py", "return not incoming", "return True", "tests/test_mpirun.py"),
    Mutant(
        "bagua_comm/transports/nccl/watchdog.py",
        'raise CommAborted(f"{self.who}: this communicator is closed")',
        "pass",
        "tests/transports/test_nccl.py",
    ),
    Mutant(
        "bagua_comm/transports/staged.py",
        "step = piece_bytes or x.nbytes or 1",
        "step = x.nbytes or 1",
        "tests/transports/test_staged.py",
    ),
    Mutant(
        "bagua_comm/algorithms/decentralized.py",
        "bucket.flat[...] = state.average",
        "pass",
        "tests/algorithms/test_matrix.py",
    ),
    Mutant(
        "bagua_comm/algorithms/low_precision.py",
        "round_ % _edges(comm.size)",
        "0 % _edges(comm.size)",
        "tests/algorithms/test_matrix.py",
    ),
    Mutant(
        "bagua_comm/algorithms/diloco.py",
        "state.steps = (state.steps + 1) % self.local_steps",
        "state.steps = (state.steps + 2) % self.local_steps",
        "tests/algorithms/test_matrix.py",
    ),
    Mutant(
        "bagua_comm/planning/costmodel/inputs.py",
        "return self.step_s - self.compute_s",
        "return self.step_s",
        "tests/planning/test_costmodel.py",
    ),
    Mutant(
        "bagua_comm/bootstrap/gpu.py",
        'return f"rank {rank} cannot load NCCL ({gpu.problem})"',
        "return None",
        "tests/bootstrap/test_gpu.py -k nccl",
    ),
    Mutant(
        "bagua_comm/launch/plan.py",
        "str(max(1, request.cores // request.ranks))",
        "str(max(1, request.cores))",
        "tests/commands/test_run.py",
    ),
    Mutant(
        "bagua_comm/launch/plan.py",
        "address = socket.gethostname() if hosts[0].name in LOOPBACK else hosts[0].name",
        "address = hosts[0].name",
        "tests/commands/test_run.py",
    ),
    Mutant(
        "bagua_comm/commands/doctor/findings.py",
        "if len(cores) < len(ranks):",
        "if len(cores) > len(ranks):",
        "tests/commands/test_doctor.py",
    ),
    Mutant(
        "bagua_comm/arrays.py",
        "return as_tensor(x.view(np.int16), torch).view(torch.bfloat16)",
        "return as_tensor(x.view(np.int16), torch).to(torch.bfloat16)",
        "tests/bagua_torch -k arrays",
    ),
    Mutant(
        "bagua_torch/ddp/torch_arguments.py",
        "max(1, int(bucket_cap_mb * 2**20))",
        "max(1, int(bucket_cap_mb * 10**6))",
        "tests/bagua_torch/test_as_pytorch.py",
    ),
    Mutant(
        "bagua_torch/tensors/broadcast.py",
        "tensors.append(torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device))",
        "tensors.append(torch.empty_strided(leaf.shape, leaf.strides, device=device))",
        "tests/bagua_torch bagua_torch/tensors/broadcast.py -k broadcast",
    ),
    Mutant(
        "bagua_torch/process_group/transport.py",
        "2 * x.nbytes * (self.size - 1) // self.size",
        "x.nbytes * (self.size - 1) // self.size",
        "tests/bagua_torch/test_process_group.py -k bytes",
    ),
]


def copy_of(root, folder):
    """A copy of what the tests need, without what was compiled."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
        else:
            shutil.copy(source, folder / name)


def missing(mutant, root):
    """Return the reason why a mutant cannot be made; "" if it can."""
    path = root / mutant.file
    if not path.exists():
        return "there is no such file"
    count = path.read_text().count(mutant.before)
    return "" if count == 1 else f"expected once, found {count} times: {mutant.before}"


def outcome_of(mutant, folder):
    """Run the tests of a mutant; return the outcome in a word, and the test or the reason."""
    if problem := missing(mutant, folder):
        return "NOT FOUND", problem
    path = folder / mutant.file
    whole = path.read_text()
    path.write_text(whole.replace(mutant.before, mutant.after))
    try:
        done = run(mutant, folder)
    except subprocess.TimeoutExpired:
        return "noticed", f"by a test that takes more than {LIMIT_S} s"
    finally:
        path.write_text(whole)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return "noticed", failed[1]
    if done.returncode == 0:
        return "SURVIVED", f"pytest {mutant.tests}"
    return (
        "NO RESULT",
        f"pytest {mutant.tests} ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}",
    )


def run(mutant, folder):
    """Pytest on the tests of a mutant, up to the first that fails."""
    path = os.pathsep.join([str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *mutant.tests.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", default="", help="of the path of a file")
    parser.add_argument("--check", action="store_true", help="run no tests")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.part in mutant.file]
    if options.check:
        problems = {mutant.file: problem for mutant in chosen if (problem := missing(mutant, ROOT))}
        for file, problem in problems.items():
            print(f"NOT FOUND  {file}: {problem}")
        print(f"{len(chosen) - len(problems)} of {len(chosen)} are where they are expected")
        return 1 if problems else 0
    noticed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_of(ROOT, folder)
        for mutant in chosen:
            start = time.monotonic()
            outcome, by = outcome_of(mutant, folder)
            noticed += outcome == "noticed"
            print(f"{outcome:9}  {mutant.file:45}  {time.monotonic() - start:5.0f} s  {by}", flush=True)
    print(f"{noticed} of {len(chosen)} were noticed")
    return 0 if noticed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
