"""Explain the evidence of one verdict offline: check all that can be checked, and state what remains to be believed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from phalanx.engine import Offence
from phalanx.errors import EvidenceError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.checked import CheckedEvidence, Pins, open_evidence
from phalanx.pipeline.evidence.files import CLAIM_PREFIX, TRUTH_PREFIX
from phalanx.pipeline.evidence.forgery import explain_forgery
from phalanx.pipeline.evidence.message_dispute import explain_message
from phalanx.pipeline.evidence.recompute import (
    redo_exactly,
    redo_gradient,
    redo_update,
    state_of_header,
    weights_vouched_by,
)
from phalanx.pipeline.evidence.weighing import (
    GradientClaim,
    same_norm,
    weigh_distant_gradient,
    weigh_gradient,
    weigh_update,
)
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.protocol.messages import Activation, Apply, Commit, GradientHeld, StateDigest, StepAudited
from phalanx.pipeline.protocol.signed import Statement, statements_in
from phalanx.pipeline.protocol.tensor_stream import announces_a_boundary, sent_gradient, transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.stage.stage_copy import frozen_part
from phalanx.pipeline.tolerance.distance import gradient_distance

_Explained = dict[str, Any]
_AboutGradient = TypeVar("_AboutGradient", GradientHeld, StepAudited)
UNPROVED = "not proved by this file alone"
"""The conclusion where a verdict rests on what only the owner has seen."""

_NOISE_BELIEVED = "that the seeds of the noise follow from the epoch's key, which opens applied steps and is not shown"

_OWNER_ONLY = "the owner's word in its signed audit log; its observations are not in this file"


def explain_evidence(path: Path, authority: Path | None = None, session: str | None = None) -> Mapping[str, Any]:
    """Check the evidence of one verdict with nothing but its two files.

    Args:
        path: ``NAME.json``; ``NAME.safetensors`` lies beside it.
        authority: Certificate of the authority as you know it; without it, compare the fingerprint.
        session: Session name that you know from the audit log; without it, compare the one that is shown.

    Returns:
        What was checked, by name, for people to read; the last two entries are what still rests on the
        owner's word, and the conclusion.

    Raises:
        EvidenceError: Something does not hold; the message names it.

    Guarantees:
        An altered tensor, header, certificate or record is found, as long as the authority's fingerprint or the file's
        digest is known from elsewhere. Signatures prove what a party stated in this session, and to which party; that
        it was wrong is recomputed here.
    """
    try:
        pem = None if authority is None else authority.read_bytes()
    except OSError as exc:
        raise EvidenceError(f"{authority}: cannot be read ({exc.strerror})") from exc
    return judge_evidence(path, Pins(pem, session))


def judge_evidence(path: Path, pins: Pins) -> Mapping[str, Any]:
    """Check evidence as `explain_evidence`, with facts that the reader knows beforehand.

    Raises:
        EvidenceError: Something does not hold: the party that it accuses is not to be convicted.
    """
    checked = open_evidence(path, pins)
    verdict = checked.record.verdict
    if verdict.party == OWNER:
        raise checked.refusal_error("accuses the owner, which is trusted")
    if verdict.party not in checked.peers:
        raise checked.refusal_error(f"lacks the certificate of {verdict.party!r}, the accused party")
    places = ("stage", "step", "microbatch", "direction", "accuser")
    signed = [f"{role} by {header.fields.sender}" for role, header in checked.headers.items()]
    facts: _Explained = {
        "verdict": f"{verdict.party} is guilty: {verdict.offence}",
        "reason": verdict.reason,
        **{name: getattr(verdict, name) for name in places},
        "file": f"SHA-256 {checked.sha256}",
        "tensors": f"SHA-256 {checked.record.tensors.sha256}, {len(checked.tensors)} tensors",
        "authority": f"{'as given' if pins.authority else 'not compared'}, fingerprint {checked.fingerprint}",
        "session": f"{checked.record.session}, {'as given' if pins.session else 'not compared'}",
        "signatures": f"{len(signed)} hold: {', '.join(signed)}" if signed else "none in this file",
    }
    return {**facts, **_EXPLAIN[verdict.offence](checked)}


def _explain_shape(checked: CheckedEvidence) -> _Explained:
    statement, plan = checked.read_statement("message", Activation), checked.record.plan
    _check_signed_by_guilty(checked, statement.header.fields.sender, "message")
    if announces_a_boundary(statement, plan):
        raise checked.refusal_error("its message has the shape, type and size of the plan")
    message = statement.message
    return _proved_conclusion(
        checked,
        f"signed a tensor {message.dtype}{list(message.shape)} of {statement.size_bytes} bytes, the plan has "
        f"{str(BOUNDARY_DTYPE).removeprefix('torch.')}{list(plan.hidden_shape)} of {plan.hidden_bytes}",
        "that the plan belongs to this run",
    )


def _explain_equivocation(checked: CheckedEvidence) -> _Explained:
    if "second" in checked.headers:
        return _explain_two_statements(checked)
    if "told_stage" in checked.headers:
        first, other = (
            checked.read_statement("told_stage", Activation),
            checked.read_statement("told_auditor", Activation),
        )
        for statement in (first, other):
            _check_signed_by_guilty(checked, statement.header.fields.sender, "told_stage, told_auditor")
        if _message_place(first) != _message_place(other) or first.payload_digest == other.payload_digest:
            raise checked.refusal_error("its two headers are not two versions of one message")
        return _proved_conclusion(checked, "signed two different tensors as one message", None)
    sent, committed = checked.read_statement("message", Activation), checked.read_statement("commit", Commit)
    message, commit = sent.message, committed.message
    for header in (sent.header, committed.header):
        _check_signed_by_guilty(checked, header.fields.sender, "message, commit")
    same_step = (commit.epoch, commit.step, commit.stage) == (message.epoch, message.step, message.source)
    digests = [s.digest for s in commit.sent if (s.direction, s.microbatch) == (message.direction, message.microbatch)]
    if not same_step or sent.payload_digest in digests:
        raise checked.refusal_error("its commitment does not contradict the message that it sent")
    return _proved_conclusion(checked, "committed to another tensor than it had signed when it sent it", None)


def _explain_two_statements(checked: CheckedEvidence) -> _Explained:
    """Two signed messages that state two different things about one."""
    stated = []
    for role in ("first", "second"):
        message = checked.read_message(role)
        _check_signed_by_guilty(checked, checked.headers[role].fields.sender, "first, second")
        stated.append(dict(statements_in(checked.record.verdict.party, message)))
    first, second = stated
    contradicted = [key for key, content in first.items() if key in second and second[key] != content]
    if not contradicted:
        raise checked.refusal_error("its two messages do not contradict each other")
    key = contradicted[0]
    what = f"signed two different statements ({key.kind!r}) about stage {key.stage}, step {key.step}, epoch {key.epoch}"
    return _proved_conclusion(checked, what, None)


def _explain_gradient(checked: CheckedEvidence) -> _Explained:
    committed = checked.read_statement("commit", Commit)
    commit, holder = committed.message, committed.header.fields.sender
    verdict = checked.record.verdict
    if (commit.stage, commit.step) != (verdict.stage, verdict.step):
        raise checked.refusal_error("its commitment is about another stage or step")
    gradient_held = _statement_of_attempt(checked, "gradient_held", GradientHeld, commit)
    audited = _statement_of_attempt(checked, "step_audited", StepAudited, commit)
    signers = {
        holder,
        *(statement.header.fields.sender for statement in (gradient_held, audited) if statement is not None),
    }
    if verdict.party not in signers:
        raise checked.refusal_error(
            f"accuses {verdict.party}, but the messages about it are from {', '.join(sorted(signers))}"
        )
    if gradient_held is not None and _signed_gradient(commit) == _signed_gradient(gradient_held.message):
        gradient_held = None
    sends_parts = not checked.record.plan.guard.shadow_upkeep.in_lockstep
    if gradient_held is not None and sends_parts and commit.gradient != gradient_held.message.gradient:
        # the parts under the holder's signature decide, and no recomputation is wanted
        return _explain_held_gradient(checked, committed, gradient_held)
    other = audited if gradient_held is None else gradient_held
    if other is None and verdict.accuser != OWNER:
        raise checked.refusal_error("has no signed header for 'step_audited' that contradicts the stage")
    if other is not None and _signed_gradient(commit) == _signed_gradient(other.message) and verdict.party != holder:
        raise checked.refusal_error("stage and auditor agree on the gradient")
    claims = [_claim_of(statement) for statement in (committed, other) if statement is not None]
    return _weigh_gradient(checked, committed, claims)


def _claim_of(said: Statement[Commit] | Statement[GradientHeld] | Statement[StepAudited]) -> GradientClaim:
    return GradientClaim(said.header.fields.sender, said.message.gradient, said.message.norm_squared)


def _weigh_gradient(
    checked: CheckedEvidence, committed: Statement[Commit], claims: Sequence[GradientClaim]
) -> _Explained:
    """Judge the weight gradient by the run's own function, from a recomputation of the shown inputs."""
    guilty, shown = checked.record.verdict.party, checked.tensors_under(TRUTH_PREFIX)
    if checked.tensors_under(CLAIM_PREFIX):
        return _weigh_distant_claim(checked, committed, [claim for claim in claims if claim.party == guilty])
    again = redo_gradient(checked, committed)
    truth = (transfer_digest(shown), finite_norm_squared(shown, checked.record.plan.numerics))
    # the norm of a gradient that all of them signed needs no recomputation
    if not shown or (again is None and any(claim.digest != truth[0] for claim in claims)):
        return _believed_conclusion(f"that {guilty} was wrong: the owner recomputed it")
    guilty_party = weigh_gradient(truth, claims[0], claims[1] if len(claims) > 1 else None)
    if guilty_party != guilty:
        raise checked.refusal_error(
            f"accuses {guilty}, but the signed and recomputed values accuse {guilty_party or 'nobody'}"
        )
    one_law = checked.record.plan.numerics != "float"
    shared = "follow the run's law of arithmetic" if one_law else "have one numeric class"
    what = "signed a weight gradient or norm that does not follow from its signed inputs"
    believed = _believed_of_gradient(checked, f"that owner and guilty party {shared}")
    if again is None:
        return _proved_conclusion(checked, what, believed)
    facts = {"recomputed here": _compare_gradients(checked, shown, again)}
    return {**facts, **_recomputed_conclusion(checked, what, believed)}


