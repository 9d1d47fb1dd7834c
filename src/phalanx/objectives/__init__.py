"""Pure losses of logits, labels and extra rows; to add an objective: one file, one line of the table."""

from phalanx.objectives.causal_lm import IGNORE, causal_lm
from phalanx.objectives.classification import Confusion, classification, mark_classes, pooled_logits
from phalanx.objectives.objective import ExtraRows, LossFunction, LossWithExtras, Objective
from phalanx.objectives.weighted_causal_lm import weighted_causal_lm

OBJECTIVES: dict[str, Objective] = {
    "causal_lm": Objective(causal_lm),
    "classification": Objective(classification, own_head=True),
    "weighted_causal_lm": Objective(with_extras=weighted_causal_lm, extras={"weights": ExtraRows()}),
}

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
    "pooled_logits",
    "weighted_causal_lm",
]
