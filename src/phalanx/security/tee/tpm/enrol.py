"""The enrolment of a TPM shows once that its attestation key (AK) lives beside a certified endorsement key (EK).

A vendor has certified the EK. The verifier encrypts a secret so that only the TPM with that EK can read it, and only
when that AK is loaded there.

Source: TCG, TPM 2.0 Library, part 1, section 24 (credential protection) and 11.4.10 (key derivation).
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.chain import Trust, check_chain
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import HASHES, PublicKey
from phalanx.security.tee.formats.x509 import read_certificates
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason
from phalanx.security.tee.tpm.key import check_attestation_key
from phalanx.security.tee.tpm.structures import parse_public

SECRET_BYTES = 32
_BLOCK_BYTES = 16


@dataclass(frozen=True)
class EkForm:
    """The form of the endorsement key; the default is that of the TCG's low-range templates (L-1, L-2).

    Attributes:
        hash: Name algorithm of the key.
        key_bits: AES key size in bits.
    """

    hash: str = "sha256"
    key_bits: int = 128


DEFAULT_EK = EkForm()


@dataclass(frozen=True)
class Enrolment:
    """One enrolment under way.

    Attributes:
        ak_name: Hex; goes into the policy's `ak_names` when the secret comes back.
        credential: TPM2B_ID_OBJECT, for TPM2_ActivateCredential.
        encrypted_secret: TPM2B_ENCRYPTED_SECRET, for the same.
    """

    ak_name: str
    credential: bytes
    encrypted_secret: bytes
    _secret: bytes

    def finish_enrolment(self, answer: bytes) -> str:
        """Return the name of the AK when the TPM could read the secret."""
        if not hmac.compare_digest(answer, self._secret):
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, "TPM: the AK is not in the TPM of this EK")
        return self.ak_name


def begin_enrolment(
    ek_certificate: bytes, chain: bytes, ak_public: bytes, trust: Trust, form: EkForm = DEFAULT_EK
) -> Enrolment:
    """Check the EK's certificate and the AK's form, and make the challenge that ties them together.

    Args:
        ek_certificate: DER or PEM of the certificate.
        chain: PEM of the vendor's certificates between it and a root; may be empty.
        ak_public: TPMT_PUBLIC of the attestation key.

    Raises:
        RefusedEvidenceError: The EK is no pinned vendor's, or the AK could leave its TPM or sign anything.
    """
    certificates = read_certificates(ek_certificate, "ek_certificate")
    if len(certificates) != 1:
        raise malformed_error("ek_certificate", f"{len(certificates)} certificates, expected one")
    check_chain(certificates[0], read_certificates(chain, "chain") if chain else (), trust)
    ak = parse_public(ak_public)
    check_attestation_key(ak)
    secret = secrets.token_bytes(SECRET_BYTES)
    credential, encrypted = make_credential(certificates[0].public_key, ak.name, secret, form)
    return Enrolment(ak.name.hex(), credential, encrypted, secret)


def make_credential(ek: PublicKey, ak_name: bytes, secret: bytes, form: EkForm = DEFAULT_EK) -> tuple[bytes, bytes]:
    """Encrypt a secret to the TPM that holds an EK and an object of this name.

    Returns:
        TPM2B_ID_OBJECT and TPM2B_ENCRYPTED_SECRET.
    """
    seed, encrypted = _seed_for(ek, form)
    size = hashlib.new(form.hash).digest_size
    storage = _kdf_a(form.hash, seed, b"STORAGE", ak_name, form.key_bits // 8)
    identity = _encrypt_cfb(storage, _sized_bytes(secret))
    integrity = _kdf_a(form.hash, seed, b"INTEGRITY", b"", size)
    outer = hmac.digest(integrity, identity + ak_name, form.hash)
    return _sized_bytes(_sized_bytes(outer) + identity), _sized_bytes(encrypted)


def _seed_for(ek: PublicKey, form: EkForm) -> tuple[bytes, bytes]:
    """Return a seed, and its encrypted form for the TPM."""
    size = hashlib.new(form.hash).digest_size
    if isinstance(ek, rsa.RSAPublicKey):
        seed, digest = secrets.token_bytes(size), HASHES[form.hash]
        scheme = padding.OAEP(padding.MGF1(digest), digest, b"IDENTITY\0")
        return seed, ek.encrypt(seed, scheme)
    ephemeral = ec.generate_private_key(ek.curve)
    width = (ek.curve.key_size + 7) // 8
    shared = ephemeral.exchange(ec.ECDH(), ek)
    mine, theirs = ephemeral.public_key().public_numbers(), ek.public_numbers()
    parties = mine.x.to_bytes(width, "big") + theirs.x.to_bytes(width, "big")
    # KDFe, one round: the seed is as long as the hash
    seed = hashlib.new(form.hash, b"\0\0\0\x01" + shared + b"IDENTITY\0" + parties).digest()
    return seed, _sized_bytes(mine.x.to_bytes(width, "big")) + _sized_bytes(mine.y.to_bytes(width, "big"))


def _kdf_a(name: str, key: bytes, label: bytes, context: bytes, size: int) -> bytes:
    """KDFa of the TPM library: SP 800-108 in counter mode, one round, which is enough for a key."""
    message = b"\0\0\0\x01" + label + b"\0" + context + (8 * size).to_bytes(4, "big")
    return hmac.digest(key, message, name)[:size]


def _encrypt_cfb(key: bytes, data: bytes) -> bytes:
    """Encrypt by AES in cipher feedback mode from a zero start: the encryption of each block masks the next one.

    It is counter mode with the block before as the counter of each block; libraries are dropping the mode itself.
    """
    out, previous = b"", bytes(_BLOCK_BYTES)
    for start in range(0, len(data), _BLOCK_BYTES):
        encryptor = Cipher(algorithms.AES(key), modes.CTR(previous)).encryptor()
        previous = encryptor.update(data[start : start + _BLOCK_BYTES])
        out += previous
    return out


def _sized_bytes(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
