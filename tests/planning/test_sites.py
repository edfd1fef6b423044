"""Which algorithm to begin with between sites."""

import dataclasses

import pytest

from bagua_comm import DiLoCo, GradientAllReduce, SparseLoCo, StreamingDiLoCo
from bagua_comm.planning.costmodel import Cluster, Job, Rates, predict
from bagua_comm.planning.sites import between_replicas, candidates, exposed_share, most_communication

JOB = Job(400_000_000, 0.1, 0.2)


def between(gbit, latency_s=0.05, sites=4, **more):
    return Cluster(sites, bandwidth_gbit=gbit, latency_s=latency_s, **more)


def test_the_first_that_hardly_waits_is_chosen_and_all_before_it_wait():
    for gbit in (0.01, 0.2, 2, 100):
        cluster = between(gbit)
        algorithm, prediction = most_communication(JOB, cluster)
        assert exposed_share(prediction) < 0.05
        for other in candidates(cluster):
            if other == algorithm:
                break
            assert exposed_share(predict(other, JOB, cluster)) >= 0.05
        else:
            pytest.fail(f"{algorithm} is no candidate")


def test_slower_links_have_more_steps_between_exchanges():
    links = (between(100, latency_s=1e-5), between(1), between(0.05))
    chosen = [
        most_communication(JOB, dataclasses.replace(link, transport="nccl"), Rates.gpu())[0] for link in links
    ]
    assert chosen[0] == GradientAllReduce()
    assert isinstance(chosen[1], (DiLoCo, StreamingDiLoCo))
    assert chosen[1].local_steps < chosen[2].local_steps


def test_no_choice_is_better_than_one_that_waits():
    assert most_communication(JOB, between(1e-5)) is None
    assert most_communication(JOB, between(100), least_waiting=0.0) is None


def test_the_largest_changes_alone_come_last():
    kinds = [type(each) for each in candidates(between(0.2))]
    assert kinds.index(SparseLoCo) == len(kinds) - 4
    assert set(kinds[-4:]) == {SparseLoCo}


def test_the_largest_changes_are_sent_among_nodes():
    host, device = (between(0.05, transport=name) for name in ("mpi", "nccl"))
    assert all(any(isinstance(each, SparseLoCo) for each in candidates(cluster)) for cluster in (host, device))
    several = dataclasses.replace(host, ranks_per_node=8)
    assert all("Hierarchical" in repr(each) for each in candidates(several) if isinstance(each, SparseLoCo))
    assert most_communication(JOB, several) is not None


def test_replicas_of_a_sharded_model_send_what_one_rank_at_each_site_would():
    cluster = between(1, sites=2, ranks_per_node=8, transport="nccl")
    algorithm, prediction = between_replicas(JOB, cluster, Rates.gpu())
    alone = dataclasses.replace(cluster, ranks_per_node=1, flows=8)
    assert (algorithm, prediction) == most_communication(JOB, alone, Rates.gpu())
    assert between_replicas(JOB, alone, Rates.gpu()) is None, "nothing is sharded"
    assert between_replicas(JOB, between(100, 1e-5, ranks_per_node=2))[0].local_steps == 10, (
        "though links are fast"
    )
    assert between_replicas(JOB, between(1e-5, ranks_per_node=2)) is None
