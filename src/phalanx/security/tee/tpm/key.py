"""The reasons for which a verifier believes that a quote's key lives in a TPM: it is enrolled, or certified."""

import hashlib
from dataclasses import dataclass

from pydantic import field_validator

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import PublicKey, load_key
from phalanx.security.tee.formats.x509 import Certificate, read_certificates
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason
from phalanx.security.tee.tpm import structures
from phalanx.security.tee.tpm.structures import TpmPublic, parse_public

_BANKS = ("sha1", "sha256", "sha384", "sha512")
_AK_MUST = structures.FIXED_TPM | structures.FIXED_PARENT | structures.SENSITIVE_DATA_ORIGIN
_AK_MUST |= structures.RESTRICTED | structures.SIGN


class TpmReference(Reference):
    """Reference values for TPMs.

    Measurements: ``sha256.0`` to ``sha256.23``, or another bank.

    Attributes:
        ak_names: Names, in hex, of attestation keys that were activated against their EK when they were enrolled.
            Without one, the evidence must bring a certificate of the AK under a pinned root.
        ak_keys: SHA-256, in hex, of the SubjectPublicKeyInfo of attestation keys that another party enrolled; the
            evidence does not show their attributes.
        accept_sha1_bank: Whether PCRs of the SHA-1 bank may be relied on.
    """

    ak_names: tuple[str, ...] = ()
    ak_keys: tuple[str, ...] = ()
    accept_sha1_bank: bool = False

    @field_validator("measurements")
    @classmethod
    def _known_banks(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name in value:
            bank, _, index = name.partition(".")
            if bank not in _BANKS or not index.isdecimal() or int(index) > 23:
                raise ValueError(f"{name}: expected BANK.NUMBER such as sha256.7")
        return value


@dataclass(frozen=True)
class TrustedAk:
    """An attestation key that is believed.

    Attributes:
        name: Name of the TPM object in hex; name of the key where the object is not shown.
        path: Certificates that vouch for it or its TPM; empty where the enrolment alone does.
        notes: Properties that rest on the enrolment alone, in sentences.
    """

    key: PublicKey
    name: str
    path: tuple[Certificate, ...] = ()
    notes: tuple[str, ...] = ()


def trusted_ak(evidence: Evidence, reference: TpmReference, trust: Trust) -> TrustedAk:
    """Return the key that must have signed.

    Raises:
        RefusedEvidenceError: It is neither enrolled nor certified, or could sign what no TPM made.
    """
    if "ak_certificate" in evidence.endorsements:
        return _read_certified_key(evidence, trust)
    if "ak_key" in evidence.endorsements:
        return _read_known_key(evidence.endorsements["ak_key"], reference)
    ak = parse_public(evidence.find_endorsement("ak"))
    check_attestation_key(ak)
    if ak.name.hex() not in reference.ak_names:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"TPM key {ak.name.hex()[:20]}...: not in ak_names, and no certificate of it was sent; enrol it first",
        )
    if "ek_certificate" not in evidence.endorsements:
        return TrustedAk(
            ak.key, ak.name.hex(), (), ("no EK certificate was sent: the AK is trusted by its enrolled name alone",)
        )
    path = _check_vendor(_read_certificate(evidence, "ek_certificate"), _read_chain(evidence), trust)
    note = "that AK and EK are of one TPM was shown when the AK was enrolled, and is not shown by a quote"
    return TrustedAk(ak.key, ak.name.hex(), path, (note,))


def check_attestation_key(ak: TpmPublic) -> None:
    """Check that the key signs only structures made by the TPM itself, and cannot leave it."""
    if ak.attributes & _AK_MUST != _AK_MUST or ak.attributes & structures.DECRYPT:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"TPM key: attributes {ak.attributes:#x}; an attestation key is restricted, signs, and is fixed to its TPM",
        )


def _read_certified_key(evidence: Evidence, trust: Trust) -> TrustedAk:
    certificate = _read_certificate(evidence, "ak_certificate")
    path = _check_vendor(certificate, _read_chain(evidence), trust)
    check_signs_data(certificate)
    if "ak" not in evidence.endorsements:
        note = "that the AK signs nothing but what its TPM made rests on who issued its certificate"
        return TrustedAk(certificate.public_key, certificate.sha256_hex, path, (note,))
    ak = parse_public(evidence.endorsements["ak"])
    check_attestation_key(ak)
    if certificate.public_key != ak.key:
        raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, "TPM key: its certificate is another key's")
    return TrustedAk(ak.key, ak.name.hex(), path)


def _read_known_key(spki: bytes, reference: TpmReference) -> TrustedAk:
    name = hashlib.sha256(spki).hexdigest()
    if name not in reference.ak_keys:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, f"TPM key {name[:16]}...: not in ak_keys; enrol it first"
        )
    note = "that the AK lives in a TPM and signs nothing else rests on who enrolled it"
    return TrustedAk(load_key(spki, "ak_key"), name, (), (note,))


def _read_chain(evidence: Evidence) -> tuple[Certificate, ...]:
    chain = evidence.endorsements.get("chain")
    return read_certificates(chain, "chain") if chain else ()


def _check_vendor(leaf: Certificate, others: tuple[Certificate, ...], trust: Trust) -> tuple[Certificate, ...]:
    if not trust.roots:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NO_ROOT, "tpm: no root of a TPM vendor is pinned (roots = [...])"
        )
    return check_chain(leaf, others, trust)


def _read_certificate(evidence: Evidence, name: str) -> Certificate:
    certificates = read_certificates(evidence.find_endorsement(name), name)
    if len(certificates) != 1:
        raise malformed_error(name, f"{len(certificates)} certificates, expected one")
    return certificates[0]
