"""Checkpoints that are atomic, signed and free of pickle; torch is loaded only to write or read one."""

from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.certified import CertifiedCheckpoints
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keys import KeyHolder, open_key, write_new_key
from phalanx.checkpoint.manifest import (
    latest_checkpoint,
    list_checkpoints,
    manifest_digest,
    step_directory,
    step_of,
)
from phalanx.checkpoint.retention import drop_checkpoints_after

if TYPE_CHECKING:
    from phalanx.checkpoint.load import Checkpoint, open_checkpoint
    from phalanx.checkpoint.remote import RemoteStore
    from phalanx.checkpoint.save import save_checkpoint
    from phalanx.checkpoint.shard import Shard

__all__ = [
    "CertifiedCheckpoints",
    "Checkpoint",
    "CheckpointConfig",
    "KeyHolder",
    "RemoteStore",
    "Shard",
    "drop_checkpoints_after",
    "latest_checkpoint",
    "list_checkpoints",
    "manifest_digest",
    "open_checkpoint",
    "open_key",
    "save_checkpoint",
    "step_directory",
    "step_of",
    "write_new_key",
]

_MODULES = {
    "Checkpoint": "load",
    "RemoteStore": "remote",
    "Shard": "shard",
    "open_checkpoint": "load",
    "save_checkpoint": "save",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib  # noqa: PLC0415 - the config of a run is read without torch

        return getattr(importlib.import_module(f"phalanx.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'phalanx.checkpoint' has no attribute {name!r}")
