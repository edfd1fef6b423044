"""A job is started again, and its program has changed: what is left in memory belongs to another one."""

import numpy as np

from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet


def test_a_state_of_other_parts_does_not_continue_from_old_snapshots(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_JOB", "test")
    monkeypatch.setenv("BAGUA_JOB_FOLDER", str(tmp_path))

    def first(fleet):
        @run(State(step=0, x=np.zeros(4)), fleet=fleet)
        def train(comm):
            for number in range(2):
                job.kill(number)
            comm.barrier()

    def second(fleet):
        @run(State(step=0, y=np.zeros(4)), fleet=fleet)
        def train(comm):
            raise AssertionError("it goes on")

    job = ThreadJob(2)
    run_fleet(job, first)
    for outcome in run_fleet(ThreadJob(2), second):
        assert "has the parts step, y, but the commit that is left in memory has step, x" in str(outcome["error"])
