"""First values that depend on a seed and a name, and on nothing else."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.exact import draw_normal

_SPREAD = 0.02
"""Standard deviation of a new head's weights, as transformers draws them."""


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU, seeded with the first 8 bytes of SHA-256 of ``seed|name``."""
    first_bytes = hashlib.sha256(f"{seed}|{name}".encode()).digest()[:8]
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(first_bytes, "big"))


def fill_normal(values: Tensor, deviation: float, generator: torch.Generator | None, mean: float = 0.0) -> Tensor:
    """Fill a tensor from a normal distribution with bits that no processor changes; see ``draw_normal``."""
    drawn = draw_normal(tuple(values.shape), generator).mul_(deviation).add_(mean)
    return values.detach().copy_(drawn)


def draw_score(name: str, weight: Tensor, seed: int) -> None:
    """Fill a new score head; the values depend on the seed and the name only."""
    fill_normal(weight, _SPREAD, seeded_generator(seed, name))


class NormalDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which ``normal_`` of tensors on the CPU is `fill_normal`: for first values that transformers draws."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.normal_.default or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        mean, deviation = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
        fill_normal(args[0], deviation, (kwargs or {}).get("generator"), mean)
        return args[0]
