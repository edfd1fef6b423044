"""A program that fails on one rank ends on all, soon, and the others say why: it is no death to recover from."""

import time

import pytest
from support.launch import run_python

FAILING = """
    import sys
    import threading

    import numpy as np

    IMPORT
    import bagua_comm

    state = bagua_comm.elastic.State(step=0)

    def fails_in_thread():
        raise ValueError("a bug")

    @bagua_comm.elastic.run(state, timeout_s=200)
    def train(comm):
        while state.step < 1000:
            comm.allreduce(np.ones(3))
            state.step += 1
            if comm.rank == 1 and state.step == 5 and "HOW" != "after":
                HOW_IT_FAILS
            state.commit()
            if "HOW" == "after" and state.step == 10:
                return

    import os
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise ValueError("a bug")
"""

HOW = {
    "raises": 'raise ValueError("a bug")',
    "exits": "sys.exit(3)",
    "aborts": "comm.abort(3)",
    "thread": "threading.Thread(target=fails_in_thread).start()",
    "after": "pass",
}


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "spares"), [*((how, 1) for how in HOW), ("raises", 0)])
def test_a_program_that_fails_on_one_rank_ends_on_all(tmp_path, how, spares):
    program = FAILING.replace("HOW_IT_FAILS", HOW[how]).replace("HOW", how)
    program = program.replace("IMPORT", "from mpi4py import MPI" if how == "after" else "")
    began = time.monotonic()
    flags = ["--spares", str(spares)] if spares else ["--ulfm"]
    done = run_python(3, script=(tmp_path / "failing.py", program), flags=flags)
    assert time.monotonic() - began < 100  # the limit of calls is 200 s
    assert done.returncode not in (0, 124)
    if how in ("raises", "thread", "after"):
        assert "ValueError: a bug" in done.stderr
