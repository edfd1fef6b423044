"""Memory that ranks of a host share, and deaths: what survivors read of it, and that they keep none."""

import pytest
from support.launch import run_python

PROGRAM = """
    import os
    import signal

    import numpy as np

    from bagua_comm import Engine, GradientAllReduce, Plan, Point, TensorSpec, elastic

    state = elastic.State(step=0)
    numbers = []

    def windows():
        links = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
        return sum("/memfd:bagua" in os.readlink(link) for link in links if os.path.lexists(link))

    @elastic.run(state)
    def train(comm):
        numbers.append(comm.rank)
        plan = Plan.pack([TensorSpec("w", (1 << 18,), "float32")])
        weight, gradient = plan.allocate(), plan.allocate()
        with Engine(comm, GradientAllReduce(), plan, {"weight": weight, "grad": gradient}) as engine:
            while state.step < 12:
                if (state.step, numbers) in ((3, [3]), (6, [2, 2]), (9, [1, 1, 1])):
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.at(Point.FORWARD)
                engine.ready("w")
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)
                state.step += 1
                state.commit()
                if comm.rank == 0 and state.step in (2, 5, 8):
                    print(comm.size, windows(), flush=True)
"""


@pytest.mark.slow
def test_windows_of_former_communicators_are_unmapped(tmp_path):
    result = run_python(4, flags=["--ulfm"], script=(tmp_path / "train.py", PROGRAM))
    assert result.returncode == 0, result.stderr
    sizes, windows = zip(*(map(int, line.split()) for line in result.stdout.splitlines()), strict=True)
    assert sizes == (4, 3, 2)
    assert windows[0] > 0
    assert len(set(windows)) == 1


DEATH = """
    import os
    import signal
    import time

    import numpy as np

    import bagua_comm
    from bagua_comm import RankFailed
    from bagua_comm.transports.mpi.peer_memory import DirectCalls

    reduce = DirectCalls._reduce

    def late(self, *arguments):
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3 + 0.4 * self.rank)  # sleeps: rank 0 sees the death first, and marks its own abort
        reduce(self, *arguments)

    DirectCalls._reduce = late
    comm = bagua_comm.connect(timeout_s=20)
    start = time.monotonic()
    try:
        comm.allreduce(np.ones(1 << 20, np.float32))
    except RankFailed as exc:
        print(list(exc.ranks), time.monotonic() - start < 3, flush=True)
    time.sleep(1.5 - comm.rank)  # sleeps: the other one should not see this one end
    os._exit(0)
"""


@pytest.mark.slow
def test_all_survivors_learn_who_died_while_its_memory_was_read(tmp_path):
    """The second one finds the mark of the first, which sends no notice: it has raised `RankFailed` itself."""
    result = run_python(3, flags=["--ulfm"], script=(tmp_path / "death.py", DEATH))
    assert result.stdout.splitlines() == ["[2] True"] * 2, result.stderr
