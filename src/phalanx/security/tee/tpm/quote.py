"""TPM 2.0: a quote over PCRs, signed by an attestation key (AK) that lives in the TPM.

A quote proves identity and measured state; a TPM keeps no memory secret from its host.

Source: TCG, TPM 2.0 Library, part 1 (attestation) and TCG EK Credential Profile.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto.canonical import parse_canonical
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust, first_end
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import HASHES, PublicKey, check_ecdsa
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason
from phalanx.security.tee.tpm import structures
from phalanx.security.tee.tpm.key import TpmReference, trusted_ak
from phalanx.security.tee.tpm.structures import TpmQuote, TpmSignature


def appraise_tpm(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a quote: TPM2B_ATTEST followed by TPMT_SIGNATURE.

    Endorsements: ``pcrs`` (canonical JSON, bank to number to hex), and for trust in the AK ``ak_certificate`` with
    ``chain``; or ``ak`` (TPMT_PUBLIC) where the policy knows its name, with ``ek_certificate`` and ``chain`` if any;
    or ``ak_key`` (SubjectPublicKeyInfo, DER) where the policy knows the key.
    """
    if not isinstance(reference, TpmReference):
        raise TypeError("appraise_tpm: expected TpmReference")
    evidence.check_names({"ak", "ak_key", "pcrs", "ak_certificate", "ek_certificate", "chain"})
    ak = trusted_ak(evidence, reference, trust)
    quote, values = check_quote(evidence, ak.key)
    weak = sorted(name for name in reference.measurements if name.startswith("sha1."))
    if weak and not reference.accept_sha1_bank:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE, f"TPM quote: {weak[0]} is of the SHA-1 bank (accept_sha1_bank)"
        )
    return Claims(
        kind="tpm",
        measurements=values,
        report_data=quote.extra_data,
        expires=first_end(ak.path) if ak.path else datetime.max.replace(tzinfo=UTC),
        tcb={"firmware": f"{quote.firmware:016x}", "resets": quote.reset_count, "restarts": quote.restart_count},
        debug_off=False,
        device=ak.name,
        notes=("a TPM keeps no memory secret from the host of its machine", *ak.notes),
    )


def check_quote(evidence: Evidence, key: PublicKey) -> tuple[TpmQuote, dict[str, str]]:
    """Check that the key signed the quote, and that the PCR values beside it fit the quote.

    Returns:
        The quote, and the values by ``BANK.NUMBER``.
    """
    signed, quote, signature = structures.parse_quote_and_signature(evidence.data)
    _check_signature(key, signature, signed)
    values = _pcr_values(evidence, quote)
    _check_digest(quote, signature.hash, values)
    return quote, values


def inspect_tpm(evidence: Evidence) -> Mapping[str, str]:
    """Read PCR values without appraising anything."""
    _, quote, _ = structures.parse_quote_and_signature(evidence.data)
    return _pcr_values(evidence, quote)


def _check_signature(key: PublicKey, signature: TpmSignature, signed: bytes) -> None:
    place = "TPM quote"
    if signature.hash not in HASHES:
        raise malformed_error(place, f"signed with {signature.hash}, which is not accepted")
    digest = HASHES[signature.hash]
    if isinstance(key, ec.EllipticCurvePublicKey) and signature.scheme == structures.ECDSA:
        if digest.digest_size * 8 != min(key.curve.key_size, 512):
            raise malformed_error(place, f"{signature.hash} does not belong to {key.curve.name}")
        r, s = (int.from_bytes(part, "big") for part in signature.parts)
        check_ecdsa(key, type(key.curve), r, s, signed, place)
        return
    if not isinstance(key, rsa.RSAPublicKey) or signature.scheme == structures.ECDSA:
        raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, f"{place}: signed by a key of another kind")
    scheme: padding.AsymmetricPadding = padding.PKCS1v15()
    if signature.scheme == structures.RSAPSS:
        scheme = padding.PSS(padding.MGF1(digest), padding.PSS.AUTO)
    try:
        key.verify(signature.parts[0], signed, scheme, digest)
    except InvalidSignature as exc:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{place}: the signature does not match"
        ) from exc


def _pcr_values(evidence: Evidence, quote: TpmQuote) -> dict[str, str]:
    """Read the PCR values beside a quote: exactly the selected ones, in its order."""
    try:
        sent: Any = parse_canonical(evidence.find_endorsement("pcrs"))
    except ValueError as exc:
        raise malformed_error("pcrs", str(exc)) from exc
    values = {}
    for bank, indexes in quote.selection:
        size = hashlib.new(bank).digest_size
        of_bank = sent.get(bank)
        if not isinstance(of_bank, dict) or set(of_bank) != {str(index) for index in indexes}:
            raise malformed_error("pcrs", f"expected the values of {bank} that are in the quote, no more and no fewer")
        for index in indexes:
            values[f"{bank}.{index}"] = _decode_hex(of_bank[str(index)], size)
    if set(sent) != {bank for bank, _ in quote.selection}:
        raise malformed_error("pcrs", "values of a bank that is not in the quote")
    return values


def _decode_hex(text: Any, size: int) -> str:
    if not isinstance(text, str) or len(text) != 2 * size or set(text) - set("0123456789abcdef"):
        raise malformed_error("pcrs", f"a value is not {size} bytes in lowercase hex")
    return text


def _check_digest(quote: TpmQuote, name: str, values: Mapping[str, str]) -> None:
    concatenated = b"".join(bytes.fromhex(value) for value in values.values())
    if not hmac.compare_digest(hashlib.new(name, concatenated).digest(), quote.digest):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_MEASUREMENT, "TPM quote: its digest is not that of the PCRs sent along"
        )


TPM = Backend(TpmReference, appraise_tpm, inspect_tpm, needs_roots=False)
