"""The network plugin beside the scheme of NCCL's sockets, on links whose flows are capped, and on others.

    python -m benchmarks.net                     # all, about five minutes; as root
    python -m benchmarks.net --only capped slow
    python -m benchmarks.net --report            # writes the table and the figure from the record again

Two emulated hosts (see netlab/), and on the link between them one class of tc's htb for each source port, so
that a flow has a rate of its own: `capped`, all alike; `free`, the link's; `slow`, four flows of which one is ten
times slower; `uneven`, rates from a quarter of the cap to all of it, so that flows overtake each other.

Schemes: `plugin`, this library's; `one flow`, the same with BAGUA_NET_FLOWS=1; `TxS`, NCCL's scheme with T
threads (NCCL_SOCKET_NTHREADS) and S sockets each (NCCL_NSOCKS_PERTHREAD), from stock_net.c; `default`, without
threads. All of them are connected at the same time, and take turns at each size, in the same two processes.

A round sends a number of bytes one way, in messages of at most 1 MiB, four of them in flight, as NCCL does in
its rings; then 8 bytes come back. The last round of each is compared byte by byte. Figures are medians.
"""
