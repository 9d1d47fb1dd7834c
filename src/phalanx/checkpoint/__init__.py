"""Checkpoints that are atomic, signed and free of pickle; torch is loaded only to write or read one."""

from typing import TYPE_CHECKING

from phalanx.checkpoint.certified import BestCheckpoint, CertifiedCheckpoints
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keys import KeyHolder, open_key, write_new_key
from phalanx.checkpoint.manifest import (
    latest_checkpoint,
    list_checkpoints,
    manifest_digest,
    step_directory,
    step_of,
)
from phalanx.checkpoint.retention import Retention, drop_checkpoints_after
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.checkpoint.load import Checkpoint, open_checkpoint
    from phalanx.checkpoint.remote import RemoteStore
    from phalanx.checkpoint.save import save_checkpoint
    from phalanx.checkpoint.stream import Shard

__all__ = [
    "BestCheckpoint",
    "CertifiedCheckpoints",
    "Checkpoint",
    "CheckpointConfig",
    "KeyHolder",
    "RemoteStore",
    "Retention",
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


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
