"""A mixture of experts distributed over ranks: tokens are sent to their experts and back.

    y = sum over the k experts e of the largest s_e of  s_e E_e(x),    s = softmax(W x)

No token is dropped, and experts have no capacity: every expert gets all tokens that chose it, in the order of
the ranks and of the tokens on each rank. So an expert sees the same rows as in one process with all tokens, and
the model on p ranks is the model of one process.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv 1701.06538) for the layer; Fedus et al.,
"Switch Transformers" (2101.03961) for the balance loss; Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy
for Mixture-of-Experts" (2408.15664) for the bias; Gale et al., "MegaBlocks" (2211.15841) for dropping nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn

import bagua_comm
from bagua_comm import ArrayError, Codec, Communicator, UnsupportedError
from bagua_comm.arrays import Array
from bagua_comm.codecs.base import check_codec_argument

from .entry import communicator_of, errors_on_all
from .functional import alltoall
from .tensors import rng
from .tensors.broadcast import broadcast_tree, map_leaves
from .tensors.checks import check_same_layer, compare

T = TypeVar("T")


class Experts(nn.ModuleDict):
    """The experts of this rank, by their number among all experts of the layer."""

    stays_on_rank: ClassVar[bool] = True
    """Exclude the experts from copies and averages of `DistributedDataParallel`."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        """Number of ranks that hold the experts together; it must be all ranks that train the model."""


class MoE(nn.Module):
    """A mixture of experts over the ranks of a communicator. Each token is sent to `k` experts.

    Collective. So is every forward pass, in training and in evaluation, and every backward pass. A rank without
    tokens passes an empty tensor, and uses the result in its loss (its `.sum()` is enough). Ranks may have
    different numbers of tokens. See `bagua_torch.functional` for the rules of backward passes.

    Expert e is on rank r if r E // p <= e < (r + 1) E // p; with fewer experts than ranks some ranks have none,
    and only send tokens. Each expert is initialized with a separate seed, so that weights do not depend on the
    number of ranks; so is the gate, which all ranks hold.

    `DistributedDataParallel` averages the gate and leaves the experts to their ranks. A gradient of an expert is
    divided by the number of ranks, as all averages are: the loss is the mean of the ranks' losses. Every expert
    runs in every forward pass, also without tokens, so that its gradient is zero rather than None.

    Limits: `torch.nn.utils.clip_grad_norm_` sees only this rank's experts (use `clip_grad_norm_` of this module).
    So does `GradScaler`, so training in float16 is refused: use bfloat16. `ddp.join()` is refused: pass empty
    batches. Use activation checkpointing on an expert, not on this layer, whose bias may change in between.
    `bagua_torch.Checkpoints` load on the same number of ranks; for another number, save `global_state_dict` and
    `global_optimizer_state`.

    Args:
        hidden: The size of a token, and of the result of an expert.
        make_expert: Constructs an expert, a module that maps (tokens, hidden) to (tokens, hidden). Called once
            for each expert of this rank.
        experts: E, the number of experts on all ranks together.
        k: The number of experts that each token is sent to.
        comm: The ranks; if None, `bagua_comm.default()`. These must be all ranks that train
            the model: with fewer, several ranks would hold an expert whose weights are not averaged, and
            `DistributedDataParallel` refuses it.
        balance: How load is balanced. "bias": choose by s_e + b_e, weight by s_e; after each training
            forward pass b_e grows by `gamma` where an expert had fewer tokens than the mean of all, and shrinks
            where it had more. "loss": add `balance_loss`, times 0.01 say, to the loss of every rank.
        gamma: The step of the bias.
        normalize: Divide the weights of a token by their sum. It needs k > 1: a single weight would always be 1,
            and the gate would not learn.
        codec: The encoding of tokens and of results of experts, for the codec's dtypes; gradients are exact.
        seed: The seed of the weights; if None, drawn from PyTorch's generator on rank 0.

    Raises:
        ArrayError: An argument is out of range, or `make_expert` returns the same module twice.
        CommMismatch: The ranks give different arguments.

    >>> torch.manual_seed(0)
    <torch._C.Generator ...>
    >>> layer = MoE(4, lambda: nn.Linear(4, 4), experts=8, k=2)
    >>> layer(torch.ones(3, 4)).shape, int(layer.load.sum())
    (torch.Size([3, 4]), 6)
    """

    def __init__(
        self,
        hidden: int,
        make_expert: Callable[[], nn.Module],
        experts: int,
        k: int = 2,
        *,
        comm: Communicator | None = None,
        balance: Literal["bias", "loss"] = "bias",
        gamma: float = 1e-3,
        normalize: bool = False,
        codec: Codec | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.comm = communicator_of("MoE", comm, bagua_comm.default)
        with errors_on_all(self.comm):
            _check_range("hidden", hidden, 1, 2**31)
            _check_range("experts", experts, 1, 2**31)
            _check_range("k", k, 1, experts)
            if not callable(make_expert):
                raise ArrayError(f"MoE: make_expert is {make_expert!r}, expected a function that makes an expert")
            if balance not in ("bias", "loss"):
                raise ArrayError(f'MoE: balance is {balance!r}, expected "bias" or "loss"')
            if not isinstance(gamma, (int, float)) or not 0 <= gamma < float("inf"):
                raise ArrayError(f"MoE: gamma is {gamma!r}, expected a number of at least 0")
            if normalize and k == 1:
                raise ArrayError("MoE: normalize is True, but k is 1: the one weight would always be 1; use k=2")
            if seed is not None and not isinstance(seed, int):
                raise ArrayError(f"MoE: seed is {seed!r}, expected an integer or None")
            if codec is not None:
                check_codec_argument("MoE", codec)
        self.hidden, self.k, self.balance, self.gamma = hidden, k, balance, float(gamma)
        self.normalize, self.codec = normalize, codec
        p = self.comm.size
        self.counts = [(r + 1) * experts // p - r * experts // p for r in range(p)]
        """Number of experts of each rank, in rank order."""
        first = sum(self.counts[: self.comm.rank])
        self.held = range(first, first + self.counts[self.comm.rank])
        """The numbers of this rank's experts."""
        self.load = torch.zeros(experts, dtype=torch.int64)
        """Number of tokens of all ranks that chose each expert in the last forward pass, (E,), on the host."""
        self.balance_loss: torch.Tensor | None = None
        """With balance="loss", after a forward pass: a number whose mean over the ranks is E sum_e f_e P_e, where
        f_e is the share of all choices that e got, and P_e the mean of s_e over all ranks' tokens. It is 1 if
        all are equal. Each rank adds it, times a factor, to its loss; averaged gradients are then those of the
        sum over all tokens. It needs no communication."""

        self._number = self.comm.next_id("MoE")
        seed = self._agree(experts, seed)
        with _seeded(seed, "gate"):
            self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(self.comm.size)
        for number in self.held:
            with _seeded(seed, number):
                self._add(number, make_expert())
        if balance == "bias":
            self.bias_steps: torch.Tensor
            self.register_buffer("bias_steps", torch.zeros(experts, dtype=torch.int64))

    @property
    def bias(self) -> torch.Tensor:
        """The bias added to the scores for the choice of experts, (E,).

        It is stored as a whole number of steps of `gamma`, so it is exact in any precision of the model.
        """
        if self.balance != "bias":
            return torch.zeros(len(self.load), device=self.gate.weight.device)
        return self.bias_steps * self.gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token in `x`, (..., hidden), to its experts; return their weighted sum, (..., hidden).

        Collective. Under autocast, tokens are sent in its dtype, and the result has that dtype.

        Raises:
            ArrayError: `x` is not a tensor of tokens, or an expert returns another shape.
            CommMismatch: The ranks call different layers, only some of them need a gradient, or their tokens are
                of several dtypes.
            UnsupportedError: It would train in float16, on more than one rank.
        """
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.shape[-1:] != (self.hidden,):
            what = f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ArrayError(f"MoE: x is {what}, expected tokens of floats, (..., {self.hidden})")
        dtype = self._dtype(x)
        if dtype is torch.float16 and self.training and torch.is_grad_enabled() and self.comm.size > 1:
            raise UnsupportedError(
                "MoE: training in float16 is not supported, because its GradScaler skips a step "
                "only on ranks whose experts overflow; train in bfloat16 or float32"
            )
        tokens = x.reshape(-1, self.hidden)  # (n, hidden)
        scores, weights, chosen = self._route(tokens)
        mine = (
            torch.bincount(chosen.reshape(-1), minlength=len(self.load)).cpu().numpy()
        )  # tokens by expert, (E,)
        rows = self.comm.allgather(np.array([self._number, *mine]))
        check_same_layer("MoE", rows[:, 0].tolist())
        table = rows[:, 1:]  # (p, E), in one message
        held = table[:, self.held.start : self.held.stop]
        parts = np.split(mine, np.cumsum(self.counts)[:-1])
        sends, recvs = [int(part.sum()) for part in parts], held.sum(1).tolist()

        order = chosen.reshape(-1).argsort(stable=True)  # by expert, so by rank
        sent = tokens.repeat_interleave(self.k, 0)[order].to(dtype)  # (n k, hidden)
        # By rank, then by expert.
        received = alltoall(self.comm, sent, counts=sends, out_counts=recvs, codec=self.codec)
        made = self._run(received, held)
        if torch.is_grad_enabled() and not made.requires_grad:
            made.requires_grad_()  # as on the other ranks, whose experts may need one
        back = alltoall(self.comm, made, counts=recvs, out_counts=sends, codec=self.codec)[order.argsort()]
        y = (back.view(-1, self.k, self.hidden) * weights.unsqueeze(-1)).sum(1)

        self._balance(scores, table.sum(0))
        return y.to(sent.dtype).view(x.shape)

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All scores, (n, E), and the weights and numbers of chosen experts, (n, k), at least in float32."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = nn.functional.linear(tokens.to(wide), self.gate.weight.to(wide)).softmax(-1)
        chosen = (scores.detach() + self.bias.to(wide)).topk(self.k).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        return scores, weights, chosen

    def _run(self, received: torch.Tensor, held: Array) -> torch.Tensor:
        """Run this rank's experts on the received rows; return the results in the order of the rows.

        Args:
            received: The rows, sorted by source rank, then by expert.
            held: The numbers of rows from each rank for each expert, (p, experts of this rank).
        """
        p, n = held.shape
        if n == 0:
            return received
        experts = np.repeat(np.tile(np.arange(n), p), held.reshape(-1))
        order = torch.from_numpy(experts.argsort(kind="stable")).to(received.device)  # by expert, then by rank
        parts = torch.split(received[order], held.sum(0).tolist())
        made = []
        for (number, expert), part in zip(self.experts.items(), parts, strict=True):
            made.append(expert(part))
            if not isinstance(made[-1], torch.Tensor) or made[-1].shape != part.shape:
                what = list(made[-1].shape) if isinstance(made[-1], torch.Tensor) else type(made[-1]).__name__
                raise ArrayError(f"MoE: expert {number} returned {what}, expected {list(part.shape)}, as it got")
        return torch.cat(made).to(received.dtype)[order.argsort()]

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        """The dtype in which tokens are sent, the same on all ranks."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        return torch.get_autocast_dtype(kind) if autocast else x.dtype

    def _balance(self, scores: torch.Tensor, load: Array) -> None:
        """Store the load, (E,), and update the loss or the bias, on all ranks."""
        self.load = torch.from_numpy(load)
        choices, experts = int(load.sum()), len(load)
        if self.balance == "loss":
            shares = torch.from_numpy(load / max(1, choices)).to(scores)
            per_token = experts * self.comm.size * self.k / max(1, choices)
            self.balance_loss = (shares * scores.sum(0)).sum() * per_token
        elif self.training:
            steps = np.sign(choices - experts * load)  # sign(mean - load), in integers
            self.bias_steps += torch.from_numpy(steps).to(self.bias_steps.device)

    def _agree(self, experts: int, seed: int | None) -> int:
        """Compare the arguments of all ranks, and return the common seed. Collective."""
        mine = {
            "hidden": self.hidden,
            "experts": experts,
            "k": self.k,
            "balance": self.balance,
            "gamma": self.gamma,
            "normalize": self.normalize,
            "codec": repr(self.codec),
            "seed": seed,
        }
        with rng.exclusive:
            drawn = int(torch.randint(2**62, ()))  # on every rank, so that generators stay alike
        compare("MoE", self.comm, mine)
        return seed if seed is not None else self.comm.broadcast_object(drawn, root=0)

    def _add(self, number: int, expert: nn.Module) -> None:
        if not isinstance(expert, nn.Module):
            raise ArrayError(f"MoE: make_expert returned a {type(expert).__name__}, expected a module")
        known = {id(parameter) for parameter in self.experts.parameters()}
        if any(id(parameter) in known for parameter in expert.parameters()):
            raise ArrayError(
                f"MoE: make_expert returned parameters for expert {number} that another expert has; expected new "
                "ones in each call"
            )
        self.experts[str(number)] = expert
        size = self.comm.size  # the hook holds no module, which would be a circle
        for parameter in expert.parameters():
            needed = parameter.requires_grad
            if size > 1 and parameter.is_floating_point():
                # Registering needs requires_grad; the hook stays if the parameter is frozen afterwards.
                hooked: Any = parameter.requires_grad_()  # torch leaves the method untyped
                hooked.register_hook(lambda gradient: gradient / size)
                parameter.requires_grad_(needed)

    def extra_repr(self) -> str:
        """The arguments, and the experts of this rank."""
        return (
            f"hidden={self.hidden}, experts={len(self.load)}, k={self.k}, balance={self.balance!r}, "
            f"held={self.held.start}..{self.held.stop - 1}"
        )

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "MoE: cannot be copied or pickled, as it holds a communicator; make another one and load "
            "bagua_torch.moe.global_state_dict"
        )


