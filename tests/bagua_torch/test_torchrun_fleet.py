"""The fleet under torchrun: processes that hold a rendezvous in a store, die, and continue without each other."""

import ast
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked_fleet import TIMEOUT_S, Processes, run
from support.launch import torchrun, with_packages
from support.waiting import until

from bagua_comm import ArrayError, BootstrapError, CommError, RankFailed, elastic
from bagua_comm.elastic import start
from bagua_comm.system.files import shared_memory
from bagua_comm.system.processes import free_port
from bagua_torch.process_group import agent_folder, fleet
from bagua_torch.process_group.fleet import TorchrunFleet
from bagua_torch.process_group.rendezvous import join
from bagua_torch.process_group.store import FleetStore

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about fork


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    found.close()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def total(comm):
    return float(comm.allreduce(np.full(3, comm.rank + 1.0, np.float32))[0])


def numbers(rendezvous):
    return [process.number for process in rendezvous.alive]


def connect_all(fleet, rendezvous):
    return fleet.connect(numbers(rendezvous))


def leave(fleet, comm):
    comm.barrier()
    comm.close()
    fleet.end()


# ---------------------------------------------------------------------------------------------------
# Deaths
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [[1], pytest.param([0, 3], marks=pytest.mark.slow)])
def test_the_survivors_join_a_rendezvous_and_continue(processes, victims):
    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        sums = [total(comm)]
        if fleet.me in victims:
            die()
        with pytest.raises(CommError) as error:
            total(comm)
        rendezvous = fleet.rendezvous(error.value)
        comm = connect_all(fleet, rendezvous)
        sums.append(total(comm))
        leave(fleet, comm)
        return numbers(rendezvous), [(death.process.number, death.reason) for death in rendezvous.dead], sums

    size = 3 if len(victims) == 1 else 4
    alive = [n for n in range(size) if n not in victims]
    before, after = size * (size + 1) / 2, len(alive) * (len(alive) + 1) / 2
    expected = (alive, [(n, "died") for n in victims], [before, after])
    assert [None if n in victims else expected for n in range(size)] == run(processes, size, body)


def test_a_death_is_noticed_outside_of_calls(processes):
    """Gloo and stores raise errors of their own then."""

    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        if fleet.me == 1:
            die()
        until(lambda: fleet.failure(comm) is not None)
        comm = connect_all(fleet, fleet.rendezvous(fleet.failure(comm)))
        result = total(comm)
        leave(fleet, comm)
        return result

    assert run(processes, 2, body) == [1.0, None]


def test_a_process_that_hangs_is_killed(processes):
    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        if fleet.me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommError) as error:
            comm.barrier(timeout_s=0.5)
        fleet.timeout_s = 0.5
        rendezvous = fleet.rendezvous(error.value)
        fleet.end()
        return [str(death) for death in rendezvous.dead], [death.reason for death in rendezvous.dead]

    left, hung = run(processes, 2, body)
    assert hung is None
    assert left[1] == ["did not answer for 0.5 s, and was killed"]


def test_a_death_while_the_others_connect_is_found_long_before_the_timeout(processes):
    def body(fleet):
        rendezvous = fleet.rendezvous()
        if fleet.me == 2:
            die()
        began_s = time.monotonic()
        with pytest.raises(CommError, match=r"died meanwhile|started a rendezvous") as error:
            connect_all(fleet, rendezvous)
        rendezvous = fleet.rendezvous(error.value)
        took_s = time.monotonic() - began_s
        result = total(comm := connect_all(fleet, rendezvous))
        leave(fleet, comm)
        return result, took_s < TIMEOUT_S / 2

    assert run(processes, 3, body) == [(3.0, True), (3.0, True), None]


def test_a_process_that_torchrun_is_about_to_end_trains_no_more(processes, monkeypatch):
    monkeypatch.setattr(fleet, "AGENT_S", 0.01)

    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        if fleet.me == 1:
            die()
        with pytest.raises(CommError) as error:
            total(comm)
        rendezvous = fleet.rendezvous(error.value)
        fleet.end()
        return numbers(rendezvous), [death.reason.partition(" process")[0] for death in rendezvous.dead]

    first, second, third = run(processes, 3, body, agents=[7, 7, 8])
    assert first.startswith("RankFailed: process 0 is ended by torchrun, together with process 1")
    assert second is None
    assert third == ([2], ["is ended by torchrun, together with", "died"])


@pytest.mark.slow
def test_a_death_while_a_group_is_split_off_is_found_long_before_the_timeout(processes):
    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        total(comm)
        began_s = time.monotonic()
        if fleet.me == 1:
            comm.allgather_object(0)
            die()
        comm.allgather_object(0)
        with pytest.raises(CommError) as error:
            comm.dup()
        fleet.rendezvous(error.value)
        fleet.end()
        return time.monotonic() - began_s < TIMEOUT_S / 2

    assert run(processes, 3, body) == [True, None, True]


