"""Data for ranks: samplers that balance their work, and caches of samples that are slow to make.

BalancedSampler, PlainSampler, measure      which samples each rank takes
Cached, Cache                               samples, and any values, that are loaded once
MemoryStore, LMDBStore, RedisStore,         where these are kept
ShardedStore, local_redis
"""

from .balanced import BalancedSampler
from .cache import Cache, Cached
from .counters import Stats
from .lmdb_store import LMDBStore
from .measure import measure
from .redis_server import local_redis
from .redis_store import RedisStore
from .sampler import PlainSampler, Sampler
from .stores import MemoryStore, ShardedStore, Store

__all__ = [
    "BalancedSampler",
    "Cache",
    "Cached",
    "LMDBStore",
    "MemoryStore",
    "PlainSampler",
    "RedisStore",
    "Sampler",
    "ShardedStore",
    "Stats",
    "Store",
    "local_redis",
    "measure",
]
