"""The process group of torch.distributed in trainings that lose processes, with PyTorch's own calls on it."""

import json

import pytest
from support.launch import run_python

PROGRAM = """
    import json, os, signal, sys, threading, time

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import bagua_torch.fsdp
    from bagua_comm import Exact, elastic

    moment, TCPStore = sys.argv[1], torch.distributed.TCPStore
    state = elastic.State(step=0, total=0.0)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def connect_late(*args, is_master, **options):
        torch.distributed.TCPStore = TCPStore
        if is_master:
            threading.Timer(0.2, die).start()
        else:
            time.sleep(0.5)
        return TCPStore(*args, is_master=is_master, **options)

    @elastic.run(state)
    def said(comm):
        if not elastic.history() and moment == "store":
            torch.distributed.TCPStore = connect_late
        elif not elastic.history() and comm.rank == 0:
            threading.Timer(1.0 if moment == "keys" else float(moment), die).start()
        bagua_torch.fsdp.renew_group(comm)
        while moment == "keys" and not elastic.history():
            torch.distributed.distributed_c10d._get_default_store().add("key", 1)
        torch.manual_seed(0)
        layer, replicas = torch.nn.Linear(8, 7), 2 if comm.size == 4 else 1
        mesh = init_device_mesh("cpu", (replicas, comm.size // replicas), mesh_dim_names=("replicas", "shards"))
        fully_shard(layer, mesh=mesh if replicas > 1 else mesh["shards"])
        bagua_torch.fsdp.attach(layer, Exact(), comm=comm, replicas=Exact() if replicas > 1 else None)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        state.register(layer=layer, optimizer=optimizer)
        restored = state.step == 0 or state.total == layer.weight.full_tensor().double().sum().item()
        while state.step < 4 or not elastic.history():
            layer(torch.ones(2, 8)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.total = layer.weight.full_tensor().double().sum().item()
            state.commit()
        return torch.distributed.get_world_size(), torch.distributed.get_backend(), restored

    if said is not None:
        print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "moment"),
    [(3, "store"), (3, "keys"), (3, "1.0"), (4, "2.0")],
    ids=["before all have its store", "in a call of its store", "in a step", "in a step of replicas"],
)
def test_the_group_has_the_ranks_that_are_left(tmp_path, ranks, moment):
    script = tmp_path / "program.py", PROGRAM
    result = run_python(ranks, moment, script=script, flags=["--spares", "0"], timeout_s=180)
    assert result.returncode == 0, result.stdout + result.stderr
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert said == [[ranks - 1, "bagua", True]] * (ranks - 1)
