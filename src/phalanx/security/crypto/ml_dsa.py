"""The second signing key of a party: ML-DSA-44 of FIPS 204, which a quantum computer does not break."""

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey, MLDSA44PublicKey

from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto.files import read_private, write_private

ML_DSA_KEY = "signing-ml-dsa-44.key"
ML_DSA_PUBLIC_BYTES, ML_DSA_SIGNATURE_BYTES = 1312, 2420
_SEED_CHARACTERS = 64


def make_ml_dsa_key(home: Path) -> MLDSA44PrivateKey:
    """Make the key in a private directory; its file holds the 32-byte seed in hex.

    Raises:
        CertificateError: There is one already, or it cannot be written.
    """
    key = MLDSA44PrivateKey.generate()
    write_private(home / ML_DSA_KEY, key.private_bytes_raw().hex().encode() + b"\n")
    return key


def load_ml_dsa_key(home: Path) -> MLDSA44PrivateKey | None:
    """Load the key of a party; None where the party was made before there were any.

    Raises:
        CertificateError: It is malformed, or readable by others.
    """
    path = home / ML_DSA_KEY
    if not path.exists() and not path.is_symlink():
        return None
    text = read_private(path).strip()
    try:
        seed = bytes.fromhex(text.decode("ascii"))
        if len(text) != _SEED_CHARACTERS:
            raise CertificateError(f"{path}: expected the {_SEED_CHARACTERS} hex characters of a seed")
        return MLDSA44PrivateKey.from_seed_bytes(seed)
    except ValueError as exc:
        raise CertificateError(f"{path}: expected the {_SEED_CHARACTERS} hex characters of a seed") from exc


def verify_ml_dsa(public_key: bytes, signature: bytes, data: bytes, where: str) -> None:
    """Return when the holder of a key signed exactly this data.

    Raises:
        SignatureError: It did not, or the key is none.
    """
    try:
        MLDSA44PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError) as exc:
        raise SignatureError(f"{where}: the ML-DSA-44 signature does not match the data") from exc
