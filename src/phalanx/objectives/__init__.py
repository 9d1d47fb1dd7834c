"""Pure losses of logits, labels and extra rows; to add an objective: one file, one line of the table."""

from phalanx.config import resolve
from phalanx.objectives.causal_lm import IGNORE, causal_lm
from phalanx.objectives.classification import Confusion, classification, mark_classes, pooled_logits
from phalanx.objectives.objective import ExtraRows, LossFunction, LossWithExtras, Objective
from phalanx.objectives.own import own_objective
from phalanx.objectives.policy_gradient import (
    ROLLOUT_EXTRAS,
    DrGrpoSettings,
    GrpoSettings,
    RlooSettings,
    RolloutSettings,
    dr_grpo,
    grpo,
    rloo,
)
from phalanx.objectives.weighted_causal_lm import weighted_causal_lm

OBJECTIVES: dict[str, Objective] = {
    "causal_lm": Objective(causal_lm),
    "classification": Objective(classification, own_head=True),
    "weighted_causal_lm": Objective(with_extras=weighted_causal_lm, extras={"weights": ExtraRows()}),
    "grpo": Objective(with_extras=grpo, extras=ROLLOUT_EXTRAS, settings=GrpoSettings, target="sequence"),
    "dr_grpo": Objective(with_extras=dr_grpo, extras=ROLLOUT_EXTRAS, settings=DrGrpoSettings, target="sequence"),
    "rloo": Objective(with_extras=rloo, extras=ROLLOUT_EXTRAS, settings=RlooSettings, target="sequence"),
}


def objective_of(kind: str) -> Objective:
    """Return what a run minimises.

    Args:
        kind: A key of `OBJECTIVES`, or a reference to a function of the user's own.

    Raises:
        ConfigError: There is none of that name, or the function is no objective.
    """
    return resolve(kind, OBJECTIVES, own_objective)


__all__ = [
    "IGNORE",
    "OBJECTIVES",
    "Confusion",
    "ExtraRows",
    "LossFunction",
    "LossWithExtras",
    "Objective",
    "causal_lm",
    "classification",
    "mark_classes",
    "objective_of",
    "pooled_logits",
    "weighted_causal_lm",
]
