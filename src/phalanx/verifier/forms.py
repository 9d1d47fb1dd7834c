"""Canonical JSON, digests, signatures, certificates and Merkle trees: the forms that all other files here stand on.

Nothing of Phalanx is imported in this folder, only cryptography and blake3: it is published by itself as
``phalanx-verify`` and written to be read. docs/audit_log.md and docs/shards.md describe the same forms in words.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1
DIGEST = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_CURVE_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
_SECOND_KEY, _SECOND_KEY_BYTES = x509.ObjectIdentifier("2.25.193162931155594955135267465926512766213"), 1312
_PARTY_URI = re.compile(r"phalanx://([a-z0-9-]+)\?ed25519=([0-9a-f]{64})")


class RefusedError(Exception):
    """Something does not hold; the message names it."""


class UnreadableError(Exception):
    """A file is missing or cannot be read: nothing is known about it."""


def require(holds: bool, reason: str) -> None:
    """Return when something holds.

    Raises:
        RefusedError: It does not; `reason` is the message.
    """
    if not holds:
        raise RefusedError(reason)


# --- canonical JSON and digests -----------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """Return the one form of a JSON value that is signed and hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse(data: bytes) -> dict[str, Any]:
    """Read one JSON object in canonical form.

    Raises:
        ValueError: It is in another form, which two readers could read in two ways, or too deep, or a number too large.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_read_integer)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(value, dict) or _depth_of(value) > MAX_DEPTH or canonical(value) != data:
        raise ValueError("not one object in canonical form")
    return value


def read_json(data: bytes) -> Any:
    """Read JSON that others have written, in any form, but with no name twice in an object.

    Raises:
        ValueError: It is no JSON, or ambiguous.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_int=_read_integer, object_pairs_hook=_read_pairs)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def _read_integer(text: str) -> int:
    number = int(text) if len(text) <= 20 else MAX_INTEGER + 1
    if abs(number) > MAX_INTEGER:
        raise ValueError("a number is too large")
    return number


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is there twice")
    return value


def _depth_of(value: object) -> int:
    layer, depth = [value], 0
    while layer:
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth - 1


def digest(data: bytes) -> str:
    """Return BLAKE3 with 32 bytes of output, in hex."""
    return blake3(data).hexdigest()


def sha256(data: bytes) -> str:
    """Return SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def in_domain(domain: str, data: bytes) -> bytes:
    """Prefix data before it is signed, so that a signature for one purpose is void for another."""
    return b"phalanx/" + domain.encode() + b"\x00" + data


# --- signatures and certificates ----------------------------------------------------------------------


def check_signature(key: bytes, signature: str, domain: str, data: bytes) -> None:
    """Return when an Ed25519 key signed this data for this purpose.

    Args:
        signature: 128 lowercase hex characters.

    Raises:
        ValueError: It did not.
    """
    if not isinstance(signature, str) or _SIGNATURE.fullmatch(signature) is None:
        raise ValueError("a signature is 128 lowercase hex characters")
    check_raw_signature(key, bytes.fromhex(signature), in_domain(domain, data))


def check_raw_signature(key: bytes, signature: bytes, data: bytes) -> None:
    """Return when an Ed25519 key signed exactly these bytes.

    Raises:
        ValueError: It did not.
    """
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except InvalidSignature:
        raise ValueError("the signature does not hold") from None


def check_ecdsa_signature(key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> None:
    """Return when a key of P-256, P-384 or P-521 signed exactly these bytes, with the hash of its size; else raise."""
    algorithm = _CURVE_HASHES.get(key.curve.name)
    if algorithm is None:
        raise ValueError(f"a key of {key.curve.name}, expected P-256")
    try:
        key.verify(signature, data, ec.ECDSA(algorithm))
    except InvalidSignature:
        raise ValueError("the signature does not hold") from None


def check_signatures(party: "CertifiedParty", fields: Mapping[str, Any], domain: str, data: bytes) -> None:
    """Return when each key of a party signed this data for this purpose.

    Raises:
        ValueError: One did not.
    """
    check_signature(party.key, fields["signature"], domain, data)
    if party.second_key:
        signature = bytes.fromhex(str(fields.get("ml_dsa_44") or ""))
        check_ml_dsa_signature(party.second_key, signature, in_domain(domain, data))


def check_ml_dsa_signature(key: bytes, signature: bytes, data: bytes) -> None:
    """Return when an ML-DSA-44 key signed exactly these bytes; else raise."""
    try:
        MLDSA44PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, UnsupportedAlgorithm):
        raise ValueError("the ML-DSA-44 signature does not hold") from None


_CERTIFICATE_ERRORS = (
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    UnsupportedAlgorithm,
    InvalidSignature,
    TypeError,
)
"""What cryptography raises of a malformed or foreign certificate beside ValueError."""


@dataclass(frozen=True)
class CertifiedParty:
    """The party that a certificate names.

    Attributes:
        key: Raw Ed25519 public key: signs messages and log lines.
        release_key: ECDSA P-256 key of the same certificate: signs what programs of others verify.
        second_key: Raw ML-DSA-44 key: signs seals, heads and manifests beside the first. Empty where it has none.
        vouched: The authority's ML-DSA-44 signature for all three.
    """

    name: str
    key: bytes
    release_key: ec.EllipticCurvePublicKey
    second_key: bytes
    vouched: bytes
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> str:
        """The Ed25519 key in hex, which people compare."""
        return self.key.hex()


def party_of(pem: str) -> CertifiedParty:
    """Read a party's certificate; its dates are not judged, because a log outlives certificates.

    Raises:
        ValueError: It is not the certificate of a party.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris, key = names.get_values_for_type(x509.UniformResourceIdentifier), certificate.public_key()
        second_key, vouched = _read_second_key(certificate)
    except _CERTIFICATE_ERRORS as exc:
        raise ValueError(f"a malformed certificate, or one that names no party: {exc}") from exc
    match = _PARTY_URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("a certificate names no party")
    # a key that the authority has not signed for is none
    return CertifiedParty(match[1], bytes.fromhex(match[2]), key, second_key if vouched else b"", vouched, certificate)


