"""Layouts that cannot work are refused before any process starts, with the reason and the nearest that does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.parallel.config import ParallelConfig
from phalanx.planner import nearest, shape_of, why_not


@dataclass(frozen=True)
class Workload:
    """What one step is made of.

    Attributes:
        batch_size: Sequences of one step, all ranks together.
        microbatches: Parts that each copy's sequences are cut into.
        sequence_length: Tokens of a sequence.
        attention: Attention kernel that the run file asks for.
    """

    batch_size: int
    microbatches: int
    sequence_length: int
    attention: str = "sdpa"


def check_layout(config: ParallelConfig, hub_config: Mapping[str, Any], load: Workload) -> None:
    """Refuse a layout that cannot train a model.

    Args:
        config: The run's section.
        hub_config: The model's config.json.
        load: Of the run.

    Raises:
        ConfigError: Says why, and names the nearest layout that works.
        ModelError: The model's config lacks a size.
    """
    shape = shape_of(hub_config, "model config")
    numbers = (shape, load.batch_size, load.microbatches, load.sequence_length)
    reason = why_not(config.layout, *numbers)
    if reason is not None:
        found = nearest(config.layout, *numbers)
        advice = "no layout works" if found is None else f"the nearest that works is {found}"
        raise ConfigError(f"parallel: {reason}; {advice}")
    for reason in _our_reasons(config, hub_config, load):
        raise ConfigError(f"parallel: {reason}")


def _our_reasons(config: ParallelConfig, hub_config: Mapping[str, Any], load: Workload) -> Iterator[str]:
    family = hub_config.get("model_type")
    if config.cp > 1 and family == "bloom":
        yield f"cp={config.cp}: bloom's bias on attention scores has no context parallel kernel; set cp to 1, raise tp"
    if config.cp > 1 and load.attention != "sdpa":
        yield f'cp={config.cp} needs model.attention = "sdpa", found "{load.attention}"'
    if config.sequence_parallel and load.sequence_length % (config.cp * config.tp):
        yield (
            f"sequence_parallel: cp={config.cp} * tp={config.tp} does not divide a sequence of "
            f"{load.sequence_length} tokens; change one of them"
        )
    if config.tp > 1 and hub_config.get("slow_but_exact") and hub_config.get("pretraining_tp", 1) > 1:
        yield f"tp={config.tp}: slow_but_exact = true cuts matrices itself; set it to false in the model's config"
