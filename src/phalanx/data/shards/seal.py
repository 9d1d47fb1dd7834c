"""Leaves under AES-256-GCM: each opens with the dataset's data key, in its own place, and nowhere else."""

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CertificateError, DataError
from phalanx.security.crypto import (
    Identity,
    Peer,
    in_domain,
    make_private_directory,
    parse_canonical,
    read_private,
    write_private,
)

WRAPPED_KEY_FILE = "dataset.key.json"
"""The wrapped data key beside the manifest: it can be wrapped anew without a new signature."""
TAG_BYTES = 16
_KEY_BYTES, _NONCE_BYTES = 32, 12


class SealRecord(StrictModel):
    """What a manifest says of the encryption of its leaves.

    Attributes:
        dataset: 128 random bits that no other dataset has; bound into every leaf.
        commitment: Commitment to the data key, so that no other one can be put in its place.
    """

    scheme: Literal["aes-256-gcm-leaves/1"] = "aes-256-gcm-leaves/1"
    dataset: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]
    commitment: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class SealKey:
    """The key that wraps data keys; it lives in a file outside of every dataset, and is never printed."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        name = HKDF(algorithm=SHA256(), length=8, salt=None, info=in_domain("dataset-key-name/1", b""))
        self.name = f"aes256-{name.derive(key).hex()}"

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a key file: 64 hex characters, mode 0600.

        Raises:
            DataError: It is missing, readable for others, or not of that form. Its content is never in the message.
        """
        try:
            text = read_private(path, "phalanx data new-key PATH makes one").decode("ascii", errors="replace")
        except CertificateError as exc:
            raise DataError(f"key of the dataset: {exc}") from exc
        try:
            key = bytes.fromhex(text.strip())
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise DataError(f"{path}: does not hold 64 hex characters; give the key file of the dataset")
        return cls(key)

    @classmethod
    def create_file(cls, path: Path) -> Self:
        """Draw a key and write it to a new file of mode 0600."""
        key = secrets.token_bytes(_KEY_BYTES)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, key.hex().encode() + b"\n")
        except OSError as exc:
            raise DataError(f"{path.parent}: cannot be made ({exc.strerror})") from exc
        except CertificateError as exc:
            raise DataError(f"key of the dataset: {exc}") from exc
        return cls(key)

    def wrap_data_key(self, data_key: bytes, dataset: str) -> bytes:
        """Return the content of the file of the wrapped data key."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = nonce + self._cipher.encrypt(nonce, data_key, _wrapping_context(dataset))
        return canonical_json({"version": 1, "key": self.name, "wrapped": wrapped.hex()})

    def unwrap_data_key(self, content: bytes, dataset: str, where: str) -> bytes:
        """Return the data key."""
        try:
            record = parse_canonical(content)
            version, name, wrapped = record["version"], record["key"], bytes.fromhex(record["wrapped"])
            # hex in one form only, so that no byte of the file can change unseen
            if len(record) != 3 or wrapped.hex() != record["wrapped"]:
                raise ValueError("not canonical")  # noqa: TRY301
        except (ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{where}: truncated or altered; restore it from a copy") from exc
        if version != 1:
            raise DataError(f"{where}: is of version {version!r:.20}, expected 1; use the Phalanx that wrote it")
        if name != self.name:
            raise DataError(
                f"{where}: was wrapped with key {name!s:.80}, but key {self.name} was given; give the former"
            )
        try:
            return self._cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _wrapping_context(dataset))
        except (InvalidTag, ValueError) as exc:
            raise DataError(
                f"{where}: does not open with key {self.name}: it was altered or belongs to another dataset"
            ) from exc

    def __repr__(self) -> str:
        return f"SealKey({self.name})"


@dataclass(frozen=True, repr=False)
class DatasetSeal:
    """The data key of one dataset.

    Attributes:
        dataset: 128 random bits in hex that name the dataset.
    """

    dataset: str
    _data_key: bytes

    @classmethod
    def from_random(cls) -> Self:
        """Draw a data key and a name: both anew for every dataset, so that no nonce is used twice under one key."""
        return cls(secrets.token_hex(16), secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def from_wrapped(cls, record: SealRecord, key: SealKey, content: bytes, where: str) -> Self:
        """Unwrap the data key that a manifest commits to."""
        seal = cls(record.dataset, key.unwrap_data_key(content, record.dataset, where))
        if seal.seal_record().commitment != record.commitment:
            raise DataError(f"{where}: its data key differs from the manifest; restore it from a copy")
        return seal

    def seal_record(self) -> SealRecord:
        """Return the record for the manifest."""
        return SealRecord(dataset=self.dataset, commitment=self._derive_key("commitment").hex())

    def file_cipher(self, file: str) -> "LeafCipher":
        """Return the cipher of one file, which has a key of its own; `file` is its path in the dataset."""
        return LeafCipher(AESGCM(self._derive_key("file", file)), self.dataset, file)

    def wrapped_key(self, key: SealKey) -> bytes:
        """Return the content of the file of the wrapped data key."""
        return key.wrap_data_key(self._data_key, self.dataset)

    def _derive_key(self, *about: str) -> bytes:
        info = in_domain("dataset-file-key/1", canonical_json([*about]))
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=bytes.fromhex(self.dataset), info=info).derive(
            self._data_key
        )

    def __repr__(self) -> str:
        return f"DatasetSeal({self.dataset})"


@dataclass(frozen=True, repr=False)
class LeafCipher:
    """The cipher of the leaves of one file; the nonce of a leaf is its number, which is used once."""

    _cipher: AESGCM
    dataset: str
    file: str

    def seal_leaf(self, index: int, plain: bytes) -> bytes:
        """Encrypt a leaf; the result is `TAG_BYTES` longer."""
        return self._cipher.encrypt(_leaf_nonce(index), plain, self._associated_data(index))

    def open_leaf(self, index: int, sealed: bytes | memoryview) -> bytes:
        """Decrypt a leaf."""
        try:
            return self._cipher.decrypt(_leaf_nonce(index), sealed, self._associated_data(index))
        except (InvalidTag, ValueError) as exc:
            raise DataError(
                f"{self.file}: leaf {index} does not open: it was altered or belongs to another leaf, file or "
                "dataset; restore the file from a copy"
            ) from exc

    def _associated_data(self, index: int) -> bytes:
        return in_domain("dataset-leaf/1", canonical_json([self.dataset, self.file, index]))

    def __repr__(self) -> str:
        return f"LeafCipher({self.file})"


def _leaf_nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "big")


def _wrapping_context(dataset: str) -> bytes:
    return in_domain("dataset-key/1", canonical_json([dataset]))


FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_NAME = "dataset-signer"
_KEY_BYTES = 32


def default_signing_key() -> Path:
    """Return where a person's signing key lies: in the configuration directory of the user (XDG)."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "phalanx" / "dataset-signing.key"


