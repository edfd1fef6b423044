"""A program that reads a slow data set through a cache, alone or by workers, and prints the outcome as JSON."""

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import asdict

import numpy as np

from bagua_comm.data import Cached, LMDBStore, RedisStore


class Slow:
    """Samples that take `delay_s` to load; every load is logged."""

    def __init__(self, n, log, delay_s):
        self.n, self.log, self.delay_s = n, log, delay_s

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        with open(self.log, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        time.sleep(self.delay_s)  # sleeps: a sample that takes long to load
        return np.full(4, index, np.int16), None


def right(sample, index):
    return np.array_equal(sample[0], np.full(4, index, np.int16)) and sample[1] is None


def read(cached, indices):
    """Read samples as a worker process does, which exits without closing anything."""
    if not all(right(cached[i], i) for i in indices):
        sys.exit(1)


def by_processes(cached, options):
    """Read by worker processes: each reads all samples if they are shared, else its part."""
    context = multiprocessing.get_context(options.method)
    n, k = len(cached), options.workers
    parts = [range(n) if options.shared else range(w, n, k) for w in range(k)]
    workers = [context.Process(target=read, args=(cached, part)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return all(worker.exitcode == 0 for worker in workers)


def by_dataloader(cached, options):
    import torch

    loader = torch.utils.data.DataLoader(
        cached, batch_size=4, num_workers=options.workers, multiprocessing_context=options.method, collate_fn=list
    )
    return all(right(sample, i) for i, sample in enumerate(sample for batch in loader for sample in batch))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("log")
    parser.add_argument("-n", type=int, default=12)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--method", default="fork")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--dataloader", action="store_true")
    parser.add_argument("--buffer", type=int, default=1 << 20)
    options = parser.parse_args()
    store = RedisStore(options.store) if "://" in options.store else LMDBStore(options.store)
    cached = Cached(Slow(options.n, options.log, options.delay), store, buffer_bytes=options.buffer)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(options.epochs):
            if options.dataloader:
                ok = by_dataloader(cached, options)
            elif options.workers:
                ok = by_processes(cached, options)
            else:
                ok = all(right(cached[i], i) for i in range(options.n))
    warned = [str(warning.message) for warning in caught]
    print(json.dumps({"ok": ok, "warned": warned, **asdict(cached.stats())}))  # and ends without closing


if __name__ == "__main__":
    main()
