"""The evidence of a verdict on rollouts: written by the owner, and judged again offline by any reader."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import EvidenceError, FrameError, ModelError, SignatureError
from phalanx.pipeline.evidence.checked import Pins, certified_peers, known_peer
from phalanx.pipeline.evidence.explain import UNPROVED, explain_evidence
from phalanx.pipeline.evidence.files import (
    MAX_RECORD_BYTES,
    MAX_TENSOR_BYTES,
    MAX_WEIGHT_BYTES,
    TensorFile,
    file_digest,
    read_bounded,
)
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.pipeline.protocol.signed import Statements, to_signed
from phalanx.rollouts.judgement import (
    judge_rollout,
    judge_second_answer,
    read_answer,
)
from phalanx.rollouts.messages import TO_OWNER, TO_WORKER
from phalanx.rollouts.policy import PolicyModel, RolloutPolicy
from phalanx.rollouts.prefill import reread_rollouts
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer
from phalanx.rollouts.verdict import RolloutTolerance, RolloutVerdict
from phalanx.security.crypto import digest_hex
from phalanx.transport import SignedHeader, parse_body

FORMAT: Final = "rollouts/1"
_WEIGHT = "policy/"
_NEED_NO_WEIGHTS = ("equivocation", "form", "request")
_OWNER_ONLY = {
    "reward": "what the text earns: the owner's reward rule is not in this file",
    "stale": "what the policy before says: its weights are not in this file",
    "borders": "how often it did so: the count over all its answers is the owner's",
}


class SignedAnswer(NamedTuple):
    """An answer as its worker signed it."""

    header: SignedHeader
    payload: bytes


@dataclass(frozen=True)
class RolloutCase:
    """All that is known about one verdict on rollouts.

    Attributes:
        verdict: The guilty worker and its offence.
        request: The owner's signed header.
        answers: What the worker signed in return; the first and the last one are kept.
        tolerance: That the verdict was found with.
        policy: The weights of the request.
    """

    verdict: RolloutVerdict
    request: SignedHeader
    answers: Sequence[SignedAnswer]
    tolerance: RolloutTolerance
    policy: RolloutPolicy


@dataclass(frozen=True)
class EvidenceDesk:
    """Where evidence is written, and what vouches for the parties in it.

    Attributes:
        directory: Gets the files.
        session: Name that every header bears.
        authority: PEM of the authority.
        certificates: PEM of the parties, by name.
    """

    directory: Path
    session: str
    authority: str
    certificates: Mapping[str, str]


class RolloutEvidence(StrictModel):
    """The contents of ``NAME.json``."""

    format: Literal["rollouts/1"]
    session: str = Field(min_length=1, max_length=128)
    verdict: RolloutVerdict
    headers: dict[str, PassedOnHeader]
    """``request``, ``answer`` and, where a worker contradicts itself, ``second_answer``."""
    authority: str
    certificates: dict[str, str]
    tolerance: RolloutTolerance
    config: str
    """The hub's config.json of the policy."""
    weights_left_out: str | None
    """Why the weights are not in the tensor file; None when they are."""
    tensors: TensorFile


def write_rollout_evidence(
    desk: EvidenceDesk, case: RolloutCase, max_weight_bytes: int = MAX_WEIGHT_BYTES
) -> RolloutVerdict:
    """Write one verdict as ``NAME.json`` with payloads and weights beside it; an older file is never overwritten.

    Returns:
        The verdict, which now names the file and its digest.
    """
    desk.directory.mkdir(parents=True, exist_ok=True)
    verdict, shown = case.verdict, {"answer": case.answers[0]}
    if verdict.offence == "equivocation":
        shown["second_answer"] = case.answers[-1]
    headers = {"request": case.request, **{role: one.header for role, one in shown.items()}}
    tensors = {
        role: torch.frombuffer(bytearray(one.payload), dtype=torch.uint8) for role, one in shown.items() if one.payload
    }
    size_bytes, left_out = sum(one.nbytes for one in case.policy.tensors.values()), None
    if verdict.offence in _NEED_NO_WEIGHTS:
        left_out = "the verdict needs none"
    elif size_bytes > max_weight_bytes:
        left_out = f"{size_bytes} bytes of weights, more than the {max_weight_bytes} that evidence may hold"
    else:
        # cloned, because parts of one tensor may share memory, which safetensors refuses
        tensors |= {f"{_WEIGHT}{name}": one.detach().cpu().clone() for name, one in case.policy.tensors.items()}
    blob, name = save(tensors), _free_name(desk.directory, verdict)
    (desk.directory / f"{name}.safetensors").write_bytes(blob)
    record = RolloutEvidence(
        format=FORMAT,
        session=desk.session,
        verdict=verdict,
        headers={role: to_signed(header) for role, header in headers.items()},
        authority=desk.authority,
        certificates={one: pem for one, pem in desk.certificates.items() if one in _parties(headers.values())},
        tolerance=case.tolerance,
        config=canonical_json(dict(case.policy.config)).decode(),
        weights_left_out=left_out,
        tensors=TensorFile(file=f"{name}.safetensors", sha256=hashlib.sha256(blob).hexdigest()),
    )
    path, spare = desk.directory / f"{name}.json", desk.directory / f"{name}.json.tmp"
    spare.write_text(json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True), encoding="utf-8")
    spare.replace(path)
    return verdict.model_copy(
        update={"evidence": f"{desk.directory.name}/{path.name}", "evidence_sha256": file_digest(path)}
    )


