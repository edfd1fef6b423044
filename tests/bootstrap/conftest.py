"""Programs whose ranks end, or fail to connect."""

import time

import pytest
from support.launch import run_python

SOON_S = 55
"""Less than the 60 s for which ranks would wait, or sleep."""


@pytest.fixture
def ended(tmp_path):
    """Run a program on ranks: it must end soon, with this exit code, or any but 0 if `code` is None."""

    def run(ranks, program, code=0, **options):
        start_s = time.monotonic()
        result = run_python(ranks, script=(tmp_path / "script.py", program), **options)
        assert result.returncode == code if code is not None else result.returncode, result.stderr
        assert time.monotonic() - start_s < SOON_S
        return result

    return run
