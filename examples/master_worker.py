"""A master gives each worker its next task as soon as it is free; tasks take times of their own.

bagua run -n 3 examples/master_worker.py
"""

import time

import bagua_comm


def work(task: int) -> int:
    time.sleep(0.2 if task == 0 else 0.01)
    return task**2


with bagua_comm.connect() as comm:
    if comm.rank == 0:
        tasks, results = list(range(20)), {worker: [] for worker in range(1, comm.size)}
        for _ in range(len(tasks) + comm.size - 1):
            worker, result = comm.recv_any_object()
            results[worker].append(result)
            comm.send_object(tasks.pop(0) if tasks else None, dest=worker)
        for worker, found in results.items():
            print(f"worker {worker}: {len(found) - 1} tasks, the sum of their results {sum(found)}")
    else:
        result = 0  # no result yet: it asks for its first task
        while True:
            comm.send_object(result, dest=0)
            if (task := comm.recv_object(source=0)) is None:
                break
            result = work(task)
