"""The optimizer for `bagua_comm.QAdam`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bagua_comm import ArrayError, QAdam, UnsupportedError


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam that freezes its variance after `warmup_steps`, and then uses the momentum of `bagua_comm.QAdam`.

    During warm-up it equals `torch.optim.Adam`, to the bit. Afterwards the variance and its bias correction are
    constant, and weight decay continues. A weight without a gradient during warm-up has no variance, and does not
    change. Without `bagua_comm.QAdam`, the optimizer keeps the momentum itself.

    Source: 1-bit Adam, Tang et al., arXiv 2102.02888.

    Args:
        params: Parameters, or groups of them. All groups share the first of `betas` and `warmup_steps`.
        lr: Learning rate.
        warmup_steps: Steps, at least 1, before the variance is frozen; as in the algorithm.
        betas: Decay of momentum and variance.
        eps: The number added to the square root of the variance.
        weight_decay: The factor by which the weight is added to the gradient.

    Raises:
        ArrayError: A setting is out of range, or differs between groups where it may not.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "warmup_steps": warmup_steps,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_shared"):  # not shared with copies
            self._shared: dict[Tensor, Tensor] = {}
            self._frozen: set[Tensor] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its settings.

        Raises:
            ArrayError: A setting is out of range, or differs from the other groups' where it may not.
        """
        settings = {**self.defaults, **param_group}
        fine = settings["warmup_steps"] >= 1 and all(0 <= beta < 1 for beta in settings["betas"])
        if not fine or settings["lr"] < 0 or settings["eps"] < 0 or settings["weight_decay"] < 0:
            found = ", ".join(f"{key}={value!r}" for key, value in settings.items() if key != "params")
            raise ArrayError(f"QAdamOptimizer: a setting is out of range: {found}")
        common = {(group["warmup_steps"], group["betas"][0]) for group in [*self.param_groups, settings]}
        if len(common) > 1:
            raise ArrayError("QAdamOptimizer: all groups must have the same warmup_steps and the same betas[0]")
        super().add_param_group(param_group)

    @property
    def warmup_steps(self) -> int:
        """Steps before the variance is frozen."""
        return int(self.param_groups[0]["warmup_steps"])

    @property
    def beta1(self) -> float:
        """The decay of the momentum."""
        return float(self.param_groups[0]["betas"][0])

    shares_state: ClassVar[str] = "momentum"
    """The array of an algorithm's state that this optimizer shares."""

    def check_algorithm(self, algorithm: QAdam) -> None:
        """Raise `ArrayError` unless `algorithm`, a `bagua_comm.QAdam`, has the settings of this optimizer."""
        wanted = (algorithm.warmup_steps, algorithm.beta1)
        if (self.warmup_steps, self.beta1) != wanted:
            raise ArrayError(
                f"DistributedDataParallel: the optimizer has warmup_steps={self.warmup_steps} and "
                f"betas[0]={self.beta1}, but {algorithm} has {wanted[0]} and {wanted[1]}; make them equal"
            )

    def attach(
        self, parameters: Iterable[Tensor], momenta: Mapping[Tensor, Tensor], *, algorithm: QAdam, step: int
    ) -> None:
        """Keep the momentum of each parameter in the given tensor, which the algorithm averages.

        Args:
            parameters: The parameters of one model.
            momenta: The tensors, by parameter. A parameter that is missing is detached.
            algorithm: The algorithm, for the length of the warm-up.
            step: The number of training steps so far. After the warm-up the algorithm averages the momentum.
        """
        self._share(parameters, momenta, frozen=step >= algorithm.warmup_steps)

    def detach(self, parameters: Iterable[Tensor]) -> None:
        """Keep the momentum of each parameter in a separate tensor again."""
        self._share(parameters, {}, frozen=False)

    def _share(self, parameters: Iterable[Tensor], momenta: Mapping[Tensor, Tensor], *, frozen: bool) -> None:
        for parameter in parameters:
            shared, own = momenta.get(parameter), self.state.get(parameter, {}).get("exp_avg")
            if shared is None:
                if self._shared.pop(parameter, None) is not None and own is not None:
                    self.state[parameter]["exp_avg"] = own.clone()
            else:
                self._shared[parameter] = shared
                if own is not None and shared.data_ptr() != own.data_ptr():
                    shared.copy_(own)
                    self.state[parameter]["exp_avg"] = shared
            (self._frozen.add if frozen else self._frozen.discard)(parameter)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler; if True, it leaves unscaling to `step`."""
        return bool(self._shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Raises:
            UnsupportedError: Called by a GradScaler, which would unscale gradients after momenta were averaged.
        """
        if hasattr(self, "found_inf"):  # set by a GradScaler for this call
            for name in ("found_inf", "grad_scale"):
                vars(self).pop(name, None)
            raise UnsupportedError(
                "QAdamOptimizer: QAdam averages the momentum during the backward pass, before GradScaler "
                "unscales the gradients; use autocast to bfloat16, which needs no scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), shared = self.state[x], group["betas"], self._shared.get(x)
        if not state:
            state["step"] = state["variance_step"] = 0
            state["exp_avg"] = torch.zeros_like(x) if shared is None else shared
            state["exp_avg_sq"] = torch.zeros_like(x)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        frozen = state["step"] > group["warmup_steps"] if shared is None else x in self._frozen
        if not frozen:
            g = g.add(x, alpha=group["weight_decay"]) if group["weight_decay"] else g
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            state["variance_step"] += 1
        else:
            if shared is None:
                m.lerp_(g, 1 - beta1)
            if group["weight_decay"]:
                m.add_(x, alpha=(1 - beta1) * group["weight_decay"])
        second = 1 - beta2 ** max(1, state["variance_step"])
        denominator = (v.sqrt() / math.sqrt(second)).add_(group["eps"])
        if frozen:
            denominator.masked_fill_(v == 0, math.inf)
        x.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
