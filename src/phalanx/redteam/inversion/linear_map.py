"""A linear map from hidden states to token embeddings, learnt from the host's own text by least squares."""

import torch
from torch import Tensor

from phalanx.redteam.inversion.inverter import nearest_rows

_RIDGE = 1e-3


class LinearMap:
    """Ridge regression to the embedding, and the nearest row of its table.

    Sees: activations of one cut, also of text that it knows, under the same guard. Wins: the tokens.

    Args:
        embedding: The public table, ``[vocab, features]``.

    Source: Song and Raghunathan 2020 (white-box inversion maps back to the embedding first).
    """

    def __init__(self, embedding: Tensor) -> None:
        self.embedding = embedding
        self.centre = embedding.mean(dim=0)
        self._mean = self._scale = self._map = torch.zeros(0)

    def fit_states(self, states: Tensor, ids: Tensor) -> None:
        """As `Inverter` says."""
        x, tokens = states.flatten(0, 1).double(), ids.flatten()
        self._mean, self._scale = x.mean(dim=0).float(), x.std(dim=0).clamp_min(1e-6).float()
        x = self.standardise_states(states).flatten(0, 1).double()
        self.centre = self.embedding[tokens].mean(dim=0)
        y = (self.embedding[tokens] - self.centre).double()
        gram = x.T @ x
        gram.diagonal().add_(_RIDGE * float(gram.diagonal().mean()) + 1e-9)
        self._map = torch.linalg.solve(gram, x.T @ y).float()

    @property
    def map_weight(self) -> Tensor:
        """The map, ``[dim, features]``, from standardised states to centred embeddings."""
        return self._map

    def standardise_states(self, states: Tensor) -> Tensor:
        """Return states with mean 0 and deviation 1 in each column of the text that was learnt from."""
        return (states - self._mean) / self._scale

    def rank_tokens(self, states: Tensor, count: int) -> Tensor:
        """As `Inverter` says."""
        return nearest_rows(self.standardise_states(states) @ self._map, self.embedding - self.centre, count)
