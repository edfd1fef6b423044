"""Muon of plain and of sharded parameters (FSDP2), whose matrices the ranks share among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT

from bagua_comm import ArrayError, Communicator, UnsupportedError, optim
from bagua_comm.arrays import Array
from bagua_comm.codecs import Codec
from bagua_comm.elastic.snapshot.shards import even, is_sharded, slab_of
from bagua_comm.optim.newton_schulz import EPS, newton_schulz
from bagua_comm.optim.owners import Matrix, Owners
from bagua_comm.optim.row_codec import check_row_codec
from bagua_comm.trace import Counters

from ..arrays import as_array, as_tensor, torch_stream
from ..entry import communicator_of, errors_on_all
from ..process_group.groups import GroupComms

Settings = Mapping[str, object]
"""Settings by which AdamW steps some parameters."""

_Group = Mapping[str, Any]
"""A group of parameters with its settings."""

_Chosen = tuple[Tensor, optim.Muon, str]
"""A parameter that Muon steps, with the settings of its group, the last one its dtype."""

_MOVED_AS = {"float32": torch.int32, "bfloat16": torch.int16}
"""The dtypes of matrices, and those as which their bits travel."""

_COMPARED = (
    *("lr", "momentum", "weight_decay", "nesterov", "adjust_lr_fn"),
    *("dtype", "betas", "eps", "amsgrad", "maximize"),
)
"""The settings that ranks compare, first those of `bagua_comm.optim.Muon`."""

_NAME = "bagua_torch.Muon"


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for all parameters that a rule of yours names.

    The formulas are those of `bagua_comm.optim.Muon`; up to rounding, results are those of `torch.optim.Muon` and
    `torch.optim.AdamW`. Momentum is sharded like its parameter: checkpoints hold it as they hold the states of
    other optimizers, for any number of ranks.

    Alone, the optimizer steps whole parameters. After `distribute`, each matrix is orthogonalized by one rank.
    Parameters of `fully_shard` need that.

    Args:
        params: Parameters or groups of them, as for any optimizer; AdamW steps groups with `algorithm="adam"`.
            With the argument `adam`, `model.named_parameters()`.
        lr: Learning rate.
        weight_decay: The share of a weight that a step takes off, times `lr`.
        momentum: Decay of the momentum.
        nesterov: Whether the momentum is Nesterov's.
        adjust_lr_fn: The factor of the learning rate of a matrix; see `bagua_comm.optim.Muon`.
        dtype: "bfloat16", as published, or "float32": to this the momentum is rounded before it is sent and
            orthogonalized, and so is the result. CPUs compute in float32 all the same.
        adam: From the name of a parameter and the parameter to the settings by which AdamW steps it, such as
            {"lr": 1e-3} or {}; None for Muon. For vectors, embeddings and the last layer.

    Raises:
        ArrayError: A setting is out of range; or Muon would step a parameter that is no matrix.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    >>> muon = Muon(model.named_parameters(), adam=lambda name, p: None if name == "1.weight" else {"lr": 3e-3})
    >>> [(group["algorithm"], group["lr"], len(group["params"])) for group in muon.param_groups]
    [('adam', 0.003, 2), ('muon', 0.001, 1)]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        dtype: str = "bfloat16",
        adam: Callable[[str, Tensor], Settings | None] | None = None,
    ) -> None:
        own: dict[str, object] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype}
        own |= {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "algorithm": "muon"}
        self._adam = torch.optim.AdamW([torch.empty(0)])
        super().__init__(params if adam is None else _by_rule(params, adam), {**self._adam.defaults, **own})
        self.__setstate__({})

    def __setstate__(self, state: dict[str, object]) -> None:
        for group in cast("list[_Group]", state.get("param_groups", [])):  # a copy's, or loaded ones
            _check(group)
        super().__setstate__(state)
        if not hasattr(self, "_owners"):  # not shared with copies
            self._adam = torch.optim.AdamW([torch.empty(0)])
            self._owners: Owners = Owners()
            self._group: dist.ProcessGroup | None = None
            self._compares = False  # whether gradients are compared, until a step has one that is not 0
            self._close: Callable[[], None] = lambda: None
        self._owners.reset()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group of parameters with its settings.

        Raises:
            ArrayError: A setting is out of range; or Muon would step a parameter that is no matrix.
        """
        super().add_param_group(param_group)
        try:
            _check_parameters(self.param_groups[-1], self.defaults)
        except ArrayError:
            del self.param_groups[-1]
            raise

    def distribute(self, comm: Communicator | None = None, *, codec: Codec | None = None) -> None:
        """Let the ranks share the matrices: each is orthogonalized by one of them in all later steps.

        Collective. Plain parameters must be equal on all ranks, and their gradients averaged. Parameters of
        `fully_shard` are exchanged among the ranks of their mesh, on one of two dimensions among those of each
        replica. All ranks then call `step` together, with gradients for the same parameters.

        Args:
            comm: All ranks; if None, the default communicator, which `bagua_torch.connect` makes.
            codec: Encodes orthogonal matrices on their way back, with error feedback, as `Int4()`; None to send
                them in `dtype`. Their owners keep the errors, and no checkpoint does. They begin without after
                another state is loaded, and for a matrix whose owner changes, as when others have no gradient.

        Raises:
            ArrayError: The ranks share the matrices already; call `close` first. Or `codec` is not a Codec, or
                rounds stochastically.
            UnsupportedError: `codec` does not take float32. Or parameters are sharded by another dimension than
                the first, or over several groups of ranks.
        """
        comm = communicator_of(f"{_NAME}.distribute", comm)
        with errors_on_all(comm):
            if self._owners.comm is not None and not self._owners.comm.guard.closed:
                raise ArrayError(f"{_NAME}.distribute: the ranks share the matrices already; call close() first")
            check_row_codec(f"{_NAME}.distribute", codec)
            groups = {group for p, _, _ in self._by_muon() if (group := _spread(p)[1])}
        numbers = comm.allgather_object(len(groups))
        if numbers not in ([0] * comm.size, [1] * comm.size):
            raise UnsupportedError(
                f"{_NAME}.distribute: parameters are sharded over {numbers} groups of ranks, expected one on all "
                "ranks, or none; make an optimizer for each group"
            )
        if groups:
            comms = GroupComms(comm, [*groups], _NAME)
            comm, self._close = comms.of(*groups), comms.close
        self._owners, self._group, self._compares = Owners(comm, codec), next(iter(groups), None), comm.size > 1

    @property
    def counters(self) -> Counters:
        """Calls and bytes of the exchanges of matrices since `distribute`."""
        return self._owners.counters

    def close(self) -> None:
        """Let each rank step alone again, which needs whole parameters. Collective."""
        self._owners.close()
        self._close()
        self._owners, self._group, self._close, self._compares = Owners(), None, lambda: None, False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients.

        Collective after `distribute`.

        Raises:
            ArrayError: A parameter is sharded, and `distribute` has not been called; a gradient is sparse; or a
                setting is out of range.
            CommMismatch: Ranks have other settings, or gradients for other parameters; or one of them raises an
                `ArrayError`; or, in the first step after `distribute`, plain parameters have gradients that are
                no mean over the ranks. Raised on all ranks, before a parameter changes.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        chosen = list[_Chosen]()
        settings = [*self._settings(), *(self._gradients() if self._compares else [])]
        matrices = self._owners.agree("Muon.step", settings, lambda: self._choose(chosen))
        self._compares = self._compares and not any(grad.count_nonzero() for grad in self._plain_gradients())
        for dtype in _MOVED_AS:
            self._step([pair for pair in zip(chosen, matrices, strict=True) if pair[0][2] == dtype], dtype)
        self._adam.state = self.state
        self._adam.param_groups = [group for group in self.param_groups if group["algorithm"] == "adam"]
        self._adam.step()
        return loss

    def _settings(self) -> list[list[object]]:
        """What must be equal on all ranks in a step: settings of groups, and which parameters have gradients."""
        return [
            [
                group["algorithm"],
                *(float(group[key]) if isinstance(group[key], Tensor) else group[key] for key in _COMPARED),
                crc32(bytes(p.grad is not None for p in group["params"])),
            ]
            for group in self.param_groups
        ]

    def _gradients(self) -> list[str]:
        """What tells mean gradients, which are equal on all ranks, from others: their checksum."""
        checksum = 0
        for grad in self._plain_gradients():
            checksum = crc32(grad.cpu().contiguous().view(torch.uint8).numpy().data, checksum)
        return [f"mean gradients with checksum {checksum:x}"]

    def _plain_gradients(self) -> Iterator[Tensor]:
        """Yield the gradients of plain parameters that Muon steps."""
        for p in (p for group in self.param_groups if group["algorithm"] == "muon" for p in group["params"]):
            if p.grad is not None and not p.grad.is_sparse and not is_sharded(p):
                yield p.grad

    def _by_muon(self) -> Iterator[_Chosen]:
        """Yield the parameters that Muon steps."""
        for group in self.param_groups:
            _check(group)  # it may have changed
            if group["algorithm"] == "muon":
                settings = optim.Muon(*(group[key] for key in _COMPARED[:5]))
                yield from ((p, settings, group["dtype"]) for p in group["params"])

    def _choose(self, chosen: list[_Chosen]) -> Iterator[Matrix]:
        """Yield the matrices with gradients, and add them to `chosen`; raise if this rank cannot step them."""
        size = 1 if self._owners.comm is None else self._owners.comm.size
        for p, muon, dtype in (each for each in self._by_muon() if each[0].grad is not None and each[0].numel()):
            grad, (rows, group) = cast(Tensor, p.grad), _spread(p)
            if grad.is_sparse or grad.dtype != p.dtype:
                raise ArrayError(
                    f"Muon.step: a parameter of {p.dtype} has a gradient of {grad.dtype}, {grad.layout}, "
                    "expected a dense one of its dtype"
                )
            if rows is not None and (len(rows) != size or (size > 1 and group != self._group)):
                raise ArrayError(
                    f"Muon.step: a parameter is sharded over {len(rows)} ranks, expected the group of {size} "
                    "that shares the matrices; close(), and call distribute(comm) with all ranks of its mesh"
                )
            ours, found = (tuple(_local(x).shape) for x in (p, self.state[p].get("momentum_buffer", p)))
            if ours != found:
                raise ArrayError(
                    f"Muon.step: the momentum of a parameter is {found}, expected {ours}, that of its rows "
                    "here; load states of sharded parameters by set_state_dict of torch.distributed.checkpoint"
                )
            chosen.append((p, muon, dtype))
            yield Matrix((p.shape[0], p.shape[1]), rows)

    def _step(self, chosen: Sequence[tuple[_Chosen, Matrix]], dtype: str) -> None:
        """Step matrices that are orthogonalized in one dtype. Collective after `distribute`."""
        if not chosen:
            return
        rounded, bits, is_exact = getattr(torch, dtype), _MOVED_AS[dtype], self._owners.codec is None

        def moved(index: int) -> Array:
            p, muon, _ = chosen[index][0]
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            update = muon.move(_local(cast(Tensor, p.grad)), _local(state["momentum_buffer"]))
            return as_array(update.to(rounded).view(bits))

        def computed(whole: Array) -> Array:
            found = orthogonalize(as_tensor(whole).view(rounded))
            return as_array(found.view(bits) if is_exact else found.float())

        with torch_stream(chosen[0][0][0].device):
            matrices, names = [matrix for _, matrix in chosen], [p for (p, _, _), _ in chosen]
            for index, rows in self._owners.map(computed, matrices, moved, names.__getitem__):
                (p, muon, _), matrix = chosen[index]
                update = as_tensor(rows).view(rounded) if is_exact else as_tensor(rows)
                muon.change(_local(p), update.to(p.dtype), matrix.shape)


