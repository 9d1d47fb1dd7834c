"""A property of whole texts out of hidden states: their domain, or whether they are medical."""

import torch
from torch import Tensor

_RIDGE = 0.1


class TextProperty:
    """Ridge regression from means and deviations over a text's positions to one of several classes.

    Sees: activations of one cut, also of texts with a known property, under the same guard. Wins: the property of the
    others.

    Source: Pan et al. 2020 (keywords and kinds of text from embeddings of general-purpose language models).
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._mean = self._scale = self._map = self._offset = torch.zeros(0)

    def fit_texts(self, states: Tensor, labels: Tensor) -> None:
        """Learn from texts of every class, states ``[batch, seq, dim]`` and labels ``[batch]``."""
        x = _pool_positions(states)
        self._mean, self._scale = x.mean(dim=0), x.std(dim=0).clamp_min(1e-6)
        x = (x - self._mean) / self._scale
        y = torch.nn.functional.one_hot(labels, self._classes).double()
        self._offset = y.mean(dim=0)
        # fewer texts than columns: the system of the texts is the smaller one
        gram = x @ x.T
        gram.diagonal().add_(_RIDGE * float(gram.diagonal().mean()) + 1e-9)
        self._map = x.T @ torch.linalg.solve(gram, y - self._offset)

    def recover_labels(self, states: Tensor) -> Tensor:
        """Return the classes, ``[batch]``."""
        x = (_pool_positions(states) - self._mean) / self._scale
        return (x @ self._map + self._offset).argmax(dim=-1)


def _pool_positions(states: Tensor) -> Tensor:
    """Return mean and deviation of each column over a text, without its first position, which is unlike the others."""
    rest = states[:, 1:].double()
    return torch.cat([rest.mean(dim=1), rest.std(dim=1)], dim=-1)
