"""The evidence of a verdict on rollouts: written by the owner, and judged again offline by any reader."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import EvidenceError, FrameError, ModelError
from phalanx.pipeline.evidence.checked import Pins, certified_peers, peer_lookup
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.evidence.files import (
    MAX_RECORD_BYTES,
    TensorFile,
    file_digest,
    read_bounded,
    read_tensors,
    write_record,
    write_tensors,
)
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.rollouts.bundle import AnsweredRequest, ControlModels, RolloutBundle, SignedAnswer, judge_bundle
from phalanx.rollouts.policy import RolloutPolicy
from phalanx.rollouts.verdict import RolloutVerdict
from phalanx.transport import SignedHeader

FORMAT: Final = "rollouts/3"
_PAYLOAD = "answer"
_POLICY, _OLDER = "policy/", "older/"
_NEED_NO_WEIGHTS = ("equivocation", "form")
Record = TypeVar("Record", bound=StrictModel)


@dataclass(frozen=True)
class EvidenceDirectory:
    """Directory of evidence, and certificates of the parties in it.

    Attributes:
        session: Name that every header bears.
        certificates: PEM of the parties, by name.
    """

    directory: Path
    session: str
    authority: str
    certificates: Mapping[str, str]


class RolloutEvidence(StrictModel):
    """The contents of ``NAME.json``.

    Attributes:
        headers: Signed headers by role, as in `RolloutBundle.headers_by_role`.
        config: The hub's config.json of the policy.
        weights: Digest of the policy's weights.
        older_config: The hub's config.json of an older policy.
    """

    format: Literal["rollouts/3"]
    session: str = Field(min_length=1, max_length=128)
    verdict: RolloutVerdict
    headers: dict[str, PassedOnHeader]
    authority: str
    certificates: dict[str, str]
    config: str
    weights: str = Field(max_length=64)
    older_config: str | None
    tensors: TensorFile


def write_rollout_evidence(desk: EvidenceDirectory, bundle: RolloutBundle, verdict: RolloutVerdict) -> RolloutVerdict:
    """Write a bundle and its verdict as ``NAME.json`` with payload and weights beside it.

    An older file is never overwritten.
    """
    desk.directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    if bundle.answer.payload:
        tensors[_PAYLOAD] = torch.frombuffer(bytearray(bundle.answer.payload), dtype=torch.uint8)
    if verdict.offence not in _NEED_NO_WEIGHTS:
        tensors |= _prefix_tensors(_POLICY, bundle.policy) | _prefix_tensors(_OLDER, bundle.older_policy)
    path = free_path(desk.directory, f"rollouts-{verdict.step:08d}-{verdict.party}")
    headers, policy, older = bundle.headers_by_role, bundle.policy, bundle.older_policy
    parties = {party for header in headers.values() for party in (header.fields.sender, header.fields.receiver)}
    record = RolloutEvidence(
        format=FORMAT,
        session=desk.session,
        verdict=verdict,
        headers={role: to_signed(header) for role, header in headers.items()},
        authority=desk.authority,
        certificates={party: pem for party, pem in desk.certificates.items() if party in parties},
        config=canonical_json(dict(bundle.config if policy is None else policy.config)).decode(),
        weights=bundle.weights if policy is None else policy.digest_of_weights,
        older_config=None if older is None else canonical_json(dict(older.config)).decode(),
        tensors=write_tensors(path.with_suffix(".safetensors"), tensors),
    )
    write_record(path, record)
    return verdict.model_copy(
        update={"evidence": f"{desk.directory.name}/{path.name}", "evidence_sha256": file_digest(path)}
    )


def explain_any_evidence(path: Path, authority: Path | None, session: str | None) -> Mapping[str, Any]:
    """Explain the evidence of a verdict on rollouts or on stages, whichever a file holds."""
    if read_format(path).startswith("rollouts/"):
        return explain_rollout_evidence(path, read_pins(authority, session))
    return explain_evidence(path, authority, session)


def read_format(path: Path) -> str:
    """Return the format that a file of evidence names; empty if it is no JSON object."""
    try:
        record = json.loads(read_bounded(path, MAX_RECORD_BYTES))
    except (ValueError, RecursionError):
        return ""
    return str(record.get("format")) if isinstance(record, dict) else ""


def read_pins(authority: Path | None, session: str | None) -> Pins:
    """Read the authority's certificate that a reader has from elsewhere."""
    try:
        return Pins(None if authority is None else authority.read_bytes(), session)
    except OSError as exc:
        raise EvidenceError(f"{authority}: cannot be read ({exc.strerror})") from exc