def orthogonalize(x: Tensor) -> Tensor:
    """Return the matrix of `newton_schulz` for one of any norm, (m, n); on CPUs computed in float32 at least."""
    wide = x.float() if x.device.type == "cpu" else x
    normalized = wide / wide.norm().clamp(min=EPS)
    found = newton_schulz(normalized, lambda beta, c, alpha, a, b: c.addmm(a, b, beta=beta, alpha=alpha))
    return cast(Tensor, found).to(x.dtype)


def _local(x: Tensor) -> Tensor:
    """The rows of this rank of a sharded tensor; another tensor itself. Shares memory."""
    return x.to_local() if is_sharded(x) else x


def _spread(x: Tensor) -> tuple[tuple[int, ...] | None, dist.ProcessGroup | None]:
    """How many rows the ranks have over which a tensor is sharded, and their group; None for a plain tensor."""
    if not is_sharded(x):
        return None, None
    slab = slab_of(x)
    if slab.axis != 0:
        raise UnsupportedError(f"{_NAME}: a parameter is sharded by dimension {slab.axis}, expected 0")
    (axis,) = (n for n, each in enumerate(x.placements) if not each.is_replicate())
    rows = tuple(end - begin for begin, end in even(x.shape[0], x.device_mesh.size(axis)))
    return rows, cast(DeviceMesh, x.device_mesh).get_group(axis)


