"""What parties find wrong with each other's messages: written down, and only a wrong signed header convicts."""

from phalanx.errors import FrameError, OutOfBoundsError
from phalanx.pipeline.config import MOST_STAGES, OWNER
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.messages import Fault, parse_message
from phalanx.pipeline.plan import BOUNDARY_DTYPE, StepPlan
from phalanx.transport import SignedHeader

NONSENSE = "nonsense"
"""The role of a header whose own values convict its sender."""


class Faults:
    """Reports that were not looked at yet."""

    def __init__(self, docket: Docket) -> None:
        self._docket = docket
        self._waiting: list[tuple[str, Fault]] = []

    def add(self, sender: str, fault: Fault) -> None:
        """Take a report."""
        self._waiting.append((sender, fault))

    def weigh(self) -> Judgement | None:
        """Write reports down; the first signed header that is wrong whatever its payload is ends it."""
        docket = self._docket
        while self._waiting:
            sender, fault = self._waiting.pop(0)
            # what the owner finds itself is of its author's making, whatever a worker reports of the worker's
            number = docket.sample.number("fault", fault.about if sender == OWNER else sender)
            if number is not None:
                said = {"about": fault.about, "error": fault.error, "reason": fault.reason}
                docket.observe("fault", {"party": sender, **said, "number": number})
            if fault.evidence is None or fault.about == OWNER:
                continue
            header = docket.signed_by(fault.evidence, fault.about)
            if header is None or header.fields.body.get("epoch") != docket.ledger.epoch:
                continue
            if header.fields.kind == "tensor" and not _announces_a_boundary(header, docket.plan):
                source = header.fields.body.get("source")
                stage = source if isinstance(source, int) else -1
                headers = {"message": fault.evidence}
                return docket.judgement("shape", fault.about, stage, fault.reason, accuser=sender, headers=headers)
            beyond = out_of_bounds(header)
            if beyond is not None:
                headers = {NONSENSE: fault.evidence}
                reason = f"{fault.about} signed what nothing can be: {beyond}"
                return docket.judgement("forgery", fault.about, _stage_of(header), reason, headers=headers)
        return None


def out_of_bounds(header: SignedHeader) -> str | None:
    """What is wrong with a message that has a value beyond its bounds; None where that is not what is wrong."""
    try:
        parse_message(header.fields.kind, header.fields.body)
    except OutOfBoundsError as exc:
        return str(exc)
    except FrameError:
        return None
    return None


def _stage_of(header: SignedHeader) -> int:
    stage = header.fields.body.get("stage", header.fields.body.get("source"))
    return stage if isinstance(stage, int) and 0 <= stage < MOST_STAGES else -1


def _announces_a_boundary(header: SignedHeader, plan: StepPlan) -> bool:
    body = header.fields.body
    right = (list(plan.hidden_shape), str(BOUNDARY_DTYPE).removeprefix("torch."), plan.hidden_bytes)
    return (body.get("shape"), body.get("dtype"), header.fields.payload_size) == right
