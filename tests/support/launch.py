"""Start Python on several ranks from a test."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


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
