"""Every file of evidence against an honest writer that true headers of an honest run can be put into."""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from round_acts import Drill, acts_of
from safetensors.torch import save

from phalanx.config import canonical_json
from phalanx.errors import EvidenceError
from phalanx.rollouts import RolloutPolicy, RolloutRequest
from phalanx.rollouts.evidence import explain_any_evidence
from phalanx.transport import CheckedFrame, SignedHeader

VICTIM = "writer-1"
OFFENCES = ("form", "request", "sketch", "logprob", "draw", "stale", "borders", "reward", "equivocation")


@dataclass(frozen=True)
class Forgery:
    """One file.

    Attributes:
        name: What was put together.
        record: Its words.
        tensors: Its numbers.
    """

    name: str
    record: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]


def forgeries_of(drill: Drill) -> Iterator[Forgery]:
    """Every request, every answer, every second one, every offence; with an altered config, and without weights.

    The words begin as those of a true file, so they have the fields of the release that wrote it.
    """
    drill.play(next(act for act in acts_of(drill) if act.value == "token altered" and act.moment == "instead"))
    (path,) = (drill.home / "evidence").glob("*.json")
    plain = json.loads(path.read_text())
    table = drill.play(next(acts_of(drill)))
    certificates = drill.pki.desk(drill.home).certificates
    plain["certificates"] = {name: certificates[name] for name in ("owner", VICTIM)}
    asked = [header for name, header in table.sent if (name, header.fields.kind) == (VICTIM, RolloutRequest.kind)]
    answers = [item for item in table.answered if item.sender == VICTIM]
    for offence, (at, request), (n, answer), second in itertools.product(
        OFFENCES, enumerate(asked), enumerate(answers), [None, *answers]
    ):
        headers = {"request": request, "answer": answer.header}
        if second is not None:
            headers["second_answer"] = second.header
        name = f"{offence} by request {at} and answer {n}"
        if second is not None:
            name += f", second answer {answers.index(second)}"
        yield from _files(drill, plain, offence, headers, {"answer": answer, "second_answer": second}, name)
    if "older_config" in plain:
        yield from _with_older_policies(drill, plain, asked, answers)


def _files(
    drill: Drill,
    plain: Mapping[str, Any],
    offence: str,
    headers: Mapping[str, SignedHeader],
    shown: Mapping[str, CheckedFrame | None],
    name: str,
) -> Iterator[Forgery]:
    request = RolloutRequest.model_validate_json(json.dumps(headers["request"].fields.body))
    policy = drill.steps[request.step][0]
    payloads = {
        role: torch.frombuffer(bytearray(item.payload), dtype=torch.uint8)
        for role, item in shown.items()
        if item is not None and len(item.payload)
    }
    for is_altered, has_weights in itertools.product((False, True), (True, False)):
        record = copy.deepcopy(dict(plain))
        record["verdict"].update(party=VICTIM, step=request.step, request=request.request_digest, offence=offence)
        record["verdict"].update(prompt=request.text_places[0][0], sample=0)
        record["headers"] = {
            role: {"header": one.header_bytes.decode(), "signature": one.signature.hex()}
            for role, one in headers.items()
            for role, one in headers.items()
        }
        config = dict(policy.config) | ({"vocab_size": 7} if is_altered else {})
        record["config"] = canonical_json(config).decode()
        if "weights" in record:
            record["weights"] = policy.digest_of_weights
        record["weights_left_out"] = None if has_weights else "the verdict needs none"
        if "tolerance" in record and is_altered:
            record["tolerance"] = dict.fromkeys(record["tolerance"], 0.0)
        tensors = payloads | (_weights("policy/", policy) if has_weights else {})
        yield Forgery(f"{name}, {'altered' if is_altered else 'true'} words, weights: {has_weights}", record, tensors)


def _with_older_policies(
    drill: Drill, plain: Mapping[str, Any], asked: list[SignedHeader], answers: list[CheckedFrame]
) -> Iterator[Forgery]:
    """Files that say that a text is of the policy of another request."""
    for (at, request), (n, answer), (old, older), (m, before) in itertools.product(
        *(enumerate(one) for one in (asked, answers, asked, answers))
    ):
        headers = {"request": request, "answer": answer.header, "older_request": older, "older_answer": before.header}
        policy = drill.steps[int(older.fields.body["step"])][0]
        name = f"stale by request {at} and answer {n}, older request {old} and answer {m}"
        for forgery in _files(drill, plain, "stale", headers, {"answer": answer}, name):
            record = forgery.record | {"older_config": canonical_json(dict(policy.config)).decode()}
            has_weights = record["weights_left_out"] is None
            older_weights = _weights("older/", policy) if has_weights else {}
            yield Forgery(forgery.name, record, {**forgery.tensors, **older_weights})


def _weights(prefix: str, policy: RolloutPolicy) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": one.clone() for name, one in policy.tensors.items()}


def convicts(drill: Drill, forgery: Forgery) -> bool:
    """Whether a reader with the authority's certificate says that the conclusion holds."""
    path = drill.home / "forged.json"
    blob = save(dict(forgery.tensors))
    tensors = {"file": "forged.safetensors", "sha256": hashlib.sha256(blob).hexdigest()}
    (drill.home / "forged.safetensors").write_bytes(blob)
    path.write_text(json.dumps(forgery.record | {"tensors": tensors}))
    try:
        facts = explain_any_evidence(path, drill.pki.authority, "run-1")
    except EvidenceError:
        return False
    return str(facts["conclusion"]).startswith("holds")
