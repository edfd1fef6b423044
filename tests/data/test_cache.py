"""Caches in one process: what is found, what is loaded, and how they go on when a store fails."""

import gc
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bagua_comm import ArrayError, UnsupportedError
from bagua_comm.data import Cache, Cached, LMDBStore, MemoryStore, RedisStore, ShardedStore, local_redis
from bagua_comm.errors import StoreError

pytestmark = pytest.mark.needs("lmdb", "msgpack", "redis", "xxhash")


class Counted:
    """A data set that counts how often each sample was loaded."""

    def __init__(self, n=20):
        self.n, self.loads = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        self.loads.append(index)
        return np.full(3, index), f"label {index}"


class Failing(MemoryStore):
    """A store that can be made to fail."""

    def __init__(self):
        super().__init__()
        self.reads_fail = self.writes_fail = False
        self.calls = 0

    def get_many(self, keys):
        self.calls += 1
        if self.reads_fail:
            raise StoreError("no connection")
        return super().get_many(keys)

    def set_many(self, items):
        self.calls += 1
        if self.writes_fail:
            raise StoreError("no space")
        super().set_many(items)


@dataclass
class Unhashable(Failing):
    """A store with an equality of its own, and so without a hash."""

    size: int = 0

    def __post_init__(self):
        super().__init__()


def two_epochs(cached):
    for _ in range(2):
        list(cached)
        cached.flush()


def same(a, b):
    return np.array_equal(a[0], b[0]) and a[1] == b[1]


@pytest.mark.parametrize("kind", ["memory", "lmdb", "redis"])
def test_the_second_epoch_loads_nothing(kind, tmp_path):
    def epochs(store):
        data = Counted()
        with Cached(data, store, name="digits") as cached:
            for _ in range(2):
                assert all(same(sample, Counted()[i]) for i, sample in enumerate(cached))
            stats = cached.stats()
        assert data.loads == list(range(20))
        assert (stats.hits, stats.misses) == (20, 20)
        assert stats.errors == stats.damaged == stats.bypassed == stats.unwritten == 0
        assert cached.stats().written_bytes > 20 * 24
        again = Cached(data, store, name="digits")
        assert same(again[7], Counted()[7])
        assert len(data.loads) == 20

    if kind == "redis":
        with local_redis() as url, RedisStore(url) as store:
            epochs(store)
    else:
        with MemoryStore() if kind == "memory" else LMDBStore(tmp_path) as store:
            epochs(store)


def test_none_is_kept():
    calls = []
    cache = Cache(MemoryStore())
    for _ in range(3):
        assert cache.get("a", calls.append) is None
    assert calls == ["a"]


def test_data_sets_share_a_store_by_name():
    store = MemoryStore()
    with Cached([1, 2], store, name="a") as a, Cached([3, 4], store, name="b") as b:
        assert (a[0], b[0]) == (1, 3)
    with Cached(None, store, name="a") as a, Cached(None, store, name="b") as b:
        assert (a[0], b[0]) == (1, 3)
    assert store.count() == 2


def test_data_sets_of_two_lengths_need_two_names(tmp_path):
    """A set for training and one for validation would be given each other's samples."""
    with LMDBStore(tmp_path) as store, LMDBStore(tmp_path) as again:
        train = Cached([1, 2, 3], store)
        with pytest.raises(ArrayError, match=r'of 3 under the name .*this one has 2; give .*name="train"'):
            Cached([4, 5], again)
        assert Cached([4, 5], store, name="validation")[0] == 4
        assert Cached([1, 2, 3], again)[0] == train[0] == 1
        assert Cached([4, 5], MemoryStore())[0] == 4


def test_keys_of_other_types_and_names_never_collide():
    cache = Cache(MemoryStore())
    keys = [1, -1, "1", b"1", "i1", "", b"", 1 << 100, "x" * 1000, "x" * 1001, "\udcff"]
    for number, key in enumerate(keys):
        cache.put(key, number)
    assert [cache.peek(key) for key in keys] == list(range(len(keys)))
    assert cache.peek(np.int64(1)) == cache.peek(True) == 0
    parts = [("a", "b"), ("ab", ""), ("", "ab")]
    assert len({Cache(MemoryStore(), name=name).key(key) for name, key in parts}) == 3
    for wrong in (1.5, None, (1, 2), slice(3)):
        with pytest.raises(UnsupportedError, match="expected an int, str or bytes"):
            cache.get(wrong, str)
        with pytest.raises(UnsupportedError, match="expected an int, str or bytes"):
            Cached([1], MemoryStore())[wrong]


def test_a_batch_is_one_request_and_repeated_samples_are_different_objects():
    store, data = Failing(), Counted()
    cached = Cached(data, store)
    for _ in range(2):
        batch = cached.__getitems__([3, 5, 3, -1])
        assert [int(sample[0][0]) for sample in batch] == [3, 5, 3, 19]
        assert batch[0][0] is not batch[2][0]
        cached.flush()
    assert data.loads == [3, 5, 19]
    assert store.calls == 4  # two looks and a write, then one look
    stats = cached.stats()
    assert (stats.hits, stats.misses) == (5, 3)
    batch[0][0][:] = 7  # the value belongs to the caller
    assert same(cached[3], data[3])


