"""Start Python on several ranks from a test."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from bagua_comm.system.processes import free_port

TESTS = Path(__file__).parents[1]

TIME_FACTOR = 3 * float(os.environ.get("BAGUA_TEST_PATIENCE", "1"))
"""Factor of the time limits of tests and of the programs that they start, so that only a hang reaches them."""


DAEMON_FAILED = 213
"""mpirun's exit code if its daemon did not start, which happens now and then on a busy machine."""


def with_tests(env=None):
    """Environment variables that add tests/ to the path of Python."""
    return _with_path(TESTS, os.environ if env is None else env)


def with_packages():
    """Environment variables that add the packages of this checkout to the path of Python."""
    return _with_path(TESTS.parent, os.environ)


def _with_path(folder, env):
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(folder)]))}


def run_python(ranks, *arguments, script=None, flags=(), mpirun=(), timeout_s=100, env=None):
    """Run `python -m bagua_comm run` with these arguments, or on the text of a script; returns its result.

    The ranks import the packages of this checkout, like the tests, not the installed ones.
    """
    command = [sys.executable, "-m", "bagua_comm", "run", "-n", str(ranks), *flags]
    command += [f"--mpirun={argument}" for argument in mpirun]
    if script is not None:
        path, text = script
        path.write_text(textwrap.dedent(text))
        arguments = (str(path), *arguments)
    for _ in range(2):
        result = subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_FACTOR * timeout_s,
            env=_with_path(TESTS.parent, os.environ if env is None else env),
        )
        if result.returncode != DAEMON_FAILED:
            break
    return result


def environment_of_a_world(ranks):
    """The variables that a launcher sets for all its processes, except RANK."""
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def run_by_hand(ranks, *arguments, timeout_s=100):
    """Start Python as each rank of torch.distributed, without torchrun, which would end all when one has died.

    Returns the exit codes and the outputs. A rank that does not end is an error that has the output of all.
    """
    world, command = environment_of_a_world(ranks), [sys.executable, *map(str, arguments)]
    ends_s = time.monotonic() + TIME_FACTOR * timeout_s
    with tempfile.TemporaryDirectory() as folder:
        outputs, processes = [Path(folder, str(rank)) for rank in range(ranks)], []
        for rank, path in enumerate(outputs):
            with path.open("w") as output:
                env = {**with_packages(), **world, "RANK": str(rank)}
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env))
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < ends_s:
                time.sleep(0.05)  # sleeps: between looks at the processes
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [path.read_text(errors="replace") for path in outputs]
    assert None not in codes, (codes, texts)
    return codes, texts


def torchrun(ranks, *arguments, timeout_s=90):
    """Run a program under torchrun; returns its result."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIME_FACTOR * timeout_s,
        env={**with_packages(), "OMP_NUM_THREADS": "1"},
    )


def clone(folder):
    """Let a folder have all that the repository has, so that commands of pages work there; returns it."""
    for entry in TESTS.parent.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    return folder


def as_typed(commands, folder, timeout_s=100):
    """Run commands in bash, in `folder`, as a page gives them; returns the result."""
    env = with_packages() | dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # `python` is this one
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # of ranks, where tests have few cores
    env["PET_STANDALONE"] = "1"  # of torchrun: a free port, as other tests run beside this one
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIME_FACTOR * timeout_s,
        env=env,
    )