def _read_second_key(certificate: x509.Certificate) -> tuple[bytes, bytes]:
    try:
        raw = certificate.extensions.get_extension_for_oid(_SECOND_KEY).value.public_bytes()
    except x509.ExtensionNotFound:
        return b"", b""
    return raw[:_SECOND_KEY_BYTES], raw[_SECOND_KEY_BYTES:]


def check_issuer(party: CertifiedParty, authority_pem: str) -> None:
    """Return when an authority signed the certificate of a party.

    Raises:
        ValueError: It did not, or it is no authority.
    """
    try:
        authority = x509.load_pem_x509_certificate(authority_pem.encode())
        is_authority = authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        party.certificate.verify_directly_issued_by(authority)
        if party.second_key:
            first_key = party.release_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            names = f"phalanx://{party.name}?ed25519={party.fingerprint}", first_key.hex(), party.second_key.hex(), ""
            bound = in_domain("certificate-ml-dsa/1", "\n".join(names).encode())
            check_ml_dsa_signature(_read_second_key(authority)[0], party.vouched, bound)
    except _CERTIFICATE_ERRORS as exc:
        raise ValueError(f"the certificate of {party.name} is not from the authority") from exc
    if not is_authority:
        raise ValueError("the authority's certificate is none of an authority")


def certificate_fingerprint(pem: str) -> str:
    """Return the SHA-256 of a certificate in hex."""
    try:
        return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex()
    except x509.InvalidVersion as exc:
        raise ValueError(str(exc)) from exc


# --- Merkle trees -------------------------------------------------------------------------------------


def merkle_root(leaves: Sequence[bytes]) -> str:
    """Return the root over leaves with BLAKE3, in hex: the tree of the audit log (RFC 6962, section 2.1)."""
    if not leaves:
        return digest(b"")
    return _fold_level([blake3(b"\0" + leaf).digest() for leaf in leaves], lambda node: blake3(node).digest()).hex()


def _fold_level(level: Sequence[bytes], hash_node: Callable[[bytes], bytes]) -> bytes:
    while len(level) > 1:
        pairs = [hash_node(b"\1" + level[index] + level[index + 1]) for index in range(0, len(level) - 1, 2)]
        # the last node of an odd level is its own parent: the same tree as by the largest power of two
        level = pairs if len(level) % 2 == 0 else [*pairs, level[-1]]
    return level[0]


def shard_leaf(data: bytes) -> bytes:
    """Return the hash of a leaf in the trees of datasets, which are over SHA-256."""
    return hashlib.sha256(b"\0" + data).digest()


def shard_root(level: Sequence[bytes]) -> bytes:
    """Return the root over hashes of leaves with SHA-256: the trees of datasets."""
    return _fold_level(level, lambda node: hashlib.sha256(node).digest()) if level else hashlib.sha256().digest()


def root_from_path(node: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root that the path from one leaf leads to (RFC 9162, section 2.1.3.2).

    Raises:
        RefusedError: The path does not fit a tree of `size` leaves.
    """
    require(0 <= index < size, f"leaf {index} is outside of a tree of {size}")
    rest, last = list(path), size - 1
    while last:
        if index % 2 or index < last:
            require(bool(rest), "a path is too short")
            sibling = rest.pop(0)
            node = hashlib.sha256(b"\1" + (sibling + node if index % 2 else node + sibling)).digest()
        index, last = index // 2, last // 2
    require(not rest, "a path is too long")
    return node


# --- files ----------------------------------------------------------------------------------------------


def is_plain_path(name: str) -> bool:
    """Whether a name is a path below a directory, in its one form."""
    return "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


@dataclass(frozen=True)
class Member:
    """A range of bytes of a file: a whole file, or one inside of a bundle."""

    path: Path
    start: int
    size: int

    @classmethod
    def from_file(cls, path: Path) -> "Member":
        """Take a whole file.

        Raises:
            UnreadableError: It cannot be read.
        """
        try:
            status = path.stat()
        except OSError as exc:
            raise UnreadableError(f"{path}: cannot be read ({exc.strerror})") from exc
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError(f"{path}: is no file")
        return cls(path, 0, status.st_size)

    def read_range(self, offset: int, size: int) -> bytes:
        """Read some of it.

        Raises:
            RefusedError: It is shorter.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise RefusedError(f"{self.path}: bytes {offset} to {offset + size} are missing")
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + offset)
                data = file.read(size)
        except OSError as exc:
            raise UnreadableError(f"{self.path}: cannot be read ({exc.strerror})") from exc
        require(len(data) == size, f"{self.path}: bytes {offset} to {offset + size} are missing")
        return data

    def read_all(self, max_bytes: int = 2**30) -> bytes:
        """Read all of it.

        Raises:
            RefusedError: It is larger than anything of its kind.
        """
        require(self.size <= max_bytes, f"{self.path}: {self.size} bytes, at most {max_bytes} are read")
        return self.read_range(0, self.size)

    def hash_content(self, algorithm: str = "sha256") -> str:
        """Return its SHA-256, or BLAKE3, in hex."""
        total: Any = hashlib.sha256() if algorithm == "sha256" else blake3()
        piece = 2**20
        for offset in range(0, self.size, piece):
            total.update(self.read_range(offset, min(piece, self.size - offset)))
        return str(total.hexdigest())
