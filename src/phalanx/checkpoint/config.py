"""The configuration of checkpoints: how often, how and where to a run is saved, and how many are kept."""

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from phalanx.config import StrictModel
from phalanx.config.strict import later_key

_KEY = re.compile(r"(file|env|command):\S.*")


class CheckpointConfig(StrictModel):
    """The ``[checkpoint]`` section.

    Attributes:
        every: Steps between two checkpoints; 0 saves only at the end of the run.
        keep: Checkpoints that are kept, newest first; at least 1.
        keep_every: Checkpoints of steps that are multiples of this stay for good; 0 keeps none for good.
        best: Name of a validation set, "validation" being the held-out share: the checkpoint with the lowest loss on it
            is kept as well, whatever its age.
        encrypt: Everything but the manifest is written under AES-256-GCM.
        key: Source of the key, never the key: ``file:PATH``, ``env:NAME`` or ``command:PROGRAM ARGUMENT ...``.
        asynchronous: Collecting and writing go on beside the training.
        sharded: Each rank of ``[parallel]`` writes its own part of the state, to a directory that all ranks share.
        journal: Every process keeps its last two states in the run directory, so that a killed owner goes on at the
            step where it died. Left out, it does where all processes use this machine's CPUs and nothing is encrypted.
        remote: An fsspec address that every checkpoint is copied to as well, such as ``s3://bucket/folder``.
    """

    every: int = Field(default=50, ge=0)
    keep: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)
    best: str | None = None
    encrypt: bool = False
    key: str | None = None
    asynchronous: bool = False
    sharded: bool = later_key(False)
    journal: bool | None = None
    remote: str | None = None

    @field_validator("key")
    @classmethod
    def _check_key(cls, value: str | None) -> str | None:
        # the value is not repeated: it may be the key itself
        if value is not None and _KEY.fullmatch(value) is None:
            raise ValueError(
                'is the location of the key, "file:PATH", "env:NAME" or "command:PROGRAM"; never the key itself'
            )
        return value

    @field_validator("remote")
    @classmethod
    def _check_remote(cls, value: str | None) -> str | None:
        if value is None:
            return value
        parts = urlsplit(value)
        if not parts.scheme or "@" in parts.netloc or parts.query:
            raise ValueError(
                "expected an address such as s3://bucket/folder, without credentials: those belong into the environment"
            )
        return value

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        if self.encrypt != (self.key is not None):
            raise ValueError(
                "encrypt = true and key belong together; `phalanx checkpoint new-key FILE` makes a key file"
            )
        if self.encrypt and self.sharded:
            raise ValueError("sharded = true writes in the clear: the key stays with rank 0; leave one of the two out")
        return self
