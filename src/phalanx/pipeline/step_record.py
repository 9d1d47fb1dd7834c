"""What proves an applied step: commitments, draws, signed audits, agreed states and the decision, as leaves of a tree."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.config import canonical_json
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.docket import Docket
from phalanx.pipeline.ledger import StepLedger
from phalanx.pipeline.messages import AuditReport, Signed, StepAudited
from phalanx.pipeline.recovery import Assignment
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.signed import to_signed
from phalanx.pipeline.testimony import Testimony

Leaf = dict[str, Any]

_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class StepRecord:
    """One applied step whose audits are all in.

    Attributes:
        step: Its number.
        epoch: Of the attempt that was applied.
        leaves: Canonical JSON objects; `docs/audit_log.md` has their fields.
    """

    step: int
    epoch: int
    leaves: tuple[bytes, ...]


@dataclass(frozen=True)
class _Applied:
    ledger: StepLedger
    assignment: Assignment
    unlike: tuple[int, ...]


class StepRecords:
    """Gathers the leaves of each applied step and hands them on as soon as its audits are in.

    Args:
        docket: The owner's facts.
        session: Name of the session, which every signed header has.
        testimony: Has what parties signed.
        note: Takes the records; None where nobody keeps them, which costs nothing.
    """

    def __init__(
        self,
        docket: Docket,
        session: str,
        testimony: Callable[[], Testimony],
        note: Callable[[StepRecord], None] | None,
    ) -> None:
        self._docket = docket
        self._session = session
        self._testimony = testimony
        self._note = note
        self._pending: deque[_Applied] = deque()

    def applied(self) -> None:
        """The decision about the present step is on its way to the optimizers."""
        docket = self._docket
        if self._note is None or not docket.plan.guard.enabled:
            return
        unlike = tuple(
            s for s in docket.watched if not all(map(docket.same_class, (docket.holder(s), docket.shadow(s))))
        )
        self._pending.append(_Applied(docket.ledger, docket.assignment, unlike))
        self.look()

    def look(self) -> None:
        """Hand on the steps whose audits are in."""
        while self._note is not None and self._pending and self._pending[0].ledger.is_audited:
            past = self._pending.popleft()
            leaves = tuple(canonical_json(leaf) for leaf in self._leaves(past))
            self._note(StepRecord(past.ledger.step, past.ledger.epoch, leaves))

    def forget(self) -> None:
        """Steps whose audits are not in are undone."""
        self.look()
        self._pending.clear()

    def _leaves(self, past: _Applied) -> Iterator[Leaf]:
        ledger, assignment = past.ledger, past.assignment
        holders = assignment.holders
        yield {
            "leaf": "attempt",
            "session": self._session,
            "step": ledger.step,
            "epoch": ledger.epoch,
            "stages": {str(stage): [holders[stage], assignment.shadows.get(stage)] for stage in sorted(holders)},
            "lanes": assignment.lanes,
            "unlike": list(past.unlike),
            "clip": ledger.clip_coefficient,
            "frozen": sorted(ledger.frozen),
        }
        for (stage, lane), commit in sorted(ledger.commits.items()):
            header = ledger.commit_headers[(stage, lane)]
            yield {
                "leaf": "commit",
                "stage": stage,
                "lane": lane,
                "party": assignment.server_of((stage, lane)),
                "header": None if header is None else header.digest,
                "gradient": commit.gradient,
                "norm_squared": commit.norm_squared,
            }
        for stage, state in sorted(ledger.agreed.items()):
            yield {"leaf": "state", "stage": stage, "weights": state.weights, "moments": state.moments}
        yield from self._draws(ledger)
        yield from self._audits(ledger)

    def _draws(self, ledger: StepLedger) -> Iterator[Leaf]:
        drawn: dict[tuple[int, str], list[int]] = {}
        for stage, microbatch, auditor in sorted(ledger.awaited_audits):
            drawn.setdefault((stage, auditor), []).append(microbatch)
        for (stage, auditor), microbatches in drawn.items():
            whole = (stage, auditor) in ledger.awaited_step_audits
            yield {"leaf": "draw", "stage": stage, "auditor": auditor, "microbatches": microbatches, "whole": whole}
        for stage in sorted(ledger.owner_audited):
            yield {"leaf": "owner_audit", "stage": stage}

    def _audits(self, ledger: StepLedger) -> Iterator[Leaf]:
        testimony = self._testimony()
        for (stage, microbatch, auditor), report in sorted(ledger.reports.items(), key=lambda item: item[0]):
            said = _shown(testimony.said(AuditReport.kind, auditor, stage, ledger.step, microbatch), auditor)
            outputs = [ledger.messages.get((stage, direction, microbatch)) for direction in _DIRECTIONS]
            yield {
                "leaf": "audit",
                "stage": stage,
                "microbatch": microbatch,
                "auditor": auditor,
                "digests": dict(report.digests) if said is None else None,
                "report": said,
                "outputs": [None if output is None else output.header.model_dump() for output in outputs],
            }
        for (stage, auditor), audited in sorted(ledger.step_audits.items()):
            said = _shown(testimony.said(StepAudited.kind, auditor, stage, ledger.step), auditor)
            commit = ledger.commit_headers.get((stage, audited.lane))
            yield {
                "leaf": "step_audit",
                "stage": stage,
                "lane": audited.lane,
                "auditor": auditor,
                "gradient": audited.gradient if said is None else None,
                "norm_squared": audited.norm_squared if said is None else None,
                "report": said,
                "commit": None if commit is None else to_signed(commit).model_dump(),
            }


def _shown(said: Signed | None, auditor: str) -> dict[str, str] | None:
    """What an auditor signed; the owner signs nothing to itself."""
    return None if said is None or auditor == OWNER else said.model_dump()
