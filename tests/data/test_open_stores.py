"""Stores that others can write to, and stores that are taken for each other."""

import os
import socket

import pytest

from bagua_comm import ArrayError
from bagua_comm.data import Cache, LMDBStore, MemoryStore, RedisStore, ShardedStore


def by_pickle(store):
    with store, Cache(store, form="pickle") as cache:
        return cache.get("key", lambda key: {1, 2})


def test_a_folder_of_ones_own_holds_pickles(tmp_path):
    assert by_pickle(LMDBStore(tmp_path / "mine")) == {1, 2}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("what", ["", "data.mdb"])
def test_pickles_of_a_folder_that_others_can_write_to_are_not_run(tmp_path, mode, what):
    folder = tmp_path / "open"
    LMDBStore(folder).close()
    (folder / what).chmod(mode)
    store = LMDBStore(folder)
    with pytest.raises(ArrayError, match=r'form="pickle" runs code.*others can write to it.*chmod.*"tree"'):
        by_pickle(store)
    with pytest.raises(ArrayError, match='form="pickle" runs code'):
        by_pickle(ShardedStore([MemoryStore(), store]))
    with Cache(LMDBStore(folder)) as cache:  # arrays and numbers are data
        assert cache.get("key", len) == 3


def test_pickles_of_another_users_folder_are_not_run(tmp_path, monkeypatch):
    store = LMDBStore(tmp_path)
    tmp_path.chmod(0o700)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ArrayError, match="belongs to another user"):
        by_pickle(store)


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("redis://host:1/0", True),
        ("redis://name@host:1/0", True),
        ("rediss://host:1/0", True),
        ("redis://:word@host:1/0", False),
        ("redis://host:1/0?password=word", False),
        ("rediss://host:1/0?ssl_certfile=mine.pem", False),
    ],
)
def test_pickles_of_a_server_without_a_password_are_not_run(url, is_open):
    for store in (RedisStore(url), RedisStore(["redis://:word@other:1/0", url])):
        assert (store.open_to_others() is not None) == is_open
    if is_open:
        with pytest.raises(ArrayError, match=r"whoever reaches redis:host:1/0 can write.*give the server one"):
            Cache(store, form="pickle")


def test_a_socket_that_only_this_user_may_open_needs_no_password(tmp_path):
    path = tmp_path / "socket"
    store = RedisStore(f"unix://{path}")
    assert store.open_to_others() is not None  # there is none yet
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o700)
        assert store.open_to_others() is None
        path.chmod(0o777)
        assert "can write there" in store.open_to_others()


@pytest.mark.parametrize(
    "urls",
    [
        ["redis://host/0", "redis://host/1"],
        ["redis://host?db=0", "redis://host?db=1"],
        ["unix:///a/socket?db=0", "unix:///a/socket?db=1"],
        ["unix:///a/socket", "unix:///b/socket"],
        ["redis:///0?host=a", "redis:///0?host=b"],
    ],
)
def test_two_databases_of_one_server_are_two_stores(urls):
    one, two = map(RedisStore, urls)
    assert one.identity != two.identity
    assert len(RedisStore(urls).names) == 2


def test_a_store_has_one_name_whatever_its_password_and_its_limits_are():
    names = {
        RedisStore(f"redis://{user}host:6379/2{query}").identity
        for user, query in [("", ""), (":word@", ""), ("me:word@", ""), ("", "?password=word&socket_timeout=3")]
    }
    assert names == {"redis:host:6379/2"}  # changed, keys of several servers would be looked for in other ones