def test_errors_of_the_data_set_come_through_and_nothing_stays_locked():
    data = Counted(3)
    cached = Cached(data, MemoryStore(), wait_s=0)
    for _ in range(2):
        with pytest.raises(IndexError, match="5"):
            cached.__getitems__([0, 5, 1])
    assert data.loads == [0]
    assert cached.stats().timeouts == 0
    assert [int(sample[0][0]) for sample in cached] == [0, 1, 2]


@pytest.mark.needs("torch")
def test_the_samples_of_a_data_set_of_tensors_go_through_a_loader():
    dataset = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10))
    cached = Cached(dataset, MemoryStore())
    for _ in range(2):
        loaders = [torch.utils.data.DataLoader(each, batch_size=4) for each in (cached, dataset)]
        for (x, y), (expected_x, expected_y) in zip(*loaders, strict=True):
            assert torch.equal(x, expected_x)
            assert torch.equal(y, expected_y)
    assert (cached.stats().misses, cached.stats().hits) == (10, 10)


def test_a_sample_that_cannot_be_kept_says_where():
    cached = Cached([{"x": torch.zeros(1, requires_grad=True)}], MemoryStore())
    with pytest.raises(UnsupportedError, match=r"\['x'\] is a tensor that requires a gradient"):
        cached[0]
    by_pickle = Cached([{"x": torch.zeros(1)}], MemoryStore(), form="pickle")
    assert torch.equal(by_pickle[0]["x"], by_pickle[0]["x"])
    assert by_pickle.stats().hits == 1


def test_a_damaged_value_is_loaded_again_counted_and_mended(tmp_path):
    store, data = LMDBStore(tmp_path), Counted()
    with Cached(data, store) as cached:
        expected = list(cached)
    keys = [cached.cache.key(i) for i in range(3)]
    whole = store.get_many(keys)
    store.set_many({keys[0]: whole[0][:-1], keys[1]: whole[2], keys[2]: b""})
    cached = Cached(data, store)
    with pytest.warns(RuntimeWarning, match="a value is damaged, and loaded anew") as caught:
        assert all(same(a, b) for a, b in zip(cached, expected, strict=True))
    assert len(caught) == 1
    cached.close()
    assert (cached.stats().damaged, cached.stats().misses, cached.stats().hits) == (3, 3, 17)
    assert store.get_many(keys) == whole


def test_a_store_that_cannot_be_read_is_reported_once_bypassed_and_tried_again():
    store, data = Failing(), Counted()
    cached = Cached(data, store, retry_s=1e6)
    store.reads_fail = store.writes_fail = True
    with pytest.warns(RuntimeWarning) as caught:
        two_epochs(cached)
    assert sorted(str(warning.message)[:28] for warning in caught) == [
        "cache: a store fails to read",
        "cache: a store fails to writ",
    ]
    assert store.calls == 2
    stats = cached.stats()
    assert (stats.errors, stats.misses, stats.unwritten, stats.hits) == (2, 40, 40, 0)
    assert stats.bypassed > 40
    store.reads_fail = store.writes_fail = False
    cached = Cached(data, store, retry_s=0)
    store.reads_fail = store.writes_fail = True
    with pytest.warns(RuntimeWarning, match="fails to read"):
        cached[0]
    store.reads_fail = store.writes_fail = False
    cached[0], cached[0]
    cached.flush()
    assert store.count() == 1
    assert cached.stats().bypassed == 0


def test_a_full_store_is_still_read():
    store, data = MemoryStore(capacity_bytes=1000), Counted()
    full = pytest.warns(RuntimeWarning, match="fails to write.*full")
    with Cached(data, store, buffer_bytes=0) as cached, full:
        list(cached)
    kept = store.count()
    assert 0 < kept < 20
    loads = len(data.loads)
    list(cached)
    assert len(data.loads) == loads + 20 - kept
    assert cached.stats().hits == kept


def test_one_lost_shard_takes_only_its_own_samples_away():
    good, bad = MemoryStore(), Failing()
    data = Counted(100)
    with Cached(data, ShardedStore([good, bad])) as cached:
        list(cached)
    bad.reads_fail = True
    data.loads.clear()
    with pytest.warns(RuntimeWarning, match="fails to read") as caught:
        assert all(same(sample, Counted(100)[i]) for i, sample in enumerate(cached))
    assert len(caught) == 1
    assert len(data.loads) == bad.count()
    assert good.count() + bad.count() == 100
    assert 30 < bad.count() < 70


