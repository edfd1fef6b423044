"""The memory of the buckets, which holds gradients and weights.

Autograd accumulates a gradient in its bucket, because `p.grad` is a tensor over a part of the bucket. Where an
algorithm exchanges weights, the parameters are parts of buckets. Each part keeps its memory format
(`channels_last`) and has a separate storage: see `flats`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.autograd.graph import increment_version

from bagua_comm import Algorithm, ArrayError, Plan, TensorSpec
from bagua_comm.algorithms import base
from bagua_comm.algorithms.base import Payload

from ..arrays import dtype_name
from .flats import Flat, flat_of, layout_of
from .gradients import GradientsInBucket, SeparateGradients

ALIGNMENT = 32
"""Buckets are padded to a multiple of this many elements, times the number of ranks."""

_address = torch.Tensor.data_ptr


def pack(parameters: Mapping[str, nn.Parameter], algorithm: Algorithm, bucket_bytes: int, ranks: int) -> Plan:
    """The buckets for this algorithm, of about `bucket_bytes`, padded for this number of ranks."""
    return base.pack(algorithm, specs_of(parameters), bucket_bytes=bucket_bytes, alignment=ALIGNMENT * ranks)


def specs_of(parameters: Mapping[str, nn.Parameter]) -> list[TensorSpec]:
    """The parameters in the approximate order of their gradients in a backward pass: the last one first."""
    return [
        TensorSpec(name, tuple(parameter.shape), dtype_name(parameter), layout_of(parameter).memory)
        for name, parameter in reversed(list(parameters.items()))
    ]


class BucketMemory:
    """The tensors behind the buckets of a plan, for gradients, for weights, or for both.

    Args:
        parameters: The parameters that are trained, by name. All are on one device.
        plan: The buckets.
        in_buckets: Whether `p.grad` is a part of its bucket; otherwise gradients are copied there and back.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], plan: Plan, *, in_buckets: bool = True) -> None:
        self.parameters, self.plan, self.in_buckets = parameters, plan, in_buckets
        self.names = [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets]
        """The parameters of each bucket."""
        self.layouts = {name: layout_of(parameters[name]) for names in self.names for name in names}
        """The layout of each parameter in its bucket."""
        self.flats: dict[Payload, list[torch.Tensor]] = {}
        """One flat tensor for each bucket, by payload."""
        self._flats: dict[Payload, list[Flat]] = {}
        self.gradients: list[GradientsInBucket] = []
        """The gradients of each bucket; empty while gradients are not exchanged."""
        self._location: dict[str, tuple[GradientsInBucket, int]] = {}  # by parameter
        self.weights: dict[str, torch.Tensor] = {}
        """Internal views of the buckets of weights, by parameter."""
        self._in_weights: list[nn.Parameter] = []  # the parameters of `weights`, and their addresses below
        self._weights_at: list[int] = []
        self._strays: list[str] = []  # weights that user code has moved, and that stay there

    def allocate(self, payload: Payload) -> None:
        """Allocate zeroed memory for gradients or for weights."""
        self.flats[payload], self._flats[payload] = [], []
        self._allocate_missing(payload)

    def _allocate_missing(self, payload: Payload) -> None:
        """Allocate memory for the buckets that have none yet."""
        begin = len(self.flats[payload])
        all_names = self.names[begin:]
        for bucket in self.plan.buckets[begin:]:
            first = self.parameters[bucket.tensors[0].name]
            zeros = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
            self.flats[payload].append(zeros)
            self._flats[payload].append(Flat(zeros, bucket=True))
        flats = self._flats[payload][begin:]
        if payload == "grad":
            make = GradientsInBucket if self.in_buckets else SeparateGradients
            self.gradients += [
                make(names, [self.parameters[n] for n in names], flat, [self.layouts[n] for n in names])
                for names, flat in zip(all_names, flats, strict=True)
            ]
            self._location = {name: (part, i) for part in self.gradients for i, name in enumerate(part.names)}
        else:
            for names, flat in zip(all_names, flats, strict=True):
                self.weights.update(zip(names, flat.views([self.layouts[n] for n in names]), strict=True))
            self._in_weights = [self.parameters[name] for name in self.weights]
            self._weights_at = list(map(_address, self.weights.values()))

    def parts(self, flats: list[Flat]) -> dict[str, torch.Tensor]:
        """Tensors with separate storages over flat memory in the layout of the buckets, by parameter."""
        return {
            name: part
            for names, flat in zip(self.names, flats, strict=True)
            for name, part in zip(names, flat.parts([self.layouts[n] for n in names]), strict=True)
        }

    def provide(self, payloads: Collection[Payload]) -> None:
        """Allocate missing memory for `payloads`, and move weights there."""
        for payload in payloads:
            if payload in self.flats:
                continue
            self.allocate(payload)
            if payload == "weight":
                self._move_in(self.weights)
        self.reclaim()

    def extend(self, plan: Plan) -> None:
        """Allocate memory for the buckets that `plan` adds to the present one, and move weights there."""
        new = [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets[len(self.names) :]]
        self.plan = plan
        self.names += new
        self.layouts.update((name, layout_of(self.parameters[name])) for names in new for name in names)
        for payload in self.flats:
            self._allocate_missing(payload)
        if "weight" in self.flats:
            self._move_in([name for names in new for name in names])

    def _move_in(self, names: Collection[str]) -> None:
        """Move the weights of these parameters into the buckets."""
        for name in names:
            self.weights[name].copy_(self.parameters[name].detach())
        self._strays += [name for name in names if _shared(self.parameters[name])]
        self._attach_weights(names)

    def copy(self, old: BucketMemory) -> None:
        """Allocate memory for the payloads of `old`, with the same values, and attach it; see `replace`."""
        for payload, flats in old.flats.items():
            self.allocate(payload)
            values = old.plan.cut(flats)
            for name, view in self.plan.cut(self.flats[payload]).items():
                view.copy_(values[name])
        self.replace(old)

    def replace(self, old: BucketMemory) -> None:
        """Attach gradients and parameters to this memory, to which the engine has copied their values."""
        for name, (part, index) in old._location.items() if self._location else ():
            part.move_to(index, *self._location[name])
        self._strays = old._strays
        self._attach_weights()

    def _attach_weights(self, names: Collection[str] | None = None) -> None:
        """Make these parameters parts of the buckets; all if None."""
        for name, part in self.parts(self._flats["weight"]).items() if self.weights else ():
            if name not in self._strays and (names is None or name in names):
                self.parameters[name].data = part

    # Gradients ------------------------------------------------------------------------------------------

    def attach(self, name: str) -> None:
        """Make `p.grad` a part of its bucket with the same values or zeros, if gradients are exchanged."""
        if name in self._location:
            part, index = self._location[name]
            part.attach_one(index)

    def attach_bucket(self, index: int) -> None:
        """Collect the gradients of a bucket in its memory, before it is sent."""
        if self.gradients:
            self.gradients[index].collect()

    def attach_all(self) -> set[str]:
        """Let autograd accumulate into the buckets.

        Returns:
            The names of the parameters that had no gradient.
        """
        without: set[str] = set()
        for part in self.gradients:
            without |= part.attach()
        return without

    def collect(self) -> None:
        """Collect all gradients in the buckets."""
        for part in self.gradients:
            part.collect()

    def spread(self) -> None:
        """Copy the buckets to `p.grad`, unless that is a part of them."""
        for part in self.gradients:
            part.spread()

    # Weights --------------------------------------------------------------------------------------------

    @property
    def strayed(self) -> bool:
        """Whether user code has moved weights out of the buckets."""
        return bool(self._in_weights) and list(map(_address, self._in_weights)) != self._weights_at

    @torch.no_grad()
    def reclaim(self) -> None:
        """Move weights back into the buckets that user code has moved: converted and back, or replaced.

        Weights in shared memory or of another dtype stay where they are. For them the bucket is a copy, which
        `note_new_weights` writes back.

        Raises:
            ArrayError: A weight is in the bucket of another wrapper, or has another shape or device.
        """
        self._strays = []
        if not self.strayed:
            return
        parts: dict[str, torch.Tensor] = {}
        for address, (name, view) in zip(self._weights_at, self.weights.items(), strict=True):
            parameter = self.parameters[name]
            if parameter.data_ptr() == address:
                continue
            flat = flat_of(parameter)
            if parameter.shape != view.shape or parameter.device != view.device or (flat and flat.bucket):
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} of shape {tuple(parameter.shape)} on {parameter.device} "
                    "was resized, moved or wrapped once more, so its weights would not be exchanged; expected "
                    f"shape {tuple(view.shape)} on {view.device}, in the buckets of this wrapper. Close this one "
                    "and wrap the module again"
                )
            view.copy_(parameter.detach())
            if parameter.dtype == view.dtype and not _shared(parameter):
                parts = parts or self.parts(self._flats["weight"])
                parameter.data = parts[name]
            else:
                self._strays.append(name)

    def check(self) -> None:
        """Raise `ArrayError` if a parameter was converted after wrapping."""
        for part in self.gradients:
            part.check_layouts()
        for name in self._strays:
            if self.parameters[name].dtype != self.weights[name].dtype:
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} was converted to {self.parameters[name].dtype}, expected "
                    f"{self.weights[name].dtype} as when the module was wrapped; convert it back before a "
                    "training pass, or close this one and wrap the module again"
                )

    def note_new_weights(self) -> None:
        """Increment the versions of weights, to which the engine has written.

        Autograd then raises where an older graph needs the earlier weights.
        """
        if self.strayed:
            self._write_back()
        increment_version(self.parameters.values())

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy exchanged weights to the parameters that are not parts of the buckets."""
        for address, (name, view) in zip(self._weights_at, self.weights.items(), strict=True):
            if self.parameters[name].data_ptr() != address and self.parameters[name].shape == view.shape:
                self.parameters[name].copy_(view)


class SavedGradients:
    """The present gradients, to restore `p.grad` after the buckets were used for other values.

    Args:
        memory: The memory of the buckets.
    """

    def __init__(self, memory: BucketMemory) -> None:
        for part in memory.gradients:
            part.set_aside()
        names = [name for part in memory.gradients for name in part.names]
        self._saved = [(memory.parameters[name], memory.parameters[name].grad) for name in names]

    def restore(self) -> None:
        """Restore `p.grad` and its values."""
        for parameter, gradient in self._saved:
            parameter.grad = gradient


def _shared(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is in shared memory of the CPU; `is_shared` is True for all CUDA tensors."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
