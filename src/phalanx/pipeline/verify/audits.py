"""The audits of a step (L2): what is being audited, what was reported, and which messages are withheld until then."""

from collections.abc import Collection, Iterable, Mapping

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Audit, AuditReport, Release, ScreenHit
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.tolerance.drift import DriftWatch
from phalanx.pipeline.tolerance.screen import STEPS_PER_DOUBT, Doubt, DoubtBudget
from phalanx.pipeline.verify.accomplices import accomplice, vouched
from phalanx.pipeline.verify.audit_judgement import AuditJudgement
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import AuditKey, Judgement, MessageKey, StepFacts, StepLedger
from phalanx.pipeline.verify.referee import Referee
from phalanx.planner.schedules import Direction

BOTH: tuple[Direction, Direction] = ("forward", "backward")


class AuditRequests:
    """The requests for audits, with what is awaited noted in the ledger."""

    def __init__(self, facts: StepFacts, post: Post, draw: AuditDraw) -> None:
        self._facts = facts
        self._post = post
        self._draw = draw
        self._doubts = DoubtBudget()
        self._num_orders = 0

    def draw(self, leaning: Collection[int]) -> None:
        """Draw what is audited; no party may know that before every stage has committed to the whole step."""
        ledger, facts = self._facts.ledger, self._facts
        ledger.audits_drawn = True
        self._doubts.pass_step()
        everything = tuple(range(facts.plan.microbatches))
        for stage in facts.watched if facts.plan.guard.audits else ():
            auditor, where = facts.shadow(stage), {"step": ledger.step, "epoch": ledger.epoch, "stage": stage}
            lockstep = facts.plan.guard.upkeep.in_lockstep
            # no other party has the gradient, and its norm changes the update of every stage
            unseen = facts.plan.guard.one_optimizer and self._is_odd(stage, ledger.commits[stage].norm_squared)
            if unseen or self._draw.owners_step(**where):
                ledger.owners_audits.add(stage)
            if facts.holder(stage) == OWNER:
                # an interrupted change of roles can leave a shadow to a stage of the owner, which needs no audit
                continue
            whole = not lockstep and self._draw.whole_step(**where)
            drawn = self._drawn(where)
            if lockstep or whole or stage in leaning:
                drawn = everything
            if whole:
                ledger.awaited_step_audits.add((stage, auditor))
            self._draw_third_party(stage)
            ledger.awaited_audits |= {(stage, m, auditor) for m in drawn}
            if drawn:
                ledger.orders[(stage, auditor)] = self._ask(stage, drawn, BOTH, urgent=False, weights=whole)
        only_shadows = all(facts.has_copy(auditor, stage) for stage, _, auditor in ledger.awaited_audits)
        ledger.may_lag = facts.plan.guard.commit_lag > 0 and only_shadows and not ledger.owners_audits

    def _is_odd(self, stage: int, norm_squared: float | None) -> bool:
        """Whether the owner must recompute a norm that no other party can check."""
        clips = self._facts.plan.optimizer.clip_norm is not None
        return norm_squared is None or (clips and self._facts.norms.is_odd(stage, norm_squared))

    def _drawn(self, where: Mapping[str, int]) -> tuple[int, ...]:
        """Microbatches of a stage that are drawn; all of a step or none where the auditor must fetch weights."""
        num_microbatches = self._facts.plan.microbatches
        if self._facts.plan.guard.keeps_snapshots:
            return tuple(range(num_microbatches)) if self._draw.all_messages(**where) else ()
        return self._draw.microbatches(**where, num_microbatches=num_microbatches)

    def _draw_third_party(self, stage: int) -> None:
        """Have a worker with no copy of the stage redo its step: a league cannot know it in advance."""
        ledger, facts = self._facts.ledger, self._facts
        involved = {OWNER, facts.holder(stage), facts.shadow(stage)}
        among = sorted(facts.present - involved)
        who = self._draw.third_party(step=ledger.step, epoch=ledger.epoch, stage=stage, among=among)
        if who is None:
            return
        everything = tuple(range(facts.plan.microbatches))
        ledger.awaited_audits |= {(stage, m, who) for m in everything}
        ledger.awaited_step_audits.add((stage, who))
        number = self._ask(stage, everything, BOTH, urgent=False, weights=True, third_party=who)
        ledger.orders[(stage, who)] = number

    def urgent(self, hit: ScreenHit) -> int:
        """Ask for the very microbatch that looked odd to its receiver; return the number of the order."""
        return self._ask(hit.source, (hit.microbatch,), directions_of(hit), urgent=True)

    def look_closer(self, ledger: StepLedger, stage: int, auditor: str, doubt: Doubt) -> None:
        """Ask an auditor to which a stage's weight gradient looks odd to recompute all of the step, once.

        That costs the auditor as much as any other audit; what it then finds is compared, and disputed, as ever. Of an
        auditor that doubts more often than the screen errs, only so many doubts are followed.
        """
        facts = self._facts
        is_screened = facts.plan.guard.screens_gradients and auditor == facts.shadow(stage)
        if not is_screened or stage in ledger.doubted or (stage, auditor) in ledger.awaited_step_audits:
            return
        ledger.doubted[stage] = doubt
        place = {"step": ledger.step, "stage": stage, "party": facts.holder(stage), "auditor": auditor}
        if not self._doubts.may_follow(stage, auditor):
            if self._doubts.is_news(stage, auditor):
                facts.observe("doubts_not_followed", {**place, "steps_per_doubt": STEPS_PER_DOUBT})
            if facts.plan.guard.commit_lag:
                # it stays before its update until it is told
                self._order(auditor, self._closer(ledger, stage, ()))
            return
        facts.observe("gradient_doubted", {**place, "reason": doubt})
        everything = tuple(range(facts.plan.microbatches))
        for microbatch in everything:
            ledger.reports.pop((stage, microbatch, auditor), None)
        ledger.awaited_audits |= {(stage, microbatch, auditor) for microbatch in everything}
        ledger.num_audits += len(everything)
        ledger.awaited_step_audits.add((stage, auditor))
        ledger.orders[(stage, auditor)] = self._order(auditor, self._closer(ledger, stage, everything))

    def _closer(self, ledger: StepLedger, stage: int, microbatches: tuple[int, ...]) -> Audit:
        """The answer to a doubt: what to recompute, or nothing."""
        return Audit(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatches=microbatches,
            directions=BOTH,
            order=0,
            urgent=False,
            weights=True,
        )

    def _order(self, auditor: str, audit: Audit) -> int:
        """Send an order under the next number, which the reports on it name."""
        self._num_orders += 1
        self._post(auditor, audit.model_copy(update={"order": self._num_orders}), ())
        return self._num_orders

    def release(self, hit: ScreenHit) -> None:
        """Let the receiver use a screened message after all."""
        release = Release(
            epoch=hit.epoch, step=hit.step, microbatch=hit.microbatch, direction=hit.direction, source=hit.source
        )
        self._post(self._facts.holder(target_of(hit)), release, ())

    def _ask(
        self,
        stage: int,
        microbatches: tuple[int, ...],
        directions: tuple[Direction, ...],
        *,
        urgent: bool,
        weights: bool = False,
        third_party: str | None = None,
    ) -> int:
        ledger, fetches = self._facts.ledger, third_party is not None or self._facts.plan.guard.keeps_snapshots
        ledger.num_audits += len(microbatches)
        audit = Audit(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatches=microbatches,
            directions=directions,
            order=0,
            urgent=urgent,
            weights=weights,
            state=self._facts.agreed[stage] if fetches else None,
        )
        return self._order(third_party or self._facts.shadow(stage), audit)


