"""The run file in deepspeed's own words, and the refusal, before any process starts, of what its ranks cannot do."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.parallel.deepspeed.config import DeepSpeedConfig

if TYPE_CHECKING:
    from phalanx.parallel.control.rank_trainer import RankRecipe
from phalanx.errors import ConfigError
from phalanx.parallel.deepspeed.disk import why_no_disk, why_no_locked_memory
from phalanx.parallel.deepspeed.extra import (
    build_kernels,
    deepspeed_environment,
    load_package,
    why_no_extra,
    why_no_kernels,
)

_PARAMETER_BUFFERS, _STATE_BUFFERS = 5, 4
"""deepspeed's own numbers: parameters in memory at once; weights, two moments and a gradient."""
_BYTES = 4


def largest_share(largest: int, copies: int) -> int:
    """Numbers of the largest share of one parameter that a rank has."""
    return -(-largest // copies)


def locked_bytes(config: DeepSpeedConfig, total: int, largest: int, copies: int) -> int:
    """Bytes of memory that a rank locks for the disk.

    Args:
        total: Number of trained parameters of the whole model.
        largest: Numbers of the largest parameter.
        copies: Number of ranks that share them.
    """
    share = largest_share(largest, copies)
    num_bytes = 0
    if config.offload_optimizer == "nvme":
        num_bytes += _STATE_BUFFERS * min(config.update_at_once + share, largest_share(total, copies)) * _BYTES
    if config.offload_parameters == "nvme":
        num_bytes += _PARAMETER_BUFFERS * share * _BYTES
    return num_bytes


def deepspeed_settings(
    config: DeepSpeedConfig, recipe: "RankRecipe", largest: int, folder: Path | None
) -> dict[str, Any]:
    """Return the config for ``deepspeed.initialize``.

    Args:
        largest: Numbers of the largest parameter.
        folder: This rank's own; None where nothing is kept on disk.
    """
    copies = recipe.parallel.dp
    zero: dict[str, Any] = {"stage": config.zero, "sub_group_size": config.update_at_once}
    if config.offload_optimizer != "none":
        zero["offload_optimizer"] = _offload_settings(config.offload_optimizer, folder) | {
            "buffer_count": _STATE_BUFFERS
        }
    if config.offload_parameters != "none":
        zero["offload_param"] = _offload_settings(config.offload_parameters, folder) | {
            "buffer_count": _PARAMETER_BUFFERS,
            "buffer_size": largest_share(largest, copies),
            # else deepspeed keeps the first 10^9 numbers in memory, whatever the file says
            "max_in_cpu": 0,
        }
    if config.offload_parameters == "nvme":
        # its reading ahead asks twice for a parameter that occurs twice among the next ones, and ends the rank
        zero["stage3_prefetch_bucket_size"] = 0
        # what is kept for its next use keeps its buffer, and there are five
        zero["stage3_max_reuse_distance"] = 0
    aio = config.aio
    return {
        "train_micro_batch_size_per_gpu": recipe.batch_size // (copies * recipe.microbatches),
        "gradient_accumulation_steps": recipe.microbatches,
        "gradient_clipping": recipe.optimizer.clip_norm or 0.0,
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "aio": {
            "block_size": aio.block_bytes,
            "queue_depth": aio.queue_depth,
            "intra_op_parallelism": aio.threads,
            "single_submit": aio.single_submit,
            "overlap_events": aio.overlap_events,
        },
    }


def _offload_settings(kind: str, folder: Path | None) -> dict[str, Any]:
    return {"device": kind} if kind == "cpu" or folder is None else {"device": kind, "nvme_path": str(folder)}


def check_machine(
    config: DeepSpeedConfig, sizes: list[int], copies: int, local_copies: int, device: str, *, build: bool
) -> None:
    """Refuse settings that this machine cannot fulfil.

    Args:
        sizes: Numbers of each parameter that is trained.
        copies: Number of ranks that share them.
        local_copies: Number of these ranks on this machine.
        build: Compile the kernels too, which other ranks then find compiled.
    """
    for lacking in (why_no_extra(), _why_no_place(config, sizes, copies, local_copies)):
        if lacking is not None:
            raise ConfigError(f"deepspeed: {lacking}")
    adam, files = config.offload_optimizer != "none", config.uses_disk
    with deepspeed_environment(device, 0):
        load_package()
        lacking = why_no_kernels(adam=adam, files=files)
        if lacking is not None:
            raise ConfigError(f"deepspeed: {lacking}")
        if build:
            build_kernels(adam=adam, files=files)


def _why_no_place(config: DeepSpeedConfig, sizes: list[int], copies: int, local_copies: int) -> str | None:
    if config.directory is None:
        return None
    total = sum(sizes)
    needed = config.bytes_on_disk * total * local_copies // copies
    lacking = why_no_disk(Path(config.directory), needed)
    if lacking is not None:
        return f"directory: {lacking}"
    return why_no_locked_memory(locked_bytes(config, total, max(sizes), copies))
