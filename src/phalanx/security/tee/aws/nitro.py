"""AWS Nitro Enclaves: an attestation document, signed by a key that AWS certifies for three hours.

Source: AWS, "Nitro Enclaves attestation process" (aws-nitro-enclaves-nsm-api, docs/attestation_process.md).
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.cbor import decode_cbor
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data, first_end
from phalanx.security.tee.formats.cose import ES384, Sign1, parse_sign1
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_raw_ecdsa
from phalanx.security.tee.formats.x509 import parse_certificate
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_WHERE = "Nitro document"
_REQUIRED = {"module_id", "digest", "timestamp", "pcrs", "certificate", "cabundle"}
_OPTIONAL = {"public_key": 1024, "user_data": 512, "nonce": 512}
_MAX_PCRS, _MAX_CERTIFICATES, _MAX_CERTIFICATE_BYTES = 32, 16, 1024
_PCR_BYTES = (32, 48, 64)
# in milliseconds; dates end with the year 9999
_LAST_MOMENT = 1 << 47
# of a document's own clock against the verifier's
_SKEW = timedelta(minutes=5)


class NitroReference(Reference):
    """Reference values for Nitro Enclaves. Measurements: ``pcr0`` (image), ``pcr1``, ``pcr2``, ``pcr8`` (signer)."""


def appraise_nitro(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a document. It brings its own certificates; there are no endorsements.

    The binding goes into ``user_data``, or into ``nonce`` where there is none.
    """
    evidence.check_names(set())
    message = parse_sign1(evidence.data, _WHERE)
    document = _read_document(message)
    leaf = parse_certificate(document["certificate"], "Nitro certificate")
    bundle = [parse_certificate(der, "Nitro certificate") for der in document["cabundle"]]
    path = check_chain(leaf, bundle, trust)
    check_signs_data(leaf)
    if message.algorithm != ES384 or len(message.signature) != 96:
        raise malformed_error(_WHERE, f"signature algorithm {message.algorithm}, expected {ES384} (ES384)")
    check_raw_ecdsa(leaf.public_key, ec.SECP384R1, message.signature, message.signed, _WHERE)
    _check_moment(document["timestamp"], trust.now)
    pcrs = _read_pcrs(document)
    if not pcrs.get("pcr0", "").strip("0"):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.DEBUG_ENABLED, "Nitro document: PCR0 is zero, which an enclave has in debug mode only"
        )
    user_data, nonce = document.get("user_data"), document.get("nonce")
    return Claims(
        kind="nitro",
        measurements=pcrs,
        report_data=(user_data if user_data is not None else nonce) or b"",
        expires=first_end(path),
        device=document["module_id"],
        notes=("AWS publishes no TCB versions; trust in the host's firmware rests on AWS.",),
    )


def inspect_nitro(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    return _read_pcrs(_read_document(parse_sign1(evidence.data, _WHERE)))


def _read_document(message: Sign1) -> dict[str, Any]:
    document = decode_cbor(message.payload, _WHERE)
    if not isinstance(document, dict) or not _REQUIRED <= set(document) <= _REQUIRED | set(_OPTIONAL):
        raise malformed_error(_WHERE, f"expected the keys {', '.join(sorted(_REQUIRED))}")
    if document["digest"] != "SHA384":
        raise malformed_error(_WHERE, "digest is not SHA384")
    module, moment, pcrs = document["module_id"], document["timestamp"], document["pcrs"]
    if not isinstance(module, str) or not module or type(moment) is not int or not 0 < moment < _LAST_MOMENT:
        raise malformed_error(_WHERE, "module or timestamp")
    if not isinstance(pcrs, dict) or not 1 <= len(pcrs) <= _MAX_PCRS:
        raise malformed_error(_WHERE, f"expected 1 to {_MAX_PCRS} PCRs")
    for index, value in pcrs.items():
        if type(index) is not int or not 0 <= index < _MAX_PCRS or not _is_bytes(value, _PCR_BYTES):
            raise malformed_error(_WHERE, "a PCR has no number below 32, or a value of another length")
    bundle = document["cabundle"]
    if not isinstance(bundle, list) or not 1 <= len(bundle) <= _MAX_CERTIFICATES:
        raise malformed_error(_WHERE, f"expected 1 to {_MAX_CERTIFICATES} certificates in cabundle")
    for der in (document["certificate"], *bundle):
        if not isinstance(der, bytes) or not 1 <= len(der) <= _MAX_CERTIFICATE_BYTES:
            raise malformed_error(_WHERE, "a certificate is no bytes, or of a length that cannot be")
    for name, limit in _OPTIONAL.items():
        value = document.get(name)
        if value is not None and (not isinstance(value, bytes) or len(value) > limit):
            raise malformed_error(_WHERE, f"{name} is no bytes, or longer than {limit}")
    return document


def _is_bytes(value: Any, lengths: tuple[int, ...]) -> bool:
    return isinstance(value, bytes) and len(value) in lengths


def _read_pcrs(document: dict[str, Any]) -> dict[str, str]:
    return {f"pcr{index}": value.hex() for index, value in document["pcrs"].items()}


def _check_moment(milliseconds: int, now: datetime) -> None:
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    if moment > now + _SKEW:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NOT_YET_VALID, f"{_WHERE}: written at {moment}, the clock says {now}"
        )


NITRO = Backend(NitroReference, appraise_nitro, inspect_nitro, packaged_roots=("aws_nitro.pem",))
