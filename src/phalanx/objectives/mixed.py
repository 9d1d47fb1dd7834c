"""Several objectives at once: each microbatch is learned by one of them, and a step's loss is their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from phalanx.errors import DataError
from phalanx.objectives.objective import ExtraRows, Objective

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor

PART = "part"
"""The name of the extra rows with the number of the objective that a row is learned by, int64 ``[batch]``."""
SHARE = "share"
"""The name of the extra rows with the weight of a row's objective over its targets in the step, float32 ``[batch]``."""


def mixed_objective(parts: Sequence[Objective]) -> Objective:
    """Return the objective whose microbatches are each learned by one of several.

    Its extra rows are those of all parts, with `PART` and `SHARE`; rows have zeros for those of other parts.
    """
    extras = {name: rows for part in parts for name, rows in part.extras.items()}
    extras |= {PART: ExtraRows("int64", per_token=False), SHARE: ExtraRows(per_token=False)}
    return Objective(with_extras=partial(mixed_loss, parts=tuple(parts)), extras=extras, target="step")


def mixed_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    parts: Sequence[Objective],
) -> tuple[Float[Tensor, ""], int]:
    """Weighted loss of one microbatch by the objective of its rows.

    Args:
        extras: ``part``, the same number in each row; ``share``, the same number in each row; and those of all parts.

    Returns:
        ``share`` times the summed loss of the part, so that a step adds up to the sum of each part's weight times the
        mean over its targets; and 1, since nothing is divided by targets any more.
    """
    number, share = int(extras[PART][0]), extras[SHARE]
    if not 0 <= number < len(parts):
        raise DataError(f"extras.{PART}: has {number}, but there are {len(parts)} objectives")
    if bool((extras[PART] != number).any()) or bool((share != share[0]).any()):
        raise DataError(
            f"extras.{PART}, extras.{SHARE}: differ within a microbatch; give each microbatch one objective"
        )
    part = parts[number]
    total, _ = part(logits, labels, {name: extras[name] for name in part.extras})
    return total * share[0].to(total.device), 1