def explain_rollout_evidence(path: Path, pins: Pins) -> Mapping[str, Any]:
    """Judge the records of one verdict on rollouts again, with nothing but its two files.

    Args:
        path: ``NAME.json``; ``NAME.safetensors`` lies beside it.
        pins: Facts that the reader has from elsewhere.

    Returns:
        What was checked, by name; the last two entries are what rests on the owner's word, and the conclusion.

    Raises:
        EvidenceError: Something does not hold: the worker that it accuses is not to be convicted.

    Guarantees:
        It is the owner's judge: the same function of the same records, which computes the text again as its writer did.
    """
    record = read_record(path, RolloutEvidence)
    tensors = read_tensors(path.parent, record.tensors)
    fingerprint, peers = certified_peers(path, record, pins)
    verdict = record.verdict
    try:
        bundle = _bundle_of(record, tensors)
        judgement = judge_bundle(bundle, record.session, peer_lookup(peers), ControlModels())
    except (EvidenceError, ModelError, FrameError) as exc:
        raise EvidenceError(f"{path}: {exc}") from exc
    if _verdict_core(judgement.verdict) != _verdict_core(verdict):
        raise EvidenceError(
            f"{path}: accuses {verdict.party} of {verdict.offence}; a reader {_describe_finding(judgement.verdict)}"
            f"{f' ({judgement.doubt})' if judgement.doubt else ''}"
        )
    again = judgement.verdict
    return {
        "verdict": f"{verdict.party} is guilty: {verdict.offence}",
        "reason": verdict.reason,
        "step": verdict.step,
        "prompt": verdict.prompt,
        "sample": verdict.sample,
        "tolerance, as both have signed": _tolerance_of(bundle),
        "file": f"SHA-256 {file_digest(path)}",
        "tensors": f"SHA-256 {record.tensors.sha256}",
        "authority": f"{'as given' if pins.authority else 'not compared'}, fingerprint {fingerprint}",
        "session": f"{record.session}, {'as given' if pins.session else 'not compared'}",
        "judged again": "not" if again is None else again.reason,
        "rests on the owner's word": "nothing",
        "conclusion": f"holds: {verdict.party} signed what these weights do not write",
    }


def _tolerance_of(bundle: RolloutBundle) -> Mapping[str, float]:
    tolerance: Mapping[str, float] = bundle.request.fields.body["tolerance"]
    return tolerance


def _verdict_core(verdict: RolloutVerdict | None) -> tuple[object, ...] | None:
    """Return the part on which two readers of the same records must agree; distances depend on the machine."""
    if verdict is None:
        return None
    return verdict.party, verdict.step, verdict.request, verdict.offence, verdict.prompt, verdict.sample


def _describe_finding(verdict: RolloutVerdict | None) -> str:
    if verdict is None:
        return "finds nothing wrong"
    return f"finds {verdict.party} guilty of {verdict.offence} in step {verdict.step}: {verdict.reason}"


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read the JSON file of some evidence.

    Raises:
        EvidenceError: It cannot be read, or is of another kind or version.
    """
    try:
        return kind.model_validate_json(read_bounded(path, MAX_RECORD_BYTES))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise EvidenceError(f"{path}: is no evidence of this version: {place}: {first['msg']}") from exc


def signed_headers(headers: Mapping[str, PassedOnHeader], *needed: str) -> dict[str, SignedHeader]:
    """Return headers by role, as they were signed.

    Args:
        needed: Roles that must be there.

    Raises:
        EvidenceError: One of these is missing, or a header is malformed.
    """
    for role in needed:
        if role not in headers:
            raise EvidenceError(f"has no signed header for {role!r}")
    try:
        return {
            role: SignedHeader(passed_on.header.encode(), bytes.fromhex(passed_on.signature))
            for role, passed_on in headers.items()
        }
    except ValueError as exc:
        raise EvidenceError(f"a header is malformed: {exc}") from exc


def free_path(directory: Path, stem: str) -> Path:
    """Return the first of ``stem.json``, ``stem-2.json`` and so on that does not exist."""
    name, number = stem, 1
    while (directory / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    return directory / f"{name}.json"


def _bundle_of(record: RolloutEvidence, tensors: Mapping[str, torch.Tensor]) -> RolloutBundle:
    verdict, config = record.verdict, _parse_config(record.config)
    payload = tensors[_PAYLOAD].numpy().tobytes() if _PAYLOAD in tensors else b""
    headers = signed_headers(record.headers, "request", "answer")
    request, answer = headers["request"], SignedAnswer(headers["answer"], payload)
    older = None
    if "older_request" in headers and "older_answer" in headers:
        older = AnsweredRequest(headers["older_request"], headers["older_answer"])
    weights, older_policy = _select_tensors(_POLICY, tensors), None
    if weights and record.older_config is not None:
        older_policy = RolloutPolicy(_parse_config(record.older_config), _select_tensors(_OLDER, tensors))
    return RolloutBundle(
        party=verdict.party,
        request=request,
        answer=answer,
        policy=RolloutPolicy(config, weights) if weights else None,
        config=config,
        weights=record.weights,
        second_answer=headers.get("second_answer"),
        place=None if verdict.prompt is None or verdict.sample is None else (verdict.prompt, verdict.sample),
        older=older,
        older_policy=older_policy,
    )


def _parse_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise EvidenceError(f"the policy's config is malformed ({exc})") from exc
    if not isinstance(config, dict):
        raise EvidenceError("the policy's config is no object")
    return config


def _select_tensors(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prefix_tensors(prefix: str, policy: RolloutPolicy | None) -> dict[str, torch.Tensor]:
    return {} if policy is None else {f"{prefix}{name}": tensor for name, tensor in policy.tensors.items()}
