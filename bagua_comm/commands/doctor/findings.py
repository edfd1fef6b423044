"""Conclusions from the facts and measurements of all ranks: pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ...launch.mpirun import OPEN_MPI, SEGMENT_BYTES
from ...topology import ranks_by
from ..info import NOT_INSTALLED, Facts
from .measure import Pair

FILES_PER_RANK, THREADS_PER_RANK = 4, 64
"""The needs of a rank: files for each other rank, and threads."""

CLOCK_S = 0.1
"""The largest difference between clocks that is accepted."""

SLOW = 3.0
"""A pair is reported if its bandwidth is this many times less than the median."""

MUST_BE_EQUAL = ("bagua_comm", "MPI")
"""Packages that need the same version on all ranks; versions of other packages may differ."""


Level = Literal["ok", "note", "warning", "problem"]
"""How much a finding matters."""


@dataclass(frozen=True)
class Finding:
    """The result of one check, in `what`, and the advice, in `do`."""

    level: Level
    what: str
    do: str = ""


ok, note, warning, problem = (partial(Finding, level) for level in get_args(Level))


@dataclass(frozen=True)
class World:
    """The facts and measurements of all ranks."""

    facts: list[Facts]
    """The facts of each rank."""
    together: list[int]
    """For each rank, the first rank that shares memory with it according to MPI; empty without MPI."""
    pairs: list[Pair]
    clocks: dict[int, float]
    """By rank, how many seconds the clock of its host is ahead."""

    @property
    def names(self) -> list[str]:
        """The name of each rank's host; of two machines with one name, the second is "name (2)"."""
        names: dict[object, str] = {}
        uses: Counter[str] = Counter()
        for facts in self.facts:
            machine, name = facts.get("machine", facts["host"]), facts["host"]
            if machine not in names:
                uses[name] += 1
                names[machine] = name if uses[name] == 1 else f"{name} ({uses[name]})"
        return [names[facts.get("machine", facts["host"])] for facts in self.facts]

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks on each host, by the host's name."""
        return ranks_by(self.names)

    def on(self, host: str) -> Facts:
        """Return the facts of the first rank of a host."""
        return self.facts[self.hosts[host][0]]

    @property
    def is_mixed(self) -> bool:
        """Whether ranks have different versions of this library, whose facts may differ."""
        return len({facts["versions"]["bagua_comm"] for facts in self.facts}) > 1


