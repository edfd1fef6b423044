"""Programs on the backend "bagua" under mpirun and torchrun: only its name differs from one on gloo."""

import pytest
from support.launch import run_python, torchrun

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import _shard
from torch.distributed.fsdp import fully_shard
if "OMPI_COMM_WORLD_RANK" in os.environ:  # as under plain mpirun, without the variables of `run`
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
def run(backend):
    global bagua_torch
    if backend == "bagua":
        import bagua_torch
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    dist.init_process_group(backend)
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            model(torch.randn(4, 6, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    train(torch.nn.parallel.DistributedDataParallel(plain))
    sharded = torch.nn.Linear(6, 2)
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
    train(sharded)
    weights = [*plain.parameters(), *(each.full_tensor() for each in sharded.parameters())]
    group = dist.new_group([size - 1, 0])
    x, y = torch.full((3,), rank + 1.0), torch.empty(100_000)
    dist.all_reduce(x, group=group)
    send = dist.P2POp(dist.isend, torch.full_like(y, rank), (rank + 1) % size)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, y, (rank - 1) % size)]):
        work.wait()
    assert (y == (rank - 1) % size).all()
    same = [size] * size if rank else None  # a fact of one rank alone
    given, out = torch.arange(float(size * size)), torch.empty(size * size)
    dist.all_to_all_single(out, given, same, same)
    assert out.tolist() == [float(rank * size + i) for _ in range(size) for i in range(size)]
    if backend == "bagua":  # of gloo, all ranks must have one shape
        out = torch.empty(size).reshape((size, 1) if rank else (size,))
        dist.reduce_scatter_tensor(out, given)
        assert out.flatten().tolist() == (size * given).view(size, size)[rank].tolist()
    spec = _shard.sharding_spec.ChunkShardingSpec(0, [f"rank:{each}/cpu" for each in range(size)])
    shards, whole = _shard.sharded_tensor.full(spec, (2 * size,), 3.0), torch.empty(2 * size)
    shards.gather(0, whole if rank == 0 else None)
    assert rank or whole.tolist() == [3.0] * 2 * size
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    if rank == 0:
        print("weights", x.tolist(), torch.cat([each.detach().flatten() for each in weights]).tolist())
    dist.destroy_process_group()
for backend in sys.argv[1:]:
    run(backend)
x = torch.ones(3)
dist.init_process_group("bagua")
with bagua_torch.connect() as comm:
    assert comm.size == int(os.environ["WORLD_SIZE"])
dist.destroy_process_group()
with bagua_torch.connect(process_group="bagua") as comm:
    assert dist.get_backend() == "bagua"
    dist.all_reduce(x)
assert not dist.is_initialized()
"""

PENDING = """
import torch, torch.distributed as dist, bagua_torch
dist.init_process_group("bagua")
dist.barrier()
if dist.get_rank() == 0:
    work = dist.irecv(torch.empty(3), 1, tag=5)
"""

LATE_CALLBACK = """
import threading, types, torch, torch.distributed as dist, bagua_torch
destroyed, released = threading.Event(), threading.Event()
class Late(types.SimpleNamespace):
    def __del__(self): self.f()
class Callback(types.SimpleNamespace):
    def __call__(self, future): return future.value()[0]
def hook(state, bucket):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1: destroyed.set(), store.wait(["rank 0 waits"])
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    future = future.then(Callback(a=Late(f=destroyed.wait), b=dist.group.WORLD, c=Late(f=released.set)))
    return (store.set("rank 0 waits", ""), future)[1]
dist.init_process_group("gloo")
ddp = bagua_torch.DistributedDataParallel(torch.nn.Linear(2, 1))
ddp.register_comm_hook(None, hook)
ddp(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
destroyed.set(), released.wait()
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ddp_and_fsdp2_as_over_gloo_under_mpirun_and_torchrun(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    runs = [torchrun(2, script, "gloo", "bagua"), run_python(2, script, "bagua")]
    assert [run.returncode for run in runs] == [0, 0], "".join(run.stderr[-2000:] for run in runs)
    expected, *found = [weights for run in runs for weights in run.stdout.splitlines() if "weights" in weights]
    assert found == [expected, expected]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", [PENDING, LATE_CALLBACK], ids=["message", "callback"])
def test_a_program_may_end_while_a_thread_waits_or_releases_a_group(program, tmp_path):
    """A thread that waited for a message returned from the library below while Python ended: SIGABRT, or exit 14.
    With a hook of PyTorch, a thread of gloo released its group last, and joined itself: SIGABRT."""
    script = tmp_path / "program.py"
    script.write_text(program)
    run = torchrun(2, script)
    assert run.returncode == 0, run.stderr[-2000:]