# ---------------------------------------------------------------------------------------------------
# The whole model
# ---------------------------------------------------------------------------------------------------


def global_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of `module` with the experts of all ranks, for any number of ranks.

    Collective. Every rank gets the whole dict, and needs memory for all experts. It equals the state dict of one
    process with all experts, in the same order, so that ranks can save it together (`Checkpoints`). All other
    entries are this rank's.

    Raises:
        ArrayError: There is no MoE in `module`.
    """
    state = dict(module.state_dict())
    for prefix, layer in _layers(module):
        own = {key: value for key, value in state.items() if key.startswith(f"{prefix}experts.")}
        experts = _of_all_ranks(layer.comm, own)
        whole: dict[str, Any] = {}
        for key in [key for key in state if key not in own]:
            whole[key] = state[key]
            if key == f"{prefix}gate.weight":  # the experts follow, also on ranks without experts
                whole.update(experts)
        state = {**whole, **experts}
    return state


def load_global_state_dict(module: nn.Module, state: Mapping[str, object], *, strict: bool = True) -> Any:
    """Load the result of `global_state_dict`, with this rank's experts, on any number of ranks.

    Not collective, but all ranks call it. Returns the result of `module.load_state_dict`.

    Raises:
        ArrayError: There is no MoE in `module`.
        RuntimeError: With `strict`, the state is of another module or number of experts.
    """
    kept = dict(state)
    for prefix, layer in _layers(module):
        others = set(range(len(layer.load))) - set(layer.held)
        gone = tuple(f"{prefix}experts.{number}." for number in others)
        kept = {key: value for key, value in kept.items() if not key.startswith(gone)}
    return module.load_state_dict(kept, strict=strict)


def global_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of `module` by the names of parameters, with the experts of all ranks.

    Collective. Load it by `load_global_optimizer_state`, on any number of ranks. It is the same on all ranks if
    the state of all other parameters is.

    Raises:
        ArrayError: There is no MoE in `module`, or the optimizer steps a parameter that is not in it.
    """
    names = _names(module, optimizer)
    state = {names[p]: optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for prefix, layer in _layers(module):
        own = {key: value for key, value in state.items() if key.startswith(f"{prefix}experts.")}
        state.update(_of_all_ranks(layer.comm, own))
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def load_global_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load the result of `global_optimizer_state`, with this rank's experts, on any number of ranks.

    Not collective, but all ranks call it. The optimizer has the same number of groups as the saved one.

    Raises:
        ArrayError: There is no MoE in `module`, the optimizer steps a parameter that is not in it or not in the
            state, or it has another number of groups.
    """
    names, saved = _names(module, optimizer), state["state"]
    groups = optimizer.param_groups
    if len(groups) != len(state["param_groups"]):
        raise ArrayError(
            f"load_global_optimizer_state: the optimizer has {len(groups)} groups, but the state has "
            f"{len(state['param_groups'])}"
        )
    mine = [names[parameter] for group in groups for parameter in group["params"]]
    missing = [name for name in mine if name not in saved]
    if missing:
        raise ArrayError(f"load_global_optimizer_state: there is no {missing[0]!r} in the state")
    positions = {name: i for i, name in enumerate(mine)}
    packed = [
        {**theirs, "params": [positions[names[parameter]] for parameter in group["params"]]}
        for group, theirs in zip(groups, state["param_groups"], strict=True)
    ]
    kept = {positions[name]: map_leaves(saved[name], _copied) for name in mine if saved[name]}
    optimizer.load_state_dict({"state": kept, "param_groups": packed})


def _copied(value: object) -> object:
    """A copy, since an optimizer steps a loaded state in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of `module` so that their norm, with the experts of all ranks, is at most `max_norm`.

    Collective. Call it between `backward()` and `step()`, after gradients are averaged. Every rank scales by the
    same factor; `torch.nn.utils.clip_grad_norm_` would see only this rank's experts, and gates would diverge.
    Returns the norm before scaling, the same on every rank.

    Raises:
        ArrayError: There is no MoE in `module`, or several over different communicators.
    """
    layers = [layer for _, layer in _layers(module)]
    comm = layers[0].comm
    if any(layer.comm is not comm for layer in layers):
        raise ArrayError("clip_grad_norm_: this module has MoE over different communicators; expected the same")
    experts = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    squares = [0.0, 0.0]  # of common parameters, and of experts
    gradients = [(p.grad, id(p) in experts) for p in module.parameters() if p.grad is not None]
    for gradient, of_expert in gradients:
        squares[of_expert] += float(gradient.double().square().sum())
    norm = torch.tensor(squares[0] + float(comm.allreduce(np.array(squares[1]))), dtype=torch.float64).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient, _ in gradients:
        gradient.mul_(scale.to(gradient.device))
    return norm


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The names of an optimizer's parameters."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    if not all(parameter in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ArrayError(f"the optimizer steps a parameter that is not in this {type(module).__name__}")
    return names


def _layers(module: nn.Module) -> list[tuple[str, MoE]]:
    """All MoE in `module`, with their prefixes in its state dict."""
    found = [(f"{name}." if name else "", m) for name, m in module.named_modules() if isinstance(m, MoE)]
    if not found:
        raise ArrayError(f"there is no MoE in this {type(module).__name__}")
    return found


def _of_all_ranks(comm: Communicator, mine: Mapping[str, T]) -> dict[str, T]:
    """The union of all ranks' values, whose names differ between ranks. Collective."""
    result: dict[str, T] = {}
    for rank in range(comm.size):
        result.update(broadcast_tree(comm, mine, root=rank))
    return result


# ---------------------------------------------------------------------------------------------------
# Small parts
# ---------------------------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int, part: object) -> Iterator[None]:
    """A context in which PyTorch's generators are seeded for this part; restores their states."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    number = int.from_bytes(hashlib.blake2b(f"{seed} {part}".encode(), digest_size=8).digest(), "little")
    with rng.fork(devices):
        torch.default_generator.manual_seed(number)
        for _ in devices:
            torch.cuda.manual_seed(number)
        yield


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArrayError(f"MoE: {name} is {value!r}, expected an integer from {least} to {most}")
