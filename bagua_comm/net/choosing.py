"""Choice of NCCL's network, this library's plugin or NCCL's own, before NCCL starts.

NCCL reads its variables when its first communicator is made. If a plugin cannot be loaded, NCCL silently uses
sockets; if only some ranks have one, it hangs. So ranks exchange what they have (`look`), and each makes the same
decision (`decide`). NCCL_NET=bagua then turns the silent fallback into an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from ..errors import BootstrapError
from ..system import infiniband
from .building import NAME, build, source_hash

Net: TypeAlias = Literal["bagua", "auto", "nccl"]
"""The network of NCCL between hosts; see `connect`."""

VARIABLE = "BAGUA_NET"
"""The variable by which `run --net` passes the choice to ranks."""

PLUGIN, NETWORK = "NCCL_NET_PLUGIN", "NCCL_NET"
"""NCCL's variables: the plugin to load, and the network that must be used."""

ALIKE = ("BAGUA_NET_FLOWS", "BAGUA_NET_CHUNK", "BAGUA_NET_TIMEOUT_S")
"""Settings of the plugin that must be equal on all ranks."""

ONE_HOST = "all ranks are on one host, where NCCL uses shared memory"

NO_PLUGIN = "none"
"""The value of NCCL_NET_PLUGIN for no plugin."""


class Facts(NamedTuple):
    """The facts that a rank sends to the others."""

    host: str
    """The host name for NCCL."""
    source: str = ""
    """The hash of the plugin's source; empty if the plugin is not wanted."""
    library: str = ""
    """The path of the plugin; empty if it could not be built."""
    problem: str = ""
    """Why it could not be built."""
    variables: Mapping[str, str] = {}
    """The variables of NCCL and of the plugin that are set."""
    started: Mapping[str, str | None] | None = None
    """The variables with which NCCL was started in this process; None before."""
    infiniband: bool = False


class Decision(NamedTuple):
    """The decision for a rank."""

    variables: dict[str, str | None]
    """The variables to set, or to remove for None."""
    why: str


def asked_for(given: str | None) -> str | None:
    """The choice of the program, or of `run --net`; None without one."""
    return given or os.environ.get(VARIABLE) or None


def agree(choices: Sequence[str | None]) -> str | None:
    """The choice of all ranks.

    Raises:
        BootstrapError: They differ, or the choice is unknown.
    """
    if len(set(choices)) > 1:
        which = ", ".join(f"{choice!r} on rank {choices.index(choice)}" for choice in dict.fromkeys(choices))
        raise BootstrapError(f"connect: net (or {VARIABLE}) differs between ranks: {which}; give all the same")
    if choices[0] not in (None, *get_args(Net)):
        known = ", ".join(map(repr, get_args(Net)))
        raise BootstrapError(f"connect: net (or {VARIABLE}) is {choices[0]!r}, expected one of {known}, or None")
    return choices[0]


def look(choice: str, host: str, started: Mapping[str, str | None] | None, *, several_hosts: bool) -> Facts:
    """Collect the facts of this rank. Builds the plugin if it may be needed, which takes seconds once.

    Never raises: a problem is part of the facts, and `decide` raises it on all ranks.
    """
    names = (PLUGIN, NETWORK, *ALIKE)
    variables = {name: os.environ[name] for name in names if name in os.environ}
    facts = Facts(host, variables=variables, started=started)
    if choice == "nccl" or (choice == "auto" and not several_hosts):
        return facts
    try:
        return facts._replace(infiniband=bool(infiniband.devices()), source=source_hash(), library=str(build()))
    except Exception as exc:  # any error: the other ranks wait for an answer
        return facts._replace(problem=str(exc) or type(exc).__name__)


def decide(choice: str, everyone: Sequence[Facts], rank: int) -> Decision:
    """The decision for this rank; the same on all ranks, except for the path of the plugin.

    Raises:
        BootstrapError: The ranks cannot use the chosen network; raised on all ranks; it names the rank at fault.
    """
    wanted: list[dict[str, str | None]]
    if choice == "nccl":
        wanted = [{PLUGIN: NO_PLUGIN, NETWORK: None} for _ in everyone]
    else:
        obstacle = next(_obstacles(choice, everyone), None)
        if obstacle is not None and choice == "auto":
            return Decision({}, f"NCCL's own, since {obstacle}")
        if obstacle is not None:
            raise BootstrapError(f"connect: net: {obstacle}")
        wanted = [{PLUGIN: facts.library, NETWORK: NAME} for facts in everyone]
    for number, (facts, variables) in enumerate(zip(everyone, wanted, strict=True)):
        _check_free(f"connect: net is {choice!r}, but rank {number} on {facts.host}", facts, variables)
    if choice == "nccl":
        return Decision(wanted[rank], "NCCL's own network, without a plugin")
    no_effect = f", without effect: {ONE_HOST}" if _are_on_one_host(everyone) else ""
    return Decision(
        wanted[rank], f"the plugin {everyone[rank].library} (source {everyone[rank].source}){no_effect}"
    )


