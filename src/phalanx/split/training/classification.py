"""A classification head in the place of the language model's, trained inside the enclave."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine import NO_EXTRAS
from phalanx.errors import ModelError
from phalanx.models import StageModule
from phalanx.models.family import HEAD
from phalanx.objectives import OBJECTIVES, ExtraRows, pooled_logits


class HeldOutScores(NamedTuple):
    """The scores of held-out rows.

    Attributes:
        pair_sums: Twice the pairs of which the better answer is worth more, where equal ones count once, and the sum of
            the differences in worth; empty where rows are no pairs.
    """

    loss: float
    targets: int
    answers: tuple[int, ...] = ()
    pair_sums: tuple[float, ...] = ()


class Classification:
    """One class a text, from the mean of its tokens' logits; a `SplitTask`."""

    def __init__(self, num_classes: int) -> None:
        if num_classes < 2:
            raise ModelError(f"classification: {num_classes} classes; expected 2 or more")
        self._num_classes = num_classes

    @property
    def extra_kinds(self) -> Mapping[str, ExtraRows]:
        """None: a class is all that is learned."""
        return OBJECTIVES["classification"].extras

    @property
    def held_out_extras(self) -> Mapping[str, ExtraRows]:
        """None."""
        return {}

    @property
    def num_pair_sums(self) -> int:
        """None: there are no pairs."""
        return 0

    def put_head(self, back: StageModule) -> dict[str, nn.Parameter]:
        """Replace the head by a linear one of zeros: at first every class is as likely as any other."""
        if not back.spec.is_last:
            raise ModelError(f"stage {back.spec.index}: has no head; a classification head belongs to the last part")
        head = nn.Linear(int(back.hub_config.hidden_size), self._num_classes, dtype=torch.float32)
        for parameter in head.parameters():
            parameter.detach().zero_()
        back.replace_head(head)
        return {f"{HEAD}.{name}": parameter for name, parameter in head.named_parameters()}

    def compute_loss(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[Tensor, int]:
        """As `SplitTask` says; labels as `phalanx.objectives.mark_classes` makes them."""
        return OBJECTIVES["classification"](back(hidden), labels, extras)

    def measure_rows(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `SplitTask` says: the likeliest class of each text, for the client that sent it."""
        del extras
        logits = back(hidden)
        loss, targets = OBJECTIVES["classification"](logits, labels)
        pooled, _ = pooled_logits(logits, labels)
        return HeldOutScores(float(loss), targets, tuple(int(label) for label in pooled.argmax(dim=1)))

    def count_targets(self, labels: Tensor) -> int:
        """As `SplitTask` says: texts, each of which has one label that counts."""
        return OBJECTIVES["classification"].count_targets(labels)

    def num_answers(self, rows: int) -> int:
        """One class a text."""
        return rows

    def label_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """One label a token, all but a text's last one ignored: so the host does not see how long a text is."""
        return (rows, seq)

    @torch.no_grad()
    def predict_classes(self, back: StageModule, hidden: Tensor, labels: Tensor) -> list[int]:
        """Return the likeliest class of each text.

        Args:
            back: Trained; its mode is put back afterwards.
            hidden: ``[rows, seq, hidden]``, any float type.
            labels: Only where a text ends is read from them.
        """
        was_training = back.training
        back.eval()
        try:
            pooled, _ = pooled_logits(back(hidden.to(torch.float32)), labels)
        finally:
            back.train(was_training)
        return [int(label) for label in pooled.argmax(dim=1)]
