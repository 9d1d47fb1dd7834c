"""Labels out of gradients: read off the gradients of the logits, or from the direction of the cut's gradients."""

import torch
from torch import Tensor
from torch.nn import functional


def labels_of_logit_gradients(gradients: Tensor) -> Tensor:
    """Return the labels.

    The gradient of a cross-entropy is the softmax less one at the label: the label's entry alone is negative.

    Sees: gradients of the logits, ``[..., classes]``. Wins: every label, ``[...]``.

    Source: Zhao et al. 2020 (iDLG).
    """
    return gradients.argmin(dim=-1)


class LabelsByDirection:
    """Labels by the direction of the cut's gradient, compared with a few examples of known labels.

    Sees: gradients of the cut, ``[batch, dim]``, a few known examples among them: the host may be a client itself.
    Wins: the labels of the others.

    Source: Li et al. 2022 (label leakage in split learning: cosine attack).
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._directions = self._mean = torch.zeros(0)

    def fit_directions(self, gradients: Tensor, labels: Tensor) -> None:
        """Learn each label's direction from known examples, ``[batch, dim]`` and ``[batch]``, with every label."""
        self._mean = gradients.mean(dim=0)
        unit = functional.normalize(gradients - self._mean, dim=-1)
        self._directions = torch.stack([unit[labels == label].mean(dim=0) for label in range(self._classes)])

    def recover_labels(self, gradients: Tensor) -> Tensor:
        """Return the labels, ``[batch]``."""
        unit = functional.normalize(gradients - self._mean, dim=-1)
        return (unit @ functional.normalize(self._directions, dim=-1).T).argmax(dim=-1)
