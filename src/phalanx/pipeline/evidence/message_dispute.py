"""Explanations of disputes about one message: which was wrong, the stage's message or the accuser's claim?"""

from typing import Any

from torch import Tensor

from phalanx.pipeline.evidence.checked import CheckedEvidence
from phalanx.pipeline.evidence.recompute import recompute_message, weights_vouched_by
from phalanx.pipeline.evidence.weighing import Limit, MessageClaim, vouches_for_lie, weigh_message
from phalanx.pipeline.protocol.messages import Activation, AuditReport
from phalanx.pipeline.tolerance.distance import token_distance
from phalanx.transport import SignedHeader

_SLACK = 1e-3
"""Relative difference of a recomputed distance that other machines' summation may cause."""


def explain_message(checked: CheckedEvidence) -> tuple[dict[str, Any], str | None, str]:
    """Check a verdict on one message between two stages.

    Returns:
        The facts that were checked, the part that rests on the owner's word (None: nothing), and the guilty act.
    """
    verdict = checked.record.verdict
    if verdict.direction is None or verdict.microbatch is None:
        raise checked.refusal_error("its verdict names no direction or no microbatch")
    output = _message_header(checked, "output", verdict.stage, verdict.direction)
    facts: dict[str, Any] = {"inputs": _check_inputs(checked, output)}
    truth = _evidence_tensor(checked, "recomputed")
    distances = {
        "claimed": _tensor_distance(checked, "claimed", truth),
        "accuser": _tensor_distance(checked, "accuser", truth),
    }
    facts["distance of the message"] = _format_distance(distances["claimed"])
    facts["distance of the accuser"] = _format_distance(distances["accuser"])
    if verdict.offence == "collusion":
        what = _weigh_accomplice(checked, output, truth)
    elif verdict.offence == "message":
        what = _weigh_holder(checked, output, truth, distances["claimed"])
    else:
        what = _weigh_accuser(checked, output, truth, distances["accuser"])
    signers = weights_vouched_by(checked)
    again = recompute_message(checked, verdict.direction, verdict.microbatch)
    facts["weights"] = f"their digest was signed by {' and '.join(signers)}" if signers else "digest not signed"
    facts["recomputed here"] = _compare_recomputed(checked, truth, again)
    distance = distances["accuser" if verdict.offence == "accusation" else "claimed"]
    return facts, _list_believed(checked, signers, again, distance), what


def _message_header(checked: CheckedEvidence, role: str, source: int, direction: str) -> SignedHeader:
    """The header of a message from `source`, about the verdict's step and microbatch."""
    verdict = checked.record.verdict
    statement = checked.read_statement(role, Activation)
    message, header = statement.message, statement.header
    actual = (message.step, message.microbatch, message.source, message.direction)
    expected = (verdict.step, verdict.microbatch, source, direction)
    if actual != expected:
        raise checked.refusal_error(
            f"header {role!r} is about (step, microbatch, stage, direction) {actual}, its verdict about {expected}"
        )
    return header


def _check_inputs(checked: CheckedEvidence, output: SignedHeader) -> str:
    """Check that the inputs are those of their senders' signatures, in the same attempt as the output."""
    verdict = checked.record.verdict
    expected_inputs = [("input_forward", "input", verdict.stage - 1, "forward")]
    if verdict.direction == "backward":
        expected_inputs.append(("input_backward", "gradient", verdict.stage + 1, "backward"))
    descriptions = []
    for role, name, source, direction in expected_inputs:
        header = _message_header(checked, role, source, direction)
        if header.fields.body["epoch"] != output.fields.body["epoch"]:
            raise checked.refusal_error(f"header {role!r} is of another attempt than the output")
        if header.fields.receiver != output.fields.sender:
            raise checked.refusal_error(f"header {role!r} is to {header.fields.receiver}, who did not send the output")
        if checked.digest_of(name) != header.fields.payload_digest:
            raise checked.refusal_error(f"tensor {name!r} differs from the digest that {header.fields.sender} signed")
        descriptions.append(f"{name} as {header.fields.sender} signed it")
    return ", ".join(descriptions)


def _message_claim(checked: CheckedEvidence, party: str, digest: str, tensor: str) -> MessageClaim:
    """What a party signed, as the run's own judge takes it."""
    allowed = checked.record.verdict.allowed
    return MessageClaim(party, digest, checked.tensors.get(tensor), Limit(allowed) if allowed else None)


def _output_claim(checked: CheckedEvidence, output: SignedHeader) -> MessageClaim:
    return _message_claim(checked, output.fields.sender, output.fields.payload_digest, "claimed")


