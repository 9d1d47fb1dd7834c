"""The audits of a step (L2): orders, reports, and the messages that are withheld until then."""

from collections.abc import Collection

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Audit, AuditReport, MessageKey, Release, ScreenHit, target_of
from phalanx.pipeline.protocol.needs import owner_task
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.tolerance.drift import DriftWatch
from phalanx.pipeline.tolerance.screen import STEPS_PER_DOUBT, Doubt, DoubtBudget
from phalanx.pipeline.verify.audit_judgement import AuditJudgement
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import AuditKey, Judgement, StepFacts, StepLedger
from phalanx.pipeline.verify.referee import Referee
from phalanx.planner.schedules import Direction

BOTH: tuple[Direction, Direction] = ("forward", "backward")


class AuditRequests:
    """The requests for audits, with awaited reports noted in the ledger."""

    def __init__(self, facts: StepFacts, post: Post, draw: AuditDraw) -> None:
        self._facts = facts
        self._post = post
        self._draw = draw
        self._doubts = DoubtBudget()
        self._num_orders = 0

    def draw_audits(self, leaning: Collection[int]) -> None:
        """Draw the audits; no party may know them before every stage has committed to the whole step."""
        ledger, facts = self._facts.ledger, self._facts
        ledger.audits_drawn = True
        self._doubts.pass_step()
        everything = tuple(range(facts.plan.microbatches))
        lockstep = facts.plan.guard.shadow_upkeep.in_lockstep
        for stage in facts.watched_stages:
            auditor, place = facts.shadow_of(stage), {"step": ledger.step, "epoch": ledger.epoch, "stage": stage}
            if self._draw.draws_owner_audit(**place):
                ledger.owners_audits.add(stage)
            if facts.holder_of(stage) == OWNER:
                # an interrupted change of roles can leave a shadow to a stage of the owner, which needs no audit
                continue
            is_whole = not lockstep and self._draw.draws_whole_step(**place)
            if is_whole:
                ledger.awaited_step_audits.add((stage, auditor))
            drawn = everything
            if not (lockstep or is_whole or stage in leaning):
                drawn = self._draw.draw_microbatches(**place, num_microbatches=facts.plan.microbatches)
            ledger.awaited_audits |= {(stage, m, auditor) for m in drawn}
            ledger.orders[(stage, auditor)] = self._order_audit(ledger, stage, drawn, auditor=auditor, weights=is_whole)
        ledger.may_lag = facts.plan.guard.commit_lag > 0 and not ledger.owners_audits

    def order_urgent_audit(self, hit: ScreenHit) -> int:
        """Ask for the very microbatch that looked odd to its receiver; return the number of the order."""
        place, auditor = (self._facts.ledger, hit.source, (hit.microbatch,)), self._facts.shadow_of(hit.source)
        return self._order_audit(*place, auditor=auditor, directions=directions_of(hit), urgent=True)

    def audit_whole_step(self, ledger: StepLedger, stage: int, auditor: str, doubt: Doubt) -> None:
        """Ask an auditor to which a stage's weight gradient looks odd to recompute all of the step, once.

        That costs the auditor as much as any other audit; its findings are compared, and disputed, as ever. Of an
        auditor that doubts more often than the screen errs, only a bounded number of doubts are followed.
        """
        facts = self._facts
        is_screened = facts.plan.guard.screens_gradients and auditor == facts.shadow_of(stage)
        if not is_screened or stage in ledger.doubted or (stage, auditor) in ledger.awaited_step_audits:
            return
        ledger.doubted[stage] = doubt
        place = {"step": ledger.step, "stage": stage, "party": facts.holder_of(stage), "auditor": auditor}
        if not self._doubts.may_follow(stage, auditor):
            if self._doubts.is_first_unfollowed(stage, auditor):
                facts.observe("doubts_not_followed", {**place, "steps_per_doubt": STEPS_PER_DOUBT})
            if facts.plan.guard.commit_lag:
                # it stays before its update until it is told
                self._order_audit(ledger, stage, (), auditor=auditor, weights=True)
            return
        facts.observe("gradient_doubted", {**place, "reason": doubt})
        everything = tuple(range(facts.plan.microbatches))
        for microbatch in everything:
            ledger.reports.pop((stage, microbatch, auditor), None)
        ledger.awaited_audits |= {(stage, microbatch, auditor) for microbatch in everything}
        ledger.awaited_step_audits.add((stage, auditor))
        ledger.orders[(stage, auditor)] = self._order_audit(ledger, stage, everything, auditor=auditor, weights=True)

    def release_screened(self, hit: ScreenHit) -> None:
        """Let the receiver use a screened message after all."""
        self._post(self._facts.holder_of(target_of(hit.key)), Release.about_key(hit.epoch, hit.step, hit.key), ())

    def _order_audit(
        self,
        ledger: StepLedger,
        stage: int,
        microbatches: tuple[int, ...],
        *,
        auditor: str,
        weights: bool = False,
        directions: tuple[Direction, ...] = BOTH,
        urgent: bool = False,
    ) -> int:
        """Send an order under the next number, which the reports on it name."""
        self._num_orders += 1
        ledger.num_audits += len(microbatches)
        audit = Audit(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatches=microbatches,
            directions=directions,
            order=self._num_orders,
            urgent=urgent,
            weights=weights,
        )
        self._post(auditor, audit, ())
        return self._num_orders


def directions_of(hit: ScreenHit) -> tuple[Direction, ...]:
    """Return the directions of an urgent audit: a screened activation has no gradient yet."""
    return ("forward",) if hit.direction == "forward" else BOTH