def load_signer(path: Path) -> Identity:
    """Read the key that signs datasets; make it where there is none yet.

    The file holds the 32 bytes of an Ed25519 key in hex and has mode 0600. Keep a copy of it, and tell its fingerprint
    (`fingerprint_of`) to readers of the datasets.
    """
    try:
        if not path.exists():
            if not path.parent.exists():
                make_private_directory(path.parent)
            _create_key(path)
        text = read_private(path, "name a new file to create a key").decode("ascii", "replace")
    except CertificateError as exc:
        raise DataError(f"signing key of datasets: {exc}") from exc
    text = text.removesuffix("\n")
    if FINGERPRINT.fullmatch(text) is None:
        raise DataError(f"{path}: does not hold 64 hex characters; name the key that signs datasets, or a new file")
    return Identity(_NAME, Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))


def _create_key(path: Path) -> None:
    """Make a key whole or not at all; where another process is first, that one's stays."""
    spare = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_private(spare, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n")
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(spare)
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be written ({exc.strerror})") from exc
    finally:
        spare.unlink()


def fingerprint_of(identity: Identity) -> str:
    """Return the fingerprint of a signer: its public key, 64 hex characters."""
    return identity.public.public_key.hex()


def signer_of(fingerprint: str) -> Peer:
    """Return the party with this fingerprint."""
    if FINGERPRINT.fullmatch(fingerprint) is None:
        raise DataError(f"signer {fingerprint[:80]!r}: expected a fingerprint, 64 characters of 0-9 and a-f")
    return Peer.from_hex(_NAME, fingerprint)
