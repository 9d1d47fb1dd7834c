"""The back part's scores of held-out rows."""

from typing import NamedTuple


class HeldOutScores(NamedTuple):
    """The scores of held-out rows.

    Attributes:
        loss: Summed, in nats.
        targets: How many there were.
        answers: What the task says to each row; empty where it says nothing.
    """

    loss: float
    targets: int
    answers: tuple[int, ...] = ()
