"""The key files of a party or an authority: how they are made, written and read."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from phalanx.errors import CertificateError
from phalanx.security.crypto.files import make_private_directory, read_private, write_private
from phalanx.security.crypto.ml_dsa import ML_DSA_KEY, make_ml_dsa_key

TLS_KEY, SIGNING_KEY = "tls.key", "signing.key"


def new_tls_key() -> ec.EllipticCurvePrivateKey:
    """Make a key for TLS, ECDSA P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def make_party_keys(home: Path) -> tuple[ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey, MLDSA44PrivateKey]:
    """Make the three keys of a party in a directory that no other user can enter, and return them.

    Raises:
        CertificateError: Others have access to the directory, or there are keys already.
    """
    tls_key, signing_key = new_tls_key(), ed25519.Ed25519PrivateKey.generate()
    make_private_directory(home)
    write_private(home / TLS_KEY, private_pem(tls_key))
    write_private(home / SIGNING_KEY, private_pem(signing_key))
    return tls_key, signing_key, make_ml_dsa_key(home / ML_DSA_KEY)


def load_tls_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Load a key for TLS."""
    key = _load_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: is not an ECDSA key")
    return key


def load_signing_key(path: Path) -> ed25519.Ed25519PrivateKey:
    """Load a key that signs messages."""
    key = _load_key(path)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CertificateError(f"{path}: is not an Ed25519 key")
    return key


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """Return a private key as its file holds it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _load_key(path: Path) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(read_private(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise CertificateError(f"{path}: is not a readable, unencrypted PEM key") from exc