def explain_any_evidence(path: Path, authority: Path | None, session: str | None) -> Mapping[str, Any]:
    """Explain the evidence of a verdict on rollouts or on stages, whichever a file holds.

    Raises:
        EvidenceError: As `explain_rollout_evidence` and `explain_evidence`.
    """
    try:
        found = json.loads(read_bounded(path, MAX_RECORD_BYTES))
        pem = None if authority is None else authority.read_bytes()
    except (ValueError, RecursionError):
        found = None
    except OSError as exc:
        raise EvidenceError(f"{authority}: cannot be read ({exc.strerror})") from exc
    if isinstance(found, dict) and found.get("format") == FORMAT:
        return explain_rollout_evidence(path, Pins(pem, session))
    return explain_evidence(path, authority, session)


@dataclass(frozen=True)
class _Opened:
    """Evidence with signatures and digests that hold."""

    where: str
    record: RolloutEvidence
    request: RolloutRequest
    answers: Sequence[tuple[RolloutAnswer, bytes, str]]
    policy: RolloutPolicy | None
    fingerprint: str

    def refuse(self, reason: str) -> EvidenceError:
        return EvidenceError(f"{self.where}: {reason}")


def explain_rollout_evidence(path: Path, pins: Pins) -> Mapping[str, Any]:
    """Check the evidence of one verdict on rollouts with nothing but its two files.

    Args:
        path: ``NAME.json``; ``NAME.safetensors`` lies beside it.
        pins: What the reader knows from elsewhere.

    Returns:
        What was checked, by name; the last two entries are what rests on the owner's word, and the conclusion.

    Raises:
        EvidenceError: Something does not hold: the worker that it accuses is not to be convicted.

    Guarantees:
        Where the weights are in the file, every token that the verdict speaks of is drawn again here.
    """
    opened = _open(path, pins)
    verdict = opened.record.verdict
    found, believed = _judged_again(opened)
    if believed is None and (found is None or found.offence != verdict.offence):
        was = "finds nothing wrong" if found is None else f"finds {found.offence}: {found.reason}"
        raise opened.refuse(f"accuses {verdict.party} of {verdict.offence}; a reader {was}")
    return {
        "verdict": f"{verdict.party} is guilty: {verdict.offence}",
        "reason": verdict.reason,
        "step": verdict.step,
        "prompt": verdict.prompt,
        "sample": verdict.sample,
        "tolerance": opened.record.tolerance.model_dump(),
        "file": f"SHA-256 {file_digest(path)}",
        "tensors": f"SHA-256 {opened.record.tensors.sha256}",
        "authority": f"{'as given' if pins.authority else 'not compared'}, fingerprint {opened.fingerprint}",
        "session": f"{opened.record.session}, {'as given' if pins.session else 'not compared'}",
        "judged again": "not" if found is None else found.reason,
        "rests on the owner's word": believed or "nothing but the tolerance",
        "conclusion": UNPROVED if believed else f"holds: {verdict.party} signed what these weights do not write",
    }


def _judged_again(opened: _Opened) -> tuple[RolloutVerdict | None, str | None]:
    """The verdict of this reader, and what it has to believe instead."""
    verdict, request = opened.record.verdict, opened.request
    answer, payload, _ = opened.answers[0]
    if verdict.offence == "equivocation":
        answered = [digest for one, _, digest in opened.answers if one.request == request.digest]
        return judge_second_answer(verdict.party, request, answered), None
    vocab_size = json.loads(opened.record.config).get("vocab_size", 0)
    rollouts, formal = read_answer(verdict.party, request, answer, payload, vocab_size)
    if formal is not None or verdict.offence in _NEED_NO_WEIGHTS:
        return formal, None
    if verdict.offence in _OWNER_ONLY:
        return None, _OWNER_ONLY[verdict.offence]
    if opened.policy is None:
        return None, f"what the weights say: {opened.record.weights_left_out}"
    return _reread(opened, opened.policy, rollouts), None


