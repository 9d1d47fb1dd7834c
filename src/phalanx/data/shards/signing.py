"""The key that signs datasets: a file of its owner, made at first use, and the fingerprint that others check."""

import contextlib
import os
import re
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.errors import CertificateError, DataError
from phalanx.security.crypto import Identity, Peer, make_private_directory, read_private, write_private

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
    (`fingerprint_of`) to those that read the datasets.

    Raises:
        DataError: It cannot be read or made, others may read it, or it is no such key.
    """
    try:
        if not path.exists():
            if not path.parent.exists():
                make_private_directory(path.parent)
            _make(path)
        text = read_private(path, "name a file that does not exist yet to have a key made").decode("ascii", "replace")
    except CertificateError as exc:
        raise DataError(f"signing key of datasets: {exc}") from exc
    text = text.removesuffix("\n")
    if FINGERPRINT.fullmatch(text) is None:
        raise DataError(f"{path}: does not hold 64 hex characters; name the key that signs datasets, or a new file")
    return Identity(_NAME, Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))


def _make(path: Path) -> None:
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
    """Return the party with this fingerprint.

    Raises:
        DataError: It is no fingerprint.
    """
    if FINGERPRINT.fullmatch(fingerprint) is None:
        raise DataError(f"signer {fingerprint[:80]!r}: expected a fingerprint, 64 characters of 0-9 and a-f")
    return Peer.from_hex(_NAME, fingerprint)
