"""The refusal, before any process starts, of what DeepSpeed's ranks cannot do here."""

from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.parallel.deepspeed.config import DeepSpeedConfig
from phalanx.parallel.deepspeed.disk import why_no_disk, why_no_locked_memory
from phalanx.parallel.deepspeed.extra import build_kernels, environment, load, why_no_extra, why_no_kernels
from phalanx.parallel.deepspeed.settings import locked_bytes


def check_machine(
    config: DeepSpeedConfig, sizes: list[int], copies: int, local_copies: int, device: str, *, build: bool
) -> None:
    """Refuse what this machine cannot do.

    Args:
        config: The section.
        sizes: Numbers of each parameter that is trained.
        copies: Ranks that share them.
        local_copies: How many of these are on this machine.
        device: Of the ranks.
        build: Compile the kernels too, which other ranks then find compiled.

    Raises:
        ConfigError: Says what is lacking, and what to do.
    """
    for lacking in (why_no_extra(), _why_no_place(config, sizes, copies, local_copies)):
        if lacking is not None:
            raise ConfigError(f"deepspeed: {lacking}")
    adam, files = config.offload_optimizer != "none", config.uses_disk
    with environment(device, 0):
        load()
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
