"""The span check: tokens with inputs that lie in the row space of an adapter's gradient.

The gradient of a linear layer is a sum over tokens of (gradient of the output) times (input), so its rows lie in the
span of the inputs. In the first layer an input is one of few known vectors for each token. With fewer tokens in the
batch than the adapter's rank, the inputs themselves are in that span, and hardly any other vector is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NOISE = 1e-5
"""Singular values below this share of the largest are rounding."""


@dataclass(frozen=True)
class SpanCheck:
    """The check on one LoRA layer of the first block.

    Sees: gradients of the layer's ``lora_A`` and ``lora_B``, and ``lora_A`` itself, in the clear. Wins: the set of
    tokens in the batch; with learned positions also their places.

    Attributes:
        inputs: Input of the layer for each position and token, ``[positions, vocab, features]``; one position where
            inputs do not depend on it.
        tolerance: Part of a vector that may lie outside the span.

    Source: Petrov et al. 2024 (DAGER), section on low-rank adapters; here the first layer alone.
    """

    inputs: Tensor
    tolerance: float = 0.05

    def tokens_by_position(self, gradient_a: Tensor, gradient_b: Tensor, weight_a: Tensor) -> list[Tensor]:
        """Return the tokens at each position, likeliest first.

        Args:
            gradient_a: ``[rank, features]``; zero in the first step of an adapter, because its B begins with zeros.
            gradient_b: ``[out, rank]``; used where the other one is zero.
            weight_a: ``[rank, features]``.
        """
        if float(gradient_a.abs().max()) > 0:
            return self._members_by_row(gradient_a, self.inputs)
        return self._members_by_row(gradient_b, self.inputs @ weight_a.T)

    def tokens_of_update(self, before: Tensor, after: Tensor) -> list[Tensor]:
        """The same from two states of ``lora_A`` with a plain gradient step, or a few, between them."""
        return self._members_by_row(after - before, self.inputs)

    def _members_by_row(self, gradient: Tensor, candidates: Tensor) -> list[Tensor]:
        outside = outside_of_rows(gradient, candidates)
        return [self._members_of_span(part) for part in outside]

    def _members_of_span(self, outside: Tensor) -> Tensor:
        order = outside.argsort()
        return order[outside[order] <= self.tolerance]


def outside_of_rows(gradient: Tensor, candidates: Tensor) -> Tensor:
    """Return the share of each vector that lies outside of a matrix's row space.

    Args:
        gradient: ``[rows, features]``.
        candidates: ``[..., features]``.

    Returns:
        From 0 to 1, ``[...]``; 1 for all where the matrix is zero, not finite, or spans everything and tells nothing.
    """
    shape = candidates.shape[:-1]
    if not bool(torch.isfinite(gradient).all()):
        return torch.ones(shape)
    _, values, directions = torch.linalg.svd(gradient.double(), full_matrices=False)
    rows = directions[values > _NOISE * values.max().clamp_min(1e-300)]
    if len(rows) == 0 or len(rows) >= candidates.shape[-1] or float(values.max()) == 0.0:
        return torch.ones(shape)
    x = torch.nn.functional.normalize(candidates.double(), dim=-1)
    outside: Tensor = (1.0 - (x @ rows.T).square().sum(dim=-1)).clamp_min(0.0).sqrt().float()
    return outside


def precision_and_recall(found: Tensor, ids: Tensor) -> tuple[float, float]:
    """Compare a set of tokens with the tokens of a batch; precision is 0 for an empty set."""
    guessed, actual = set(found.flatten().tolist()), set(ids.flatten().tolist())
    right = len(guessed & actual)
    return (right / len(guessed) if guessed else 0.0), right / len(actual)
