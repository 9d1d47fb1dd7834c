"""The identity of a party: a name, and an Ed25519 key that signs, or verifies, the party's statements."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto.files import make_private_directory, read_public, write_private, write_public
from phalanx.security.crypto.keys import SIGNING_KEY, load_signing_key, private_pem
from phalanx.security.crypto.ml_dsa import verify_ml_dsa

_NAME, _LIFE = r"[a-z0-9][a-z0-9-]{0,62}", r"\.(?:[2-9]|[1-9][0-9]{1,4})"
SESSION_NAME = f"{_NAME}(?:{_LIFE})?"
"""Regular expression of the names that `check_session_name` accepts."""
SIGNATURE_FIELDS = ("signature", "ml_dsa_44")
_PARTY_NAME, _LATER_LIFE = re.compile(_NAME), re.compile(_LIFE)


def check_party_name(name: str) -> str:
    """Return the name of a party unchanged.

    Raises:
        CertificateError: It is not 1 to 63 of ``a-z 0-9 -``, the first no hyphen.
    """
    if _PARTY_NAME.fullmatch(name) is None:
        raise CertificateError(
            f"party name {name[:80]!r}: expected 1 to 63 of a-z, 0-9 and hyphen, not starting with a hyphen"
        )
    return name


def check_session_name(name: str) -> str:
    """Return a party's name in a session unchanged: its certificate's name, numbered from its second incarnation on."""
    certified = certified_name(name)
    if name != certified and _LATER_LIFE.fullmatch(name[len(certified) :]) is None:
        raise CertificateError(f"party name {name[:80]!r}: expected NAME, or NAME.N for its incarnation N from 2 on")
    check_party_name(certified)
    return name


def certified_name(name: str) -> str:
    """Return the name in the certificate of a party, from the party's name in a session."""
    return name.partition(".")[0]


def incarnation_of(name: str) -> int:
    """Return the number of the incarnation that a name in a session stands for, from 1."""
    return int(name.partition(".")[2] or 1)


def name_of_incarnation(certified: str, number: int) -> str:
    """Return the name in a session of an incarnation of a certified party, from 1."""
    return certified if number == 1 else f"{certified}.{number}"


@dataclass(frozen=True)
class Peer:
    """The public half of a party.

    Attributes:
        public_key: Raw Ed25519 public key, 32 bytes.
        ml_dsa_key: Raw ML-DSA-44 public key, 1312 bytes; empty for a party without one, or where it was not told.
    """

    name: str
    public_key: bytes
    ml_dsa_key: bytes = field(default=b"", repr=False, compare=False)
    _key: Ed25519PublicKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_session_name(self.name)
        if len(self.public_key) != 32:
            raise CertificateError(
                f"public key of {self.name}: found {len(self.public_key)} bytes, expected the 32 of Ed25519"
            )
        object.__setattr__(self, "_key", Ed25519PublicKey.from_public_bytes(self.public_key))

    @classmethod
    def from_hex(cls, name: str, public_key: str) -> Self:
        """Build a peer from the hex form that JSON carries."""
        try:
            raw = bytes.fromhex(public_key)
        except ValueError as exc:
            raise CertificateError(f"public key of {name[:80]!r}: expected 64 hex characters") from exc
        return cls(name, raw)

    def with_session_name(self, name: str) -> Self:
        """The same party as it is called in a session.

        Raises:
            CertificateError: That is the name of another certificate.
        """
        return replace(self, name=_of_same_certificate(self.name, name))

    def verify_signature(self, signature: bytes, data: bytes) -> None:
        """Return when the peer signed exactly this data."""
        try:
            self._key.verify(signature, data)
        except InvalidSignature as exc:
            raise SignatureError(f"{self.name}: the signature does not match the data") from exc

    def verify_fields(self, fields: Mapping[str, object], data: bytes) -> None:
        """Return when `fields` has a good signature of this data by each key of the peer.

        Args:
            fields: As `Identity.signature_fields` makes them, and anything else.
        """
        try:
            signatures = [bytes.fromhex(str(fields.get(name) or "")) for name in SIGNATURE_FIELDS]
        except ValueError as exc:
            raise SignatureError(f"{self.name}: a signature is no hex") from exc
        self.verify_signature(signatures[0], data)
        if self.ml_dsa_key:
            verify_ml_dsa(self.ml_dsa_key, signatures[1], data, self.name)

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.public_key.hex()[:8]}...)"


