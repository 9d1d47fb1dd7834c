"""The audits of a step (L2): what is being audited, what was reported, and which messages are withheld until then."""

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import AuditReport, ScreenHit
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.tolerance.drift import DriftWatch
from phalanx.pipeline.verify.accomplices import accomplice, vouched
from phalanx.pipeline.verify.audit_judgement import AuditJudgement
from phalanx.pipeline.verify.audit_requests import BOTH, AuditRequests, directions_of
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.verify.ledger import AuditKey, MessageKey
from phalanx.pipeline.verify.referee import Referee


class Audits:
    """The audits under way: reports are kept until they can be compared, screened messages until they are cleared.

    Attributes:
        screened: Odd messages that their receivers do not use yet, by (source stage, microbatch).
    """

    def __init__(self, facts: StepFacts, post: Post, referee: Referee, draw: AuditDraw) -> None:
        self.screened: dict[tuple[int, int], ScreenHit] = {}
        self._facts = facts
        self._reports = AuditJudgement(facts, referee, DriftWatch(draw.derived(b"drift")))
        self._summons = AuditRequests(facts, post, draw)
        self._unweighed: list[tuple[str, AuditReport]] = []
        self._doubted: set[MessageKey] = set()
        """Every message of this attempt that ever looked odd."""
        self._unasked: list[ScreenHit] = []
        """Unusual messages with an auditor that must first fetch weights that are not agreed on yet."""

    def reset(self) -> None:
        """Forget what belongs to another attempt, and keep what was said about a step that lags."""
        lagging = self._facts.lagging
        self.screened.clear()
        self._unweighed = [said for said in self._unweighed if lagging is not None and said[1].step == lagging.step]
        self._doubted.clear()
        self._unasked.clear()
        self._reports.undecided.clear()

    def draw(self) -> None:
        """Draw the step's audits and ask for them."""
        self._summons.draw(self._reports.leaning)

    def doubt(self, hit: ScreenHit) -> None:
        """Note that a message looks odd to its receiver.

        Raises:
            FrameError: It has said so before: a repetition would cause audits without end.
        """
        key: MessageKey = (hit.source, hit.direction, hit.microbatch)
        if key in self._doubted or hit.microbatch >= self._facts.plan.microbatches:
            raise FrameError(f"{key} of step {hit.step} was screened before, or is no message of a step")
        self._doubted.add(key)

    @property
    def progress(self) -> tuple[int, ...]:
        """Grows with what is said for the first time, and with nothing else."""
        said = (
            number for ledger in self._facts.open_ledgers for number in (len(ledger.reports), len(ledger.step_audits))
        )
        return (len(self._doubted), len(self._unweighed), *said)

    @property
    def said(self) -> set[tuple[int, AuditKey]]:
        """Drawn audits, by step, that were reported on and wait until others have reported too."""
        reports = [(party, said) for party, said in self._unweighed if not said.urgent]
        return {(said.step, (said.stage, said.microbatch, party)) for party, said in reports}

    def ask_urgently(self, hit: ScreenHit) -> None:
        """Have the very microbatch recomputed that looked odd to its receiver."""
        self.screened[(hit.source, hit.microbatch)] = hit
        self._unasked.append(hit)
        self._ask_what_can_be_audited()

    def release(self, hit: ScreenHit) -> None:
        """Let the receiver use a screened message after all."""
        self._summons.release(hit)

    def add(self, sender: str, report: AuditReport) -> None:
        """Take a report.

        Raises:
            FrameError: This party was not asked for it, or it came before.
        """
        ledger, (stage, microbatch) = self._facts.ledger_of(report.step), (report.stage, report.microbatch)
        if report.urgent:
            asked = (stage, microbatch) in self.screened and sender == self._facts.auditor(stage, microbatch)
            asked = asked and report.step == self._facts.ledger.step
        else:
            asked = (stage, microbatch, sender) in ledger.awaited_audits - ledger.reports.keys()
        waiting = any(
            (party, other.step, other.stage, other.microbatch, other.urgent)
            == (sender, report.step, stage, microbatch, report.urgent)
            for party, other in self._unweighed
        )
        if waiting or not asked:
            raise FrameError(
                f"{sender!r} reported on stage, microbatch {(stage, microbatch)}, which it is not asked for, or again"
            )
        self._unweighed.append((sender, report))

    @task
    async def weigh(self) -> Judgement | None:
        """Weigh what has come; the first guilty party ends it."""
        self._ask_what_can_be_audited()
        # what the shadow has vouched for comes first: a lie among it tells of two parties
        ripe = sorted((said for said in self._unweighed if self._is_ripe(*said)), key=self._tells_less)
        for auditor, report in ripe:
            self._unweighed.remove((auditor, report))
            weigh = self._weigh_urgent if report.urgent else self._weigh_drawn
            judgement = await weigh(auditor, report)
            if judgement is not None:
                return judgement
        return None

    def _ask_what_can_be_audited(self) -> None:
        waiting, facts = self._unasked, self._facts
        fetches = facts.plan.guard.keeps_snapshots
        self._unasked = [hit for hit in waiting if fetches and hit.source not in facts.agreed]
        for hit in waiting:
            if hit not in self._unasked:
                self._summons.urgent(hit)

    def _is_ripe(self, auditor: str, report: AuditReport) -> bool:
        """A dispute needs weights that both sides have signed; a third party is heard when all others have spoken."""
        stage, ledger = report.stage, self._facts.ledger_of(report.step)
        if stage not in ledger.agreed:
            return False
        if report.urgent or self._facts.has_copy(auditor, stage):
            return True
        heard = {(said.stage, said.microbatch, party) for party, said in self._unweighed}
        return all(key in heard for key in ledger.unreported if key[0] == stage)

    def _tells_less(self, said: tuple[str, AuditReport]) -> bool:
        auditor, report = said
        if report.urgent or self._facts.has_copy(auditor, report.stage):
            return False
        return not any(vouched(self._facts, report.stage, report.microbatch, direction) for direction in BOTH)

    async def _weigh_drawn(self, auditor: str, report: AuditReport) -> Judgement | None:
        ledger = self._facts.ledger_of(report.step)
        judgement = await self._reports.weigh(auditor, report, ledger.messages, directions_of(None))
        if judgement is None:
            ledger.reports[(report.stage, report.microbatch, auditor)] = report
            if report.doubt is not None:
                self._summons.look_closer(ledger, report.stage, auditor, report.doubt)
        elif not self._facts.has_copy(auditor, report.stage):
            second = accomplice(self._facts, judgement)
            self._facts.proved += [] if second is None else [second]
        return judgement

    async def _weigh_urgent(self, auditor: str, report: AuditReport) -> Judgement | None:
        key = (report.stage, report.microbatch)
        hit = self.screened.get(key)
        if hit is None:
            return None
        known = await self._reports.committed_early(hit)
        judgement = await self._reports.weigh(auditor, report, known, directions_of(hit))
        if judgement is None and key not in self._reports.undecided:
            self._summons.release(self.screened.pop(key))
        return judgement
