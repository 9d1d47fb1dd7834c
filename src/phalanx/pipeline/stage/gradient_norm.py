"""The squared norm of a stage's gradient: as the message carries it, and how far an unchecked one is believed."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.optimizers import gradient_norm_squared

FACTOR = 4.0
"""How many times larger or smaller than the last one that the owner computed itself a stage's norm may be unseen."""
_NORM_TOLERANCE = 1e-5
"""Relative, of squared norms that were added up in another order; the clip coefficient moves by half of it at most."""


def finite_norm_squared(gradients: Mapping[str, Tensor]) -> float | None:
    """Squared norm of all gradients together; None when it is not finite, for JSON has no word for that."""
    value = gradient_norm_squared(dict(gradients))
    return value if value < float("inf") else None


class KnownNorms:
    """The squared norm of each stage's gradient as the owner computed it last.

    Where the holder alone has the gradient (`GuardConfig.one_optimizer`), its word sets the clip coefficient of every
    stage. A norm that is far from the known one has the owner redo that very step before anything is updated.

    Guarantees:
        A norm that was not checked is within `FACTOR` of one that the owner has computed for that stage, inside one
        numeric class: no lie about it moves the clip coefficient by more, and none grows from step to step.
    """

    def __init__(self) -> None:
        self._known: dict[int, float | None] = {}

    def note(self, stage: int, norm_squared: float | None) -> None:
        """Take what the owner has computed."""
        self._known[stage] = norm_squared

    def is_odd(self, stage: int, norm_squared: float) -> bool:
        """Whether a stage's word must be looked into before it is used: the first one, and one far from the known."""
        known = self._known.get(stage)
        return known is None or not known / FACTOR**2 <= norm_squared <= known * FACTOR**2


def same_norm(one: float | None, other: float | None, *, alike: bool) -> bool:
    """Whether two parties may both have got these squared norms from the same numbers."""
    if alike or one is None or other is None:
        return one == other
    return abs(one - other) <= _NORM_TOLERANCE * max(abs(one), abs(other))
