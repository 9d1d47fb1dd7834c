"""The keys of marked text: one secret an epoch, in one file that only its owner can read."""

import contextlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CertificateError, DataError
from phalanx.security.crypto import lock_file, make_private_directory, parse_canonical, read_private, write_private

SECRET_BYTES = 32
MAX_EPOCHS = 256
_MADE_BY = "phalanx mark new-keys PATH makes one"


@dataclass(frozen=True)
class MarkKey:
    """The secret of one epoch; its value is never printed.

    Attributes:
        epoch: Number from 1; new text is marked by the newest.
    """

    epoch: int
    secret: bytes = field(repr=False)


class _EpochRecord(StrictModel):
    epoch: int = Field(ge=1)
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")] = Field(repr=False)


class _RingRecord(StrictModel):
    version: int = Field(ge=1, le=1)
    epochs: tuple[_EpochRecord, ...] = Field(min_length=1, max_length=MAX_EPOCHS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [record.epoch for record in self.epochs] != list(range(1, len(self.epochs) + 1)):
            raise ValueError("epochs are numbered from 1 without a gap")
        return self


class MarkKeyRing:
    """All epochs of one file, oldest first: text is marked by the newest and looked for by all."""

    def __init__(self, keys: tuple[MarkKey, ...]) -> None:
        self.keys = keys

    @property
    def newest(self) -> MarkKey:
        """The key by which new text is marked."""
        return self.keys[-1]

    @classmethod
    def create(cls, path: Path) -> Self:
        """Draw the first key into a new file of mode 0600.

        Raises:
            DataError: The file exists already, or cannot be written.
        """
        ring = cls((MarkKey(1, secrets.token_bytes(SECRET_BYTES)),))
        try:
            make_private_directory(path.parent) if not path.parent.exists() else None
            write_private(path, ring._content())
        except CertificateError as exc:
            raise DataError(f"keys of marks: {exc}") from exc
        return ring

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            DataError: It is missing, readable for others, or malformed. No secret is ever in the message.
        """
        try:
            content = read_private(path, _MADE_BY)
        except CertificateError as exc:
            raise DataError(f"keys of marks: {exc}") from exc
        try:
            parse_canonical(content)
            record = _RingRecord.model_validate_json(content)
        except (ValueError, ValidationError):
            # the message of a validator shows what it was given
            raise DataError(f"{path}: is no file of mark keys; {_MADE_BY}") from None
        return cls(tuple(MarkKey(epoch.epoch, bytes.fromhex(epoch.secret)) for epoch in record.epochs))

    @classmethod
    def add_epoch(cls, path: Path) -> Self:
        """Draw the key of a further epoch; earlier ones stay, so that earlier text is still found.

        Raises:
            DataError: The file cannot be read or replaced, or is full.
        """
        with lock_file(path):
            ring = cls.read(path)
            if len(ring.keys) == MAX_EPOCHS:
                raise DataError(f"{path}: has {MAX_EPOCHS} epochs, which is all that it holds; begin a new file")
            longer = cls((*ring.keys, MarkKey(len(ring.keys) + 1, secrets.token_bytes(SECRET_BYTES))))
            temporary = path.with_name(path.name + ".new")
            try:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
                write_private(temporary, longer._content())
                temporary.replace(path)
            except (OSError, CertificateError) as exc:
                raise DataError(f"{path}: cannot be replaced; the former keys still hold") from exc
        return longer

    def _content(self) -> bytes:
        epochs = [{"epoch": key.epoch, "secret": key.secret.hex()} for key in self.keys]
        return canonical_json({"version": 1, "epochs": epochs})
