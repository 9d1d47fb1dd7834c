"""The owner's decisions: what has been committed to, what is audited, and when a step may be applied."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from phalanx.errors import FrameError
from phalanx.optimizers import clip_coefficient
from phalanx.pipeline.audits import Audits
from phalanx.pipeline.bulk import Post
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.courier import Courier
from phalanx.pipeline.desk import Received
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.draw import AuditDraw
from phalanx.pipeline.faults import Faults
from phalanx.pipeline.inquest import Inquest, Missing
from phalanx.pipeline.ledger import StepLedger
from phalanx.pipeline.links import compare_links
from phalanx.pipeline.messages import (
    Applied,
    AuditReport,
    Commit,
    Fault,
    GradientHeld,
    Ready,
    ScreenHit,
    StateDigest,
    StepAudited,
    WeightsHeld,
)
from phalanx.pipeline.owner_audit import OwnerAudits
from phalanx.pipeline.paper import PLAIN, Attempt
from phalanx.pipeline.recovery import Assignment, Share
from phalanx.pipeline.referee import Referee
from phalanx.pipeline.running_costs import BUSY
from phalanx.pipeline.screen import NOT_FINITE
from phalanx.pipeline.signed import to_signed
from phalanx.pipeline.summons import target_of
from phalanx.pipeline.updates import Updates

_STRIKES = 3
"""Odd messages of one party that are believed to be chance when nothing but statistics can tell."""

_MAX_DIGITS = 6
"""Of a stage's number in a message; more is nobody's stage and costs time to read."""


class Coordinator:
    """Collects what parties commit to; `advance` says what follows from it.

    Attributes:
        docket: Assignment, commitments and agreed states.
        ready: Parties that have taken their roles of this epoch.
        usage: Running costs by party, as each reported them last.
        busy: Seconds in which each party has worked since it was started, as each reported them last.
        bytes_sent: Bytes by party and receiver, as each reported them last.
    """

    def __init__(self, docket: Docket, post: Post, courier: Courier, draw: AuditDraw) -> None:
        self.docket = docket
        self.ready: dict[str, Ready] = {}
        self.usage: dict[str, dict[str, float]] = {}
        self.busy: dict[str, float] = {}
        self.bytes_sent: dict[str, Mapping[str, int]] = {}
        self._referee = Referee(docket.plan, courier, docket.same_class)
        self._audits = Audits(docket, post, courier, self._referee, draw)
        self._updates = Updates(docket, self._referee)
        self._strikes: Counter[str] = Counter()
        self._faults = Faults(docket)
        self._convictions: list[Judgement] = []
        self._owner_audits = OwnerAudits(docket, self._referee)
        self._inquest = Inquest(docket, courier, post)
        self._has_news = True

    @property
    def ledger(self) -> StepLedger:
        """Of the present attempt at the present step."""
        return self.docket.ledger

    # --- what arrives -----------------------------------------------------------------------------

    def handle(self, received: Received) -> bool:
        """Record a message to the coordinator; False when it is not for it.

        Raises:
            FrameError: The sender has no part in what it reports.
        """
        message, sender = received.message, received.sender
        if isinstance(message, Applied):
            self._add_applied(sender, message)
        elif isinstance(message, Ready):
            self._add_ready(sender, message)
        elif isinstance(message, Fault):
            self._faults.add(sender, message)
        elif isinstance(message, Commit | GradientHeld | WeightsHeld | AuditReport | StepAudited | ScreenHit):
            # of a step that lags, only its audits are still awaited
            ledgers = self.docket.open_ledgers if isinstance(message, AuditReport | StepAudited) else (self.ledger,)
            if (message.epoch, message.step) in [(ledger.epoch, ledger.step) for ledger in ledgers]:
                self._add_step_message(received, message)
        else:
            return False
        self._has_news = True
        return True

    def look_again(self) -> None:
        """Let the next `advance` look at everything, whether anything has come or not."""
        self._has_news = True

    def _add_applied(self, sender: str, message: Applied) -> None:
        self.usage[sender], self.bytes_sent[sender] = dict(message.usage), dict(message.bytes_sent)
        self.busy[sender] = self.usage[sender].pop(BUSY, 0.0)
        assignment = self.docket.assignment
        for name, state in message.states.items():
            stage = int(name) if name.isdecimal() and len(name) < _MAX_DIGITS else -1
            if sender not in (assignment.holders.get(stage), assignment.shadows.get(stage)):
                raise FrameError(f"{sender!r} reported the state of stage {name}, which it does not have")
            follows = self.docket.plan.guard.one_optimizer and sender != assignment.holders.get(stage)
            if (state.step, message.epoch) == (self.ledger.step, self.ledger.epoch) and not follows:
                self._updates.said.setdefault(stage, {})[sender] = state

    def _add_ready(self, sender: str, message: Ready) -> None:
        if message.epoch != self.ledger.epoch:
            return
        present = (self.docket.assignment, self.docket.resting)
        held = [item for roles in present for item in (*roles.holders.items(), *roles.shadows.items())]
        stray = sorted(message.states.keys() - {str(stage) for stage, party in held if party == sender})
        if stray:
            raise FrameError(f"{sender!r} got ready with stage {stray[0][:_MAX_DIGITS]}, which it does not have")
        self.ready[sender] = message

    def said_ready(self, stage: int, states: Mapping[str, StateDigest | None]) -> None:
        """Take what holder and shadow got ready with as what they say about the state after the last update."""
        self._has_news = True
        for party, state in states.items():
            if state is not None:
                self._updates.said.setdefault(stage, {})[party] = state

    def _add_step_message(
        self, received: Received, message: Commit | GradientHeld | WeightsHeld | AuditReport | StepAudited | ScreenHit
    ) -> None:
        sender, assignment = received.sender, self.docket.assignment
        if isinstance(message, ScreenHit):
            target = target_of(message)
            expected = assignment.server(target, message.microbatch) if target in assignment.holders else None
            _expect(sender, expected, message.kind)
            if message.source not in assignment.shadows or self.docket.server(*_of(message)) == OWNER:
                raise FrameError(f"{sender!r} finds a message of the owner odd, which needs no audit")
            self._audits.doubt(message)
            self._ask_for_urgent_audit(message)
            return
        if isinstance(message, AuditReport):
            self._audits.add(sender, message)
            return
        if isinstance(message, StepAudited):
            self._add_step_audit(sender, message)
            return
        if isinstance(message, WeightsHeld):
            _expect(sender, assignment.shadows.get(message.stage), message.kind)
            self._updates.take(sender, message)
            return
        share = (message.stage, message.lane)
        known = assignment.shares if isinstance(message, Commit) else self.docket.watched_shares
        party_of = assignment.server_of if isinstance(message, Commit) else assignment.auditor_of
        _expect(sender, party_of(share) if share in known else None, message.kind)
        if isinstance(message, Commit):
            if share in self.ledger.commits:
                raise FrameError(f"{sender!r} committed stage {message.stage} twice in step {message.step}")
            served = assignment.microbatches(share, self.docket.plan.microbatches)
            try:
                self.ledger.add_commit(message, received.header, served)
            except FrameError as exc:
                # signed nonsense: without a valid commitment the step could never end
                headers = {} if received.header is None else {"commitment": to_signed(received.header)}
                where = f"stage {message.stage}: {sender} committed to nonsense: {exc}"
                self._convictions.append(
                    self.docket.judgement("forgery", sender, message.stage, where, lane=message.lane, headers=headers)
                )
        elif share in self.ledger.held:
            raise FrameError(f"{message.kind!r} of stage {message.stage} came twice in step {message.step}")
        else:
            self.ledger.held[share] = message

    def _add_step_audit(self, sender: str, message: StepAudited) -> None:
        key, ledger = (message.stage, sender), self.docket.ledger_of(message.step)
        if message.stage in self.docket.watched and self.docket.audited_share(*key) != (message.stage, message.lane):
            raise FrameError(
                f"{sender!r} recomputed lane {message.lane} of stage {message.stage}, which it is not to audit"
            )
        if key not in ledger.awaited_step_audits or key in ledger.step_audits:
            raise FrameError(
                f"{sender!r} recomputed the whole step {message.step} of stage {message.stage}: not asked, or again"
            )
        ledger.step_audits[key] = message

    # --- a step's life ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, step: int, assignment: Assignment, attempt: Attempt = PLAIN) -> None:
        """Start again with a new assignment; what was agreed about states stays."""
        self.docket.assignment, self.docket.resting = attempt.serving(assignment), attempt.resting(assignment)
        self._referee.epoch = epoch
        self.ready.clear()
        self._reset(StepLedger(step, epoch, agreed=self.docket.agreed))
        self.ledger.frozen = attempt.frozen

    def open_step(self, step: int, epoch: int) -> None:
        """Start the next step; states after the last update are still to be agreed on."""
        docket = self.docket
        docket.previous = docket.ledger
        self._reset(StepLedger(step, epoch))

    def _reset(self, ledger: StepLedger) -> None:
        self.docket.ledger = ledger
        self._updates.forget()
        self._audits.reset()
        self._convictions.clear()
        self._has_news = True

    def advance(self) -> Judgement | None:
        """Draw what conclusions can be drawn now; the first guilty party ends it."""
        if not (self._has_news or self.docket.proved):
            return None
        self._has_news, before = False, self._conclusions()
        judgement = self._conclude()
        # one conclusion may be what another one waits for
        self._has_news = self._has_news or judgement is not None or self._conclusions() != before
        return judgement

    def _conclusions(self) -> tuple[int, ...]:
        """Changes with every conclusion that was drawn."""
        ledger = self.ledger
        agreed = (len(self.docket.agreed), len(ledger.gradients_agreed))
        asked = (ledger.num_audits, len(ledger.owners_audits), ledger.audits_drawn)
        late = [number for each in self.docket.open_ledgers for number in (len(each.reports), len(each.steps_agreed))]
        return (*agreed, *asked, *late, len(ledger.whole_norms), len(self._audits.screened))

    def _conclude(self) -> Judgement | None:
        docket = self.docket
        while docket.proved:
            proved = docket.proved.pop(0)
            if proved.verdict.party in docket.present:
                return proved
        judgement = self._convictions.pop(0) if self._convictions else self._faults.weigh()
        if judgement is not None or not docket.plan.guard.enabled:
            return judgement
        judgement = (
            self._updates.weigh_states()
            or self._audits.weigh()
            or self._updates.weigh_gradients()
            or self._updates.weigh_step_audits()
            or self._audit_as_owner()
        )
        if judgement is not None:
            return judgement
        all_committed = len(self.ledger.commits) == len(docket.assignment.shares)
        if all_committed and not self.ledger.audits_drawn and docket.agreed.keys() >= set(docket.watched):
            judgement = compare_links(docket)
            if judgement is None:
                self._audits.draw()
        return judgement

    def take_proved(self, alive: Collection[str]) -> list[Judgement]:
        """Hand out who is still to be convicted, once each, and forget what was to be confirmed."""
        proved = {judgement.verdict.party: judgement for judgement in reversed(self.docket.proved)}
        self.docket.proved.clear()
        self._owner_audits.forget()
        return [judgement for party, judgement in proved.items() if party in alive]

    def forget_audits(self) -> None:
        """What the owner has redone leads to no update: its batch is given up."""
        self._owner_audits.forget()

    def decided(self, *, may_lag: bool) -> bool:
        """Whether the optimizers may take the step: its own audits may lag, those of the step before may not any more.

        Args:
            may_lag: Whether the step could be undone and nothing speaks against doing so.
        """
        docket, ledger = self.docket, self.ledger
        if len(ledger.commits) < len(docket.assignment.shares):
            return False
        if not docket.plan.guard.enabled:
            return True
        watched = set(docket.watched)
        return (
            ledger.audits_drawn
            and not self._audits.screened
            and ledger.gradients_agreed >= set(docket.watched_shares)
            and watched <= docket.agreed.keys()
            and docket.lagging is None
            and (ledger.is_audited or (may_lag and ledger.may_lag))
        )

    def doubt_step(self) -> bool:
        """The outcome is not a number: the owner is to redo every stage once, where its bits can be compared.

        Returns:
            Whether there is anything that it has not redone yet.
        """
        docket, ledger = self.docket, self.ledger
        if docket.plan.guard.mode != "phalanx":
            return False
        alike = {
            s for s in docket.watched if docket.same_class(docket.holder(s)) and docket.same_class(docket.shadow(s))
        }
        ledger.owners_audits |= alike - ledger.owner_audited
        self._has_news = True
        return bool(ledger.owners_audits)

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with whatever brings the step nearer to its end; repetition and idle talk change nothing."""
        ledger, docket = self.ledger, self.docket
        said = sum(len(states) for states in self._updates.said.values())
        done = (len(ledger.commits), len(ledger.held), len(docket.agreed), said, len(self.ready))
        return (*done, *self._audits.progress)

    def find_silent(self) -> str | None:
        """Nothing has come for long: hand on what is stuck, and name who is to be replaced, if anybody."""
        docket = self.docket
        late = [
            party
            for stage in docket.watched
            for party in (docket.holder(stage), docket.shadow(stage))
            if stage not in docket.agreed and party != OWNER and party not in self._updates.said.get(stage, {})
            if party == docket.holder(stage) or not docket.plan.guard.one_optimizer
        ]
        return self._inquest.find(Missing(late, list(self._audits.screened.values()), self._updates.unsent))

    def waiting_for(self) -> str:
        """What is still missing, for a message to the user."""
        ledger, watched, lagging = self.ledger, set(self.docket.watched), self.docket.lagging
        missing = {
            "audits of the last step (stage, auditor)": [] if lagging is None else lagging.owing,
            "commitments of stages": _stages(set(self.docket.assignment.shares) - ledger.commits.keys()),
            "audits (stage, microbatch, auditor)": ledger.unreported,
            "gradients of stages": _stages(set(self.docket.watched_shares) - ledger.gradients_agreed),
            "audits of whole steps (stage, auditor)": sorted(ledger.awaited_step_audits - ledger.steps_agreed),
            "states of stages": sorted(watched - self.docket.agreed.keys()),
            "screened (stage, microbatch)": sorted(self._audits.screened),
        }
        return ", ".join(f"{what} {which}" for what, which in missing.items() if which) or "nothing"

    def clip(self) -> float:
        """Clip coefficient of the step, from norms that the shadows have confirmed."""
        clip_norm = self.docket.plan.optimizer.clip_norm
        self.ledger.clip_coefficient = clip_coefficient(self.ledger.total_norm(), clip_norm)
        return self.ledger.clip_coefficient

    # --- audits -------------------------------------------------------------------------------------------

    def _audit_as_owner(self) -> Judgement | None:
        """Last of all, when the auditors have said what they say."""
        docket, ledger = self.docket, self.ledger
        docket.proved += self._owner_audits.weigh_states()
        if docket.proved:
            return docket.proved.pop(0)
        if not ledger.audits_drawn or ledger.unreported:
            return None
        for stage in sorted(ledger.owners_audits):
            ledger.num_audits += docket.plan.microbatches
            ledger.owners_audits.remove(stage)
            ledger.owner_audited.add(stage)
            docket.proved += self._owner_audits.run(stage)
            if docket.proved:
                return docket.proved.pop(0)
        return None

    def _ask_for_urgent_audit(self, hit: ScreenHit) -> None:
        party = self.docket.server(hit.source, hit.microbatch)
        self.docket.observe("screen_hit", {**hit.model_dump(mode="json"), "party": party})
        if not self.docket.plan.guard.audits:
            self._count_strike(party, hit)
            return
        self._audits.ask_urgently(hit)

    def _count_strike(self, party: str, hit: ScreenHit) -> None:
        """Mode `statistics`: nobody can look closer, so odd numbers condemn, and until then they are used."""
        self._strikes[party] += 1
        if self._strikes[party] < _STRIKES and hit.reason != NOT_FINITE:
            self._audits.release(hit)
            return
        reason = f"stage {hit.source}, microbatch {hit.microbatch}, {hit.direction}: {hit.reason}"
        self._convictions.append(self.docket.judgement("statistics", party, hit.source, reason))


def _stages(shares: Iterable[Share]) -> list[int]:
    return sorted({stage for stage, _ in shares})


def _of(hit: ScreenHit) -> tuple[int, int]:
    return (hit.source, hit.microbatch)


def _expect(sender: str, expected: str | None, kind: str) -> None:
    if sender != expected:
        raise FrameError(f"{sender!r} sent {kind!r}; expected it from {expected!r}")
