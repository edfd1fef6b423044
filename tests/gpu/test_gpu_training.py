"""Training by two ranks that share a GPU, replicated and sharded, and the backend; see the bodies."""

import functools
import json

import pytest
from support.device_training import BODIES
from support.launch import TIME_FACTOR, with_tests

from benchmarks.gpu.world import launch


@functools.cache
def outcomes(folder, device):
    """What each body raised, by rank, and what the processes printed."""
    out = folder / "outcomes.json"
    program = ["-m", "support.gpu_rank_process", out, device]
    done = launch(2, program, timeout_s=TIME_FACTOR * 60, env=with_tests(), mpi=False)
    found = json.loads(out.read_text()) if out.exists() else {}
    return found, f"exit code {done.returncode}: {done.stdout}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.mark.gpu
@pytest.mark.timeout(TIME_FACTOR * 70)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_two_ranks_on_one_gpu(folder, body):
    found, printed = outcomes(folder, "cuda")
    errors = found.get(body.__name__, {"?": printed})
    assert not errors, "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())


@pytest.mark.gpu
@pytest.mark.timeout(TIME_FACTOR * 70)
def test_the_processes_end_well(folder):
    _, printed = outcomes(folder, "cuda")
    assert printed.startswith("exit code 0:"), printed


@pytest.mark.slow
@pytest.mark.timeout(TIME_FACTOR * 70)
def test_two_ranks_on_the_host(folder):
    """The same program, with CPU tensors in place of CUDA tensors."""
    found, printed = outcomes(folder, "cpu")
    assert found == {body.__name__: {} for body in BODIES}, printed
    assert printed.startswith("exit code 0:"), printed
