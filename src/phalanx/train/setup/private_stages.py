"""A pipeline that hides single rows: which models it may train."""

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.errors import ConfigError
from phalanx.models import FAMILIES, ModelSource
from phalanx.train.config import PipelineRun, StagedRun

_HEADS = ("classifier", "summary")
"""Beginnings of config keys of heads that no stage has."""


def check_private_model(run: StagedRun, source: ModelSource) -> None:
    """Return where one row moves a step's sum by its own gradient alone.

    Raises:
        ConfigError: The model of a run with ``[privacy]`` mixes rows, or draws by their places.
    """
    if not isinstance(run, PipelineRun) or run.privacy is None:
        return
    config, kind = source.hub_config_dict, source.hub_config.model_type
    if run.model.adapter is None and getattr(source.hub_config, "tie_word_embeddings", False):
        raise ConfigError(
            f"[privacy] excludes tied weights without an adapter: {kind} has its embedding in the first and in the "
            "last stage, each would clip a part of its gradient, and a row could exceed its bound; train an "
            'adapter (model.adapter.kind = "lora"), or set tie_word_embeddings = false'
        )
    if FAMILIES[kind].facts.routed:
        raise ConfigError(
            f"[privacy] excludes experts in stages: {kind} balances them over the present rows, so a row would "
            "change the contribution of others; use a model without experts, or [parallel]"
        )
    for name, share in _config_numbers(config):
        if "drop" in name and not name.startswith(_HEADS) and share > 0:
            raise ConfigError(
                f"[privacy] excludes dropout in stages: the model has {name} = {share}, auditors draw it by the "
                "index of a microbatch, which would reveal the number of rows before it; set it to 0 in the "
                "model's config"
            )


def _config_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return every number of a model's config by its key, those of configs inside it too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_numbers(value)
        elif isinstance(value, int | float):
            yield name, value