def _weigh_holder(checked: CheckedEvidence, output: SignedHeader, truth: Tensor, distance: float | None) -> str:
    verdict = checked.record.verdict
    if output.fields.sender != verdict.party:
        raise checked.refusal_error(
            f"accuses {verdict.party}, but {output.fields.sender} signed the message: the wrong party is named"
        )
    if "claimed" in checked.tensors and checked.digest_of("claimed") != output.fields.payload_digest:
        raise checked.refusal_error(f"tensor 'claimed' differs from the digest that {verdict.party} signed")
    finding = weigh_message(truth, _output_claim(checked, output), None)
    if finding is None or finding.offence != "message":
        raise checked.refusal_error(f"the message of {verdict.party} equals the recomputed one: it is not guilty")
    _check_distance(checked, distance)
    return "signed a message that does not follow from its signed inputs"


def _weigh_accuser(checked: CheckedEvidence, output: SignedHeader, truth: Tensor, distance: float | None) -> str:
    verdict = checked.record.verdict
    report = _message_claim(checked, verdict.party, _reported_digest(checked, output), "accuser")
    finding = weigh_message(truth, _output_claim(checked, output), report)
    if finding is None or finding.offence != "accusation":
        raise checked.refusal_error(
            f"the report of {verdict.party} equals the recomputed message, or the message does not"
        )
    _check_distance(checked, distance)
    return "signed a report that does not follow from signed inputs, against a message that does"


def _weigh_accomplice(checked: CheckedEvidence, output: SignedHeader, truth: Tensor) -> str:
    verdict = checked.record.verdict
    if not vouches_for_lie(truth, _output_claim(checked, output), _reported_digest(checked, output)):
        raise checked.refusal_error(f"the report of {verdict.party} does not vouch for a wrong message")
    return f"signed a report that vouches for a wrong message of {output.fields.sender}"


def _reported_digest(checked: CheckedEvidence, output: SignedHeader) -> str:
    """The digest that the guilty auditor signed, which is that of the tensor shown as its own."""
    verdict = checked.record.verdict
    statement = checked.read_statement("report", AuditReport)
    report, header = statement.message, statement.header
    if header.fields.sender != verdict.party or output.fields.sender == verdict.party:
        raise checked.refusal_error(
            f"accuses {verdict.party}, but {header.fields.sender} signed the report: the wrong party is named"
        )
    place = (report.epoch, report.step, report.stage, report.microbatch)
    if place != (output.fields.body["epoch"], verdict.step, verdict.stage, verdict.microbatch):
        raise checked.refusal_error("its report is about another attempt, step, stage or microbatch")
    claim = {str(direction): digest for direction, digest in report.digests.items()}.get(verdict.direction or "")
    if claim is None or ("accuser" in checked.tensors and checked.digest_of("accuser") != claim):
        raise checked.refusal_error(f"tensor 'accuser' differs from the digest that {verdict.party} signed")
    return claim


def _tensor_distance(checked: CheckedEvidence, name: str, truth: Tensor) -> float | None:
    return None if name not in checked.tensors else token_distance(_evidence_tensor(checked, name), truth)


def _check_distance(checked: CheckedEvidence, distance: float | None) -> None:
    stated = checked.record.verdict.distance
    finite = distance if distance is not None and distance < float("inf") else None
    same = stated == finite if stated is None or finite is None else abs(stated - finite) <= _SLACK * abs(finite)
    if not same:
        raise checked.refusal_error(f"its verdict says distance {stated}, its tensors have {finite}")


def _evidence_tensor(checked: CheckedEvidence, name: str) -> Tensor:
    tensor = checked.tensors.get(name)
    if tensor is None or tuple(tensor.shape) != checked.record.plan.hidden_shape or not tensor.is_floating_point():
        raise checked.refusal_error(f"tensor {name!r} is missing or has not the plan's shape")
    return tensor


def _compare_recomputed(checked: CheckedEvidence, truth: Tensor, again: Tensor | None) -> str:
    if again is None:
        return "no: the weights are not in the evidence"
    if again.equal(truth):
        return "bit-equal to the referee's result"
    distance, allowed = token_distance(again, truth), checked.record.plan.guard.tolerance
    if not distance <= allowed:
        raise checked.refusal_error(
            f"recomputed here, the message is {distance:.1e} away from the claim (allowed {allowed:.1e})"
        )
    return f"within rounding of the referee's result ({distance:.1e}; this machine has another numeric class)"


def _list_believed(
    checked: CheckedEvidence, signers: list[str], again: Tensor | None, distance: float | None
) -> str | None:
    parts = ["that the plan belongs to this run"]
    if again is None:
        parts.append("the recomputed tensor")
    if not signers:
        parts.append("which weights the stage had")
    beyond_any_class = distance is not None and not distance <= checked.record.plan.guard.tolerance
    if not checked.record.verdict.allowed and not beyond_any_class:
        parts.append("that owner and guilty party have one numeric class")
    return "; ".join(parts)


def _format_distance(distance: float | None) -> str | None:
    return None if distance is None else f"{distance:.3e}"
