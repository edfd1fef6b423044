"""The tuned constants of the MPI transport, with the measurements behind them."""

NATIVE_BYTES = 1 << 16
"""If each rank receives at most this many bytes, MPI's own collectives are used; above it, the derived ones."""

MAX_COMMUNICATORS = 65_000
"""About how many communicators Open MPI can have at a time."""

PIECE_BYTES = 1 << 17
FAST_PIECE_BYTES = 1 << 20
"""Bytes that the derived collectives send to a peer at a time, on one host and on fast networks. A larger piece
is copied less often, but is sent only once its receiver is ready."""

FAST_CODED_PIECE_BYTES = 1 << 18
"""The same for encoded elements on fast networks; on one host it is `PIECE_BYTES`."""

PACED_BYTES = 3 << 14
MAX_MESSAGES_AHEAD = 12
"""On slow networks: bytes of a message, and how many more messages a rank may have sent than received
(`PacedMessages`). The table has bus bandwidths as shares of the link's, in float32, with 4 emulated hosts at 1
Gbit/s whose links let 128 KiB pass at once, medians of one run of five rounds:

                                      allreduce                alltoall
                                      512 KiB  1 MiB  8 MiB    512 KiB  1 MiB  8 MiB
    128 KiB to all others at once     0.79     0.91   0.94     0.79     0.86   0.94
    48 KiB, 9 ahead                   0.91     0.95   0.98     0.86     0.91   0.98
    48 KiB, 12 ahead                  0.91     0.95   0.98     0.90     0.93   0.98
    32 KiB, 9 ahead                   0.93     0.96   0.99     0.92     0.93   0.99

Quantized averages do not detect a fast network. At 10 Gbit/s they take a third longer in messages of 32 KiB than
in pieces of 128 KiB, and 4 % longer in messages of 48 KiB.
"""

PACED_CODED_BYTES = 15 << 12
"""`PACED_BYTES` of encoded elements, of which each message also costs two calls of the codec. A message with its
header is within the 64 KiB that TCP passes on at once. With it, averages of 8 MiB by 4 emulated hosts on two
overloaded cores took 0.87 of the time in eight bits and 0.82 in four, at 1 Gbit/s; in 80 KiB they took longer.
"""

LONG_BYTES = 8 << 20
LONG_PIECE_BYTES = 1 << 18
"""Calls on arrays larger than the first use messages of the second size, and waits sleep at once, and longer,
instead of polling first. Ranks that compute meanwhile, as in a backward pass, come to each message late and need
their cores: fewer messages cost less, and so do fewer polls. A step of ResNet-50 on 4 emulated hosts of half a
core each, at 1 Gbit/s, took 2.41 s in messages of `PACED_BYTES`, 2.34 s in messages of 128 KiB, and 2.16 s with
these settings, in one run. A message must be shorter than what Open MPI sends without asking the receiver first
(`MPI_SETTINGS`). On smaller arrays the sleeps cost more than they save: an allgather of 1 MiB loses 5 % of its
bandwidth."""

CALLS_UNCOMPARED = 1000
"""After this many calls that follow a plan, one is compared, so that ranks agree on `FAST_BYTES_S` again."""

FEW_RANKS = 64
"""Up to this number of ranks, agreement between hosts uses an all-to-all exchange instead of a tree: along a
tree, data of ranks that know the result would arrive before the messages that others still wait for."""

FAST_BYTES_S = 0.28e9
FAST_CALLS = 16
"""A network is fast if a rank has sent more than this many bytes a second, in one of this many latest large
calls. The latest call alone is a poor guide: ranks that compute meanwhile make it slow on any network. Steps of
ResNet-50 on 4 emulated hosts of half a core each, at 10 Gbit/s, took 5 % longer if it decided."""

SHOWN_BYTES = 1 << 18
"""Ranks of one host copy whole arrays to their window if all of these together have at most this many bytes."""

READ_BYTES = 1 << 15
COPIED_BYTES, PROBES_OF_COPIES = 1 << 16, 8
"""Ranks that may read each other's memory copy arrays of at most the first size to the window; larger ones they
read in place. So one copy passes between cores instead of two, which take up to four times as long where cores
share no cache. Where they share one, two copies take less time than a call of the system: half as long for 64 KiB
and 128 KiB on two cores that share 32 MiB. So ranks compare both ways at the second size, and copy up to
`SHOWN_BYTES` if that is faster. Sums for all ranks are an exception (`ALLREDUCE_LIKE`): through the window they
take less time than MPI's."""

