"""Every former name warns at the line of the program that uses it, and does what the present one does."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from bagua_comm import ByteGrad, CommError, Engine, Plan, TensorSpec, elastic
from bagua_comm.algorithms import base
from bagua_comm.deprecation import former_names, warn_renamed
from bagua_comm.testing import ThreadJob, run_ranks
from bagua_comm.testing.fleets import ThreadFleet
from bagua_comm.transports import LocalTransport

PLAN = Plan.pack([TensorSpec("a", (3,), "float32")])


class UsesFormerNames:
    """One method for each former name; its line is the line that uses it."""

    def engine(self, comm):
        engine = Engine(comm, ByteGrad(), PLAN, PLAN.allocate())
        return engine.give_up() or engine.closed

    def lane(self, comm):
        lane = comm.lane()
        lane.give_up()
        with pytest.raises(CommError):
            lane.submit(print)
        return True

    def carrier(self, comm):
        return comm.carrier(np.ones(1)) is comm.transports[0]

    def number_of(self, comm):
        return comm.number_of("layer") == 1 and comm.next_id("layer") == 2

    def replicated(self, comm):
        return base.ALIKE is base.REPLICATED

    def recreated(self, comm):
        return base.ANEW is base.RECREATED

    def with_defaults(self, comm):
        return base.complete is base.with_defaults

    def class_with_defaults(self, comm):
        return base.Complete is base.WithDefaults

    def rendezvous(self, comm):
        from bagua_comm.elastic.fleet import Meeting

        return Meeting is elastic.fleet.Rendezvous

    def spawn(self, comm):
        return ThreadJob(1, recruit=print).spawn is print

    def attribute_of_a_job(self, comm):
        return ThreadJob(1).meetings == []

    def attribute_of_a_job_that_is_set(self, comm):
        job = ThreadJob(1)
        job.recruit = print
        return job.spawn is print

    def attribute_of_a_fleet(self, comm):
        return ThreadFleet(ThreadJob(1), 0).recruits is False

    def attribute_of_a_fleet_that_is_set(self, comm):
        fleet = ThreadFleet(ThreadJob(1), 0)
        fleet.recruits = True
        return fleet.can_spawn

    def method_of_a_fleet(self, comm):
        return ThreadFleet(ThreadJob(1), 0).meet().number == 1

    def class_of_a_fleet(self, comm):
        class Own(ThreadFleet):
            def meet(self, cause=None):
                return "met"

        return Own(ThreadJob(1), 0).rendezvous() == "met"

    def class_attribute_of_a_fleet(self, comm):
        class Own(ThreadFleet):
            recruits = True

        return Own.can_spawn

    def class_of_a_transport(self, comm):
        class Own(LocalTransport):
            def shortcut(self, name, x, op="", root=None):
                return name

        return Own().fast_path("barrier", np.ones(1)) == "barrier"

    def hook_of_a_transport(self, comm):
        return LocalTransport().heard(["a group"]) is None

    def derived_collective(self, comm):
        (transport,), x, out = comm.transports, np.ones(3), np.empty((1, 3))
        transport.allgather_over(transport.agree_on_call("allgather", x), x, out)
        return out.tolist() == [[1, 1, 1]]


FORMER = {
    "engine": ".give_up()",
    "lane": ".give_up()",
    "carrier": ".carrier(",
    "number_of": ".number_of(",
    "replicated": ".ALIKE",
    "recreated": ".ANEW",
    "with_defaults": ".complete ",
    "class_with_defaults": ".Complete ",
    "rendezvous": "import Meeting",
    "spawn": "recruit=print",
    "attribute_of_a_job": ".meetings",
    "attribute_of_a_job_that_is_set": ".recruit = ",
    "attribute_of_a_fleet": ".recruits",
    "attribute_of_a_fleet_that_is_set": ".recruits = ",
    "method_of_a_fleet": ".meet()",
    "class_of_a_fleet": "class Own(ThreadFleet)",
    "class_attribute_of_a_fleet": "class Own(ThreadFleet)",
    "class_of_a_transport": "class Own(LocalTransport)",
    "hook_of_a_transport": ".heard(",
    "derived_collective": ".allgather_over(",
}
"""For each method of `UsesFormerNames`, the text of the line that its warning points at."""


@pytest.mark.parametrize("use", FORMER)
def test_a_former_name_works_and_warns_where_it_is_used(use):
    def body(comm):
        return getattr(UsesFormerNames(), use)(comm)

    with pytest.warns(DeprecationWarning, match="is now") as warned:
        assert run_ranks(1, body) == [True]
    for warning in warned:
        assert warning.filename == __file__
        line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
        assert FORMER[use] in line


def test_a_warning_names_both_and_an_unknown_name_is_no_attribute():
    find = former_names(__name__, {"old": "PLAN"})
    with pytest.warns(DeprecationWarning, match=f"{re.escape(__name__)}.old is now PLAN$"):
        assert find("old") is PLAN
    with pytest.raises(AttributeError, match=f"module '{__name__}' has no attribute 'older'"):
        find("older")


def test_the_default_filter_shows_a_warning_once_for_each_line():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default", DeprecationWarning)
        for _ in range(3):
            warn_renamed("old", "new")
    assert [warning.message.args for warning in shown] == [("old is now new",)]
