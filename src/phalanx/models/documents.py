"""Borders of documents beside the tokens that cross between stages, so that a stage's input is all that it needs.

A stage that attends inside documents must know where they begin. It is told by one more number for each token, behind
its id or its hidden state: 1 where a document begins, 0 elsewhere. So what a stage is sent is the whole of its input:
digests, audits, evidence and replays of a message cover the borders, and there is nothing beside it to lie about.
"""

import torch
from torch import Tensor

from phalanx.models.family import AttentionPattern

_HALF = 0.5


def with_documents(ids: Tensor, documents: Tensor | None) -> Tensor:
    """Return ids with the borders of their documents, int64 ``[batch, seq, 2]``; ids as they are where none are told.

    Args:
        ids: int64 ``[batch, seq]``.
        documents: int64 ``[batch, seq]``, the number of each token's document in its row.
    """
    if documents is None:
        return ids
    return torch.stack([ids, _borders(documents).to(ids.dtype)], dim=-1)


def split_documents(x: Tensor, *, embeds: bool) -> tuple[Tensor, AttentionPattern]:
    """Return a stage's input without the borders, and the attention that they stand for.

    Args:
        x: ``[batch, seq, hidden + 1]``; ids ``[batch, seq, 2]`` of the stage that embeds, or ``[batch, seq]``, where
            every row is one document.
        embeds: Whether the stage does.
    """
    if embeds and x.dim() == 2:
        return x, AttentionPattern("documents", documents=torch.zeros_like(x))
    # what is no border is none: a number that is not one reads as 0, and the digest has told of it
    documents = (x[..., -1].detach() > _HALF).to(torch.int64).cumsum(dim=1)
    return (x[..., 0] if embeds else x[..., :-1]), AttentionPattern("documents", documents=documents)


def join_documents(hidden: Tensor, pattern: AttentionPattern) -> Tensor:
    """Return hidden states with the borders that the next stage needs, ``[batch, seq, hidden + 1]``."""
    if pattern.documents is None:
        return hidden
    return torch.cat([hidden, _borders(pattern.documents).to(hidden.dtype).unsqueeze(-1)], dim=-1)


def _borders(documents: Tensor) -> Tensor:
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins
