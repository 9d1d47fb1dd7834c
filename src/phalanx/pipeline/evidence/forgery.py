"""Explanations of forgery: whether a party showed a message that nobody sent it, by its own signatures."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import FrameError, OutOfBoundsError, PeerRefusedError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.checked import CheckedEvidence
from phalanx.pipeline.protocol.messages import (
    Activation,
    Audit,
    AuditReport,
    Commit,
    Fault,
    PassedOnHeader,
    parse_message,
)
from phalanx.pipeline.protocol.signed import Link
from phalanx.transport import SignedHeader

NONSENSE = "nonsense"
"""The role of a header with a value that convicts its sender."""

_NEIGHBOURS = "which parties held the adjacent stages"


def explain_forgery(checked: CheckedEvidence) -> tuple[str, str | None]:
    """Check a verdict about a message that a party showed in a commitment, a report or a complaint that it signed.

    Returns:
        What the guilty party did, and what rests on the owner's word (None: nothing).
    """
    if NONSENSE in checked.headers:
        return _explain_nonsense(checked)
    if "fault" in checked.headers:
        return _explain_false_complaint(checked)
    if "commit" in checked.headers and checked.headers["commit"].fields.sender == checked.record.verdict.party:
        return _explain_commitment(checked)
    return _explain_report(checked)


def out_of_bounds(header: SignedHeader) -> str | None:
    """Name the value of a message that is beyond its bounds; None where all are within them."""
    try:
        parse_message(header.fields.kind, header.fields.body)
    except OutOfBoundsError as exc:
        return str(exc)
    except FrameError:
        return None
    return None


def _explain_nonsense(checked: CheckedEvidence) -> tuple[str, str | None]:
    header, party = checked.headers[NONSENSE], checked.record.verdict.party
    beyond = out_of_bounds(header)
    if header.fields.sender != party:
        raise checked.refusal_error(f"accuses {party}, but {header.fields.sender} signed the header in it")
    if beyond is None:
        raise checked.refusal_error("every value in its message is within bounds")
    return f"signed an impossible value: {beyond}", None


def _explain_commitment(checked: CheckedEvidence) -> tuple[str, str | None]:
    statement, plan = checked.read_statement("commit", Commit), checked.record.plan
    commit, sender = statement.message, statement.header.fields.sender
    if commit.stage != checked.record.verdict.stage or commit.step != checked.record.verdict.step:
        raise checked.refusal_error("its commitment is about another stage or step")
    seen = set()
    for shown in commit.received:
        place = {"step": commit.step, "target": commit.stage}
        look = _check_shown_header(checked, shown, commit.epoch, place, (None, sender))
        message = look.message
        if message is None:
            what = "committed to an input that no party had signed for it in this session"
            return f"{what}: {look.wrong}", look.believed
        if message.microbatch >= plan.microbatches:
            return f"committed to an input of microbatch {message.microbatch}; a step has {plan.microbatches}", None
        place_of_input = (message.source, message.direction, message.microbatch)
        if place_of_input in seen:
            return f"committed to the {message.direction} input of microbatch {message.microbatch} twice", None
        seen.add(place_of_input)
    sides = (("forward", commit.stage - 1), ("backward", commit.stage + 1))
    missing = {
        (source, direction, m)
        for direction, source in sides
        if 0 <= source < len(plan.stages)
        for m in range(plan.microbatches)
    } - seen
    if missing:
        source, direction, microbatch = min(missing)
        return f"committed without the {direction} input of microbatch {microbatch} from stage {source}", None
    if "message" not in checked.record.headers or checked.record.headers["message"] not in commit.received:
        raise checked.refusal_error(f"the commitment of {sender} holds every input, each signed for it")
    return "committed to an input of a party that did not hold the stage it came from", _NEIGHBOURS


def _explain_report(checked: CheckedEvidence) -> tuple[str, str | None]:
    statement, verdict = checked.read_statement("report", AuditReport), checked.record.verdict
    report, sender = statement.message, statement.header.fields.sender
    if sender != verdict.party:
        raise checked.refusal_error(
            f"accuses {verdict.party}, but {sender} signed the report: the wrong party is named"
        )
    if (report.stage, report.step) != (verdict.stage, verdict.step):
        raise checked.refusal_error("its report is about another stage or step")
    for shown in report.inputs:
        place = {"step": report.step, "target": report.stage, "microbatch": report.microbatch}
        look = _check_shown_header(checked, shown, report.epoch, place, (None, None))
        if look.message is None:
            return f"reported an input that no party had signed in this session: {look.wrong}", look.believed
    if "input" in checked.record.headers:
        if checked.record.headers["input"] not in report.inputs:
            raise checked.refusal_error(f"the header 'input' is not in the message of {sender}")
        return "reported an input that was not sent to the stage, or was sent by the wrong party", _NEIGHBOURS
    ordered = checked.read_statement("order", Audit)
    order, link = ordered.message, (ordered.header.fields.sender, ordered.header.fields.receiver)
    asked = (order.order, order.epoch, order.step, order.stage)
    if link != (OWNER, sender) or asked != (report.order, report.epoch, report.step, report.stage):
        raise checked.refusal_error(f"its order is not the order that the report of {sender} answers")
    if set(report.digests) == set(order.directions):
        raise checked.refusal_error(f"the report of {sender} answers its order")
    return f"reported on {sorted(report.digests)}, asked for {sorted(order.directions)}", None


def _explain_false_complaint(checked: CheckedEvidence) -> tuple[str, str | None]:
    statement = checked.read_statement("fault", Fault)
    fault, sender = statement.message, statement.header.fields.sender
    if sender != checked.record.verdict.party:
        raise checked.refusal_error(f"accuses {checked.record.verdict.party}, but {sender} signed the complaint")
    if fault.evidence is None:
        raise checked.refusal_error(f"the complaint of {sender} has no header")
    look = _check_shown_header(checked, fault.evidence, fault.epoch, {}, (fault.about, sender))
    if look.message is None:
        what = f"complained about a header that {fault.about} did not sign for it in this session"
        return f"{what}: {look.wrong}", look.believed
    return "complained about a party that has no link to it", _NEIGHBOURS


@dataclass(frozen=True)
class _HeaderFinding:
    """The findings about a header by itself, whichever party held the stage: its fault, or its message.

    `believed` is what rests on the owner's word: a signature of a party without a certificate here cannot be checked.
    """

    wrong: str = ""
    message: Activation | None = None
    believed: str | None = None


def _check_shown_header(
    checked: CheckedEvidence, shown: PassedOnHeader, epoch: int, place: Mapping[str, object], link: Link
) -> _HeaderFinding:

    def between_neighbours(message: Activation) -> Link | None:
        follows = message.target == message.source + (1 if message.direction == "forward" else -1)
        return link if follows else None

    try:
        return _HeaderFinding(
            message=checked.statements.open_statement(shown, Activation, epoch, place, between_neighbours).message
        )
    except (FrameError, SignatureError) as exc:
        unknown = isinstance(exc.__cause__, PeerRefusedError)
        return _HeaderFinding(str(exc), believed="that this sender is not in the run" if unknown else None)
