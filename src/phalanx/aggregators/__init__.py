"""Robust rules: how one update comes of many, some of which lie. A rule is its file and one line of a table."""

import torch
from torch import Tensor

from phalanx.aggregators.rule import krum_update, max_krum_byzantine, multi_krum
from phalanx.aggregators.rule import max_mda_byzantine, mda_mean
from phalanx.aggregators.rule import caf_mean
from phalanx.aggregators.rule import centered_clipping
from phalanx.aggregators.rule import geometric_median
from phalanx.aggregators.rule import mean_update
from phalanx.aggregators.rule import median_update
from phalanx.aggregators.rule import PreStep as PreStep, bucket_updates, nearest_neighbour_mixing
from phalanx.aggregators.rule import (
    Aggregator as Aggregator,
    below_half,
    squared_distances as squared_distances,
)
from phalanx.aggregators.rule import trimmed_mean
from phalanx.errors import ConfigError

AGGREGATORS: dict[str, Aggregator] = {
    "mean": Aggregator(mean_update, lambda clients: 0, "McMahan et al. 2017"),
    "median": Aggregator(median_update, below_half, "Yin et al. 2018"),
    "trimmed_mean": Aggregator(trimmed_mean, below_half, "Yin et al. 2018"),
    "krum": Aggregator(krum_update, max_krum_byzantine, "Blanchard et al. 2017"),
    "multi_krum": Aggregator(multi_krum, max_krum_byzantine, "Blanchard et al. 2017"),
    "geometric_median": Aggregator(geometric_median, below_half, "Pillutla et al. 2022"),
    "centered_clipping": Aggregator(centered_clipping, below_half, "Karimireddy et al. 2021"),
    "mda": Aggregator(mda_mean, max_mda_byzantine, "El-Mhamdi et al. 2021"),
    "caf": Aggregator(caf_mean, below_half, "Allouah et al. 2025"),
}

PRE_STEPS: dict[str, PreStep] = {"nnm": nearest_neighbour_mixing, "bucketing": bucket_updates}


def aggregate_updates(
    updates: Tensor, rule: str, byzantine: int, before: tuple[str, ...] = (), seed: int = 0
) -> Tensor:
    """Return one update of many.

    Args:
        updates: ``[clients, values]``, admitted: finite and within the norm.
        rule: Name in `AGGREGATORS`.
        byzantine: Number of clients that may lie.
        before: Names in `PRE_STEPS`, in order.
        seed: Decides the draws of steps; another one in each round, or a liar meets the same clients in all of them.
    """
    unknown = [name for name in (rule, *before) if name not in (AGGREGATORS if name == rule else PRE_STEPS)]
    if unknown:
        raise ConfigError(f"aggregator: found {unknown[0]!r}; choices: {', '.join((*AGGREGATORS, *PRE_STEPS))}")
    chance = torch.Generator().manual_seed(seed)
    for name in before:
        updates, byzantine = PRE_STEPS[name](updates, byzantine, chance)
    return AGGREGATORS[rule](updates, byzantine)


def check_rule(clients: int, rule: str, byzantine: int, before: tuple[str, ...]) -> None:
    """Return where a rule, after these steps, stands so many liars of so many clients."""
    updates = torch.zeros(clients, 1)
    for name in before:
        updates, byzantine = PRE_STEPS[name](updates, byzantine, torch.Generator())
    AGGREGATORS[rule].check_byzantine(len(updates), byzantine)