def test_a_store_need_not_be_hashable():
    for store in (Unhashable(), ShardedStore([Unhashable(), Unhashable()])):
        with Cached(Counted(), store) as cached:
            two_epochs(cached)
            assert (cached.stats().hits, cached.stats().misses) == (20, 20)
    good, bad = Unhashable(), Unhashable()
    bad.writes_fail = True
    with Cached(Counted(), good) as one, Cached(Counted(3), bad) as other:  # equal, but two stores
        with pytest.warns(RuntimeWarning, match="fails to write"):
            two_epochs(other)
        two_epochs(one)
        assert (one.stats().errors, one.stats().hits) == (0, 20)


def test_a_store_of_several_that_names_no_part_is_told_what_to_return():
    class Parts(MemoryStore):
        def leaf_of(self, key):
            return 0

    with pytest.raises(ArrayError, match="Parts: leaf_of returned 0, expected a Store"):
        Cache(Parts()).get("a", str.upper)


def test_a_server_killed_in_mid_epoch_is_done_without():
    data = Counted(40)
    with local_redis() as url:
        cached = Cached(data, RedisStore(url, timeout_s=1), buffer_bytes=0)
        assert all(same(cached[i], Counted(40)[i]) for i in [*range(20), *range(20)])
    with pytest.warns(RuntimeWarning, match="a store fails to") as caught:
        assert all(same(cached[i], Counted(40)[i]) for i in range(40))
    stats = cached.stats()
    assert (stats.hits, stats.misses, stats.errors, stats.unwritten) == (20, 60, 2, 40)
    assert len(caught) == 2


def test_buffers_are_written_when_full_at_close_and_when_a_cache_is_forgotten():
    store = Failing()
    cached = Cached(Counted(), store, buffer_bytes=500)
    cached[0]
    assert store.count() == 0
    for i in range(15):
        cached[i]
    assert store.count() > 0
    before = store.count()
    cached.close()
    assert store.count() == 15 > before
    cached[16]  # a closed cache continues
    del cached
    gc.collect()
    assert store.count() == 16


def test_threads_that_ask_for_one_sample_load_it_once():
    loads, begun, go = [], threading.Event(), threading.Event()

    def load(key):
        loads.append(key)
        begun.set()
        assert go.wait(60)
        return key

    cache = Cache(MemoryStore())
    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.get("a", load))) for _ in range(4)]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert found == ["a"] * 4
    assert loads == ["a"]
    assert cache.stats().hits == 3


def test_a_process_that_loads_too_long_is_not_waited_for():
    begun, go = threading.Event(), threading.Event()

    def slow(key):
        begun.set()
        assert go.wait(60)
        return key

    cache = Cache(MemoryStore(), wait_s=0.05)
    thread = threading.Thread(target=cache.get, args=("a", slow))
    thread.start()
    assert begun.wait(60)
    with pytest.warns(RuntimeWarning, match="loaded one sample for 0.05 s"):
        assert cache.get("a", str.upper) == "A"
    go.set()
    thread.join(60)
    assert cache.stats().timeouts == 1


def test_loading_one_sample_may_need_another_of_the_same_batch():
    cache = Cache(MemoryStore(), wait_s=0)

    def load(key):
        return key + (cache.get(key - 1, load) if key else 0)

    assert cache.get_many([3, 2, 1], load) == [6, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store": "path"}, "store is 'path', expected a Store"),
        ({"form": "json"}, 'form is \'json\', expected "tree" or "pickle"'),
        ({"buffer_bytes": -1}, "buffer_bytes is -1"),
        ({"wait_s": None}, "wait_s is None"),
        ({"retry_s": float("nan")}, "retry_s is nan"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ArrayError, match=message):
        Cache(**{"store": MemoryStore(), **arguments})


def test_the_settings_of_a_cache_can_be_read_and_set_before_its_first_use():
    store = MemoryStore()
    cache = Cache(store, name="a", form="pickle", buffer_bytes=5, wait_s=6.0, retry_s=7.0)
    assert (cache.store, cache.name, cache.form) == (store, "a", "pickle")
    assert (cache.buffer_bytes, cache.wait_s, cache.retry_s) == (5, 6.0, 7.0)
    cache.buffer_bytes = 0
    cache.put("a", 1)
    assert store.count() == 1


def test_a_missing_library_names_the_extra(monkeypatch):
    import sys

    for name in ("xxhash", "msgpack", "redis", "lmdb"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=r"bagua-comm\[data\]"):
                {
                    "xxhash": lambda: Cache(MemoryStore()),
                    "msgpack": lambda: Cache(MemoryStore()).put(1, 1),
                    "redis": lambda: RedisStore("redis://x"),
                    "lmdb": lambda: LMDBStore("/tmp/never-opened"),
                }[name]()


def test_a_host_without_locks_says_so_and_continues(monkeypatch):
    from bagua_comm.data import worker

    def fail(path):
        raise OSError("no locks available")

    monkeypatch.setattr(worker, "locks_in", fail)
    cache = Cache(MemoryStore())
    with pytest.warns(RuntimeWarning, match="more than once: no locks available"):
        assert cache.get("a", str.upper) == "A"
    with warnings.catch_warnings():
        assert cache.get("a", str.lower) == "A"