def test_one_that_waits_for_a_living_rank_learns_of_a_rendezvous(processes):
    def body(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        total(comm)
        if fleet.me == 1:
            rendezvous = fleet.rendezvous()  # in no call: rank 0 waits for this rank, which lives
        else:
            with pytest.raises(CommError) as error:
                total(comm)
            rendezvous = fleet.rendezvous(error.value)
        fleet.end()
        return rendezvous.number, numbers(rendezvous), rendezvous.dead

    assert run(processes, 2, body) == [(2, [0, 1], ())] * 2


# ---------------------------------------------------------------------------------------------------
# Spares, and processes that join
# ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spare_is_called_when_one_dies_and_released_at_the_end(processes):
    def body(fleet):
        rendezvous = fleet.rendezvous()
        assert fleet.wanted == 2
        members = [0, 1]
        heard = []
        while fleet.me not in members:
            heard.append(fleet.stand_by(members))
            if not heard[-1]:
                return heard
            rendezvous = fleet.rendezvous()
            members = numbers(rendezvous)[: fleet.wanted]
        while True:
            try:
                result = total(comm := fleet.connect(members))
                if fleet.me == 1:
                    die()
                total(comm)
                if len(rendezvous.alive) == 4:
                    total(comm)
                leave(fleet, comm)
                return heard, result
            except CommError as exc:
                rendezvous = fleet.rendezvous(exc)
                members = numbers(rendezvous)[: fleet.wanted]

    assert run(processes, 4, body, spares=2) == [([], 3.0), None, ([True], 3.0), [True, False]]


@pytest.mark.slow
def test_a_process_that_is_started_again_alone_is_admitted(processes):
    def old(fleet):
        comm = connect_all(fleet, fleet.rendezvous())
        if fleet.me == 1:
            die()
        with pytest.raises(CommError) as error:
            total(comm)
        until(lambda: fleet._fleet_store.add("joining") == 1)
        rendezvous = fleet.rendezvous(error.value)
        comm = connect_all(fleet, rendezvous)
        result = total(comm)
        leave(fleet, comm)
        return numbers(rendezvous), result

    def new(fleet):
        rendezvous = fleet.rendezvous()
        comm = connect_all(fleet, rendezvous)
        result = total(comm)
        leave(fleet, comm)
        return numbers(rendezvous), result

    first, second = (processes.start(rank, 2, old) for rank in range(2))
    processes.serve()
    assert processes.result(second) is None
    third = processes.start(1, 2, new)
    assert [processes.result(first), processes.result(third)] == [([0, 2], 3.0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fleet.end()", ""])
def test_a_process_ends_well_while_its_fleet_looks_in_the_store(end):
    """A thread that is in the store when Python ends would abort the process: "terminate called ..."."""
    code = f"""
        import time
        import torch.distributed as dist
        from bagua_torch.process_group import fleet as module

        module.WATCH_S = 0  # all the time
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        fleet = module.TorchrunFleet(store, 0, 1, timeout_s=5)
        time.sleep(0.2)
        {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_requests_that_are_refused():
    with pytest.raises(ArrayError, match="2 of 2 processes are spares"):
        TorchrunFleet(dist.HashStore(), 0, 2, timeout_s=5, spares=2)
    fleet = TorchrunFleet(dist.HashStore(), 0, 1, timeout_s=5)
    fleet.rendezvous()
    with pytest.raises(ArrayError, match=r"members are \[0, 1\], expected different ones of \[0\]"):
        fleet.connect([0, 1])
    fleet.end()


# ---------------------------------------------------------------------------------------------------
# The start
# ---------------------------------------------------------------------------------------------------


def join_all(store, size, timeout_s=TIMEOUT_S):
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(join, store, rank, size, timeout_s=timeout_s) for rank in range(size)]
        return [rank.result() for rank in ranks]


def test_keys_of_an_earlier_attempt_in_the_store_are_ignored():
    store = dist.HashStore()
    before = {each.prefix for each in join_all(store, 3)}
    with pytest.raises(BootstrapError, match=r"rank 1 of 3 has waited 0\.05 s"):
        join(store, 1, 3, timeout_s=0.05)  # and dies before the others are there
    after = join_all(store, 3)
    assert [each.number for each in after] == [0, 1, 2]
    assert len({each.prefix for each in after}) == 1
    assert before.isdisjoint({after[0].prefix})


def test_a_missing_process_is_named():
    with pytest.raises(BootstrapError, match=r"rank 0 of 3 has waited 0.05 s .* nothing of ranks \[1, 2\]"):
        join(dist.HashStore(), 0, 3, timeout_s=0.05)


def test_a_store_that_is_gone_is_an_error_that_says_what_to_do():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = FleetStore(dist.TCPStore("127.0.0.1", server.port, is_master=False), "test")
    client.set("here")
    del server
    with pytest.raises(RankFailed, match=r"the store at 127.0.0.1:.* is gone: .* --max-restarts"):
        until(lambda: not client.has("here"))


def test_the_first_of_several_values_holds():
    store = dist.HashStore()
    stores = [FleetStore(store, "test") for _ in range(8)]
    gate = threading.Barrier(8)

    def set_once(n):
        gate.wait()
        return stores[n].set_once("result", n)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(set_once, range(8)))) == 1


def test_under_torchrun_without_bagua_torch_the_error_names_the_import(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(start, "_under_torchrun", None)
    with pytest.raises(BootstrapError, match="import bagua_torch before"):
        elastic.run(elastic.State(step=0))(print)


# ---------------------------------------------------------------------------------------------------
# State that outlives the processes
# ---------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_folder, "shared_memory", lambda: tmp_path)
    return tmp_path


def test_the_folder_is_the_same_for_all_processes_of_an_agent_and_private(memory):
    folder = agent_folder.provide()
    assert folder == agent_folder.provide()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_whose_agent_is_gone_is_removed_and_no_other(memory):
    mine = agent_folder.provide()
    space, agent, start_ticks = mine.name.removeprefix(agent_folder.PREFIX).split("-")
    gone = memory / f"{agent_folder.PREFIX}{space}-{agent}-{int(start_ticks) - 1}"
    elsewhere = memory / f"{agent_folder.PREFIX}1{space}-{agent}-1"  # another container's: unknown
    for folder in (gone, elsewhere):
        folder.mkdir(mode=0o700)
        (folder / "slot-0-a-own").write_bytes(b"x")
    agent_folder.remove_stale(memory)
    assert {mine, elsewhere} == set(memory.iterdir())


def test_a_folder_that_others_can_write_to_is_refused(memory):
    agent_folder.provide().chmod(0o777)
    with pytest.raises(BootstrapError, match="belongs to another user"):
        agent_folder.provide()


# ---------------------------------------------------------------------------------------------------
# Under torchrun
# ---------------------------------------------------------------------------------------------------

PROGRAM = """
    import logging, os, signal, sys
    from pathlib import Path

    import torch
    import bagua_comm
    import bagua_torch

    logging.basicConfig(level=logging.INFO)
    folder, victim = Path(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = bagua_comm.elastic.State(model=model, optimizer=optimizer, step=0)

    @bagua_comm.elastic.run(state, timeout_s=60)
    def train(comm):
        begun, size = state.step, comm.size
        ddp = bagua_torch.DistributedDataParallel(model, [optimizer], bagua_comm.GradientAllReduce(), comm=comm)
        while state.step < 20:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(state.step))  # alike on all ranks
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if state.step == 10 and os.environ["RANK"] == victim and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return begun, size, model.weight.sum().item()

    (folder / f"result-{os.environ['RANK']}").write_text(repr(train))
    {end}
"""


def undisturbed():
    """The sum of the weights that a run without a death ends with."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model.weight.sum().item()


def write(folder, end=""):
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).replace("{end}", end))
    return program


@pytest.mark.slow
def test_processes_that_torchrun_restarts_continue_from_the_last_commit(tmp_path):
    program = write(tmp_path)
    before = set(shared_memory().glob(f"{agent_folder.PREFIX}*"))
    result = torchrun(2, "--max-restarts=1", program, tmp_path, 1, timeout_s=200)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "training continues" in line]
    assert re.search(r"from commit \d+, which is left in memory, on 2 ranks$", line)
    for rank in range(2):
        begun, size, weights = ast.literal_eval((tmp_path / f"result-{rank}").read_text())
        assert begun in (9, 10)  # the victim dies right after a commit, which the other one may not have finished
        assert size == 2
        assert weights == pytest.approx(undisturbed(), rel=1e-5)
    assert set(shared_memory().glob(f"{agent_folder.PREFIX}*")) <= before


@pytest.mark.slow
def test_workers_of_other_agents_continue_in_the_same_processes(tmp_path):
    program = write(
        tmp_path, end="os.kill(os.getppid(), signal.SIGKILL)  # the agent would wait for the dead one's"
    )
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", program, tmp_path, "1"],
            env={**with_packages(), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in range(3)
    ]
    try:
        for agent in agents[1:]:
            agent.wait(timeout=200)
        until((tmp_path / "result-0").exists)
    finally:
        for agent in agents:
            agent.kill()
        codes = [agent.wait(20) for agent in agents]
    assert [codes[0], codes[2]] == [-signal.SIGKILL] * 2
    for rank in (0, 2):
        begun, size, weights = ast.literal_eval((tmp_path / f"result-{rank}").read_text())
        assert begun >= 9
        assert size == 2
        assert weights == pytest.approx(undisturbed(), rel=1e-5)
