"""The formulas of codecs and steps in plain operations of CuPy and PyTorch, which `codecs` times, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_comm.arrays import Array

from .device import is_stand_in, torch_with_cuda

BLOCK = 512
"""Elements of a block of MinMaxUInt8."""


@dataclass(frozen=True)
class Plain:
    """Operations that libraries name differently; CuPy's names are NumPy's."""

    rint: Callable[[Any], Any]
    sqrt: Callable[[Any], Any]
    lowest: Callable[[Any], Any]
    """Along the last axis, which stays."""
    highest: Callable[[Any], Any]
    clip: Callable[[Any, float, float], Any]
    cast: Callable[[Any, str], Any]

    @classmethod
    def of_numpy(cls, library: Any) -> Plain:
        """Operations of NumPy or CuPy."""
        return cls(
            rint=library.rint,
            sqrt=library.sqrt,
            lowest=lambda x: x.min(axis=-1, keepdims=True),
            highest=lambda x: x.max(axis=-1, keepdims=True),
            clip=library.clip,
            cast=lambda x, dtype: x.astype(dtype),
        )

    @classmethod
    def of_torch(cls, torch: Any) -> Plain:
        """Operations of PyTorch."""
        return cls(
            rint=torch.round,
            sqrt=torch.sqrt,
            lowest=lambda x: x.amin(dim=-1, keepdim=True),
            highest=lambda x: x.amax(dim=-1, keepdim=True),
            clip=torch.clamp,
            cast=lambda x, dtype: x.to(getattr(torch, dtype)),
        )

    def levels(self, low: Any, high: Any) -> tuple[Any, Any]:
        """Scale and lowest level of each block."""
        scale = (0 * low + 255) / (high - low)  # for 255 / x, PyTorch takes 255 * (1 / x)
        return scale, self.rint(high * scale) - 255

    def minmax_encode(self, x: Any, block: int = BLOCK) -> tuple[Any, Any, Any]:
        """Ends of blocks and codes, of rows that are whole blocks."""
        blocks = x.reshape(len(x), -1, block)
        low, high = self.lowest(blocks), self.highest(blocks)
        scale, lower = self.levels(low, high)
        codes = self.clip(self.rint(blocks * scale) - lower, 0, 255)
        return low, high, self.cast(codes, "uint8")

    def minmax_decode(self, low: Any, high: Any, codes: Any) -> Any:
        """The elements, in blocks."""
        scale, lower = self.levels(low, high)
        return (self.cast(codes, "float32") + lower) / scale

    def minmax_combine(self, low: Any, high: Any, codes: Any) -> tuple[Any, Any, Any]:
        """The average of the rows, encoded."""
        total = self.minmax_decode(low[0], high[0], codes[0])
        for row in range(1, len(codes)):
            total = total + self.minmax_decode(low[row], high[row], codes[row])
        return self.minmax_encode((total / len(codes)).reshape(1, -1), codes.shape[-1])

    def cast_encode(self, x: Any) -> Any:
        """To float16. Numbers beyond its range become infinite; the codec would keep them finite."""
        return self.cast(x, "float16")

    def sgd_step(self, x: Any, g: Any, buffer: Any) -> None:
        """See `host.sgd_step`, with the settings below."""
        g = g + x * SGD["weight_decay"]
        buffer *= SGD["momentum"]
        buffer += g
        x -= (g + buffer * SGD["momentum"]) * SGD["lr"]

    def adam(self, x: Any, g: Any, m: Any, v: Any) -> None:
        """See `host.adam_moments` and `host.adam_step`, with the settings below."""
        (b1, b2), (first, second) = ADAM["betas"], ADAM_STEP["corrections"]
        g = g + x * ADAM["weight_decay"]
        m *= b1
        m += g * (1 - b1)
        v *= b2
        v += g * g * (1 - b2)
        x -= m / (self.sqrt(v) / second**0.5 + ADAM_STEP["eps"]) * (ADAM_STEP["lr"] / first)


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}
ADAM_STEP: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "corrections": (0.1, 0.001)}


def rivals(cupy: Any) -> dict[str, tuple[Plain, Callable[[Array], Any]]]:
    """Libraries to time beside our kernels, and how each views a CuPy array."""
    if is_stand_in():  # it has no arithmetic
        return {}
    found: dict[str, tuple[Plain, Callable[[Array], Any]]] = {"cupy": (Plain.of_numpy(cupy), lambda x: x)}
    torch = torch_with_cuda()
    if torch is not None:
        found["torch"] = (Plain.of_torch(torch), torch.from_dlpack)
    return found