def _weigh_distant_claim(
    checked: CheckedEvidence, committed: Statement[Commit], claims: Sequence[GradientClaim]
) -> _Explained:
    """Judge a gradient of a party that need not have the owner's bits, by the distance that rounding allows."""
    claimed, guilty = checked.tensors_under(CLAIM_PREFIX), checked.record.verdict.party
    if not claims or transfer_digest(claimed) != claims[0].digest:
        raise checked.refusal_error(f"the gradient that it shows is not the one that {guilty} signed")
    norm = finite_norm_squared(claimed, checked.record.plan.numerics)
    if not same_norm(claims[0].norm_squared, norm, alike=False):
        return _proved_conclusion(checked, "signed a norm that its signed weight gradient does not have", None)
    again = redo_gradient(checked, committed)
    if again is None:
        return _believed_conclusion(f"that {guilty} was wrong: the owner recomputed it")
    tolerance = checked.record.plan.guard.tolerance
    weighed = weigh_distant_gradient(again, claimed, tolerance, lambda: redo_exactly(checked, committed))
    if not weighed.is_off:
        raise checked.refusal_error(
            f"the gradient that {guilty} signed is {weighed.distance:.1e} away from the one recomputed here "
            f"(allowed {weighed.allowed:.1e}): it is not guilty"
        )
    facts = {"distance of the gradient": f"{weighed.distance:.3e}, allowed {weighed.allowed:.1e}"}
    what = "signed a weight gradient that is further than rounding from the one that its signed inputs lead to"
    return {**facts, **_recomputed_conclusion(checked, what, _believed_of_gradient(checked))}


