"""Which tokens of a row see which, as the objective and ``data.attention`` say it and the model's family can."""

from phalanx.errors import ConfigError
from phalanx.models import FAMILIES, AttentionKind, ModelSource
from phalanx.objectives import OBJECTIVES, RowAttention
from phalanx.objectives.pretraining import DenoisersSettings
from phalanx.train.config import RunConfig


def attention_of(run: RunConfig, source: ModelSource) -> RowAttention:
    """Return which tokens see which, as far as the objective says it."""
    family, kind = FAMILIES[source.hub_config.model_type], attention_asked(run)
    needs, has = f"{kind} attention", f"only {', '.join(sorted(family.attention_kinds))}"
    settings = run.train.objective
    hides = isinstance(settings, DenoisersSettings) and any(part.kind == "masked" for part in settings.effective_tasks)
    if family.facts.predicts == "target" and hides:
        # hidden tokens are predicted where they stood, and that is the encoder's text
        needs, has = "logits of the text that the encoder reads", "only those of what a decoder writes"
    elif kind in family.attention_kinds:
        return kind
    raise ConfigError(
        f'train.objective = "{run.train.objective_kind}": its rows need {needs}, but {family.model_type} has '
        f"{has}; choose another objective or model"
    ).with_facts(code="PHX-C025", key="train.objective", found=run.train.objective_kind)


def attention_asked(run: RunConfig) -> RowAttention:
    """Return which tokens see which by the objective, whatever the model can do."""
    objective = OBJECTIVES.get(run.train.objective_kind)
    return "causal" if objective is None else objective.attention


def attention_kind(run: RunConfig, source: ModelSource) -> AttentionKind:
    """Return which tokens see which: inside documents, or as the objective says it."""
    return "documents" if attends_in_documents(run, source) else attention_of(run, source)


def attends_in_documents(run: RunConfig, source: ModelSource) -> bool:
    """Whether attention stays inside documents."""
    if run.data.attention == "across":
        return False
    model_type = source.hub_config.model_type
    if "documents" not in FAMILIES[model_type].attention_kinds:
        raise ConfigError(
            f'data.attention = "document": transformers does not support it for {model_type}; set "across"'
        )
    return True
