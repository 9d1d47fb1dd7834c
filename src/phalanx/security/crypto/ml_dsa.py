"""The second signing key of a party: ML-DSA-44 of FIPS 204, which a quantum computer does not break.

A certificate of a party has one extension: the party's public key, and the authority's ML-DSA-44 signature over the
name and all keys. That of an authority has its public key alone, and is trusted as a file.
"""

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey, MLDSA44PublicKey

from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto.canonical import in_domain
from phalanx.security.crypto.files import read_private, write_private

ML_DSA_KEY = "signing-ml-dsa-44.key"
ML_DSA_PUBLIC_BYTES, ML_DSA_SIGNATURE_BYTES = 1312, 2420
_SEED_CHARACTERS = 64
ML_DSA_EXTENSION = x509.ObjectIdentifier("2.25.193162931155594955135267465926512766213")
ML_DSA_REQUEST = x509.ObjectIdentifier("2.25.55440141076791104415603855384300681417")


def make_ml_dsa_key(path: Path) -> MLDSA44PrivateKey:
    """Make a key in a private directory; its file holds the 32-byte seed in hex."""
    key = MLDSA44PrivateKey.generate()
    write_private(path, key.private_bytes_raw().hex().encode() + b"\n")
    return key


def load_ml_dsa_key(path: Path) -> MLDSA44PrivateKey | None:
    """Load a key; None where the party was made before there were any."""
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
    """Return when the holder of a key signed exactly this data."""
    try:
        MLDSA44PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError) as exc:
        raise SignatureError(f"{where}: the ML-DSA-44 signature does not match the data") from exc


def bound_keys(party_uri: str, tls_key: bytes, ml_dsa_key: bytes, authority: str = "") -> bytes:
    """Return what binds the keys of a party together: the authority signs it, and in a request the party.

    Args:
        tls_key: SubjectPublicKeyInfo of the ECDSA key, in DER.
    """
    lines = (party_uri, tls_key.hex(), ml_dsa_key.hex(), authority)
    return in_domain("certificate-ml-dsa/1", "\n".join(lines).encode("ascii"))


def read_ml_dsa_extension(certificate: x509.Certificate, where: str) -> tuple[bytes, bytes]:
    """Return public key and signature in a certificate, either of them empty where it has none."""
    try:
        value = certificate.extensions.get_extension_for_oid(ML_DSA_EXTENSION).value
    except x509.ExtensionNotFound:
        return b"", b""
    raw = value.value if isinstance(value, x509.UnrecognizedExtension) else b""
    if len(raw) not in (ML_DSA_PUBLIC_BYTES, ML_DSA_PUBLIC_BYTES + ML_DSA_SIGNATURE_BYTES):
        raise CertificateError(f"{where}: its ML-DSA-44 key is malformed")
    return raw[:ML_DSA_PUBLIC_BYTES], raw[ML_DSA_PUBLIC_BYTES:]
