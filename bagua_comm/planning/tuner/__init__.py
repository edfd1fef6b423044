"""The tuner: searches for the bucket size, average and codec block that train fastest, while training goes on.

All ranks train a few steps with the same settings and agree on how long these took; the slowest rank's time
counts. Rank 0 decides what to try next. Steps are noisy, so the fastest few settings are measured again, in turn,
and the best of them stay.

grid        the settings to choose from
search      which of them to measure next; it knows nothing of ranks
tuner       measurements on all ranks
profile     the file of the best settings found
"""

from .grid import BLOCKS, BUCKET_BYTES, Settings, Trial
from .tuner import Tuner

__all__ = ["BLOCKS", "BUCKET_BYTES", "Settings", "Trial", "Tuner"]
