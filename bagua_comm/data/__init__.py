"""Data for ranks: samplers that balance their work, and caches of samples that are slow to load.

BalancedSampler, PlainSampler, measure      the samples of each rank
Cached, Cache                               caches of samples, and of any values
MemoryStore, LMDBStore, RedisStore,         stores of cached values
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