ALLREDUCE_LIKE = "allreduce", "reduce_scatter"

SHARED_BYTES = 1 << 20
"""From this size on, ranks of one host sum encoded elements through the window."""

QUANTIZE_BYTES = 1 << 17
"""Between hosts, arrays of this size and more are averaged in eight bits however fast the links are, smaller ones
only if these are slow (`LinkSpeed`). Between ranks that share memory eight bits always take longer; there the
user decides what to send."""

ENCODED_CALL_S = 0.001
"""How much longer an average may take in eight bits than exactly, apart from the bytes: about twice as long as
below, since ranks that compute meanwhile take longer. The table has times in eight bits as shares of exact ones,
in calls between two emulated hosts, the shortest of five rounds of a run for each row:

                2 KiB   4 KiB   8 KiB   16 KiB   32 KiB   64 KiB
    10 Mbit/s   0.43    0.31    0.27    0.27     0.26     0.25
    100 Mbit/s  4.23    1.62    1.18    0.36     0.26     0.22
    300 Mbit/s  9.04    2.02    1.87    0.92     0.63     0.35
    1 Gbit/s    6.89    2.36    2.31    2.24     2.09     1.13
"""

SLOW_BYTES_S = 25e6
"""Links of more bytes per second a rank are fast. Ranks on overloaded cores measure less than a link reaches, and
should not encode small arrays for that."""

PROBE_BYTES, PROBES_OF_SPEED, PROBES_OF_LATENCY, PROBING_S = 1 << 19, 24, 4, 0.2
"""Bytes of a message by which the speed of links is measured when a world starts, and how often it is repeated at
most: the fastest counts, since ranks wait for a core at times. No more messages are sent if they take longer than
this many seconds together, or are fast. Networks let some bytes pass faster than their rate: fewer than these. By
128 KiB at a time, links of 100 Mbit/s that let as many pass seemed twice as fast on an overloaded machine."""

EAGER_BYTES = 2048
"""Without shared memory, collectives on larger arrays begin only after all ranks have agreed on the size: Open
MPI 5.0 writes a message that is longer than expected beyond the end of the receiver's array, unless it is short
enough to go eagerly."""

FRAME_BYTES = 1 << 13
"""A message between two ranks of at most so many bytes is copied behind its label. The array of a longer one
is a message of its own, which its label follows, since two copies would take longer."""

MESSAGE_BYTES = 1 << 30
"""Larger messages are split; MPI counts with 32 bits."""

BUSY_S = 0.00003
"""How long a wait polls without yielding its core."""

PROBES = 20
"""How often a rank probes for a message before it looks at the clock: about ten microseconds."""

SPIN_S = 0.0005
"""How long a wait polls without sleeping."""

SLEEPS_S = 0.00005, 0.0003
"""How long a wait then sleeps between polls, at least and at most: a tenth of the time that it has waited."""

LONG_SLEEP_S = 0.001
"""How long a sleeping wait sleeps between polls, from its beginning on: in calls on large arrays on slow
networks."""

LISTEN_S = 0.02
"""How often a waiting rank listens to notices."""

GRACE_S = 0.5
"""How long a rank still waits after the notice that another one has left, whose last messages may be on their
way."""

ROLL_CALL_S = 1.0
"""How long a rank that has timed out waits, at most, for the notices of others that wait as well."""

FAILED_RANKS_S = 3.0
"""How long a rank waits, at most, after an error of MPI, for the name of a rank that has died."""

LEAVE_QUIETLY_S = 1.0
"""How long a rank that leaves waits for the others before it sends a notice."""

TABLES = 64
"""The largest number of tables and routes that are kept, by call, shape and dtype."""

RANKS_NAMED = 8
"""How many ranks an error names one by one."""


def paced_bytes(nbytes: int, shorter: int) -> int:
    """Bytes of a message on slow networks, in a call on an array of `nbytes`; `shorter` if it is not large."""
    return LONG_PIECE_BYTES if nbytes > LONG_BYTES else shorter
