"""Requests for audits: sent when every stage has committed, or at once for a message that looks odd."""

from collections.abc import Collection, Mapping

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Audit, Release, ScreenHit
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.tolerance.gradient_screen import STEPS_PER_DOUBT, Doubt, DoubtBudget
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.verify.ledger import StepLedger

BOTH: tuple[Direction, Direction] = ("forward", "backward")


class AuditRequests:
    """The requests for audits, with what is awaited noted in the ledger."""

    def __init__(self, facts: StepFacts, post: Post, draw: AuditDraw) -> None:
        self._facts = facts
        self._post = post
        self._draw = draw
        self._doubts = DoubtBudget()

    def draw(self, leaning: Collection[int]) -> None:
        """Draw what is audited; no party may know that before every stage has committed to the whole step."""
        ledger, facts = self._facts.ledger, self._facts
        ledger.audits_drawn = True
        self._doubts.pass_step()
        for share in facts.watched_shares if facts.plan.guard.audits else ():
            (stage, lane), auditor = share, facts.assignment.auditor_of(share)
            where = {"step": ledger.step, "epoch": ledger.epoch, "stage": stage}
            everything = facts.assignment.microbatches(share, facts.plan.microbatches)
            lockstep = facts.plan.guard.shadow == "lockstep"
            # no other party has the gradient, and its norm changes the update of every stage
            unseen = facts.plan.guard.one_optimizer and self._is_odd(stage, ledger.commits[share].norm_squared)
            if not lane and (unseen or self._draw.owners_step(**where)):
                ledger.owners_audits.add(stage)
            if facts.assignment.server_of(share) == OWNER:
                # what the owner serves as a second copy needs no audit
                continue
            where |= {"lane": lane} if lane else {}
            whole = not lockstep and self._draw.whole_step(**where)
            drawn = self._drawn(where, everything)
            if lockstep or whole or stage in leaning:
                drawn = everything
            if whole:
                ledger.awaited_step_audits.add((stage, auditor))
            self._draw_third_party(stage)
            ledger.awaited_audits |= {(stage, m, auditor) for m in drawn}
            if drawn:
                self._ask(stage, drawn, BOTH, urgent=False, weights=whole)
        only_shadows = all(facts.has_copy(auditor, stage) for stage, _, auditor in ledger.awaited_audits)
        ledger.may_lag = facts.plan.guard.commit_lag > 0 and only_shadows and not ledger.owners_audits

    def _is_odd(self, stage: int, norm_squared: float | None) -> bool:
        """Whether the owner must recompute a norm that no other party can check."""
        clips = self._facts.plan.optimizer.clip_norm is not None
        return norm_squared is None or (clips and self._facts.norms.is_odd(stage, norm_squared))

    def _drawn(self, where: Mapping[str, int], everything: tuple[int, ...]) -> tuple[int, ...]:
        """Microbatches of a share that are drawn; all of a step or none where the auditor must fetch weights."""
        if self._facts.plan.guard.keeps_snapshots:
            return everything if self._draw.all_messages(**where) else ()
        places = self._draw.microbatches(**where, num_microbatches=len(everything))
        return tuple(everything[place] for place in places)

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
        self._ask(stage, everything, BOTH, urgent=False, weights=True, third_party=who)

    def urgent(self, hit: ScreenHit) -> None:
        """Ask for the very microbatch that looked odd to its receiver."""
        self._ask(hit.source, (hit.microbatch,), directions_of(hit), urgent=True)

    def look_closer(self, ledger: StepLedger, stage: int, auditor: str, doubt: Doubt) -> None:
        """Ask an auditor to which a stage's weight gradient looks odd to recompute all of the step, once.

        That costs the auditor as much as any other audit; what it then finds is compared, and disputed, as ever. Of an
        auditor that doubts more often than the screen errs, only so many doubts are followed.
        """
        facts, share = self._facts, self._facts.audited_share(stage, auditor)
        is_screened = facts.plan.guard.screens_gradients and auditor == facts.shadow(stage)
        if not is_screened or share in ledger.doubted or (stage, auditor) in ledger.awaited_step_audits:
            return
        ledger.doubted[share] = doubt
        party = facts.assignment.server_of(share)
        place = {"step": ledger.step, "stage": stage, "party": party, "auditor": auditor}
        if not self._doubts.may_follow(stage, auditor):
            if self._doubts.is_news(stage, auditor):
                facts.observe("doubts_not_followed", {**place, "steps_per_doubt": STEPS_PER_DOUBT})
            if facts.plan.guard.commit_lag:
                # it stays before its update until it is told
                self._post(auditor, self._closer(ledger, stage, ()), ())
            return
        facts.observe("gradient_doubted", {**place, "reason": doubt})
        everything = facts.assignment.microbatches(share, facts.plan.microbatches)
        for microbatch in everything:
            ledger.reports.pop((stage, microbatch, auditor), None)
        ledger.awaited_audits |= {(stage, microbatch, auditor) for microbatch in everything}
        ledger.num_audits += len(everything)
        ledger.awaited_step_audits.add((stage, auditor))
        self._post(auditor, self._closer(ledger, stage, everything), ())

    def _closer(self, ledger: StepLedger, stage: int, microbatches: tuple[int, ...]) -> Audit:
        """The answer to a doubt: what to recompute, or nothing."""
        return Audit(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatches=microbatches,
            directions=BOTH,
            urgent=False,
            weights=True,
        )

    def release(self, hit: ScreenHit) -> None:
        """Let the receiver use a screened message after all."""
        release = Release(
            epoch=hit.epoch, step=hit.step, microbatch=hit.microbatch, direction=hit.direction, source=hit.source
        )
        self._post(self._facts.server(target_of(hit), hit.microbatch), release, ())

    def _ask(
        self,
        stage: int,
        microbatches: tuple[int, ...],
        directions: tuple[Direction, ...],
        *,
        urgent: bool,
        weights: bool = False,
        third_party: str | None = None,
    ) -> None:
        ledger, fetches = self._facts.ledger, third_party is not None or self._facts.plan.guard.keeps_snapshots
        ledger.num_audits += len(microbatches)
        audit = Audit(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatches=microbatches,
            directions=directions,
            urgent=urgent,
            weights=weights,
            state=self._facts.agreed[stage] if fetches else None,
        )
        self._post(third_party or self._facts.auditor(stage, microbatches[0]), audit, ())


def directions_of(hit: ScreenHit | None) -> tuple[Direction, ...]:
    """Return the directions of an audit: a screened activation has no gradient yet, all else is audited both ways."""
    return ("forward",) if hit is not None and hit.direction == "forward" else BOTH


def target_of(hit: ScreenHit) -> int:
    """The stage that a screened message was for."""
    return hit.source + (1 if hit.direction == "forward" else -1)
