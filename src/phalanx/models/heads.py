"""The head of a model in transformers' config object, and the first values of one that is new."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from phalanx.errors import ModelError
from phalanx.models.seeding import seeded_generator
from phalanx.planner.model.heads import VALUE_HEAD, HeadKind, head_kind

_SPREAD = 0.02
"""Standard deviation of a new head's weights, as transformers draws them."""


def head_of(hub_config: Any) -> HeadKind:
    """Return the head that a config object describes."""
    keys = ("architectures", "num_labels", VALUE_HEAD)
    return head_kind({key: getattr(hub_config, key, None) for key in keys})


def config_with_head(hub_config: Any, kind: HeadKind, where: str) -> Any:
    """Return a copy of a config with another head.

    Raises:
        ModelError: transformers has no class for scores of the family, so no file of the hub could tell of them.
    """
    changed = copy.deepcopy(hub_config)
    changed.architectures = None
    setattr(changed, VALUE_HEAD, kind == "lm_and_score")
    if kind == "lm":
        delattr(changed, VALUE_HEAD)
    if kind == "score":
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hub_config.model_type)
        if name is None:
            raise ModelError(
                f'model.head = "score": transformers has no class that scores texts for {hub_config.model_type} '
                f"({where}); take a model of another family"
            )
        delattr(changed, VALUE_HEAD)
        changed.architectures, changed.num_labels, changed.tie_word_embeddings = [name], 1, False
    return changed


def draw_score(name: str, weight: Tensor, seed: int) -> None:
    """Fill a new score head; the values depend on the seed and the name only."""
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    values.normal_(0.0, _SPREAD, generator=seeded_generator(seed, name))
    weight.detach().copy_(values)
