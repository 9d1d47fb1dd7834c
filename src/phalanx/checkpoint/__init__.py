"""Checkpoints that are atomic, signed and free of pickle; torch is loaded only to write or read one."""

from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.manifest import latest_checkpoint

if TYPE_CHECKING:
    from phalanx.checkpoint.load import Checkpoint, open_checkpoint
    from phalanx.checkpoint.save import drop_checkpoints_after, save_checkpoint
    from phalanx.checkpoint.shard import Shard

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "Shard",
    "drop_checkpoints_after",
    "latest_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
]

_MODULES = {
    "Checkpoint": "load",
    "Shard": "shard",
    "drop_checkpoints_after": "save",
    "open_checkpoint": "load",
    "save_checkpoint": "save",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib  # noqa: PLC0415 - the config of a run is read without torch

        return getattr(importlib.import_module(f"phalanx.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'phalanx.checkpoint' has no attribute {name!r}")
