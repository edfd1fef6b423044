"""The fleet under torchrun where processes of a host cannot see each other, as in containers on its network."""

import os

import numpy as np
import pytest
from support.forked_fleet import Processes, run
from support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about fork


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    found.close()


def total(fleet, rendezvous):
    """The sum of the numbers of all processes in the rendezvous, each plus one."""
    with fleet.connect([process.number for process in rendezvous.alive]) as comm:
        return float(comm.allreduce(np.full(3, fleet.me + 1.0, np.float32))[0])


def test_living_processes_of_other_containers_are_not_taken_for_dead(processes):
    def body(fleet):
        store, find_dead = fleet._fleet_store, fleet._detector.find_dead
        fleet._detector.find_dead = lambda *args, **options: [find_dead(*args, **options), store.set("looked")][0]
        if fleet.me == 1:
            until(lambda: store.has("looked"))  # rank 0 has missed this one, and looked for its process
        rendezvous = fleet.rendezvous()
        found = len(rendezvous.alive), rendezvous.dead, total(fleet, rendezvous)
        fleet.end()
        return found

    assert run(processes, 2, body, containers=[1], agents=[7, 7]) == [(2, (), 3.0)] * 2


@pytest.mark.slow
def test_a_death_in_a_container_does_not_end_processes_of_another_container_whose_agent_has_the_same_pid(
    processes,
):
    def body(fleet):
        total(fleet, fleet.rendezvous())
        if fleet.me == 0:
            os._exit(1)
        rendezvous = fleet.rendezvous()
        found = [process.number for process in rendezvous.alive], len(rendezvous.dead), total(fleet, rendezvous)
        fleet.end()
        return found

    assert run(processes, 3, body, containers=[0, 1], agents=[7, 7, 8])[1:] == [([1, 2], 1, 5.0)] * 2