def _recomputed_conclusion(checked: CheckedEvidence, what: str, believed: str) -> _Explained:
    """Conclude from a recomputation, which proves something where a party has signed the weights."""
    signers = weights_vouched_by(checked)
    if not signers:
        return {"weights": "digest not signed", **_believed_conclusion("which weights the stage had")}
    weights = f"their digest was signed by {' and '.join(signers)}"
    return {"weights": weights, **_proved_conclusion(checked, what, believed)}


def _believed_of_gradient(checked: CheckedEvidence, *further: str) -> str:
    """Return what a conviction for a recomputed weight gradient rests on beside signatures and arithmetic."""
    noise = () if checked.record.plan.privacy is None else (_NOISE_BELIEVED,)
    return "; ".join(("that the plan belongs to this run", *further, *noise))


def _compare_gradients(checked: CheckedEvidence, shown: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> str:
    if transfer_digest(shown) == transfer_digest(again):
        return "bit-equal to the referee's result"
    if {name: tensor.shape for name, tensor in shown.items()} != {name: tensor.shape for name, tensor in again.items()}:
        raise checked.refusal_error("its gradient does not belong to the stage in its plan")
    distance, allowed = gradient_distance(shown, again), checked.record.plan.guard.tolerance
    if not distance <= allowed:
        raise checked.refusal_error(
            f"recomputed here, the gradient is {distance:.1e} away from the claim (allowed {allowed:.1e})"
        )
    return f"within rounding of the referee's result ({distance:.1e}; this machine has another numeric class)"


def _explain_held_gradient(
    checked: CheckedEvidence, committed: Statement[Commit], held: Statement[GradientHeld]
) -> _Explained:
    """A shadow has another gradient, or another norm of it, than the stage committed to."""
    holder, shadow = committed.header.fields.sender, held.header.fields.sender
    guilty = checked.record.verdict.party
    if guilty not in (holder, shadow):
        raise checked.refusal_error(f"accuses {guilty}, which is neither the holder {holder} nor the shadow {shadow}")
    sent = sent_gradient(checked.statements, held.message, (holder, shadow))
    if guilty != (holder if sent == held.message.gradient else shadow):
        raise checked.refusal_error(f"the parts signed by {holder} do not accuse {guilty}")
    what = "sent another gradient than it committed to" if guilty == holder else "has no signed gradient"
    return _proved_conclusion(checked, what, None)


def _statement_of_attempt(
    checked: CheckedEvidence, role: str, kind: type[_AboutGradient], commit: Commit
) -> Statement[_AboutGradient] | None:
    """Return the statement about the gradient of the very attempt that was committed to; None when there is none."""
    if role not in checked.headers:
        return None
    statement = checked.read_statement(role, kind)
    message = statement.message
    same = (message.epoch, message.step, message.stage) == (commit.epoch, commit.step, commit.stage)
    return statement if same else None


def _signed_gradient(message: Commit | GradientHeld | StepAudited) -> tuple[str, float | None]:
    return (message.gradient, message.norm_squared)


def _explain_message(checked: CheckedEvidence) -> _Explained:
    facts, believed, what = explain_message(checked)
    return {**facts, **_proved_conclusion(checked, what, believed)}


def _explain_collusion(checked: CheckedEvidence) -> _Explained:
    return _explain_vouched_gradient(checked) if checked.record.verdict.direction is None else _explain_message(checked)


def _explain_vouched_gradient(checked: CheckedEvidence) -> _Explained:
    """An auditor signed the very gradient that a stage is guilty of."""
    committed = checked.read_statement("commit", Commit)
    statement: Statement[StepAudited] | Statement[GradientHeld] | None = _statement_of_attempt(
        checked, "step_audited", StepAudited, committed.message
    )
    statement = statement or _statement_of_attempt(checked, "gradient_held", GradientHeld, committed.message)
    party = checked.record.verdict.party
    if statement is None or statement.header.fields.sender != party:
        raise checked.refusal_error(f"has no message in which {party} vouches for a gradient")
    claim = _claim_of(committed)
    if _signed_gradient(committed.message) != _signed_gradient(statement.message):
        raise checked.refusal_error(f"{party} signed another gradient than the stage")
    if checked.tensors_under(CLAIM_PREFIX):
        return _weigh_distant_claim(checked, committed, [_claim_of(statement)])
    shown = checked.tensors_under(TRUTH_PREFIX)
    if not shown or redo_gradient(checked, committed) is None:
        return _believed_conclusion(f"that the gradient of {claim.party} is wrong: the owner recomputed it")
    if (
        weigh_gradient((transfer_digest(shown), finite_norm_squared(shown, checked.record.plan.numerics)), claim, None)
        is None
    ):
        raise checked.refusal_error(f"the gradient that {party} vouches for equals the recomputed one")
    what = f"vouched for a weight gradient of {claim.party} that does not follow from its signed inputs"
    return _proved_conclusion(checked, what, _NOISE_BELIEVED if checked.record.plan.privacy else None)


def _explain_state(checked: CheckedEvidence) -> _Explained:
    """Explain a dispute about a state: an altered copy, or a wrong update."""
    return _explain_altered_copy(checked) if "agreed" in checked.headers else _explain_wrong_update(checked)


def _explain_altered_copy(checked: CheckedEvidence) -> _Explained:
    """A party that kept a copy over a change of roles signed another state than the agreed one, which it had signed."""
    stage, party = checked.record.verdict.stage, checked.record.verdict.party
    states = [state_of_header(checked, role) for role in ("agreed", "ready")]
    for role in ("agreed", "ready"):
        _check_signed_by_guilty(
            checked, checked.headers[role].fields.sender if role in checked.headers else "", "agreed, ready"
        )
    agreed, ready = states
    if agreed is None or ready is None or (agreed.weights, agreed.moments) == (ready.weights, ready.moments):
        raise checked.refusal_error(f"{party} did not sign two states of stage {stage}")
    if ready.step == agreed.step + 1:
        return _believed_conclusion(
            f"which state of stage {stage} step {agreed.step} leads to: the owner made that update"
        )
    if ready.step != agreed.step:
        raise checked.refusal_error(f"{party} did not sign two states of stage {stage} after the same steps")
    what = "signed another state of a kept copy than before"
    return _proved_conclusion(checked, what, "that no step was undone between the two")


def _explain_wrong_update(checked: CheckedEvidence) -> _Explained:
    """Redo the update from the signed state, the committed gradient and the owner's decision."""
    party, stage = checked.record.verdict.party, checked.record.verdict.stage
    roles = [role for role in ("state_holder", "state_shadow") if role in checked.headers]
    after = {checked.headers[role].fields.sender: state_of_header(checked, role) for role in roles}
    signed = {name: state for name, state in after.items() if state is not None}
    if party not in signed:
        raise checked.refusal_error(f"accuses {party}, but {party} signed no state of stage {stage} in it")
    before_roles = [role for role in ("before_holder", "before_shadow") if role in checked.headers]
    if _has_moved_frozen(checked, before_roles, signed[party]):
        return _proved_conclusion(checked, "signed frozen weights that differ from those signed before the step", None)
    if not before_roles or "apply" not in checked.headers or "commit" not in checked.headers:
        return _explain_unproved(checked)
    before = state_of_header(checked, before_roles[0])
    if before is None or any(state_of_header(checked, role) != before for role in before_roles):
        raise checked.refusal_error(f"its parties did not sign one state of stage {stage} before the step")
    decided, commit = checked.read_statement("apply", Apply), checked.read_statement("commit", Commit).message
    places = {(decided.message.epoch, decided.message.step), (commit.epoch, commit.step)}
    steps = (before.step, checked.record.verdict.step - 1)
    is_one_step = len(places) == 1 and steps == (commit.step, commit.step)
    if decided.header.fields.sender != OWNER or commit.stage != stage or not is_one_step:
        raise checked.refusal_error("its state, commitment and decision belong to different steps")
    truth = redo_update(checked, before, commit.gradient, decided.message.clip_coefficient)
    if truth is None:
        return _explain_unproved(checked)
    off = weigh_update(truth, signed)
    if party not in off:
        raise checked.refusal_error(f"the state that {party} signed follows from the update")
    if not checked.pins.in_run and len(off) == len(signed) > 1:
        return _believed_conclusion(
            f"which of {' and '.join(off)} is wrong: this machine computes other bits, or both are wrong"
        )
    what = "signed a state that does not follow from the signed gradient and the state before"
    believed = ["that the plan belongs to this run", "that its machine computes these bits"]
    if party not in {checked.headers[role].fields.sender for role in before_roles}:
        believed.append("that it had the state before")
    return _proved_conclusion(checked, what, "; ".join(believed))


def _has_moved_frozen(checked: CheckedEvidence, before_roles: Sequence[str], after: StateDigest) -> bool:
    """Whether the accused party signed two frozen parts of one stage: no update touches those."""
    party = checked.record.verdict.party
    signed_states = [
        state_of_header(checked, role) for role in before_roles if checked.headers[role].fields.sender == party
    ]
    return any(before is not None and frozen_part(before) != frozen_part(after) for before in signed_states)


def _explain_unproved(checked: CheckedEvidence) -> _Explained:
    return _believed_conclusion(_OWNER_ONLY)


def _check_signed_by_guilty(checked: CheckedEvidence, sender: str, roles: str) -> None:
    party = checked.record.verdict.party
    if sender != party:
        raise checked.refusal_error(f"accuses {party}, but {sender} signed {roles}: the wrong party is named")


def _message_place(said: Statement[Activation]) -> tuple[int, int, int, str, int, str]:
    message = said.message
    place = (message.epoch, message.step, message.microbatch, message.direction, message.source)
    return (*place, said.header.fields.receiver)


def _proved_conclusion(checked: CheckedEvidence, what: str, believed: str | None) -> _Explained:
    return {
        "rests on the owner's word": believed or "nothing",
        "conclusion": f"holds: {checked.record.verdict.party} {what}",
    }


def _believed_conclusion(what: str) -> _Explained:
    return {"rests on the owner's word": what, "conclusion": UNPROVED}


_EXPLAIN: Mapping[Offence, Callable[[CheckedEvidence], _Explained]] = {
    "message": _explain_message,
    "accusation": _explain_message,
    "collusion": _explain_collusion,
    "equivocation": _explain_equivocation,
    "forgery": lambda checked: _proved_conclusion(checked, *explain_forgery(checked)),
    "gradient": _explain_gradient,
    "state": _explain_state,
    "shape": _explain_shape,
    "transfer": _explain_unproved,
}
