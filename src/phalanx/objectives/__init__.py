"""Pure losses of logits, labels and extra rows; to add an objective: one file, one line of the table."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny
from pydantic_core import PydanticCustomError

from phalanx.config import check_name, resolve_kind
from phalanx.objectives.causal_lm import IGNORE as IGNORE, causal_lm_loss as causal_lm_loss
from phalanx.objectives.classification import (
    ConfusionMatrix as ConfusionMatrix,
    classification_loss as classification_loss,
    mark_classes as mark_classes,
    pooled_logits as pooled_logits,
)
from phalanx.objectives.dpo import (
    CpoSettings,
    DpoSettings,
    IpoSettings,
    OrpoSettings,
    SimpoSettings,
    cpo_loss,
    dpo_loss,
    ipo_loss,
    log_ratio_worth,
    mean_log_ratio_worth,
    mean_worth,
    orpo_loss,
    simpo_loss,
    total_worth,
)
from phalanx.objectives.kto import WANTED, KtoSettings, kto_loss
from phalanx.objectives.mixed import PART as PART, SHARE as SHARE, mixed_objective as mixed_objective
from phalanx.objectives.objective import (
    ROW_LABELS as ROW_LABELS,
    ExtraRows as ExtraRows,
    LossWithExtras as LossWithExtras,
    Objective as Objective,
    ObjectiveSettings as ObjectiveSettings,
    RowAttention as RowAttention,
)
from phalanx.objectives.own import own_objective
from phalanx.objectives.pairs import REFERENCE
from phalanx.objectives.policy_gradient import (
    ROLLOUT_EXTRAS,
    DrGrpoSettings,
    GrpoSettings,
    RlooSettings,
    RolloutSettings as RolloutSettings,
    dr_grpo_loss,
    grpo_loss,
    rloo_loss,
)
from phalanx.objectives.ppo import PPO_EXTRAS, PpoSettings, ppo_loss
from phalanx.objectives.pretraining import (
    CorruptedRows,
    DenoisedRows,
    DenoisersSettings,
    FillInTheMiddleSettings,
    MaskedRows,
    MaskedSettings,
    MiddleRows,
    PrefixRows,
    Row as Row,
    RowPlace as RowPlace,
    RowRewriting as RowRewriting,
    SpanCorruptionSettings,
    TokenTable as TokenTable,
)
from phalanx.objectives.reward import MARGIN, reward_loss, row_scores
from phalanx.objectives.causal_lm import weighted_causal_lm_loss as weighted_causal_lm_loss

_BESIDE_REFERENCE = {REFERENCE: ExtraRows(per_token=False)}


def _preference_objective(
    loss: LossWithExtras,
    worth: Callable[..., Any],
    settings: type[ObjectiveSettings] | None,
    extras: Mapping[str, ExtraRows] = MappingProxyType({}),
) -> Objective:
    return Objective(with_extras=loss, extras=extras, settings=settings, target="pair", worth=worth)


OBJECTIVES: dict[str, Objective] = {
    "causal_lm": Objective(causal_lm_loss),
    "classification": Objective(classification_loss, own_head=True),
    "denoisers": Objective(
        causal_lm_loss, settings=DenoisersSettings, rewriting=DenoisedRows.from_tokens, attention="prefix"
    ),
    "fill_in_the_middle": Objective(causal_lm_loss, settings=FillInTheMiddleSettings, rewriting=MiddleRows.from_tokens),
    "masked": Objective(
        causal_lm_loss, settings=MaskedSettings, rewriting=MaskedRows.from_tokens, attention="bidirectional"
    ),
    "prefix_lm": Objective(causal_lm_loss, rewriting=PrefixRows.from_tokens, attention="prefix"),
    "span_corruption": Objective(
        causal_lm_loss, settings=SpanCorruptionSettings, rewriting=CorruptedRows.from_tokens, attention="prefix"
    ),
    "weighted_causal_lm": Objective(with_extras=weighted_causal_lm_loss, extras={"weights": ExtraRows()}),
    "grpo": Objective(
        with_extras=grpo_loss, extras=ROLLOUT_EXTRAS, settings=GrpoSettings, target="sequence", by_label=True
    ),
    "dr_grpo": Objective(
        with_extras=dr_grpo_loss, extras=ROLLOUT_EXTRAS, settings=DrGrpoSettings, target="sequence", by_label=True
    ),
    "rloo": Objective(with_extras=rloo_loss, extras=ROLLOUT_EXTRAS, settings=RlooSettings, target="sequence"),
    "ppo": Objective(with_extras=ppo_loss, extras=PPO_EXTRAS, settings=PpoSettings, head="lm_and_score"),
    "dpo": _preference_objective(dpo_loss, log_ratio_worth, DpoSettings, _BESIDE_REFERENCE),
    "ipo": _preference_objective(ipo_loss, mean_log_ratio_worth, IpoSettings, _BESIDE_REFERENCE),
    "kto": _preference_objective(
        kto_loss, log_ratio_worth, KtoSettings, _BESIDE_REFERENCE | {WANTED: ExtraRows("int64", per_token=False)}
    ),
    "orpo": _preference_objective(orpo_loss, mean_worth, OrpoSettings),
    "simpo": _preference_objective(simpo_loss, mean_worth, SimpoSettings),
    "cpo": _preference_objective(cpo_loss, total_worth, CpoSettings),
    "reward": replace(
        _preference_objective(reward_loss, row_scores, None, {MARGIN: ExtraRows(per_token=False)}), head="score"
    ),
}


def _read_choice(value: Any) -> Any:
    """Turn a name, or a table with the name as ``kind``, into settings where the objective has any."""
    settings = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = settings.get("kind")
    if isinstance(value, ObjectiveSettings) or not isinstance(kind, str):
        return value
    check_name(kind, OBJECTIVES, or_own=True)
    row = OBJECTIVES.get(kind)
    if row is not None and row.settings is not None:
        return row.settings.model_validate_json(json.dumps(settings))
    if len(settings) > 1:
        raise PydanticCustomError("no_settings", "{kind} has no settings; write its name alone", {"kind": kind})
    return kind


SingleObjective = Annotated[str | SerializeAsAny[ObjectiveSettings], BeforeValidator(_read_choice)]
"""``train.objective``: a name, a reference to a function of the user's own, or settings with the name as ``kind``.

