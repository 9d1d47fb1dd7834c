"""Look each hidden state up among the states of single tokens.

At the embedding the table is exact: a hidden state *is* a row of it, but for its position. Behind blocks it holds the
front's output for each candidate after one common token, so it misses the context.
"""

import torch
from torch import Tensor

from phalanx.redteam.inversion.front import Front
from phalanx.redteam.inversion.inverter import nearest_rows


class NearestNeighbour:
    """Nearest neighbour in the hidden states of candidate tokens.

    Sees: plaintext activations of one cut; has the public front. Wins: the tokens.

    Args:
        front: The public front; the embedding is one of its cuts.
        candidates: Tokens that are tried, ``[number]``.
        table: Their states at the cut, ``[number, dim]``, as `candidate_states` gives them.

    Source: Song and Raghunathan 2020 (inversion of embeddings).
    """

    def __init__(self, front: Front, depth: int, candidates: Tensor, table: Tensor) -> None:
        self._front, self._depth = front, depth
        self._candidates, self._table = candidates, table
        self._centre = table.mean(dim=0)

    def fit_states(self, states: Tensor, ids: Tensor) -> None:
        """Learn the part that all states share; `ids` are not needed."""
        del ids
        self._centre = self._subtract_positions(states).flatten(0, 1).mean(dim=0)

    def rank_tokens(self, states: Tensor, count: int) -> Tensor:
        """As `Inverter` says; no more than there are candidates."""
        count = min(count, len(self._candidates))
        places = nearest_rows(self._subtract_positions(states) - self._centre, self._table - self._centre, count)
        return self._candidates[places]

    def _subtract_positions(self, states: Tensor) -> Tensor:
        """Subtract the positional part of an embedding; behind blocks positions are no longer a mere sum."""
        if self._depth:
            return states
        same = torch.zeros((1, max(states.shape[1], 2)), dtype=torch.int64)
        placed = self._front.states_at_depth(same, 0)[0]
        return states - (placed - placed[1])[: states.shape[1]]


def candidate_states(front: Front, candidates: Tensor, before: int, deepest: int | None = None) -> dict[int, Tensor]:
    """Run single tokens through the front.

    Args:
        candidates: Tokens, ``[number]``.
        before: The token that stands before each: the first position is unlike all others in trained models.
        deepest: Deepest state to return, as for `Front.hidden_states`.

    Returns:
        By depth, ``[number, dim]`` each.
    """
    pairs = torch.stack([torch.full_like(candidates, before), candidates], dim=1)
    return {depth: states[:, 1] for depth, states in front.hidden_states(pairs, deepest).items()}


def opening_states(front: Front, number: int) -> dict[int, Tensor]:
    """Run single tokens through the front, with nothing before them.

    Args:
        number: Tokens 0 to this; the commonest ones come first in most vocabularies.

    Returns:
        By depth, ``[number, dim]`` each.
    """
    ids = torch.arange(min(number, front.vocab_size))[:, None]
    return {depth: states[:, 0] for depth, states in front.hidden_states(ids).items()}
