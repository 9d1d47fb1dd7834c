"""Check of anything that a stranger is handed: its kind is recognised by its content."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bundle import BLOCK
from .evidence import MAX_RECORD_BYTES, verify_evidence_file
from .forms import CertifiedParty, Member, RefusedError, UnreadableError, party_of, read_json, require
from .log import check_kept_head, read_summary_head, verify
from .passport import verify_passport
from .shards import MANIFEST_FILE, MAX_PROOF_BYTES, DatasetReader, check_proof
from .statement import (
    ATTESTATION_PREDICATE,
    GIT_FILES,
    SIGNATURE_FILE,
    by_ed25519_key,
    compare_export,
    compare_model,
    open_export,
    open_model_signature,
    open_statement,
    read_key_id,
)

EXPORT_FILE = "statement.dsse.json"
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)


@dataclass(frozen=True)
class Expectations:
    """What a reader knows beforehand; None accepts anything, and the report says so.

    Attributes:
        owner: Fingerprint of the key of a run's owner.
        certificate: PEM of the owner's certificate.
        signer: Fingerprint of the key that signs data or exports.
        model: Directory of the model that came with a passport.
        heads: Heads of the log that others have kept.
        absent: Digest of a document that the model must never have seen; a passport alone can show it.
    """

    owner: str | None = None
    certificate: str | None = None
    signer: str | None = None
    model: Path | None = None
    session: str | None = None
    heads: tuple[bytes, ...] = ()
    absent: str | None = None


@dataclass
class PathReport:
    """What was checked.

    Attributes:
        remarks: Facts that hold and prove less than one may think.
        doubts: Missing facts; none of them makes a forgery pass.
        idle: What is expected and compared with nothing here.
    """

    kind: str
    rows: dict[str, str]
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)


def verify_path(path: Path, expected: Expectations, *, is_alone: bool = True) -> PathReport:
    """Check a passport, run directory, dataset, export, signed model, evidence, document proof or attestation.

    All that is expected must be compared with it where `is_alone`, else a part.

    Raises:
        RefusedError: It does not hold, or it is nothing of these.
        UnreadableError: It cannot be read.
    """
    try:
        file = None if path.is_dir() else Member.from_file(path)
        is_passport = file is not None and file.size >= BLOCK and file.read_range(257, 8) == b"ustar\x0000"
        require(is_passport or expected.absent is None, f"{path}: only a passport shows a document's absence")
        check = _verify_passport if is_passport else _choose_check(path, file)
        report = check(path, expected)
    except _MALFORMED as exc:
        # the repr escapes what a hostile file may have put into the message
        reason = "it is not JSON" if isinstance(exc, json.JSONDecodeError | UnicodeDecodeError) else f"{exc!r:.200}"
        raise RefusedError(f"{path}: is no passport, evidence or proof, or was altered ({reason})") from exc
    given = {name for name, value in vars(expected).items() if value}
    report.idle = given - _COMPARED.get(report.kind, {"signer"})
    if report.idle and (is_alone or report.idle == given):
        # another kind of thing may lie in the place of the one that was expected
        names = ", ".join(sorted(report.idle))
        report.doubts.append(f"nothing that you expect ({names}) is compared with a {report.kind}")
    return report


def _choose_check(path: Path, file: Member | None) -> Callable[[Path, Expectations], PathReport]:
    if file is None:
        checks = [check for name, check in _DIRECTORIES.items() if (path / name).is_file()]
        if not checks:
            raise UnreadableError(f"{path}: is no run, dataset, export or signed model")
        require(len(checks) == 1, f"{path}: is several things at once: one would be checked in the place of the others")
        return checks[0]
    value = read_json(file.read_all(max(MAX_RECORD_BYTES, MAX_PROOF_BYTES)))
    if value.get("format") == "phalanx-document-proof":
        return _verify_proof
    require("verdict" in value or "payloadType" in value, f"{path}: is no passport, evidence or proof")
    return _verify_evidence if "verdict" in value else _verify_attestation


def _verify_passport(path: Path, expected: Expectations) -> PathReport:
    pins = expected.owner, expected.certificate, expected.model, expected.heads, expected.absent
    findings = verify_passport(path, *pins)
    rows = {"owner": f"{findings.owner}, {'as expected' if findings.is_expected else 'not compared'}", **findings.rows}
    facts = {**findings.facts, "owner": findings.owner, "is_expected": findings.is_expected}
    return PathReport("passport of a run", rows, findings.remarks, findings.doubts, facts)


def _verify_run(path: Path, expected: Expectations) -> PathReport:
    certificate = expected.certificate
    if certificate is None:
        certificate = Member.from_file(path / "owner.pem").read_all(2**20).decode("ascii", "replace")
    owner = _read_party(certificate, expected)
    log = verify(path, certificate, read_summary_head(path))
    is_expected = expected.owner is not None or expected.certificate is not None
    rows = {
        "owner": f"{owner.fingerprint}, {'as expected' if is_expected else 'not compared'}",
        "log": f"{len(log.lines)} lines, signed, in order; run {log.run}",
        "audits": log.describe_audits(),
        "convicted": ", ".join(sorted({str(body["party"]) for body in log.verdicts})) or "nobody",
    }
    log.doubts += filter(None, [check_kept_head(head, log, owner) for head in expected.heads])
    facts = {"run": log.run, "owner": owner.fingerprint, "proven": len(log.proven), "recorded": len(log.recorded)}
    return PathReport("log of a run", rows, log.remarks, log.doubts, {**facts, "audits": log.audits, "events": len(log.lines)})


def _read_party(certificate: str, expected: Expectations) -> CertifiedParty:
    party = party_of(certificate)
    require(expected.owner in (None, party.fingerprint), f"the owner's key is {party.fingerprint}, another one")
    return party


def _verify_dataset(path: Path, expected: Expectations) -> PathReport:
    reader = DatasetReader(path, expected.signer)
    reader.check_all()
    manifest = reader.manifest
    rows = {
        "dataset": manifest.digest,
        "signer": f"{manifest.signer}, {'as expected' if expected.signer else 'not compared'}",
        "files": f"{manifest.body['documents']} documents, {manifest.body['tokens']} tokens: every byte as signed",
    }
    return PathReport("dataset", rows, facts={"dataset": manifest.digest, "signer": manifest.signer})


def _verify_export(path: Path, expected: Expectations) -> PathReport:
    key, statement = open_export(Member.from_file(path / EXPORT_FILE).read_all(2**20))
    require(expected.signer in (None, key), f"{path}: signed with key {key}, expected {expected.signer}")
    compare_export(path, statement)
    predicate = statement["predicate"]
    rows = {
        "export": f"{predicate['format']} {predicate['precision']}, {predicate['state']}",
        "signer": f"{key}, {'as expected' if expected.signer else 'not compared'}",
        "made from": f"run {predicate['source']['run']}, step {predicate['source']['step']}",
    }
    doubts = [] if predicate["state"] == "checked" else [f"compared with its model: {predicate['state']!s:.200}"]
    return PathReport("export", rows, [], doubts, {**predicate, "signer": key})


def _verify_model(path: Path, expected: Expectations) -> PathReport:
    if expected.certificate is None:
        raise RefusedError(f"{path}: give the certificate of the key that signed {SIGNATURE_FILE}")
    owner = _read_party(expected.certificate, expected)
    signature = open_model_signature(Member.from_file(path / SIGNATURE_FILE).read_all(2**26), owner.release_key)
    compare_model(path, signature)
    rows = {"model": f"{signature.name}, {len(signature.files)} files as signed, root {signature.root}"}
    others = sorted({*signature.ignored} - {*GIT_FILES, SIGNATURE_FILE})
    remarks = [f"files that the signature leaves out: {', '.join(others)[:200]}"] if others else []
    return PathReport("signed model", rows, remarks, facts={"root": signature.root, "name": signature.name})


def _verify_evidence(path: Path, expected: Expectations) -> PathReport:
    findings, value = verify_evidence_file(path, expected.session)
    rows = {
        "accused": f"{findings.party}: {findings.offence}",
        "signatures": ", ".join(f"{role} by {sender}" for role, sender in findings.signers.items()) or "none",
        "session": findings.session,
        "authority": f"{findings.authority}, not compared",
        "file": f"SHA-256 {value}",
    }
    doubts = [] if findings.is_contradiction else ["the lie itself is recomputed by `phalanx audit explain`"]
    facts = {"party": findings.party, "offence": findings.offence, "sha256": value}
    return PathReport("evidence", rows, [], doubts, facts)


def _verify_proof(path: Path, expected: Expectations) -> PathReport:
    proof = check_proof(Member.from_file(path).read_all(MAX_PROOF_BYTES), expected.signer)
    places = "; ".join(f"{group}.{split}, document {number}" for group, split, number in proof.places)
    rows = {
        "document": proof.digest,
        "dataset": f"{proof.statement['dataset']}, signed by {proof.signer}",
        "places": (places or "none (proven)") + ("" if proof.is_complete else ", and perhaps more"),
    }
    return PathReport("proof about a document", rows, facts={"document": proof.digest, "places": proof.places})


def _verify_attestation(path: Path, expected: Expectations) -> PathReport:
    data = Member.from_file(path).read_all(MAX_RECORD_BYTES)
    signer = read_key_id(data)
    require(expected.signer in (None, signer), f"{path}: signed with key {signer}, expected {expected.signer}")
    statement = open_statement(data, [by_ed25519_key(bytes.fromhex(signer))], ATTESTATION_PREDICATE)
    predicate, digest = statement["predicate"], statement["subject"][0]["digest"].get("sha256")
    verdict, run, *steps = (predicate.get(name) for name in ("verdict", "run", "recomputed", "num_steps"))
    rows = {
        "outcome": f"{verdict!s:.20}: {steps[0]!s:.20} of {steps[1]!s:.20} steps have the published bits",
        "signer": f"{signer}, {'as expected' if expected.signer else 'not compared'}",
        "publication": f"{digest!s:.64} of run {run!s:.32}",
    }
    doubts = [] if verdict == "proved" else [f"the signer's verdict is: {verdict!s:.20}"]
    return PathReport(
        "attestation of a stranger", rows, [], doubts, {**predicate, "signer": signer, "publication": digest}
    )


_DIRECTORIES = {
    "events.jsonl": _verify_run,
    MANIFEST_FILE: _verify_dataset,
    EXPORT_FILE: _verify_export,
    SIGNATURE_FILE: _verify_model,
}
_COMPARED = {
    "passport of a run": {"owner", "certificate", "model", "heads", "absent"},
    "log of a run": {"owner", "certificate", "heads"},
    "signed model": {"owner", "certificate"},
    "evidence": {"session"},
}
"""What is expected of each kind; of all others the signer."""
