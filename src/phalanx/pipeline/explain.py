"""Read the evidence of one verdict offline, believe nothing that can be checked, and say what is left to believe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.faults import NONSENSE, out_of_bounds
from phalanx.pipeline.hearing import Hearing, open_hearing
from phalanx.pipeline.messages import Activation, AuditReport, Commit, GradientHeld, StepAudited
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.sent_weights import explain_sent_weights, part_name
from phalanx.pipeline.signed import open_signed
from phalanx.pipeline.transfer import sent_gradient
from phalanx.pipeline.verdict import Offence
from phalanx.pipeline.weighing import explain_message

_Explained = dict[str, Any]
_OWNER_ONLY = "the owner's word, in its signed audit log; what it saw is not in this file"


def explain_evidence(path: Path, authority: Path | None = None) -> Mapping[str, Any]:
    """Check the evidence of one verdict with nothing but its two files.

    Args:
        path: ``NAME.json``; ``NAME.safetensors`` lies beside it.
        authority: Certificate of the authority as you know it; without it, compare the fingerprint.

    Returns:
        What was checked, by name, for people to read; the last two entries are what still rests on the
        owner's word, and the conclusion.

    Raises:
        EvidenceError: Something does not hold; the message names it.

    Guarantees:
        An altered tensor, header, certificate or record is found, as long as the authority's fingerprint
        or the file's digest is known from elsewhere. Signatures prove what a party said; that it was wrong
        is recomputed here when the stage's weights are in the evidence.
    """
    hearing = open_hearing(path, authority)
    verdict = hearing.record.verdict
    if verdict.party not in hearing.peers:
        raise hearing.refuse(f"holds no certificate of {verdict.party!r}, whom it accuses")
    where = ("stage", "step", "microbatch", "direction", "accuser")
    facts: _Explained = {
        "verdict": f"{verdict.party} is guilty: {verdict.offence}",
        "reason": verdict.reason,
        **{name: getattr(verdict, name) for name in where},
        "file": f"SHA-256 {hearing.sha256}",
        "tensors": f"SHA-256 {hearing.record.tensors.sha256}, {len(hearing.tensors)} tensors",
        "authority": f"{'as given' if authority else 'not compared'}, fingerprint {hearing.fingerprint}",
        "signatures": _signatures(hearing),
    }
    return {**facts, **_EXPLAIN[verdict.offence](hearing)}


def _signatures(hearing: Hearing) -> str:
    names = [f"{role} by {header.fields.sender}" for role, header in hearing.headers.items()]
    return f"{len(names)} hold: {', '.join(names)}" if names else "none in this file"


def _shape(hearing: Hearing) -> _Explained:
    message, header = hearing.said("message", Activation)
    _by_guilty(hearing, header.fields.sender, "message")
    plan = hearing.record.plan
    right = (plan.hidden_shape, str(BOUNDARY_DTYPE).removeprefix("torch."))
    if (message.shape, message.dtype) == right:
        raise hearing.refuse("its message has the shape and type of the plan")
    return _proved(
        hearing,
        f"signed a tensor {message.dtype}{list(message.shape)}, the plan has {right[1]}{list(right[0])}",
        "that the plan is the one of this run",
    )


def _equivocation(hearing: Hearing) -> _Explained:
    if "told_stage" in hearing.headers:
        one, first = hearing.said("told_stage", Activation)
        other, second = hearing.said("told_auditor", Activation)
        for header in (first, second):
            _by_guilty(hearing, header.fields.sender, "told_stage, told_auditor")
        if _place(one) != _place(other) or first.fields.payload_digest == second.fields.payload_digest:
            raise hearing.refuse("its two headers are no two versions of one message")
        return _proved(hearing, "signed two different tensors as one message", None)
    message, sent = hearing.said("message", Activation)
    commit, committed = hearing.said("commit", Commit)
    for header in (sent, committed):
        _by_guilty(hearing, header.fields.sender, "message, commit")
    same_step = (commit.epoch, commit.step, commit.stage) == (message.epoch, message.step, message.source)
    said = [s.digest for s in commit.sent if (s.direction, s.microbatch) == (message.direction, message.microbatch)]
    if not same_step or sent.fields.payload_digest in said:
        raise hearing.refuse("its commitment does not contradict the message that it sent")
    return _proved(hearing, "committed to another tensor than it had signed when it sent it", None)


def _forgery(hearing: Hearing) -> _Explained:
    if NONSENSE in hearing.headers:
        return _nonsense(hearing)
    role = next((role for role in ("message", "input") if role in hearing.record.headers), None)
    if role is None:
        commit, header = hearing.said("commit", Commit)
        _by_guilty(hearing, header.fields.sender, "commit")
        return _proved(
            hearing,
            f"committed to step {commit.step} with {len(commit.received)} inputs, one of which is missing",
            "which input is missing: its commitment lists those that it had",
        )
    shown = hearing.record.headers[role]
    if role == "message":
        commit, header = hearing.said("commit", Commit)
        contained = shown in commit.received
    else:
        report, header = hearing.said("report", AuditReport)
        contained = shown in report.inputs
    _by_guilty(hearing, header.fields.sender, "commit, report")
    if not contained:
        raise hearing.refuse(f"the header that it calls {role!r} is not in what {header.fields.sender} signed")
    if role not in hearing.unsigned:
        return _proved(hearing, "showed a signed header as an input that it is not", "which input was asked for")
    return _proved(hearing, "showed a header that its sender had not signed", "who held the neighbouring stage")


def _nonsense(hearing: Hearing) -> _Explained:
    header = hearing.headers[NONSENSE]
    _by_guilty(hearing, header.fields.sender, NONSENSE)
    beyond = out_of_bounds(header)
    if beyond is None:
        raise hearing.refuse("every value in the message that it shows is within its bounds")
    return _proved(hearing, f"signed a value that nothing can have: {beyond}", None)


def _gradient(hearing: Hearing) -> _Explained:
    commit, committed = hearing.said("commit", Commit)
    held, header = hearing.said("gradient_held", GradientHeld)
    if (commit.step, commit.stage, commit.lane, commit.epoch) != (held.step, held.stage, held.lane, held.epoch):
        raise hearing.refuse("its commitment and its gradient are of two attempts")
    shared = hearing.record.plan.lanes > 1
    if commit.gradient == held.gradient and (shared or commit.norm_squared == held.norm_squared):
        return _recomputed_gradient(hearing, commit, committed.fields.sender)
    holder, shadow = committed.fields.sender, header.fields.sender
    guilty = hearing.record.verdict.party
    if guilty not in (holder, shadow):
        raise hearing.refuse(f"accuses {guilty}, which is neither the holder {holder} nor the shadow {shadow}")
    lockstep = hearing.record.plan.guard.shadow == "lockstep"
    if lockstep or commit.gradient == held.gradient:
        return _believed("which of the two was off: the owner computed it again")
    try:
        sent = sent_gradient([open_signed(part, hearing.peers[holder]) for part in held.parts], held)
    except (FrameError, SignatureError):
        sent = None
    if guilty != (holder if sent == held.gradient else shadow):
        raise hearing.refuse(f"the parts that {holder} signed do not speak against {guilty}")
    what = "sent another gradient than it committed to" if guilty == holder else "holds no gradient that was signed"
    return _proved(hearing, what, None)


def _recomputed_gradient(hearing: Hearing, commit: Commit, holder: str) -> _Explained:
    """The gradient that was sent is the one that was committed to; an audit of the whole step gave another one."""
    if hearing.record.plan.lanes > 1 and "step_audited" not in hearing.headers:
        return _believed("which of the two copies was off about the norm of both lanes' sum, or about the gradient")
    audited, header = hearing.said("step_audited", StepAudited)
    if (commit.step, commit.stage, commit.epoch) != (audited.step, audited.stage, audited.epoch):
        raise hearing.refuse("its commitment and its audit are of two attempts")
    if (commit.gradient, commit.norm_squared) == (audited.gradient, audited.norm_squared):
        raise hearing.refuse("holder and shadow agree on the gradient")
    if hearing.record.verdict.party not in (holder, header.fields.sender):
        raise hearing.refuse(f"accuses {hearing.record.verdict.party}, which is neither the stage nor its auditor")
    return _believed("which of the two was off: the owner computed it again")


def _message(hearing: Hearing) -> _Explained:
    facts, believed, what = explain_message(hearing)
    return {**facts, **_proved(hearing, what, believed)}


def _collusion(hearing: Hearing) -> _Explained:
    # about a weight gradient there is no tensor to show
    return _unproved(hearing) if hearing.record.verdict.direction is None else _message(hearing)


def _state(hearing: Hearing) -> _Explained:
    """Other weights than those whose digest was signed prove themselves; a wrong update is the owner's word."""
    if part_name(0) not in hearing.headers:
        return _unproved(hearing)
    facts, believed, what = explain_sent_weights(hearing)
    return {**facts, **_proved(hearing, what, believed)}


def _unproved(hearing: Hearing) -> _Explained:
    return _believed(_OWNER_ONLY)


def _by_guilty(hearing: Hearing, sender: str, roles: str) -> None:
    party = hearing.record.verdict.party
    if sender != party:
        raise hearing.refuse(f"accuses {party}, but {sender} signed {roles}: the wrong party is named")


def _place(message: Activation) -> tuple[int, int, int, str, int]:
    return (message.epoch, message.step, message.microbatch, message.direction, message.source)


def _proved(hearing: Hearing, what: str, believed: str | None) -> _Explained:
    return {
        "rests on the owner's word": believed or "nothing",
        "conclusion": f"holds: {hearing.record.verdict.party} {what}",
    }


def _believed(what: str) -> _Explained:
    return {"rests on the owner's word": what, "conclusion": "not proved by this file alone"}


_EXPLAIN: Mapping[Offence, Callable[[Hearing], _Explained]] = {
    "message": _message,
    "accusation": _message,
    "collusion": _collusion,
    "equivocation": _equivocation,
    "forgery": _forgery,
    "gradient": _gradient,
    "state": _state,
    "shape": _shape,
    "transfer": _unproved,
    "statistics": _unproved,
}