def _reread(opened: _Opened, policy: RolloutPolicy, rollouts: Sequence[Rollout]) -> RolloutVerdict | None:
    verdict, request = opened.record.verdict, opened.request
    chosen = [one for one in rollouts if (one.prompt, one.sample) == (verdict.prompt, verdict.sample)]
    tolerance = opened.record.tolerance
    try:
        reread = reread_rollouts(PolicyModel.build(policy), request, chosen, tolerance.margin)
    except ModelError as exc:
        raise opened.refuse(str(exc)) from exc
    judged = (
        judge_rollout(verdict.party, request, one, found, tolerance) for one, found in zip(chosen, reread, strict=True)
    )
    return next((one for one in judged if one is not None), None)


def _open(path: Path, pins: Pins) -> _Opened:
    content = read_bounded(path, MAX_RECORD_BYTES)
    try:
        record = RolloutEvidence.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EvidenceError(f"{path}: is no evidence of this version: {where}: {first['msg']}") from exc
    blob = read_bounded(path.parent / record.tensors.file, MAX_TENSOR_BYTES)
    if hashlib.sha256(blob).hexdigest() != record.tensors.sha256:
        raise EvidenceError(f"{path}: its tensors were altered or swapped")
    try:
        tensors = load(blob)
    except (SafetensorError, ValueError, KeyError) as exc:
        raise EvidenceError(f"{path}: its tensors are no safetensors file ({exc})") from exc
    fingerprint, peers = certified_peers(path, record, pins)
    statements, party = Statements(record.session, known_peer(peers)), record.verdict.party
    try:
        asked = statements.frame(record.headers["request"], (None, party))
        owner = asked.fields.sender
        request = parse_body(TO_WORKER, asked.fields.kind, asked.fields.body)
        if not isinstance(request, RolloutRequest):
            raise EvidenceError(f"{path}: its request is a {asked.fields.kind!r} message")
        answers = [
            _answer(path, statements.frame(record.headers[role], (party, owner)), tensors, role)
            for role in ("answer", "second_answer")
            if role in record.headers
        ]
    except KeyError as exc:
        raise EvidenceError(f"{path}: has no signed header for {exc}") from exc
    except (FrameError, SignatureError) as exc:
        raise EvidenceError(f"{path}: a header does not hold: {exc}") from exc
    if not answers or record.verdict.request != request.digest or record.verdict.step != request.step:
        raise EvidenceError(f"{path}: its verdict is not about its request and an answer to it")
    policy = None if record.weights_left_out else _policy(path, record, request, tensors)
    return _Opened(str(path), record, request, answers, policy, fingerprint)


def _answer(
    path: Path, header: SignedHeader, tensors: Mapping[str, torch.Tensor], role: str
) -> tuple[RolloutAnswer, bytes, str]:
    answer = parse_body(TO_OWNER, header.fields.kind, header.fields.body)
    if not isinstance(answer, RolloutAnswer):
        raise EvidenceError(f"{path}: header {role!r} is a {header.fields.kind!r} message")
    payload = tensors[role].numpy().tobytes() if role in tensors else b""
    if digest_hex(payload) != header.fields.payload_digest:
        raise EvidenceError(f"{path}: the texts are not those that {header.fields.sender} signed")
    return answer, payload, digest_of_answer(header)


def digest_of_answer(header: SignedHeader) -> str:
    """Digest of what an answer says and carries; the place on its link is left out."""
    return digest_hex(canonical_json([header.fields.body, header.fields.payload_digest]))


def _policy(
    path: Path, record: RolloutEvidence, request: RolloutRequest, tensors: Mapping[str, torch.Tensor]
) -> RolloutPolicy:
    weights = {name.removeprefix(_WEIGHT): one for name, one in tensors.items() if name.startswith(_WEIGHT)}
    try:
        policy = RolloutPolicy(json.loads(record.config), weights)
        found = policy.digest
    except (ValueError, ModelError) as exc:
        raise EvidenceError(f"{path}: its weights are malformed ({exc})") from exc
    if found != request.policy:
        raise EvidenceError(f"{path}: its weights are {found[:16]}, the request names {request.policy[:16]}")
    return policy


def _parties(headers: Any) -> set[str]:
    return {name for one in headers for name in (one.fields.sender, one.fields.receiver)}


def _free_name(directory: Path, verdict: RolloutVerdict) -> str:
    stem = f"rollouts-{verdict.step:08d}-{verdict.party}"
    name, number = stem, 1
    while (directory / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    return name
