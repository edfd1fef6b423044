"""DistributedDataParallel with microbatches over MPI: the number of ranks does not show in the weights."""

import pytest
from support.launch import run_python

MICROBATCHES = 24

TRAINING = """
    import hashlib

    import torch

    import bagua_torch
    from bagua_comm import GradientAllReduce, Reproducible

    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = bagua_torch.connect()
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    algorithm = GradientAllReduce(Reproducible(addends=MICROBATCHES))
    ddp = bagua_torch.DistributedDataParallel(model, [optimizer], algorithm, comm=comm, bucket_bytes=1024)
    for step in range(10):
        optimizer.zero_grad()
        count = 0
        for number in ddp.microbatches():
            count += 1
            data = torch.Generator().manual_seed(step * MICROBATCHES + number)
            inputs, labels = torch.randn(5, 20, generator=data), torch.randint(0, 3, (5,), generator=data)
            torch.nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    bytes_ = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print("weights", count, hashlib.sha256(bytes_).hexdigest(), flush=True)
    ddp.close()
    comm.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_with_twelve_microbatches_train_as_three_with_eight(tmp_path):
    script = tmp_path / "training.py", TRAINING.replace("MICROBATCHES", str(MICROBATCHES))
    said = {}
    for ranks in (2, 3):
        result = run_python(ranks, script=script, timeout_s=145)
        lines = [line.split() for line in result.stdout.splitlines() if line.startswith("weights")]
        assert [int(count) for _, count, _ in lines] == [MICROBATCHES // ranks] * ranks, result.stderr
        said[ranks] = {digest for _, _, digest in lines}
    assert len(said[2]) == 1
    assert said[2] == said[3]