@dataclass(frozen=True, repr=False, eq=False)
class Identity:
    """The private half of a party; lives in one process and is never sent or printed.

    Attributes:
        signing_key: Ed25519 key that signs messages and log lines.
        tls_key_pem: ECDSA P-256 key for TLS; empty for an identity that never opens a network link.
        certificate_pem: Certificate that binds the name to both keys.
        ml_dsa_key: Second key, for what must hold against a quantum computer; None for a party without one.
    """

    name: str
    signing_key: Ed25519PrivateKey
    tls_key_pem: bytes = b""
    certificate_pem: bytes = b""
    authority_pem: bytes = b""
    ml_dsa_key: MLDSA44PrivateKey | None = None
    public: Peer = field(init=False)

    def __post_init__(self) -> None:
        public_key = self.signing_key.public_key().public_bytes_raw()
        second_key = b"" if self.ml_dsa_key is None else self.ml_dsa_key.public_key().public_bytes_raw()
        object.__setattr__(self, "public", Peer(self.name, public_key, second_key))

    @classmethod
    def without_certificate(cls, name: str) -> Self:
        """Make a fresh identity that can sign but not open a TLS link: for simulations and tests."""
        return cls(name, Ed25519PrivateKey.generate())

    def with_session_name(self, name: str) -> Self:
        """The same keys under the name that this party has in a session."""
        return replace(self, name=_of_same_certificate(self.name, name))

    def sign_data(self, data: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature; callers separate purposes with `in_domain`."""
        return self.signing_key.sign(data)

    def sign_ml_dsa(self, data: bytes) -> bytes:
        """Return the ML-DSA-44 signature, 2420 bytes; empty for an identity without such a key."""
        return b"" if self.ml_dsa_key is None else self.ml_dsa_key.sign(data)

    @property
    def fingerprint(self) -> str:
        """The public Ed25519 key in hex, by which files of people name it."""
        return self.public.public_key.hex()

    def signature_fields(self, data: bytes) -> dict[str, str]:
        """Return the signatures of data by every key, in hex, as fields of JSON."""
        raw = (self.sign_data(data), self.sign_ml_dsa(data))
        return {name: signature.hex() for name, signature in zip(SIGNATURE_FIELDS, raw, strict=True) if signature}

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


def _of_same_certificate(own: str, name: str) -> str:
    if certified_name(check_session_name(name)) != certified_name(own):
        raise CertificateError(
            f"{name!r}: expected {certified_name(own)!r}, or that with the number of a later incarnation"
        )
    return name


P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def verify_by_fingerprint(fingerprint: str, signature: bytes, data: bytes) -> None:
    """Return when the holder of a public key signed exactly this data.

    Args:
        fingerprint: 64 hex characters of Ed25519, or 66 of a compressed point of P-256.
        signature: 64 bytes; of P-256 ``r`` and the lower of the two values of ``s``, so that there is one signature.
    """
    try:
        raw = bytes.fromhex(fingerprint)
        if len(raw) == 32 and fingerprint == raw.hex():
            Ed25519PublicKey.from_public_bytes(raw).verify(signature, data)
            return
        r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
        if len(raw) != 33 or fingerprint != raw.hex() or len(signature) != 64 or s > P256_ORDER // 2:
            raise SignatureError(f"{fingerprint[:20]!r}...: is no key, or its signature has another form")
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), raw)
        key.verify(encode_dss_signature(r, s), data, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError) as exc:
        raise SignatureError(f"{fingerprint[:20]!r}...: the signature does not match the data") from exc


class _PublicHalf(StrictModel):
    name: Annotated[str, Field(max_length=63)]
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


def make_signer(home: Path, public_file: Path, name: str) -> Identity:
    """Make a key in a directory that no other user can enter, and write its public half into a file.

    Raises:
        CertificateError: Others have access to the directory, or there is a key already.
    """
    make_private_directory(home)
    identity = Identity(name, Ed25519PrivateKey.generate())
    write_private(home / SIGNING_KEY, private_pem(identity.signing_key))
    half = {"name": name, "public_key": identity.public.public_key.hex()}
    write_public(public_file, canonical_json(half))
    return identity


def load_signer(home: Path, public_file: Path) -> Identity:
    """Load the key of a directory; its name is that in the public file."""
    public = read_public_signer(public_file)
    identity = Identity(public.name, load_signing_key(home / SIGNING_KEY))
    if identity.public != public:
        raise CertificateError(f"{home}: its key is not the one whose public half is in {public_file}")
    return identity


def read_public_signer(path: Path) -> Peer:
    """Read the public half of a signer."""
    try:
        half = _PublicHalf.model_validate_json(read_public(path))
    except ValidationError as exc:
        raise CertificateError(f"{path}: expected the name and public key of a signer as JSON") from exc
    return Peer.from_hex(half.name, half.public_key)