def examine(world: World) -> list[Finding]:
    """Return all findings."""
    if world.is_mixed:
        return list(_versions(world))
    checks = (
        _versions,
        _mpi,
        _nodes,
        _cores,
        _memory,
        _limits,
        _infiniband,
        _networks,
        _clocks,
        _speeds,
        _gpus,
        _plugin,
        _torch,
    )
    return [finding for check in checks for finding in check(world)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message.

    >>> ranks_text([0]), ranks_text([0, 1, 2, 3]), ranks_text([1, 3])
    ('rank 0', 'ranks 0-3', 'ranks 1, 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


def _versions(world: World) -> Iterator[Finding]:
    entries = {
        name: [facts["versions"].get(name, NOT_INSTALLED) for facts in world.facts]
        for name in world.facts[0]["versions"]
    }
    entries["MPI"] = [facts["MPI"].get("library", NOT_INSTALLED) for facts in world.facts]
    same = True
    for name, found in entries.items():
        if len(set(found)) > 1:
            same = False
            which = "; ".join(f"{each} on {ranks_text(ranks)}" for each, ranks in ranks_by(found).items())
            hosts = sorted(world.hosts)
            yield Finding(
                "problem" if name in MUST_BE_EQUAL else "warning",
                f"ranks have different versions of {name}: {which}",
                f"install the same on all hosts ({', '.join(hosts[:8])}), or start Python from a shared folder",
            )
    if same:
        yield ok(f"all ranks have the same versions of {', '.join(entries)}")


def _mpi(world: World) -> Iterator[Finding]:
    mpi = world.facts[0]["MPI"]
    if not mpi["running"] and len(world.facts) > 1:
        yield note("torchrun started these ranks: they use gloo, and MPI was not examined")
        return
    if not mpi["running"]:
        library = mpi.get("library", NOT_INSTALLED)
        several = "to examine several ranks: "
        if "cannot be loaded" in library or NOT_INSTALLED in library:
            several += "pip install 'bagua-comm[mpi]', or build mpi4py with the MPI of this site; then "
        several += "python -m bagua_comm run -n 4 -m bagua_comm doctor"
        yield note(f"this is a world of one rank, without MPI (library: {library})", several)
        return
    if all(facts["MPI"]["threads"] for facts in world.facts):
        yield ok("MPI has MPI_THREAD_MULTIPLE")
    else:
        yield warning(
            "MPI was started without MPI_THREAD_MULTIPLE: lanes cannot overlap, and others notice errors late",
            "import bagua_comm and connect before another library starts MPI, or use an MPI that has it",
        )
    if mpi["ulfm"]:
        yield ok("ULFM is on: ranks can continue when one dies")
    else:
        yield note(
            "ULFM is off: a rank that dies ends the job",
            "to let the others continue, with Open MPI 5: python -m bagua_comm run --ulfm (--spares and "
            "--restarts imply it), or mpirun --with-ft ulfm",
        )


def _torch(world: World) -> Iterator[Finding]:
    each = [facts.get("torch.distributed") for facts in world.facts]
    if None in each:
        return  # differing versions are reported, and without PyTorch there is nothing to say
    over = {backend["by"] for backend in each if backend is not None}
    if len(over) > 1:
        variables = sorted({name for backend in each if backend is not None for name in backend["variables"]})
        yield problem(
            "torch.distributed: some ranks would be connected by MPI, and others by environment variables",
            f"set {', '.join(variables)} on all ranks, or on none",
        )
    elif len(each) > 1:
        yield ok(f'torch.distributed: init_process_group("bagua") works over {over.pop()}')


def _nodes(world: World) -> Iterator[Finding]:
    for host, ranks in world.hosts.items():
        if world.together and len({world.together[rank] for rank in ranks}) > 1:
            yield warning(
                f"{ranks_text(ranks)} run on {host}, but MPI treats them as ranks of several hosts, and sends "
                "messages between them over the network",
                "start them with one mpirun, or with python -m bagua_comm run; under srun, give the node the "
                "host's own name in slurm.conf",
            )


def _cores(world: World) -> Iterator[Finding]:
    tight = False
    for host, ranks in world.hosts.items():
        cores = {core for rank in ranks for core in world.facts[rank]["cores"]}
        if len(cores) < len(ranks):
            tight = True
            yield warning(
                f"{len(ranks)} ranks share {len(cores)} cores of {host}: a rank that waits delays others",
                "start fewer; or with Open MPI add --mca mpi_yield_when_idle 1, as python -m bagua_comm run does",
            )
        elif bound := [rank for rank in ranks if len(world.facts[rank]["cores"]) == 1 < len(cores)]:
            tight = True
            yield warning(
                f"{ranks_text(bound)} on {host} are bound to one core each: a rank's lane shares it with its "
                "computation",
                "mpirun --bind-to none (Open MPI) or srun --cpu-bind=none; or more cores: --map-by slot:PE=2",
            )
        threads = world.on(host)["OMP_NUM_THREADS"]
        if threads is None and len(ranks) > 1:
            yield warning(
                f"OMP_NUM_THREADS is not set on {host}: each of {len(ranks)} ranks may use all cores at once",
                f"OMP_NUM_THREADS={max(1, len(cores) // len(ranks))}; python -m bagua_comm run sets it",
            )
    if not tight:
        yield ok("each rank has a core")


def _memory(world: World) -> Iterator[Finding]:
    mpi = world.facts[0]["MPI"]
    shared = {host: ranks for host, ranks in world.hosts.items() if len(ranks) > 1}
    if not shared or not mpi["running"] or not mpi["library"].startswith(OPEN_MPI):
        return  # other libraries map memory as they need it, and gloo needs none
    enough = True
    for host, ranks in shared.items():
        memory, needed = world.on(host)["shared memory"], len(ranks) * SEGMENT_BYTES
        if memory is None or memory["free"] < needed:
            enough = False
            free = "does not exist" if memory is None else f"has {memory['free'] >> 20} MiB free"
            yield problem(
                f"/dev/shm of {host} {free}, and Open MPI needs {needed >> 20} MiB for {ranks_text(ranks)}",
                "remove old files there; in a container: docker run --shm-size=1g, or in Kubernetes an emptyDir "
                "of medium Memory at /dev/shm",
            )
    if enough:
        yield ok("/dev/shm has space for all ranks")


def _limits(world: World) -> Iterator[Finding]:
    fine = True
    for host, ranks in world.hosts.items():
        facts = world.on(host)
        limits = facts["limits"]
        wanted = {"nofile": 64 + FILES_PER_RANK * len(world.facts), "nproc": THREADS_PER_RANK * len(ranks)}
        why = {"nofile": "files and connections of a rank", "nproc": "processes and threads of a user"}
        for name, least in wanted.items():
            if limits[name] is not None and limits[name] < least:
                fine = False
                flag = "-n" if name == "nofile" else "-u"
                yield warning(
                    f"ulimit {name} on {host} is {limits[name]} ({why[name]}); {len(world.facts)} ranks may need "
                    f"{least}",
                    f"ulimit {flag} {least}, or {name} in /etc/security/limits.conf",
                )
        if facts["InfiniBand"] and limits["memlock"] is not None:
            fine = False
            yield problem(
                f"ulimit memlock on {host} is {limits['memlock'] >> 10} KiB, and InfiniBand "
                f"({', '.join(facts['InfiniBand'])}) needs to lock memory",
                "ulimit -l unlimited, memlock in /etc/security/limits.conf, or LimitMEMLOCK=infinity of slurmd",
            )
    if fine:
        yield ok("limits of files, processes and locked memory are high enough")


def _infiniband(world: World) -> Iterator[Finding]:
    hosts: dict[tuple[str, str | None], list[str]] = {}
    for host in world.hosts:
        facts = world.on(host)
        devices = ", ".join(f"{name} ({ports})" for name, ports in facts["InfiniBand"].items())
        if devices:
            hosts.setdefault((devices, facts["MPI"].get("InfiniBand")), []).append(host)
    for (devices, unused), names in hosts.items():
        if unused:
            yield Finding(
                "warning" if len(world.hosts) > 1 else "note",
                f"{', '.join(names[:8])}: {unused}",
                "load the MPI of the site, or install libibverbs: docs/clusters/hpc.md",
            )
        else:
            yield note(f"{', '.join(names[:8])}: InfiniBand or RoCE by {devices}")


def _networks(world: World) -> Iterator[Finding]:
    hosts = world.hosts
    if len(hosts) == 1:
        return
    found = {host: world.on(host)["interfaces"] for host in hosts}
    holders: dict[str, list[str]] = {}
    for host, interfaces in found.items():
        for name, facts in interfaces.items():
            holders.setdefault(facts["address"], []).append(f"{name} of {host}")
    twice = {address: names for address, names in holders.items() if len(names) > 1}
    own = [{name for name, facts in each.items() if facts["address"] not in twice} for each in found.values()]
    common = sorted(set.intersection(*own))
    chosen = world.facts[0]["MPI"].get("network chosen")
    choose = f"choose the network: python -m bagua_comm run --interface {next(iter(common), 'NAME')}"
    if twice and not chosen:
        which = "; ".join(f"{address} ({', '.join(names[:3])})" for address, names in twice.items())
        yield warning(
            f"hosts have the same address, as bridges of containers do: {which}; a connection to it stays "
            "on the host",
            choose,
        )
    elif not chosen and any(len(interfaces) > 1 for interfaces in found.values()):
        example = next(f"{host}: {', '.join(names)}" for host, names in found.items() if len(names) > 1)
        yield note(f"hosts have several networks ({example}), and MPI may use all of them", choose)
    if chosen:
        yield ok(f"ranks use the network that was chosen, {chosen}")
    elif common:
        yield ok(f"all hosts have {', '.join(common)}")
    else:
        each_host = "; ".join(f"{host}: {', '.join(names) or 'none'}" for host, names in list(found.items())[:8])
        yield warning(
            f"no interface has the same name on all hosts ({each_host})",
            "name a network: --mca btl_tcp_if_include 10.0.0.0/8; NCCL and gloo need a name on each host",
        )


def _clocks(world: World) -> Iterator[Finding]:
    if len(world.clocks) < 2:
        return
    names = world.names
    ahead = {names[rank]: value for rank, value in world.clocks.items()}
    apart = max(ahead.values()) - min(ahead.values())
    if apart <= CLOCK_S:
        yield ok(f"the clocks of all hosts agree within {apart * 1e3:.1f} ms")
        return
    first, last = min(ahead, key=ahead.__getitem__), max(ahead, key=ahead.__getitem__)
    yield warning(
        f"the clock of {last} is {apart:.1f} s ahead of that of {first}: times in logs cannot be compared, and "
        "caches may mistake new files for old ones",
        "start a time service (chrony, systemd-timesyncd) on all hosts",
    )


def _speeds(world: World) -> Iterator[Finding]:
    names = world.names
    for kind in ("on one host", "between hosts"):
        is_same = kind == "on one host"
        pairs = [pair for pair in world.pairs if (names[pair.a] == names[pair.b]) is is_same]
        if not pairs:
            continue
        latency = statistics.median(pair.latency_s for pair in pairs)
        speed = statistics.median(pair.bytes_per_s for pair in pairs)
        slow = [pair for pair in pairs if pair.bytes_per_s < speed / SLOW] if len(pairs) > 2 else []
        for pair in slow[:8]:
            yield warning(
                f"{_located(world, pair.a)} and {_located(world, pair.b)} reach "
                f"{pair.bytes_per_s / 1e9:.3g} GB/s, where the median {kind} is {speed / 1e9:.3g}",
                "check the links of their hosts (ethtool), and whether another job runs there"
                if kind == "between hosts"
                else "check whether another job runs there (top)",
            )
        yield ok(f"{kind}: {latency * 1e6:.3g} us and {speed / 1e9:.3g} GB/s (medians of pairs)")


def _located(world: World, rank: int) -> str:
    return f"rank {rank} on {world.names[rank]}"


def _gpus(world: World) -> Iterator[Finding]:
    if not any(facts["gpu"]["driver"] or facts["gpu"]["count"] for facts in world.facts):
        yield note("no host has an NVIDIA driver: arrays are in host memory")
        return
    before = True
    for host in world.hosts:
        gpu = world.on(host)["gpu"]
        if not gpu["count"]:
            before = False
            yield warning(f"{host} has no usable GPU: {gpu.get('CUDA', 'there is no driver')}")
    obstacle = world.facts[0]["gpu"].get("obstacle")
    if obstacle:
        yield warning(f"device arrays go through host memory, since {obstacle}", "start one rank for each GPU")
    elif before:
        yield ok("each rank has a GPU, and NCCL can be used")


def _plugin(world: World) -> Iterator[Finding]:
    plugins = {host: world.on(host)["plugin"] for host in world.hosts}
    chosen = [each["net"] for each in plugins.values() if each["net"]]
    if len(plugins) == 1 or not (chosen or any(facts["gpu"]["count"] for facts in world.facts)):
        if chosen:
            yield note(f"BAGUA_NET={chosen[0]} has no effect: on one host, NCCL uses shared memory")
        return
    sources = sorted({each["source"] for each in plugins.values()})
    if len(sources) > 1:
        yield Finding(
            "problem" if chosen else "warning",
            f"hosts have different sources of NCCL's network plugin: {', '.join(sources)}",
            "install the same version of bagua_comm on all hosts",
        )
    for host, each in plugins.items():
        if not each["built"] and each["compilers"].startswith("none"):
            yield Finding(
                "problem" if "bagua" in chosen else "note",
                f"{host} cannot build NCCL's network plugin, since it has no C compiler",
                "apt install gcc libc6-dev, or pip install ziglang",
            )
        if each["kept away by"] != "nothing":
            yield Finding(
                "problem" if "bagua" in chosen else "note",
                f"on {host}, NCCL would not use the network plugin: {each['kept away by']}",
                "unset these variables, and start by run --net bagua, which sets them on all ranks",
            )
    if all(each["built"] for each in plugins.values()):
        yield ok(f"all hosts have NCCL's network plugin (source {sources[0]}); run --net bagua uses it")