def directions_of(hit: ScreenHit | None) -> tuple[Direction, ...]:
    """Return the directions of an audit: a screened activation has no gradient yet, all else is audited both ways."""
    return ("forward",) if hit is not None and hit.direction == "forward" else BOTH


def message_of(hit: ScreenHit) -> MessageKey:
    """Return the message that looked odd."""
    return (hit.source, hit.direction, hit.microbatch)


def target_of(hit: ScreenHit) -> int:
    """The stage that a screened message was for."""
    return hit.source + (1 if hit.direction == "forward" else -1)


class Audits:
    """The audits under way: reports are kept until they can be compared, screened messages until they are cleared.

    Attributes:
        screened: Odd messages that their receivers do not use yet.
    """

    def __init__(self, facts: StepFacts, post: Post, referee: Referee, draw: AuditDraw) -> None:
        self.screened: dict[MessageKey, ScreenHit] = {}
        self._facts = facts
        self._reports = AuditJudgement(facts, referee, DriftWatch(draw.derived(b"drift")))
        self._audit_requests = AuditRequests(facts, post, draw)
        self._unweighed: list[tuple[str, AuditReport]] = []
        self._doubted: set[MessageKey] = set()
        """Every message of this attempt that ever looked odd."""
        self._urgent_orders: dict[int, ScreenHit] = {}
        """Orders to audit a screened message, by number."""
        self._unasked: list[ScreenHit] = []
        """Unusual messages with an auditor that must first fetch weights that are not agreed on yet."""

    def reset(self) -> None:
        """Forget what belongs to another attempt, and keep what was said about a step that lags."""
        lagging = self._facts.lagging
        self.screened.clear()
        # an urgent report is of the attempt that is over
        self._unweighed = [
            (party, report)
            for party, report in self._unweighed
            if lagging is not None and report.step == lagging.step and report.order not in self._urgent_orders
        ]
        self._doubted.clear()
        self._urgent_orders.clear()
        self._unasked.clear()
        self._reports.undecided.clear()

    def draw(self) -> None:
        """Draw the step's audits and ask for them."""
        self._audit_requests.draw(self._reports.leaning)

    def doubt(self, hit: ScreenHit) -> None:
        """Note that a message looks odd to its receiver.

        Raises:
            FrameError: It has said so before: a repetition would cause audits without end.
        """
        key = message_of(hit)
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
        reports = [(party, said) for party, said in self._unweighed if said.order not in self._urgent_orders]
        return {(said.step, (said.stage, said.microbatch, party)) for party, said in reports}

    def ask_urgently(self, hit: ScreenHit) -> None:
        """Have the very microbatch recomputed that looked odd to its receiver."""
        self.screened[message_of(hit)] = hit
        self._unasked.append(hit)
        self._ask_what_can_be_audited()

    def release(self, hit: ScreenHit) -> None:
        """Let the receiver use a screened message after all."""
        self._audit_requests.release(hit)

    def check_asked(self, sender: str, report: AuditReport) -> None:
        """Compare a report with the order that it names.

        Raises:
            FrameError: That order was not given to this party, or is about something else.
        """
        ledger, (stage, microbatch) = self._facts.ledger_of(report.step), (report.stage, report.microbatch)
        hit = self._urgent_orders.get(report.order)
        if hit is not None:
            is_asked = (hit.step, hit.source, hit.microbatch) == (report.step, stage, microbatch)
            is_asked = is_asked and sender == self._facts.shadow(stage)
        else:
            is_asked = (stage, microbatch, sender) in ledger.awaited_audits
            is_asked = is_asked and report.order == ledger.orders.get((stage, sender))
        if not is_asked:
            raise FrameError(
                f"{sender!r} reported on stage {stage}, microbatch {microbatch} for order {report.order}: not asked for"
            )

    def has(self, sender: str, report: AuditReport) -> bool:
        """Whether this party has reported on the same microbatch for the same order before."""
        earlier = self._facts.ledger_of(report.step).reports.get((report.stage, report.microbatch, sender))
        if earlier is not None and earlier.order == report.order:
            return True
        if report.order in self._urgent_orders and message_of(self._urgent_orders[report.order]) not in self.screened:
            # it was cleared, or weighed
            return True
        place = (sender, report.order, report.microbatch)
        return any((party, other.order, other.microbatch) == place for party, other in self._unweighed)

    def add(self, sender: str, report: AuditReport) -> None:
        """Take a report.

        Raises:
            FrameError: This party was not asked for it, or it came before.
        """
        self.check_asked(sender, report)
        if self.has(sender, report):
            raise FrameError(f"{sender!r} reported on stage {report.stage}, microbatch {report.microbatch} again")
        self._unweighed.append((sender, report))

    @task
    async def weigh(self) -> Judgement | None:
        """Weigh what has come; the first guilty party ends it."""
        self._ask_what_can_be_audited()
        ripe = [said for said in self._unweighed if self._is_ripe(*said)]
        of_copies = [said for said in ripe if not self._is_third_partys(said)]
        judgement = await self._weigh_first_guilty(of_copies)
        if judgement is not None:
            return judgement
        # only now it is known what the shadow has vouched for, and a lie among that tells of two parties
        return await self._weigh_first_guilty(sorted(filter(self._is_third_partys, ripe), key=self._tells_less))

    @task
    async def _weigh_first_guilty(self, said: Iterable[tuple[str, AuditReport]]) -> Judgement | None:
        for auditor, report in said:
            self._unweighed.remove((auditor, report))
            weigh = self._weigh_urgent if report.order in self._urgent_orders else self._weigh_drawn
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
                self._urgent_orders[self._audit_requests.urgent(hit)] = hit

    def _is_ripe(self, auditor: str, report: AuditReport) -> bool:
        """A dispute needs weights that both sides have signed; a third party is heard when all others have spoken."""
        stage, ledger = report.stage, self._facts.ledger_of(report.step)
        if stage not in ledger.agreed:
            return False
        if not self._is_third_partys((auditor, report)):
            return True
        heard = {(said.stage, said.microbatch, party) for party, said in self._unweighed}
        return all(key in heard for key in ledger.unreported if key[0] == stage)

    def _is_third_partys(self, said: tuple[str, AuditReport]) -> bool:
        auditor, report = said
        return not (report.order in self._urgent_orders or self._facts.has_copy(auditor, report.stage))

    def _tells_less(self, said: tuple[str, AuditReport]) -> bool:
        report = said[1]
        return not any(vouched(self._facts, report.stage, report.microbatch, direction) for direction in BOTH)

    async def _weigh_drawn(self, auditor: str, report: AuditReport) -> Judgement | None:
        ledger = self._facts.ledger_of(report.step)
        judgement = await self._reports.weigh(auditor, report, ledger.messages, directions_of(None))
        if judgement is None:
            ledger.reports[(report.stage, report.microbatch, auditor)] = report
            if report.doubt is not None:
                self._audit_requests.look_closer(ledger, report.stage, auditor, report.doubt)
        elif not self._facts.has_copy(auditor, report.stage):
            second = accomplice(self._facts, judgement)
            self._facts.proved += [] if second is None else [second]
        return judgement

    async def _weigh_urgent(self, auditor: str, report: AuditReport) -> Judgement | None:
        hit = self._urgent_orders[report.order]
        if message_of(hit) not in self.screened:
            return None
        known = await self._reports.committed_early(hit)
        judgement = await self._reports.weigh(auditor, report, known, directions_of(hit))
        if judgement is None and report.order not in self._reports.undecided:
            self._audit_requests.release(self.screened.pop(message_of(hit)))
        return judgement
