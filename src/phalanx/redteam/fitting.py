"""Small trainings that attacks need: shadow models, clones, and the undefended models of positive controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100


@dataclass(frozen=True)
class FittingPlan:
    """How a small model is trained.

    Attributes:
        batch: Rows of a step; 0 takes all.
        enough: Loss at which it ends earlier.
    """

    steps: int = 150
    rate: float = 3e-3
    batch: int = 0
    enough: float = 0.0
    seed: int = 0


def fit_rows(
    module: Any, rows: Sequence[Sequence[int]], plan: FittingPlan, masked: Sequence[int] | None = None
) -> None:
    """Train a causal language model on rows.

    Args:
        masked: Tokens at the beginning of each row that are not learned.
    """
    ids, labels = pad_rows(rows, masked)

    def loss_of(chosen: Tensor) -> Tensor:
        return torch.as_tensor(module(input_ids=ids[chosen], labels=labels[chosen]).loss)

    descend(module, loss_of, len(rows), plan)


def descend(module: Any, loss_of: Callable[[Tensor], Tensor], num_rows: int, plan: FittingPlan) -> None:
    """Minimise a loss over drawn rows with AdamW."""
    chance = torch.Generator().manual_seed(plan.seed)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.rate, weight_decay=0.0)
    module.train()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * (1.0 - 0.95 * step / plan.steps)
        chosen = torch.randperm(num_rows, generator=chance)[: plan.batch or num_rows]
        loss = loss_of(chosen)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if float(loss.detach()) < plan.enough:
            break
    module.eval()


def pad_rows(rows: Sequence[Sequence[int]], masked: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return ids and labels, ``[rows, length]`` each; padding is behind the end, where it changes nothing."""
    length = max(map(len, rows))
    ids, labels = torch.zeros((len(rows), length), dtype=torch.int64), torch.full((len(rows), length), IGNORE)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(list(row))
        start = masked[number] if masked else 0
        labels[number, start : len(row)] = ids[number, start : len(row)]
    return ids, labels


def fresh_like(module: Any, seed: int) -> Any:
    """Return a model of the same architecture with first weights of its own."""
    torch.manual_seed(seed)
    return type(module)(module.config)


def soft_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the divergence from given log-probabilities, ``[..., vocab]`` each."""
    return functional.kl_div(
        torch.log_softmax(logits, -1).flatten(0, -2), targets.flatten(0, -2), reduction="batchmean", log_target=True
    )
