"""Former names of the contract of fleets: they warn, and users' fleets and jobs that have them still work."""

import numpy as np
import pytest

from bagua_comm.elastic import State, fleet, run
from bagua_comm.elastic.fixed import FixedFleet
from bagua_comm.elastic.fleet import Fleet
from bagua_comm.testing.fleets import ThreadFleet, ThreadJob, run_fleet


def test_the_record_of_a_rendezvous_has_its_former_name():
    with pytest.warns(DeprecationWarning, match="fleet.Meeting is now Rendezvous"):
        assert fleet.Meeting is fleet.Rendezvous


def test_a_fleet_that_defines_the_former_methods_trains_to_the_end():
    with pytest.warns(DeprecationWarning, match=r"Former\.(meet|recruit|recruits_wait) is now"):

        class Former(ThreadFleet):
            joined = 0

            def meet(self, cause=None):
                self.joined += 1
                with pytest.warns(DeprecationWarning, match=r"Fleet\.meet is now rendezvous"):
                    return super().meet(cause)

            def recruit(self, count):
                raise NotImplementedError

            def recruits_wait(self):
                return False

    def body(fleet):
        @run(state := State(step=0), fleet=fleet)
        def train(comm):
            comm.allreduce(np.ones(3))
            state.commit()
            if fleet.me == 1:
                job.kill(1)
            comm.barrier()
            return comm.size

        return train, fleet.joined

    job = ThreadJob(3)
    job.fleet = Former
    first, second, third = run_fleet(job, body)
    assert [first["result"], third["result"]] == [(2, 2)] * 2
    assert "killed" in second


def test_a_fleet_of_its_own_may_define_all_methods_by_their_former_names():
    with pytest.warns(DeprecationWarning, match="is now") as warned:

        class Former(Fleet):
            recruits = True

            def meet(self, cause=None):
                return "met"

            def recruit(self, count):
                return count

            def recruits_wait(self):
                return True

            connect = stand_by = end = None

    assert {warning.filename for warning in warned} == {__file__}
    former = Former()
    assert (former.rendezvous(), former.spawn(2), former.has_joining(), former.can_spawn) == (
        "met",
        2,
        True,
        True,
    )
    assert (former.meet(), former.recruits) == ("met", True)


def test_calls_by_former_names_warn():
    job = ThreadJob(1)
    mine = ThreadFleet(job, 0)
    with pytest.warns(DeprecationWarning, match=r"Fleet\.meet is now rendezvous"):
        assert mine.meet().number == 1
    with pytest.warns(DeprecationWarning, match=r"Fleet\.recruits_wait is now has_joining"):
        assert not mine.recruits_wait()
    with pytest.warns(DeprecationWarning, match=r"Fleet\.recruits is now can_spawn"):
        assert not mine.recruits
    with pytest.warns(DeprecationWarning, match=r"Fleet\.recruits is now can_spawn"):
        mine.recruits = True
    assert mine.can_spawn
    assert not FixedFleet.can_spawn
    with pytest.warns(DeprecationWarning, match=r"ThreadJob\.meetings is now rounds"):
        assert job.meetings is job.rounds
    with pytest.warns(DeprecationWarning, match=r"\(recruit=\) is now spawn="):
        assert ThreadJob(1, recruit=print).spawn is print


def test_setting_an_attribute_of_a_job_by_its_former_name_sets_the_new_one():
    job = ThreadJob(1)
    with pytest.warns(DeprecationWarning, match=r"ThreadJob\.recruit is now spawn"):
        job.recruit = print
    assert job.spawn is print