class Audits:
    """The audits under way: reports are kept until they can be compared, screened messages until they are cleared.

    Attributes:
        screened: Odd messages that their receivers do not use yet.
    """

    def __init__(self, facts: StepFacts, post: Post, referee: Referee, draw: AuditDraw) -> None:
        self.screened: dict[MessageKey, ScreenHit] = {}
        self._facts = facts
        self._reports = AuditJudgement(facts, referee, DriftWatch(draw.derive_secret(b"drift")))
        self._audit_requests = AuditRequests(facts, post, draw)
        self._unweighed: list[tuple[str, AuditReport]] = []
        self._doubted: set[MessageKey] = set()
        """Every message of this attempt that ever looked odd."""
        self._urgent_orders: dict[int, ScreenHit] = {}
        """Orders to audit a screened message, by number."""

    def reset_attempt(self) -> None:
        """Forget what belongs to another attempt, and keep reports on a step that lags."""
        lagging = self._facts.lagging_ledger
        self.screened.clear()
        # an urgent report is of the attempt that is over
        self._unweighed = [
            (party, report)
            for party, report in self._unweighed
            if lagging is not None and report.step == lagging.step and report.order not in self._urgent_orders
        ]
        self._doubted.clear()
        self._urgent_orders.clear()

    def draw_audits(self) -> None:
        """Draw the step's audits and ask for them."""
        self._audit_requests.draw_audits(self._reports.leaning_stages)

    def note_doubt(self, hit: ScreenHit) -> None:
        """Note that a message looks odd to its receiver.

        Raises:
            FrameError: It has said so before: a repetition would cause audits without end.
        """
        key = hit.key
        if key in self._doubted or hit.microbatch >= self._facts.plan.microbatches:
            raise FrameError(f"{key} of step {hit.step} was screened before, or is not a message of a step")
        self._doubted.add(key)

    @property
    def progress_counts(self) -> tuple[int, ...]:
        """Return numbers that grow with new statements, and with nothing else."""
        counts = (
            number for ledger in self._facts.open_ledgers for number in (len(ledger.reports), len(ledger.step_audits))
        )
        return (len(self._doubted), len(self._unweighed), *counts)

    @property
    def unweighed_audits(self) -> set[tuple[int, AuditKey]]:
        """Drawn audits, by step, that were reported on and are not weighed yet."""
        reports = [(party, report) for party, report in self._unweighed if report.order not in self._urgent_orders]
        return {(report.step, (report.stage, report.microbatch, party)) for party, report in reports}

    def ask_urgently(self, hit: ScreenHit) -> None:
        """Have the very microbatch recomputed that looked odd to its receiver."""
        self.screened[hit.key] = hit
        self._urgent_orders[self._audit_requests.order_urgent_audit(hit)] = hit

    def check_asked(self, sender: str, report: AuditReport) -> None:
        """Compare a report with the order that it names."""
        ledger, (stage, microbatch) = self._facts.ledger_of(report.step), (report.stage, report.microbatch)
        hit = self._urgent_orders.get(report.order)
        if hit is not None:
            is_asked = (hit.step, hit.source, hit.microbatch) == (report.step, stage, microbatch)
            is_asked = is_asked and sender == self._facts.shadow_of(stage)
        else:
            is_asked = (stage, microbatch, sender) in ledger.awaited_audits
            is_asked = is_asked and report.order == ledger.orders.get((stage, sender))
        if not is_asked:
            raise FrameError(
                f"{sender!r} reported on stage {stage}, microbatch {microbatch} for order {report.order}: not asked for"
            )

    def has_report(self, sender: str, report: AuditReport) -> bool:
        """Whether this party has reported on the same microbatch for the same order before."""
        earlier = self._facts.ledger_of(report.step).reports.get((report.stage, report.microbatch, sender))
        if earlier is not None and earlier.order == report.order:
            return True
        if report.order in self._urgent_orders and self._urgent_orders[report.order].key not in self.screened:
            # it was cleared, or weighed
            return True
        place = (sender, report.order, report.microbatch)
        return any((party, other.order, other.microbatch) == place for party, other in self._unweighed)

    def add_report(self, sender: str, report: AuditReport) -> None:
        """Take a report.

        Raises:
            FrameError: This party was not asked for it, or it came before.
        """
        self.check_asked(sender, report)
        if self.has_report(sender, report):
            raise FrameError(f"{sender!r} reported on stage {report.stage}, microbatch {report.microbatch} again")
        self._unweighed.append((sender, report))

    @owner_task
    async def weigh_reports(self) -> Judgement | None:
        """Weigh received reports; the first guilty party ends it."""
        for auditor, report in list(self._unweighed):
            # a dispute needs weights that both sides have signed
            if report.stage not in self._facts.ledger_of(report.step).agreed:
                continue
            self._unweighed.remove((auditor, report))
            weigh = self._weigh_urgent if report.order in self._urgent_orders else self._weigh_drawn
            judgement = await weigh(auditor, report)
            if judgement is not None:
                return judgement
        return None

    async def _weigh_drawn(self, auditor: str, report: AuditReport) -> Judgement | None:
        ledger = self._facts.ledger_of(report.step)
        judgement = await self._reports.weigh_report(auditor, report, ledger.messages, BOTH)
        if judgement is None:
            ledger.reports[(report.stage, report.microbatch, auditor)] = report
            if report.doubt is not None:
                self._audit_requests.audit_whole_step(ledger, report.stage, auditor, report.doubt)
        return judgement

    async def _weigh_urgent(self, auditor: str, report: AuditReport) -> Judgement | None:
        hit = self._urgent_orders[report.order]
        if hit.key not in self.screened:
            return None
        messages = await self._reports.fetch_early_commitments(hit)
        judgement = await self._reports.weigh_report(auditor, report, messages, directions_of(hit))
        if judgement is None:
            self._audit_requests.release_screened(self.screened.pop(hit.key))
        return judgement
