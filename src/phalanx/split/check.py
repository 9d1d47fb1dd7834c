"""The check of a split before any process is started."""

from phalanx.aggregators import AGGREGATORS
from phalanx.errors import ConfigError
from phalanx.models import ModelSource
from phalanx.models.layout import check_length
from phalanx.objectives import OBJECTIVES
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.client_appraisal import client_policies_of
from phalanx.split.hardware.measure import policy_of
from phalanx.split.training.parts import cut_model


def check_split(split: SplitConfig, source: ModelSource, *, seq: int, objective: str) -> None:
    """Return where clients and an enclave can be started.

    Raises:
        ConfigError: The cut leaves a part without a layer, a policy is missing or wrong, the sequence is too long,
            the objective has no task, the model is an encoder, or more clients may lie than the rule stands.
    """
    cut_model(source.num_layers, split.cut)
    if objective not in OBJECTIVES:
        raise ConfigError(f'train.objective = "{objective}": a split supports {", ".join(OBJECTIVES)}')
    if "causal" not in source.family.attention_kinds:
        raise ConfigError(
            f"[split]: {source.family.model_type} has an encoder, but clients predict the next token; use a "
            "decoder, or [pipeline]"
        )
    if getattr(source.hub_config, "output_router_logits", False):
        raise ConfigError(
            "[split]: output_router_logits = true: an enclave does not support router losses; set it to false "
            "in the model"
        )
    _check_admission(split)
    check_length(seq, getattr(source.hub_config, "max_position_embeddings", None))
    if split.mode != "plaintext":
        policy_of(split)
    client_policies_of(split)


def _check_admission(split: SplitConfig) -> None:
    admission = split.admission
    max_byzantine = 0 if admission is None else AGGREGATORS[admission.rule].max_byzantine(split.clients)
    if admission is not None and admission.byzantine > max_byzantine:
        raise ConfigError(
            f'split.admission.byzantine = {admission.byzantine}: "{admission.rule}" tolerates '
            f"{max(0, max_byzantine)} of {split.clients} clients; lower it, or choose another rule"
        )
