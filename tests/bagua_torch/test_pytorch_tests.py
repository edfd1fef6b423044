"""PyTorch's own tests of its wrapper, on ours: pytorch_tests.py runs them all, from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("expecttest")
@pytest.mark.slow
@pytest.mark.timeout(400)  # half a minute on two idle cores; there are more without `--short`
@pytest.mark.parametrize("mode", ["bagua", "backend"])
def test_pytorchs_own_tests_pass_or_differ_as_the_table_says(mode):
    script = Path(__file__).parents[1] / "support" / "pytorch_tests.py"
    done = subprocess.run(
        [sys.executable, script, "--short", "--mode", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout
