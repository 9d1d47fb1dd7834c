"""Checkpoints that are atomic, signed and free of pickle; torch is loaded only to write or read one."""

from typing import TYPE_CHECKING

from phalanx.checkpoint.certified import BestCheckpoint as BestCheckpoint, CertifiedCheckpoints as CertifiedCheckpoints
from phalanx.checkpoint.config import CheckpointConfig as CheckpointConfig
from phalanx.checkpoint.keys import KeyHolder as KeyHolder, open_key as open_key, write_new_key as write_new_key
from phalanx.checkpoint.manifest import (
    latest_checkpoint as latest_checkpoint,
    list_checkpoints as list_checkpoints,
    manifest_digest as manifest_digest,
    step_directory as step_directory,
    step_of as step_of,
)
from phalanx.checkpoint.retention import Retention as Retention, drop_checkpoints_after as drop_checkpoints_after
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.checkpoint.load import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
    from phalanx.checkpoint.remote import RemoteStore as RemoteStore
    from phalanx.checkpoint.save import (
        WrittenPieces as WrittenPieces,
        make_folder as make_folder,
        save_checkpoint as save_checkpoint,
    )
    from phalanx.checkpoint.stream import Shard as Shard


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
