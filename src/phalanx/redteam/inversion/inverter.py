"""The interface of attacks on hidden states: they rank, for each position, the tokens that may stand there."""

from typing import Protocol

import torch
from torch import Tensor

_ROWS = 256


class Inverter(Protocol):
    """Guesses tokens from what crosses a cut."""

    def fit_states(self, states: Tensor, ids: Tensor) -> None:
        """Learn from text that the host has itself, sent under the same guard.

        Args:
            states: Observed states of that text, ``[batch, seq, dim]``.
            ids: The text, ``[batch, seq]``.
        """
        ...

    def rank_tokens(self, states: Tensor, count: int) -> Tensor:
        """Return the likeliest tokens of each position, best first.

        Args:
            states: Observed states, ``[batch, seq, dim]``.

        Returns:
            ``[batch, seq, count]``.
        """
        ...


def recover_tokens(inverter: Inverter, states: Tensor) -> Tensor:
    """Return an attack's answer, ``[batch, seq]``."""
    return inverter.rank_tokens(states, 1)[..., 0]


def share_of_tokens(found: Tensor, ids: Tensor) -> float:
    """Return how many of the tokens were recovered, each in its place, as a share."""
    return float((found == ids).double().mean())


def chance_share(public: Tensor, private: Tensor) -> float:
    """Return the share that is recovered without seeing anything: always the commonest token of public text."""
    guess = int(public.flatten().bincount().argmax())
    return share_of_tokens(torch.full_like(private, guess), private)


def nearest_rows(queries: Tensor, table: Tensor, count: int, bias: Tensor | None = None) -> Tensor:
    """Return the rows of a table in the directions nearest to the queries', best first.

    Args:
        queries: ``[..., dim]``.
        table: ``[rows, dim]``.
        bias: Added to each row's cosine, ``[rows]``; None adds nothing.

    Returns:
        Row numbers, ``[..., count]``.
    """
    directions = torch.nn.functional.normalize(table, dim=-1)
    flat = torch.nn.functional.normalize(queries.reshape(-1, queries.shape[-1]), dim=-1)
    best = [
        (part @ directions.T if bias is None else part @ directions.T + bias).topk(count, dim=-1).indices
        for part in torch.split(flat, _ROWS)
    ]
    return torch.cat(best).reshape(*queries.shape[:-1], count)
