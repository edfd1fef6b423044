"""The process group of torch.distributed in trainings that lose processes, with PyTorch's own calls on it."""

import json

import pytest
from support.launch import run_python

PROGRAM = """
    import json
    import os
    import signal
    import sys
    import threading

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import bagua_torch.fsdp
    from bagua_comm import Exact, elastic

    delay_s = float(sys.argv[1])
    state = elastic.State(step=0)


    def die():
        os.kill(os.getpid(), signal.SIGKILL)


    @elastic.run(state)
    def said(comm):
        dies = comm.rank == 0 and not elastic.history()
        if dies and delay_s == 0:
            die()
        if dies:
            threading.Timer(delay_s, die).start()
        bagua_torch.fsdp.renew_group(comm)
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(8, 7))
        bagua_torch.fsdp.attach(model, Exact(), comm=comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state.register(model=model, optimizer=optimizer)
        while state.step < 4 or comm.size == 3:  # until the first rank has died
            model(torch.ones(2, 8)).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_world_size(), dist.get_backend(), total.item(), norm.isfinite().item()

    if said is not None:
        print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("delay_s", [0, 0.01, 1.0], ids=["before", "while it is made", "in a step"])
def test_the_group_has_the_ranks_that_are_left(tmp_path, delay_s):
    result = run_python(3, delay_s, script=(tmp_path / "program.py", PROGRAM), flags=["--spares", "0"])
    assert result.returncode == 0, result.stdout + result.stderr
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert said == [[2, "bagua", 2.0, True]] * 2
