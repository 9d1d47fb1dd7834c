"""The form in which transformers has a model that classifies texts: a head with a number for each token and class."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from phalanx.errors import ModelError
from phalanx.models.build import parameter_names
from phalanx.models.families import TRANSFORMERS_REFUSALS
from phalanx.models.family import HEAD
from phalanx.models.quiet import quiet_transformers
from phalanx.models.source import ModelSource

HEAD_TENSORS = frozenset({f"{HEAD}.weight", f"{HEAD}.bias"})
"""Names under which a run has the head of its classes."""
CLASSIFIER_KEY = "phalanx_classifier"
"""Key of ``config.json`` under which an exported classifier says how tokens become the class of a text."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ClassifierForm:
    """The class of transformers that loads a classifier, with a text's logits as the mean of its tokens' logits.

    Attributes:
        classes: Their names, in the order of the logits.
        max_tokens: Tokens of a text that count; the rest was cut off in training.
        architecture: Name of the class of transformers, whose head has the name `head`.
    """

    classes: tuple[str, ...]
    max_tokens: int
    architecture: str
    head: str

    def rename_head(self, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return tensors of a run under the names of transformers' class."""
        return {
            f"{self.head}.{name.removeprefix(f'{HEAD}.')}" if name in HEAD_TENSORS else name: value
            for name, value in tensors.items()
        }

    def describe_classes(self) -> dict[str, Any]:
        """Return the keys of ``config.json`` that are a classifier's own."""
        names = dict(enumerate(self.classes))
        return {
            "architectures": [self.architecture],
            "id2label": {str(number): name for number, name in names.items()},
            "label2id": {name: number for number, name in names.items()},
            CLASSIFIER_KEY: {"max_tokens": self.max_tokens, "pooling": "mean"},
        }


def find_classifier_form(source: ModelSource, classes: tuple[str, ...], max_tokens: int) -> ClassifierForm:
    """Find the class of transformers for a model with a head of so many classes.

    Raises:
        ModelError: transformers has none of this family, or one with other parts.
    """
    config = copy.deepcopy(source.hub_config)
    config.num_labels = len(classes)
    try:
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(config, trust_remote_code=False)
    except TRANSFORMERS_REFUSALS as exc:
        raise ModelError(f"{source.family.model_type}: transformers has no class for its classifiers: {exc}") from exc
    heads = [name for name, part in model.named_children() if isinstance(part, nn.Linear)]
    if len(heads) == 1:
        form = ClassifierForm(classes, max_tokens, type(model).__name__, heads[0])
        trunk = set(parameter_names(source.hub_config)) - HEAD_TENSORS
        if {name for name, _ in model.named_parameters()} == set(form.rename_head(dict.fromkeys(trunk | HEAD_TENSORS))):
            return form
    raise ModelError(
        f"{source.family.model_type}: {type(model).__name__} of transformers has other parts than the run's model"
    )
