"""Search by gradient for embeddings that the front turns into the observed states, then take the nearest tokens.

The front is differentiable in its embeddings. Vectors in their place are moved until the states at the cut are the
observed ones; a vector that ends near a row of the table names its token. No text of the run has to be known.
"""

import torch
from torch import Tensor

from phalanx.redteam.inversion.front import Front
from phalanx.redteam.inversion.inverter import Inverter, nearest_rows

_TOKENS = 512


class GradientSearch:
    """Optimisation of the input from the activation of a cut behind a block.

    Sees: activations of one cut; has the public front. Wins: the tokens.

    Args:
        proposer: An inverter that was trained already: the search begins at the embeddings of its tokens.
        steps: Steps of Adam, with a rate that falls to zero.
        lr: First step width, in standard deviations of the embedding table.

    Source: Zhu et al. 2019 (optimisation of the input), on activations instead of gradients.
    """

    def __init__(self, front: Front, depth: int, proposer: Inverter, steps: int = 200, lr: float = 0.3) -> None:
        self._front, self._depth, self._proposer = front, depth, proposer
        self._steps, self._lr = steps, lr
        self._scale = torch.ones(1)

    def fit_states(self, states: Tensor, ids: Tensor) -> None:
        """Learn how far states are apart in each column, but for first tokens, which are unlike; ids are not needed."""
        del ids
        self._scale = states[:, 1:].flatten(0, 1).std(dim=0).clamp_min(1e-6)

    def rank_tokens(self, states: Tensor, count: int) -> Tensor:
        """As `Inverter` says."""
        table = self._front.embedding_table
        start = table[self._proposer.rank_tokens(states, 1)[..., 0]]
        # few tokens at a time: the graph of a deep front is large
        rows = max(1, _TOKENS // states.shape[1])
        parts = zip(torch.split(start, rows), torch.split(states, rows), strict=True)
        ends = torch.cat([self._search_embeddings(*part) for part in parts])
        centre = table.mean(dim=0)
        return nearest_rows(ends - centre, table - centre, count)

    def _search_embeddings(self, start: Tensor, seen: Tensor) -> Tensor:
        embedded = start.clone().requires_grad_()
        width = self._lr * float(self._front.embedding_table.std())
        optimizer = torch.optim.Adam([embedded], lr=width)
        for step in range(self._steps):
            for group in optimizer.param_groups:
                group["lr"] = width * (1.0 - step / self._steps)
            states = self._front.states_of_embeddings(embedded, self._depth)
            loss = ((states - seen) / self._scale).square().mean(dim=-1).sum()
            (embedded.grad,) = torch.autograd.grad(loss, [embedded])
            optimizer.step()
        return embedded.detach()
