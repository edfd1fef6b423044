"""A mixture of experts, of which each rank holds a part: tokens travel to their experts and back.

    y = sum over the k experts e of the largest s_e of  s_e E_e(x),    s = softmax(W x)

No token is dropped, and no expert has a capacity: every expert gets as many tokens as chose it. They come sorted
by expert and, for an expert, in the order of the ranks and of the tokens on them. So an expert sees the same rows
as in one process with all tokens, and the model on p ranks is the model of one process.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv 1701.06538) for the layer; Fedus et al.,
"Switch Transformers" (2101.03961) for the balance loss; Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy
for Mixture-of-Experts" (2408.15664) for the bias; Gale et al., "MegaBlocks" (2211.15841) for dropping nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

import bagua_comm
from bagua_comm import ArrayError, Codec, CommMismatch, Communicator, UnsupportedError
from bagua_comm.codecs.base import check_codec_argument

from . import rng
from .broadcast import broadcast_tree, map_leaves
from .checks import check_same_layer
from .functional import alltoallv


class Experts(nn.ModuleDict):
    """The experts of this rank, by their number among all experts of the layer."""

    stays_on_rank: ClassVar[bool] = True
    """What is in here belongs to this rank: `DistributedDataParallel` neither copies nor averages it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        """How many ranks hold the experts of the layer together: all that train the model, or it is refused."""