The name alone of an objective that has settings stands for its defaults."""


class MixedSettings(ObjectiveSettings):
    """Several objectives, each of microbatches of its own; engines get it for ``[[objectives]]`` of a run file."""

    kind: Literal["mixed"] = "mixed"
    parts: tuple[SingleObjective, ...] = Field(min_length=2)


def _read_any(value: Any) -> Any:
    """Read one objective, or several."""
    if isinstance(value, Mapping) and value.get("kind") == "mixed":
        return MixedSettings.model_validate_json(json.dumps(dict(value)))
    return _read_choice(value)


ObjectiveChoice = Annotated[str | SerializeAsAny[ObjectiveSettings], BeforeValidator(_read_any)]
"""What an engine learns: one objective as a run file names it, or several."""


def kind_of(choice: str | ObjectiveSettings) -> str:
    """Return the name, or the reference, of a run's objective."""
    return choice if isinstance(choice, str) else choice.kind


def objective_of(choice: str | ObjectiveSettings) -> Objective:
    """Return a run's objective, with its settings.

    Args:
        choice: A key of `OBJECTIVES`, a reference to a function of the user's own, or settings.
    """
    if isinstance(choice, MixedSettings):
        return mixed_objective([objective_of(part) for part in choice.parts])
    objective = resolve_kind(kind_of(choice), OBJECTIVES, own_objective)
    if isinstance(choice, str):
        return objective if objective.settings is None else objective.with_settings(objective.settings(kind=choice))
    return objective.with_settings(choice)
