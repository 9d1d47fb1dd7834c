"""Attacks on the weights: texts are written by a model that is cheaper, older or another one."""

import torch
from torch import Tensor

from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.rollouts import RolloutPolicy

_LEVELS = 127
_NOISE = 0.05


class OtherModel(LyingWriter):
    """A writer with a sibling of the policy: every weight matrix is off by a twentieth of its spread."""

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        """Other weights of the same shape."""
        generator = torch.Generator().manual_seed(0)

        def moved(one: Tensor) -> Tensor:
            noise = torch.randn(one.shape, generator=generator).to(one.dtype)
            return one + _NOISE * one.std() * noise

        return RolloutPolicy(policy.config, {k: moved(v) if v.ndim > 1 else v for k, v in policy.tensors.items()})


class Int8Weights(LyingWriter):
    """A writer with the policy in int8: one scale a row, the usual way to halve memory."""

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        """Weights rounded to 8 bits."""
        return RolloutPolicy(
            policy.config, {k: rounded_to_int8(v) if v.ndim > 1 else v for k, v in policy.tensors.items()}
        )


class StalePolicy(LyingWriter):
    """A writer that still uses the weights that it got first."""

    def __init__(self, *, careful: bool = True) -> None:
        super().__init__(careful=careful)
        self._first: RolloutPolicy | None = None

    def replace_policy(self, policy: RolloutPolicy) -> RolloutPolicy:
        """The first weights."""
        if self._first is None:
            self._first = RolloutPolicy(policy.config, {k: v.clone() for k, v in policy.tensors.items()})
        return self._first


def rounded_to_int8(weight: Tensor) -> Tensor:
    """Round to 8 bits, one scale a row."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _LEVELS
    return (weight / scale).round() * scale