class MoE(nn.Module):
    """A mixture of experts over the ranks of a communicator; a token is sent to `k` of them.

    Collective. So is every forward pass, in training and in evaluation, and every backward pass: a rank without
    tokens makes them on an empty tensor, whose result it uses in its loss (`.sum()` of it is enough). Ranks may
    have different numbers of tokens. `bagua_torch.functional` says what else holds for backward passes.

    Expert e is on rank r if r E // p <= e < (r + 1) E // p; with fewer experts than ranks some ranks have none,
    and only send tokens. Each expert is drawn with a seed of its own, so that the weights do not depend on the
    number of ranks; the gate, which all ranks hold, likewise.

    `DistributedDataParallel` averages the gate and leaves the experts to their ranks. A gradient of an expert is
    divided by the number of ranks, as the average of all others is: the loss is the mean of the ranks' losses.
    Every expert runs in every forward pass, without tokens too, so that a gradient is zero rather than None.

    These have the whole model in view, but see only this rank's experts: `clip_grad_norm_` (use the one here) and
    `GradScaler`, so that training in float16 is refused: use bfloat16. `ddp.join()` is refused: give empty
    batches. Checkpoint (recompute) an expert, not this layer, whose bias may change in between.
    `bagua_torch.Checkpoints` load on as many ranks as saved them; for another number, save `global_state_dict`
    and `global_optimizer_state`.

    Args:
        hidden: The size of a token, and of what an expert returns for it.
        make_expert: Makes an expert, a module that maps (tokens, hidden) to (tokens, hidden). Called once for
            each expert of this rank.
        experts: E, how many there are on all ranks together.
        k: How many each token is sent to.
        comm: The ranks; if None, `bagua_comm.default()`. All those that train the model: with fewer, an expert
            would be on several ranks, whose weights nothing averages, and `DistributedDataParallel` refuses it.
        balance: What keeps experts equally busy. "bias": choose by s_e + b_e, weight by s_e; after each training
            forward pass b_e grows by `gamma` where an expert had fewer tokens than the mean of all, and shrinks
            where it had more. "loss": add `balance_loss`, times 0.01 say, to the loss of every rank.
        gamma: The step of the bias.
        normalize: Divide the weights of a token by their sum. It needs k > 1: one weight would be 1 whatever the
            gate says, and the gate would learn nothing.
        codec: Sends tokens and what experts return encoded, the codec's own dtypes only; gradients are exact.
        seed: From which weights are drawn; if None, drawn from PyTorch's generator on rank 0.

    Raises:
        ArrayError: An argument is out of range, or `make_expert` returns a module that it has returned before.
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
        self.comm = comm if comm is not None else bagua_comm.default()
        self.hidden, self.k, self.balance, self.gamma = hidden, k, balance, float(gamma)
        self.normalize, self.codec = normalize, codec
        self.counts = [(r + 1) * experts // self.comm.size - r * experts // self.comm.size for r in self._ranks]
        """How many experts each rank holds, in rank order."""
        first = sum(self.counts[: self.comm.rank])
        self.held = range(first, first + self.counts[self.comm.rank])
        """The numbers of this rank's experts."""
        self.load = torch.zeros(experts, dtype=torch.int64)
        """How many tokens of all ranks chose each expert in the last forward pass, (E,), on the host."""
        self.balance_loss: torch.Tensor | None = None
        """With balance="loss", after a forward pass: a number whose mean over the ranks is E sum_e f_e P_e, where
        f_e is the share of all choices that e got, and P_e the mean of s_e over all ranks' tokens. It is 1 if
        all are equal. Each rank adds it, times a factor, to its loss; averaged gradients are then those of the
        whole. No rank waits for it."""

        self._number = self.comm.next_id("MoE")
        seed = self._agree(experts, seed)
        with _drawn_from(seed, "gate"):
            self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(self.comm.size)
        for number in self.held:
            with _drawn_from(seed, number):
                self._add(number, make_expert())
        if balance == "bias":
            self.bias_steps: torch.Tensor
            self.register_buffer("bias_steps", torch.zeros(experts, dtype=torch.int64))

    @property
    def bias(self) -> torch.Tensor:
        """What is added to the scores of experts when they are chosen, (E,).

        It is a whole number of steps of `gamma`, and kept as such: it is exact in any precision of the model.
        """
        if self.balance != "bias":
            return torch.zeros(len(self.load), device=self.gate.weight.device)
        return self.bias_steps * self.gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token in `x`, (..., hidden), to its experts; returns what they make of it, as large.

        Collective. Under autocast, tokens travel in its dtype, and that is the dtype of the result.

        Raises:
            ArrayError: `x` does not hold tokens, or an expert returns something of another shape.
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
                "MoE: it would train in float16, whose GradScaler skips a step on those ranks alone whose "
                "experts overflow; train in bfloat16 or float32"
            )
        tokens = x.reshape(-1, self.hidden)  # (n, hidden)
        scores, weights, chosen = self._route(tokens)
        table = self._gather(self._count(chosen))  # (p, E): all that any rank must know, in one message
        held = table[:, self.held.start : self.held.stop]
        sends, recvs = _sums(table[self.comm.rank], self.counts), held.sum(1).tolist()

        order = chosen.reshape(-1).argsort(stable=True)  # by expert, so by rank
        sent = tokens.repeat_interleave(self.k, 0)[order].to(dtype)  # (n k, hidden)
        came = alltoallv(self.comm, sent, sends, recvs, codec=self.codec)  # by rank, then by expert
        made = self._run(came, held)
        if torch.is_grad_enabled() and not made.requires_grad:
            made.requires_grad_()  # as on the other ranks, whose experts may need one
        back = alltoallv(self.comm, made, recvs, sends, codec=self.codec)[order.argsort()]
        y = (back.view(-1, self.k, self.hidden) * weights.unsqueeze(-1)).sum(1)

        self._balance(scores, table.sum(0))
        return y.to(sent.dtype).view(x.shape)

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of all experts, (n, E), weights and numbers of those chosen, (n, k); at least in float32."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = nn.functional.linear(tokens.to(wide), self.gate.weight.to(wide)).softmax(-1)
        chosen = (scores.detach() + self.bias.to(wide)).topk(self.k).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        return scores, weights, chosen

    def _count(self, chosen: torch.Tensor) -> Any:
        """How many tokens of this rank chose each expert, (E,), on the host."""
        return torch.bincount(chosen.reshape(-1), minlength=len(self.load)).cpu().numpy()

    def _gather(self, counts: Any) -> Any:
        """The counts of all ranks, (p, E), which are in the same layer. Collective."""
        rows = self.comm.allgather(np.array([self._number, *counts]))
        check_same_layer("MoE", rows[:, 0].tolist())
        return rows[:, 1:]

    def _run(self, came: torch.Tensor, held: Any) -> torch.Tensor:
        """What this rank's experts make of the rows that came, in the order of these rows.

        Args:
            came: The rows, sorted by the rank that they come from, and then by expert.
            held: How many came from each rank for each expert, (p, experts here).
        """
        p, n = held.shape
        if n == 0:
            return came
        experts = np.repeat(np.tile(np.arange(n), p), held.reshape(-1))
        order = torch.from_numpy(experts.argsort(kind="stable")).to(came.device)  # by expert, then by rank
        parts = torch.split(came[order], held.sum(0).tolist())
        made = []
        for (number, expert), part in zip(self.experts.items(), parts, strict=True):
            made.append(expert(part))
            if not isinstance(made[-1], torch.Tensor) or made[-1].shape != part.shape:
                what = list(made[-1].shape) if isinstance(made[-1], torch.Tensor) else type(made[-1]).__name__
                raise ArrayError(f"MoE: expert {number} returned {what}, expected {list(part.shape)}, as it got")
        return torch.cat(made).to(came.dtype)[order.argsort()]

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        """The dtype in which tokens travel, the same on all ranks."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        return torch.get_autocast_dtype(kind) if autocast else x.dtype

    def _balance(self, scores: torch.Tensor, load: Any) -> None:
        """Note the load, (E,), and act on it; all ranks do the same."""
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
        """Compare the arguments of all ranks; returns the seed of all. Collective."""
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
        found = self.comm.allgather_object((mine, drawn))
        for rank, (theirs, _) in enumerate(found):
            for name, value in found[0][0].items():
                if theirs[name] != value:
                    raise CommMismatch(
                        f"MoE: {name} is {value!r} on rank 0, but {theirs[name]!r} on rank {rank}; "
                        "expected the same on all ranks"
                    )
        return seed if seed is not None else int(found[0][1])

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
        for parameter in expert.parameters():
            needed = parameter.requires_grad
            if self.comm.size > 1 and parameter.is_floating_point():
                # A hook needs a gradient to hang on; it stays if the parameter is frozen, now or later.
                hooked: Any = parameter.requires_grad_()  # torch leaves the method untyped
                hooked.register_hook(_DividedBy(self.comm.size))
                parameter.requires_grad_(needed)

    @property
    def _ranks(self) -> range:
        return range(self.comm.size)

    def extra_repr(self) -> str:
        """The arguments, and which of the experts are here."""
        return (
            f"hidden={self.hidden}, experts={len(self.load)}, k={self.k}, balance={self.balance!r}, "
            f"held={self.held.start}..{self.held.stop - 1}"
        )

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            "MoE: cannot be copied or pickled, as it holds a communicator; make another one and load "
            "bagua_torch.moe.global_state_dict"
        )


# ---------------------------------------------------------------------------------------------------
# The whole model
# ---------------------------------------------------------------------------------------------------


def global_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of `module` with the experts of all ranks, for any number of ranks.

    Collective. Every rank gets all of it, so there must be memory for all experts. It is the state dict that one
    process with all experts has, in its order, so that ranks can save it together (`Checkpoints`). What is not
    an expert is this rank's.

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
            if key == f"{prefix}gate.weight":  # the experts come next, on ranks that have none as well
                whole.update(experts)
        state = {**whole, **experts}
    return state


def load_global_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load what `global_state_dict` gave, on this or another number of ranks: of the experts, this rank's.

    Not collective, but all ranks load. Returns what `module.load_state_dict` returns.

    Raises:
        ArrayError: There is no MoE in `module`.
        RuntimeError: With `strict`, the state is not one of such a module with as many experts.
    """
    kept = dict(state)
    for prefix, layer in _layers(module):
        others = set(range(len(layer.load))) - set(layer.held)
        gone = tuple(f"{prefix}experts.{number}." for number in others)
        kept = {key: value for key, value in kept.items() if not key.startswith(gone)}
    return module.load_state_dict(kept, strict=strict)


