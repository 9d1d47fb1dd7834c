"""The head of a model, which its config tells: a language model's, one score for each token, or both side by side."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from phalanx.planner.model.shape import ModelShape

HeadKind = Literal["lm", "score", "lm_and_score"]

VALUE_HEAD = "value_head"
"""The key of a config that says that a language model has a score for each token as well."""
_SCORES = "ForSequenceClassification"


def head_kind(config: Mapping[str, Any]) -> HeadKind:
    """Return the head that a hub config describes.

    The hub's own way of saying that a model scores texts is a class for sequence classification with one label.

    Args:
        config: The keys of a config.json.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    labels = config.get("num_labels") or len(config.get("id2label") or ())
    if isinstance(name, str) and name.endswith(_SCORES) and labels == 1:
        return "score"
    return "lm_and_score" if config.get(VALUE_HEAD) is True else "lm"


def with_head(shape: ModelShape, kind: HeadKind) -> ModelShape:
    """Return the shape of a model with another head on the same blocks."""
    if kind == "lm":
        return shape
    features = shape.head_matrix // shape.vocab
    if kind == "score":
        return replace(shape, tied=False, head=features, head_matrix=features)
    return replace(shape, head=shape.head + features, head_matrix=shape.head_matrix + features)
