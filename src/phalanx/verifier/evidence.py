"""Evidence of a verdict: certificates, signatures, session and digests; recomputation is left to Phalanx."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .forms import Member, RefusedError, certificate_fingerprint, check_issuer, party_of, read_json, require, sha256
from .log import open_header

MAX_RECORD_BYTES = 16 * 2**20
_ON_DISPLAY = ("message", "input")
"""Roles of headers that a forger showed; the verdict is that no party signed them."""


@dataclass(frozen=True)
class EvidenceFindings:
    """What a file of evidence shows by itself.

    Attributes:
        signers: Sender of each header whose signature holds, by its role.
        authority: SHA-256 of the authority's certificate.
        tensors: Name and SHA-256 of the file of tensors beside it.
        is_contradiction: Whether the accused signed two different versions of one message: a proof without
            recomputation. Of any other offence the signatures hold, and `phalanx audit explain` recomputes.
    """

    party: str
    offence: str
    session: str
    signers: Mapping[str, str]
    authority: str
    tensors: tuple[str, str]
    is_contradiction: bool


def verify_evidence(data: bytes, session: str | None = None, authority_pem: str | None = None) -> EvidenceFindings:
    """Check a record of evidence.

    Args:
        session: The session that it must be of; None accepts any.
        authority_pem: The authority that must have issued its certificates; None accepts any.

    Raises:
        RefusedError: It is malformed, a certificate or signature does not hold, or it is of another session.
    """
    try:
        return _verify_record(read_json(data), session, authority_pem)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RefusedError(f"no evidence, or altered: {exc}") from exc


def _verify_record(record: Mapping[str, Any], session: str | None, authority_pem: str | None) -> EvidenceFindings:
    verdict, authority = record["verdict"], record["authority"]
    require(record["format"] == 3, f"evidence of format {record['format']!r:.20}, expected 3")
    require(session in (None, record["session"]), f"is of the session {record['session']!r:.80}, expected {session}")
    fingerprint = certificate_fingerprint(authority)
    if authority_pem is not None:
        require(certificate_fingerprint(authority_pem) == fingerprint, "was certified by another authority")
    keys = {}
    for name, pem in record["certificates"].items():
        party = party_of(pem)
        check_issuer(party, authority)
        require(party.name == name.partition(".")[0], f"the certificate of {name} is another party's")
        keys[party.name] = party.key
    accused = verdict["party"]
    require(accused != "owner" and accused.partition(".")[0] in keys, f"accuses {accused!r:.80}, without certificate")
    headers = {}
    for role, signed in sorted(record["headers"].items()):
        try:
            headers[role] = open_header(signed, keys)
            require(headers[role]["run"] == record["session"], f"header {role!r} is of another session")
        except (RefusedError, ValueError) as exc:
            if verdict["offence"] != "forgery" or role not in _ON_DISPLAY:
                raise RefusedError(f"header {role!r}: {exc}") from exc
    tensors = record["tensors"]
    return EvidenceFindings(
        party=accused,
        offence=verdict["offence"],
        session=record["session"],
        signers={role: header["sender"] for role, header in headers.items()},
        authority=fingerprint,
        tensors=(tensors["file"], tensors["sha256"]),
        is_contradiction=verdict["offence"] == "equivocation" and _contradict(headers, accused),
    )


def _contradict(headers: Mapping[str, Mapping[str, Any]], accused: str) -> bool:
    """Whether the accused told stage and auditor two different tensors as one message."""
    first, other = headers.get("told_stage"), headers.get("told_auditor")
    if first is None or other is None or {first["sender"], other["sender"]} != {accused}:
        return False
    names = ("epoch", "step", "microbatch", "direction", "source")
    places = [[header["receiver"], *(header["body"].get(name) for name in names)] for header in (first, other)]
    is_one_message = first["kind"] == other["kind"] == "tensor" and places[0] == places[1]
    return bool(is_one_message and first["payload_digest"] != other["payload_digest"])


def verify_evidence_file(
    path: Path, session: str | None = None, authority_pem: str | None = None
) -> tuple[EvidenceFindings, str]:
    """Check a file of evidence and the tensors beside it; return the findings and the file's SHA-256."""
    data = Member.from_file(path).read_all(MAX_RECORD_BYTES)
    findings = verify_evidence(data, session, authority_pem)
    name, expected = findings.tensors
    require("/" not in name and name.endswith(".safetensors"), f"{path}: its tensors are in no file beside it")
    tensors = path.with_name(name)
    if tensors.exists():
        actual = Member.from_file(tensors).hash_content()
        require(actual == expected, f"{tensors}: SHA-256 {actual}, the record says {expected}")
    return findings, sha256(data)