def apply(decision: Decision) -> None:
    """Set the variables of a decision."""
    for name, value in decision.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def current() -> dict[str, str | None]:
    """The current values of NCCL's variables."""
    return {name: os.environ.get(name) for name in (PLUGIN, NETWORK)}


def breaks(variables: Mapping[str, str]) -> list[str]:
    """The setting among these variables that keeps NCCL from using the plugin, or makes it fall back silently."""
    found = [f"{PLUGIN}={variables[PLUGIN]} names another plugin"] if _is_foreign(variables, PLUGIN) else []
    if variables.get(PLUGIN) == NO_PLUGIN:
        found = [f"{PLUGIN}={NO_PLUGIN}: NCCL loads no plugin"]
    if variables.get(NETWORK, NAME).lower() != NAME:
        found.append(f"{NETWORK}={variables[NETWORK]}: NCCL uses that network")
    if _is_ours(variables.get(PLUGIN, "")) and NETWORK not in variables:
        found.append(f"{NETWORK} is not set: where the plugin fails, NCCL takes sockets without a word")
    return found


def _are_on_one_host(everyone: Sequence[Facts]) -> bool:
    return len({facts.host for facts in everyone}) == 1


def _obstacles(choice: str, everyone: Sequence[Facts]) -> Iterator[str]:
    """Why ranks cannot use the plugin, or, for "auto", should not."""
    first, is_auto = everyone[0], choice == "auto"
    if is_auto and _are_on_one_host(everyone):
        yield ONE_HOST
    for rank, facts in enumerate(everyone):
        who = f"rank {rank} on {facts.host}"
        if not facts.library:
            yield f"{who} has no plugin: {facts.problem}"
        if is_auto and facts.infiniband:
            yield f"{who} has InfiniBand, which needs no flows of TCP"
        chosen = [facts.variables.get(name) for name in (PLUGIN, NETWORK)]
        if is_auto and chosen not in ([None, None], [facts.library, NAME]):
            yield f"{who} has {_shown(facts.variables)} set"
        if facts.source != first.source:
            yield (
                f"{who} has another plugin (source {facts.source}) than rank 0 on {first.host} "
                f"({first.source}); install the same version of bagua_comm on all hosts"
            )
        for name in ALIKE:
            here, there = (each.variables.get(name) for each in (facts, first))
            if here != there:
                yield (
                    f"{name} is {here} on {who}, and {there} on rank 0 on {first.host} (None: not set); set the "
                    "same on all ranks"
                )


def _check_free(who: str, facts: Facts, wanted: Mapping[str, str | None]) -> None:
    """Check that the user has set nothing else, and that NCCL was not started with other values."""
    for name in (PLUGIN, NETWORK):
        found = facts.variables.get(name)
        if found not in (None, wanted[name]) and _is_foreign(facts.variables, name):
            raise BootstrapError(f"{who} has {name}={found}, which asks for another; unset it, or leave net out")
    if facts.started is not None and dict(facts.started) != dict(wanted):
        raise BootstrapError(
            f"{who} has started NCCL with {_shown(facts.started)}; NCCL reads them once, so give the same net in "
            "each connect of a process"
        )


def _is_foreign(variables: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to a value that `apply` does not set."""
    value = variables.get(name)
    if value is None:
        return False
    return value != NAME if name == NETWORK else value != NO_PLUGIN and not _is_ours(value)


def _is_ours(plugin: str) -> bool:
    return Path(plugin).name.startswith(f"libnccl-net-{NAME}-")


def _shown(variables: Mapping[str, str | None]) -> str:
    found = [f"{name}={variables[name]}" for name in (PLUGIN, NETWORK) if variables.get(name) is not None]
    return " and ".join(found) or f"neither {PLUGIN} nor {NETWORK}"
