"""What the back part says of held-out rows."""

from typing import NamedTuple


class HeldOutScores(NamedTuple):
    """What held-out rows come to.

    Attributes:
        loss: Summed, in nats.
        targets: How many there were.
        answers: What the task says to each row; empty where it says nothing.
    """

    loss: float
    targets: int
    answers: tuple[int, ...] = ()
