"""The layout for as many ranks as are there: more or fewer data parallel copies of the same step; imports no torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.refusal import StepWorkload, check_layout

_WITHOUT_COPIES: dict[str, Any] = {
    "zero": 0,
    "gradient_compression": "none",
    "offload": False,
    "replicas": 1,
    "outer": None,
}


def with_copies(config: ParallelConfig, dp: int) -> ParallelConfig:
    """Return the same layout with another number of data parallel copies.

    One copy alone has no other to share with, so everything that copies share is switched off for it.
    """
    if dp == config.dp:
        return config
    if not config.min_dp_copies <= dp <= config.max_dp_copies:
        raise ConfigError(
            f"parallel: dp={dp} is not between {config.min_dp_copies} and {config.max_dp_copies}; set min_dp, max_dp"
        )
    changed: dict[str, Any] = {"dp": dp}
    if dp * config.cp == 1:
        changed.update(_WITHOUT_COPIES)
    try:
        return ParallelConfig.model_validate({**config.model_dump(), **changed})
    except ValidationError as exc:
        raise ConfigError(f"parallel: dp={dp}: {exc.errors()[0]['msg']}") from exc


def fit_layout(config: ParallelConfig, world: int, hub_config: Mapping[str, Any], load: StepWorkload) -> ParallelConfig:
    """The layout with the most copies that so many ranks can play; ranks beyond it stand by.

    The batch of a step stays the same: a number of copies that does not cut it into equal shares is passed over.
    """
    if config.min_dp_copies == config.max_dp_copies:
        if world != config.num_ranks:
            raise ConfigError(
                f"parallel: the layout {config.planned_layout} needs {config.num_ranks} ranks, {world} were started; "
                "start as many, or set min_dp and max_dp"
            )
        check_layout(config, hub_config, load)
        return config
    max_copies = min(config.max_dp_copies, world // config.ranks_per_copy)
    refusals = []
    for dp in range(max_copies, config.min_dp_copies - 1, -1):
        try:
            layout = with_copies(config, dp)
            check_layout(layout, hub_config, load)
        except ConfigError as exc:
            refusals.append(str(exc))
        else:
            return layout
    if refusals:
        raise ConfigError(f"{refusals[0]} (with {world} ranks, and no smaller dp down to {config.min_dp_copies} works)")
    raise ConfigError(
        f"parallel: {world} ranks were started, dp={config.min_dp_copies} copies of {config.ranks_per_copy} need "
        f"{config.min_dp_copies * config.ranks_per_copy}; start more, or lower min_dp"
    )


def list_world_sizes(config: ParallelConfig, batch_size: int, microbatches: int) -> list[int]:
    """Numbers of ranks with which the batch is cut into equal shares, most ranks first."""
    return [
        dp * config.ranks_per_copy
        for dp in range(config.max_dp_copies, config.min_dp_copies - 1, -1)
        if batch_size % (dp * microbatches) == 0
    ]