def _check(group: _Group) -> None:
    """Raise `ArrayError` unless the settings of a group are valid."""
    missing = [key for key in ("algorithm", *_COMPARED) if key not in group]
    if missing:
        raise ArrayError(
            f"{_NAME}: a group has no {', '.join(missing)}, expected settings of {_NAME}; load the state of one"
        )
    optim.Muon(*(group[key] for key in _COMPARED[:5]))
    optim.Adam(betas=group["betas"], eps=group["eps"])
    if group["algorithm"] == "muon" and group["maximize"]:
        raise ArrayError(f"{_NAME}: a group of Muon has maximize=True, expected False; negate the loss")


def _check_parameters(group: _Group, known: Mapping[str, object]) -> None:
    """Raise `ArrayError` unless the settings of a new group are valid and fit its parameters."""
    _check(group)
    unknown = sorted(set(group) - {*known, "params", "param_names", "initial_lr"})
    if unknown or group["dtype"] not in _MOVED_AS or group["algorithm"] not in ("muon", "adam"):
        raise ArrayError(
            f"{_NAME}: a group has dtype={group['dtype']!r}, algorithm={group['algorithm']!r} and the unknown "
            f"settings {unknown}, expected one of {', '.join(_MOVED_AS)}, one of muon, adam, and none"
        )
    for n, p in enumerate(group["params"]):
        if group["algorithm"] == "muon" and (p.ndim != 2 or not p.is_floating_point()):
            name = group["param_names"][n] if "param_names" in group else "a parameter"
            raise ArrayError(
                f"{_NAME}: {name} is {tuple(p.shape)} of {p.dtype}, expected a matrix of floats; let the rule "
                "`adam` return settings for it, by which AdamW steps it"
            )


def _by_rule(params: ParamsT, adam: Callable[[str, Tensor], Settings | None]) -> list[dict[str, object]]:
    """Groups of named parameters: of Muon, and of AdamW with each set of settings."""
    groups: dict[str, tuple[Settings, list[tuple[str, Tensor]]]] = {}
    for each in params:
        if not isinstance(each, tuple):
            raise ArrayError(
                f"{_NAME}: with adam, params are {type(each).__name__}, expected model.named_parameters()"
            )
        settings = adam(*each)
        own = {} if settings is None else {**settings, "algorithm": "adam"}
        groups.setdefault(repr(sorted(own.items())), (own, []))[1].append(each)
    return [{"params": members, **own} for own, members in groups.values()]