def global_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of `module` by the names of parameters, with the experts of all ranks.

    Collective. It is for `load_global_optimizer_state` alone, on any number of ranks. It is alike on all ranks if
    what is not an expert's is.

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
    """Load what `global_optimizer_state` gave, on this or another number of ranks: of the experts, this rank's.

    Not collective, but all ranks load. The optimizer has as many groups as the one that was saved.

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
    places = {name: place for place, name in enumerate(mine)}
    packed = [
        {**theirs, "params": [places[names[parameter]] for parameter in group["params"]]}
        for group, theirs in zip(groups, state["param_groups"], strict=True)
    ]
    kept = {places[name]: map_leaves(saved[name], _copied) for name in mine if saved[name]}
    optimizer.load_state_dict({"state": kept, "param_groups": packed})


def _copied(value: Any) -> Any:
    """A copy: an optimizer would step what it loads in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of `module` so that their norm, with the experts of all ranks, is at most `max_norm`.

    Collective. Call it between `backward()` and `step()`, when gradients are averaged. Every rank scales by the
    same number; `torch.nn.utils.clip_grad_norm_` would see only this rank's experts, and gates would drift apart.
    Returns the norm before, the same on every rank.

    Raises:
        ArrayError: There is no MoE in `module`, or several over different communicators.
    """
    layers = [layer for _, layer in _layers(module)]
    comm = layers[0].comm
    if any(layer.comm is not comm for layer in layers):
        raise ArrayError("clip_grad_norm_: this module has MoE over different communicators; expected the same")
    experts = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    squares = [0.0, 0.0]  # of what all ranks have, and of experts
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
    """All MoE in `module`, with the beginning of their names in its state dict."""
    found = [(f"{name}." if name else "", m) for name, m in module.named_modules() if isinstance(m, MoE)]
    if not found:
        raise ArrayError(f"there is no MoE in this {type(module).__name__}")
    return found


def _of_all_ranks(comm: Communicator, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all ranks under their names, which differ between ranks. Collective."""
    result: dict[str, Any] = {}
    for rank in range(comm.size):
        result.update(broadcast_tree(comm, mine, root=rank))
    return result


# ---------------------------------------------------------------------------------------------------
# Small parts
# ---------------------------------------------------------------------------------------------------


class _DividedBy:
    """A hook that divides a gradient."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self._size


@contextmanager
def _drawn_from(seed: int, part: object) -> Iterator[None]:
    """In the body, PyTorch's generators begin with a seed of this part; afterwards they go on as before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    number = int.from_bytes(hashlib.blake2b(f"{seed} {part}".encode(), digest_size=8).digest(), "little")
    with rng.fork(devices):
        torch.default_generator.manual_seed(number)
        for _ in devices:
            torch.cuda.manual_seed(number)
        yield


def _sums(values: Any, counts: list[int]) -> list[int]:
    """Sums of the next counts[0] values, the next counts[1], and so on."""
    ends = np.cumsum([0, *counts])
    return [int(values[start:end].sum()) for start, end in itertools.pairwise(ends)]


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArrayError(f"MoE: {name} is {value!r}, expected an integer from {least} to {most}")
