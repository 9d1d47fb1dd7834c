"""Collateral that Intel publishes beside a quote, signed and dated: TCB levels, quoting enclave, revocation lists."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ValidationError

from phalanx.config import parse_strict_json
from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data, first_end
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_raw_ecdsa
from phalanx.security.tee.formats.x509 import RevocationList, parse_crl, read_certificates
from phalanx.security.tee.intel.dcap_tcb import QeIdentity, TcbInfo
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_WHERE = "collateral"
_KEYS = {
    "pck_crl_issuer_chain",
    "root_ca_crl",
    "pck_crl",
    "tcb_info_issuer_chain",
    "tcb_info",
    "tcb_info_signature",
    "qe_identity_issuer_chain",
    "qe_identity",
    "qe_identity_signature",
}
# some tools add it; the chain inside the quote is the one that is used, and this one must be the same
_PCK_CHAIN = "pck_certificate_chain"
_OPTIONAL = {_PCK_CHAIN}
_TCB_SIGNER = "Intel SGX TCB Signing"
_Table = TypeVar("_Table", bound=BaseModel)


@dataclass(frozen=True)
class Collateral:
    """Collateral with sound signatures and dates.

    Attributes:
        trust: The caller's, with the revocation lists added, and lists required.
        crl_chain: PEM of the authority that issued the PCK certificates.
        pck_chain: PEM of the chain that the quote has too; None where it was not sent.
        expires: Earliest end of a table or list.
    """

    tcb_info: TcbInfo
    qe_identity: QeIdentity
    trust: Trust
    lists: tuple[RevocationList, ...]
    crl_chain: bytes
    pck_chain: bytes | None
    expires: datetime


def check_collateral(data: bytes, trust: Trust) -> Collateral:
    """Read and check collateral: one JSON object of strings, as Intel's services return it."""
    parts = _unique_object(data)
    lists = (_read_crl(parts, "root_ca_crl"), _read_crl(parts, "pck_crl"))
    trust = Trust(trust.roots, trust.now, (*trust.crls, *lists), trust.revoked, require_crl=True)
    tcb_info, first = _signed_table(parts, "tcb_info", TcbInfo, trust)
    qe_identity, second = _signed_table(parts, "qe_identity", QeIdentity, trust)
    ends = (first, second, *(crl.next_update for crl in lists))
    pck_chain = _read_text(parts, _PCK_CHAIN) if parts.get(_PCK_CHAIN) is not None else None
    return Collateral(
        tcb_info, qe_identity, trust, lists, _read_text(parts, "pck_crl_issuer_chain"), pck_chain, min(ends)
    )


def _unique_object(data: bytes) -> dict[str, str]:
    value = _load_json(data, _WHERE)
    if not isinstance(value, dict) or not _KEYS <= set(value) <= _KEYS | _OPTIONAL:
        raise malformed_error(_WHERE, f"expected the keys {', '.join(sorted(_KEYS))}")
    if not all(isinstance(value[name], str) for name in value if value[name] is not None or name in _KEYS):
        raise malformed_error(_WHERE, "expected text under every key")
    return value


def _signed_table(parts: dict[str, str], name: str, model: type[_Table], trust: Trust) -> tuple[_Table, datetime]:
    """Return a table and when it or its signer's chain ends; the signature is over the text as it stands."""
    certificates = read_certificates(_read_text(parts, f"{name}_issuer_chain"), f"{name} chain")
    path = check_chain(certificates[0], certificates[1:], trust)
    check_signs_data(certificates[0])
    if certificates[0].subject_name != _TCB_SIGNER:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"{name}: signed by {certificates[0].subject_name!r}, expected {_TCB_SIGNER!r}",
        )
    signed = _read_text(parts, name)
    signature = _read_hex(parts, f"{name}_signature")
    if len(signature) != 64:
        raise malformed_error(name, f"signature of {len(signature)} bytes, expected 64")
    check_raw_ecdsa(certificates[0].public_key, ec.SECP256R1, signature, signed, name)
    _load_json(signed, name)
    try:
        table = model.model_validate_json(signed)
    except (ValidationError, RecursionError) as exc:
        raise malformed_error(name, f"not as Intel documents it: {str(exc).splitlines()[0]}") from exc
    return table, min(_check_dates(table, name, trust.now), first_end(path))


def _check_dates(table: BaseModel, name: str, now: datetime) -> datetime:
    issued, due = _parse_time(getattr(table, "issued", ""), name), _parse_time(getattr(table, "next_update", ""), name)
    if now < issued:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NOT_YET_VALID, f"{name}: issued at {issued}, the clock says {now}"
        )
    if now > due:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.EXPIRED, f"{name}: the next one was due at {due}, the clock says {now}; fetch it anew"
        )
    return due


def _parse_time(text: str, where: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError as exc:
        raise malformed_error(where, "malformed date") from exc


def _read_crl(parts: dict[str, str], name: str) -> RevocationList:
    return parse_crl(_read_hex(parts, name), name)


def _read_hex(parts: dict[str, str], name: str) -> bytes:
    try:
        return bytes.fromhex(parts[name])
    except ValueError as exc:
        raise malformed_error(_WHERE, f"{name} is not hex") from exc


def _read_text(parts: dict[str, str], name: str) -> bytes:
    try:
        return parts[name].encode("utf-8")
    except UnicodeEncodeError as exc:
        raise malformed_error(_WHERE, f"{name} is not valid text") from exc


def _load_json(data: bytes, where: str) -> Any:
    try:
        return parse_strict_json(data)
    except (ValueError, RecursionError) as exc:
        raise malformed_error(where, "is not valid JSON without double keys") from exc
