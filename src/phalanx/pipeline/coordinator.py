"""The owner's decisions: compare commitments, draw audits, weigh reports, and say when a step may be applied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.errors import FrameError, SignatureError, TransportError
from phalanx.optimizers import clip_coefficient
from phalanx.pipeline.bulk import Post, digest_of_parts
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.courier import Courier
from phalanx.pipeline.desk import Received
from phalanx.pipeline.distance import token_distance
from phalanx.pipeline.draw import AuditDraw
from phalanx.pipeline.evidence import Exhibit
from phalanx.pipeline.ledger import Committed, MessageKey, StepLedger
from phalanx.pipeline.messages import (
    Applied,
    Audit,
    AuditReport,
    Commit,
    Fault,
    Fetch,
    GradientHeld,
    Ready,
    Release,
    ScreenHit,
    Signed,
    StateDigest,
)
from phalanx.pipeline.plan import BOUNDARY_DTYPE, StepPlan
from phalanx.pipeline.recovery import Assignment
from phalanx.pipeline.referee import Dispute, Referee
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.signed import open_signed, unverified_field
from phalanx.pipeline.verdict import Verdict
from phalanx.security.crypto import Peer
from phalanx.transport.tensors import tensor_from

Observe = Callable[[str, dict[str, object]], None]


@dataclass
class Judgement:
    """A verdict with what it rests on."""

    verdict: Verdict
    exhibit: Exhibit = field(default_factory=Exhibit)
    headers: dict[str, Signed] = field(default_factory=dict)


class Coordinator:
    """Collects what parties commit to; `advance` says what follows from it."""

    def __init__(
        self,
        plan: StepPlan,
        post: Post,
        courier: Courier,
        draw: AuditDraw,
        peer: Callable[[str], Peer],
        observe: Observe,
    ) -> None:
        self.plan = plan
        self.assignment = Assignment({}, {})
        self.classes: dict[str, str] = {}
        self.ledger = StepLedger(0, 0)
        self.previous: StepLedger | None = None
        self.agreed: dict[int, StateDigest] = {}
        """Digest of each stage at the present step, once holder and shadow have both signed it."""
        self.before: dict[int, StateDigest] = {}
        self.ready: dict[str, Ready] = {}
        self.usage: dict[str, dict[str, float]] = {}
        self.bytes_sent: dict[str, dict[str, int]] = {}
        self.num_screen_hits = 0
        self.referee = Referee(plan, courier, self._same_class_as_owner)
        self._post = post
        self._courier = courier
        self._draw = draw
        self._peer = peer
        self._observe = observe
        self._guarded = plan.guard.enabled
        self._said: dict[int, dict[str, StateDigest]] = {}
        self._screened: dict[tuple[int, int], ScreenHit] = {}
        self._unweighed: list[AuditReport] = []
        self._faults: list[tuple[str, Fault]] = []

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
            if message.epoch == self.ledger.epoch:
                self.ready[sender] = message
        elif isinstance(message, Fault):
            self._faults.append((sender, message))
        elif isinstance(message, Commit | GradientHeld | AuditReport | ScreenHit):
            if message.epoch == self.ledger.epoch and message.step == self.ledger.step:
                self._add_step_message(received, message)
        else:
            return False
        return True

    def _add_applied(self, sender: str, message: Applied) -> None:
        self.usage[sender], self.bytes_sent[sender] = dict(message.usage), dict(message.bytes_sent)
        for name, state in message.states.items():
            stage = int(name) if name.isdecimal() else -1
            if sender not in (self.assignment.holders.get(stage), self.assignment.shadows.get(stage)):
                raise FrameError(f"{sender!r} reported the state of stage {name}, which it does not have")
            if state.step == self.ledger.step and message.epoch == self.ledger.epoch:
                self._said.setdefault(stage, {})[sender] = state

    def _add_step_message(self, received: Received, message: Commit | GradientHeld | AuditReport | ScreenHit) -> None:
        sender = received.sender
        if isinstance(message, ScreenHit):
            target = message.source + (1 if message.direction == "forward" else -1)
            self._expect(sender, self.assignment.holders.get(target), message.kind)
            self._ask_for_urgent_audit(message)
            return
        expected = self.assignment.holders if isinstance(message, Commit) else self.assignment.shadows
        self._expect(sender, expected.get(message.stage), message.kind)
        if isinstance(message, Commit):
            if message.stage in self.ledger.commits:
                raise FrameError(f"{sender!r} committed stage {message.stage} twice in step {message.step}")
            self.ledger.add_commit(message, received.header)
        elif isinstance(message, GradientHeld):
            self.ledger.held.setdefault(message.stage, message)
        else:
            self._unweighed.append(message)

    @staticmethod
    def _expect(sender: str, expected: str | None, kind: str) -> None:
        if sender != expected:
            raise FrameError(f"{sender!r} sent {kind!r}; expected it from {expected!r}")

    def _ask_for_urgent_audit(self, hit: ScreenHit) -> None:
        self.num_screen_hits += 1
        self._observe("screen_hit", {**hit.model_dump(mode="json"), "party": self.assignment.holders[hit.source]})
        key = (hit.source, hit.microbatch)
        both: tuple[Direction, ...] = ("forward", "backward")
        self._screened[key] = hit
        self.ledger.num_audits += 1
        audit = Audit(
            epoch=hit.epoch,
            step=hit.step,
            stage=hit.source,
            microbatches=(hit.microbatch,),
            directions=("forward",) if hit.direction == "forward" else both,
            urgent=True,
        )
        self._post(self.assignment.shadows[hit.source], audit, ())

    # --- a step's life ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, step: int, assignment: Assignment) -> None:
        """Start again with a new assignment; what was agreed about states stays."""
        self.assignment = assignment
        self.referee.epoch = epoch
        self.ready.clear()
        self._reset(step, epoch)

    def open_step(self, step: int, epoch: int) -> None:
        """Start the next step; states of the last update are still to be agreed on."""
        self.previous, self.before, self.agreed = self.ledger, self.agreed, {}
        self._reset(step, epoch)

    def _reset(self, step: int, epoch: int) -> None:
        self.ledger = StepLedger(step, epoch)
        self._said.clear()
        self._screened.clear()
        self._unweighed.clear()

    def advance(self) -> Judgement | None:
        """Draw what conclusions can be drawn now; the first guilty party ends it."""
        if not self._guarded:
            return self._weigh_faults()
        judgement = self._weigh_faults() or self._weigh_states() or self._weigh_reports() or self._weigh_gradients()
        if judgement is not None:
            return judgement
        ledger = self.ledger
        all_committed = len(ledger.commits) == len(self.plan.stages)
        if all_committed and not ledger.audits_drawn and len(self.agreed) == len(self._watched()):
            judgement = self._compare_links()
            if judgement is None:
                self._draw_audits()
        return judgement

    @property
    def decided(self) -> bool:
        """Whether everything that was asked for is in and nothing is left to doubt."""
        ledger = self.ledger
        if len(ledger.commits) < len(self.plan.stages):
            return False
        if not self._guarded:
            return True
        watched = self._watched()
        return (
            ledger.audits_drawn
            and ledger.awaited_audits <= ledger.reports.keys()
            and set(watched) <= ledger.gradients_agreed
            and set(watched) <= self.agreed.keys()
            and not self._screened
            and not self._unweighed
        )

    def waiting_for(self) -> str:
        """What is still missing, for a message to the user."""
        ledger = self.ledger
        silent = sorted(set(range(len(self.plan.stages))) - ledger.commits.keys())
        audits = sorted(ledger.awaited_audits - ledger.reports.keys())
        states = sorted(set(self._watched()) - self.agreed.keys())
        return f"commitments of stages {silent}, audits {audits}, states of stages {states}, screened {sorted(self._screened)}"

    def clip(self) -> float:
        """Clip coefficient of the step, from norms that the shadows have confirmed."""
        self.ledger.clip_coefficient = clip_coefficient(self.ledger.total_norm(), self.plan.optimizer.clip_norm)
        return self.ledger.clip_coefficient

    def _watched(self) -> list[int]:
        return sorted(self.assignment.shadows) if self._guarded else []

    # --- conclusions ------------------------------------------------------------------------------------

    def _weigh_faults(self) -> Judgement | None:
        while self._faults:
            sender, fault = self._faults.pop(0)
            self._observe(
                "fault", {"party": sender, "about": fault.about, "error": fault.error, "reason": fault.reason}
            )
            if fault.evidence is None or fault.about == OWNER:
                continue
            try:
                body = open_signed(fault.evidence, self._peer(fault.about)).fields.body
            except (SignatureError, TransportError):
                continue
            shape, dtype = list(self.plan.hidden_shape), str(BOUNDARY_DTYPE).removeprefix("torch.")
            if (body.get("shape"), body.get("dtype")) != (shape, dtype) and body.get("epoch") == self.ledger.epoch:
                return self._judgement(
                    "shape",
                    fault.about,
                    int(body.get("source", -1)),
                    fault.reason,
                    sender,
                    {"message": fault.evidence},
                )
        return None

    def _weigh_states(self) -> Judgement | None:
        for stage in self._watched():
            if stage in self.agreed:
                continue
            holder, shadow = self.assignment.holders[stage], self.assignment.shadows[stage]
            said = self._said.get(stage, {})
            if holder not in said or shadow not in said:
                continue
            if said[holder] == said[shadow] or not self._same_class(holder, shadow):
                self.agreed[stage] = said[holder]
                continue
            return self._judge_state(stage, holder, shadow, said)
        return None

    def _judge_state(self, stage: int, holder: str, shadow: str, said: dict[str, StateDigest]) -> Judgement | None:
        self._observe("alarm", {"step": self.ledger.step, "stage": stage, "kind": "state", "accuser": shadow})
        before, previous = self.before.get(stage), self.previous
        if before is None or previous is None:
            reason = f"stage {stage}: the state is not the one that the owner sent"
            return self._judgement("state", shadow, stage, reason, OWNER, {})
        gradient = (previous.commits[stage].gradient, previous.clip_coefficient)
        guilty = self.referee.judge_update(stage, holder, shadow, before, gradient, said)
        if guilty is None:
            self.agreed[stage] = said[holder]
            return None
        reason = f"stage {stage}: {guilty} reported a state after step {before.step} that the signed gradient does not lead to"
        return self._judgement("state", guilty, stage, reason, shadow if guilty == holder else holder, {})

    def _weigh_reports(self) -> Judgement | None:
        while self._unweighed:
            report = self._unweighed.pop(0)
            key = (report.stage, report.microbatch)
            known = self.ledger.messages if not report.urgent else self._screened_messages(report)
            if known is None:
                continue
            judgement = self._weigh(report, known)
            if judgement is not None:
                return judgement
            if report.urgent:
                self._release(self._screened.pop(key))
            else:
                self.ledger.reports[key] = report
        return None

    def _weigh_gradients(self) -> Judgement | None:
        ledger = self.ledger
        for stage in self._watched():
            commit, held = ledger.commits.get(stage), ledger.held.get(stage)
            if commit is None or held is None or stage in ledger.gradients_agreed or stage not in self.agreed:
                continue
            if (commit.gradient, commit.norm_squared) == (held.gradient, held.norm_squared):
                ledger.gradients_agreed.add(stage)
                continue
            holder, shadow = self.assignment.holders[stage], self.assignment.shadows[stage]
            if self._same_class(holder, shadow) or self.plan.guard.shadow == "gradient":
                guilty = self._judge_gradient(stage, holder, shadow, held)
                reason = (
                    f"stage {stage}: {guilty} reported a weight gradient or norm that is not what it sent or computed"
                )
                return self._judgement("gradient", guilty, stage, reason, shadow if guilty == holder else holder, {})
            ledger.gradients_agreed.add(stage)
        return None

    def _judge_gradient(self, stage: int, holder: str, shadow: str, held: GradientHeld) -> str:
        commit = self.ledger.commits[stage]
        if self.plan.guard.shadow == "lockstep":
            inputs = {key: known for key, known in self.ledger.messages.items() if key[0] in (stage - 1, stage + 1)}
            holders = self.assignment.holders
            return self.referee.judge_step(self.ledger, stage, inputs, holders, shadow, self.agreed[stage])
        if held.gradient == commit.gradient:
            return self.referee.judge_norm(self.ledger, stage, holder, shadow)
        try:
            parts = [open_signed(part, self._peer(holder)) for part in held.parts]
        except (SignatureError, FrameError):
            return shadow
        sent = digest_of_parts([part.fields.payload_digest for part in parts])
        # the parts carry the holder's own signature: what it sent is not what it committed to
        return holder if sent == held.gradient else shadow

    def _screened_messages(self, report: AuditReport) -> dict[MessageKey, Committed] | None:
        """An urgent audit comes before the commitments: ask both ends for what they signed."""
        hit = self._screened.get((report.stage, report.microbatch))
        if hit is None:
            return None
        target = hit.source + (1 if hit.direction == "forward" else -1)
        wanted: list[tuple[str, MessageKey]] = [
            (self.assignment.holders[target], (hit.source, hit.direction, hit.microbatch)),
            (self.assignment.holders[hit.source], (hit.source - 1, "forward", hit.microbatch)),
        ]
        if hit.direction == "backward":
            wanted.append((self.assignment.holders[hit.source], (hit.source + 1, "backward", hit.microbatch)))
        known = {}
        for party, (source, direction, microbatch) in wanted:
            request = Fetch(
                epoch=hit.epoch,
                step=hit.step,
                microbatch=microbatch,
                direction=direction,
                source=source,
                claim=False,
            )
            answer = self._courier.fetch(party, request)
            evidence = None if answer is None else getattr(answer.message, "evidence", None)
            if isinstance(evidence, Signed):
                digest = open_signed(evidence, self._peer(self.assignment.holders[source])).fields.payload_digest
                known[(source, direction, microbatch)] = Committed(digest, evidence)
        return known

    def _weigh(self, report: AuditReport, known: Mapping[MessageKey, Committed]) -> Judgement | None:
        stage, m = report.stage, report.microbatch
        holder, auditor = self.assignment.holders[stage], self.assignment.shadows[stage]
        inputs: dict[Direction, Committed] = {}
        for direction, source in (("forward", stage - 1), ("backward", stage + 1)):
            committed = known.get((source, direction, m))  # type: ignore[arg-type]
            if committed is not None:
                inputs[direction] = committed  # type: ignore[index]
        judgement = self._compare_inputs(report, inputs, auditor)
        if judgement is not None:
            return judgement
        for direction, digest in report.digests.items():
            output = known.get((stage, direction, m))
            if output is None:
                continue
            if self._matches(report, direction, digest, output, holder, auditor):
                continue
            self._observe(
                "alarm",
                {
                    "step": report.step,
                    "stage": stage,
                    "microbatch": m,
                    "direction": direction,
                    "accuser": auditor,
                },
            )
            dispute = Dispute(
                step=report.step,
                epoch=report.epoch,
                stage=stage,
                microbatch=m,
                direction=direction,
                holder=holder,
                accuser=auditor,
                holders=self.assignment.holders,
                inputs=inputs,
                output=output,
                report=report,
                state=self.agreed[stage],
            )
            verdict, exhibit = self.referee.judge_message(dispute)
            if verdict is not None:
                headers = {"output": output.header, **{f"input_{d}": c.header for d, c in inputs.items()}}
                return Judgement(verdict, exhibit, headers)
        return None

    def _compare_inputs(
        self, report: AuditReport, inputs: Mapping[Direction, Committed], auditor: str
    ) -> Judgement | None:
        """Two headers of one sender for one message prove that it told two stories."""
        for signed in report.inputs:
            peer_name, direction = self._sender_of(signed)
            try:
                header = open_signed(signed, self._peer(peer_name))
            except (SignatureError, FrameError):
                reason = f"stage {report.stage}: {auditor} reported an input that {peer_name} did not sign"
                return self._judgement("forgery", auditor, report.stage, reason, OWNER, {"input": signed})
            committed = inputs.get(direction)
            if committed is not None and committed.digest != header.fields.payload_digest:
                reason = f"stage {report.stage}, microbatch {report.microbatch}: {peer_name} signed two different {direction} messages"
                evidence = {"told_stage": committed.header, "told_auditor": signed}
                return self._judgement("equivocation", peer_name, report.stage, reason, auditor, evidence)
        return None

    def _sender_of(self, signed: Signed) -> tuple[str, Direction]:
        body = unverified_field(signed, "body")
        return self.assignment.holders[int(body["source"])], body["direction"]

    def _matches(
        self,
        report: AuditReport,
        direction: Direction,
        digest: str,
        output: Committed,
        holder: str,
        auditor: str,
    ) -> bool:
        if digest == output.digest:
            return True
        if self._same_class(holder, auditor):
            return False
        tensors = []
        for party, claim in ((auditor, True), (holder, False)):
            request = Fetch(
                epoch=report.epoch,
                step=report.step,
                microbatch=report.microbatch,
                direction=direction,
                source=report.stage,
                claim=claim,
            )
            answer = self._courier.fetch(party, request)
            if answer is None:
                return False
            tensors.append(tensor_from(answer.payload, BOUNDARY_DTYPE, self.plan.hidden_shape))
        # twice the referee's tau: of two parties that differ by this much, one is off by more than tau
        return token_distance(tensors[1], tensors[0]) <= 2 * self.plan.guard.tolerance

    def _compare_links(self) -> Judgement | None:
        """The jumping connection as an equality of digests: what one stage sent is what the next one used."""
        stages = len(self.plan.stages)
        for source in range(stages):
            for direction, target in (("forward", source + 1), ("backward", source - 1)):
                if not 0 <= target < stages or self._both_owner(source, target):
                    continue
                for m in range(self.plan.microbatches):
                    judgement = self._compare_link((source, direction, m), target)  # type: ignore[arg-type]
                    if judgement is not None:
                        return judgement
        return None

    def _both_owner(self, one: int, other: int) -> bool:
        return self.assignment.holders[one] == self.assignment.holders[other] == OWNER

    def _compare_link(self, key: MessageKey, target: int) -> Judgement | None:
        source, direction, m = key
        sender, receiver = self.assignment.holders[source], self.assignment.holders[target]
        said, received = self.ledger.said_digest(key), self.ledger.messages.get(key)
        where = f"stage {source}, microbatch {m}, {direction}"
        if received is None:
            reason = f"{where}: {receiver} committed to the step without this input"
            return self._judgement("forgery", receiver, target, reason, OWNER, {})
        if said == received.digest:
            return None
        try:
            open_signed(received.header, self._peer(sender))
        except (SignatureError, FrameError):
            reason = f"{where}: {receiver} committed to an input that {sender} did not sign"
            return self._judgement("forgery", receiver, target, reason, sender, {"input": received.header})
        reason = f"{where}: {sender} committed to another tensor than it sent"
        return self._judgement("equivocation", sender, source, reason, receiver, {"sent": received.header})

    def _draw_audits(self) -> None:
        ledger = self.ledger
        ledger.audits_drawn = True
        lockstep = self.plan.guard.shadow == "lockstep"
        for stage in self._watched():
            drawn = (
                tuple(range(self.plan.microbatches))
                if lockstep
                else self._draw.microbatches(
                    step=ledger.step, epoch=ledger.epoch, stage=stage, num_microbatches=self.plan.microbatches
                )
            )
            ledger.awaited_audits |= {(stage, m) for m in drawn}
            ledger.num_audits += len(drawn)
            audit = Audit(
                epoch=ledger.epoch,
                step=ledger.step,
                stage=stage,
                microbatches=drawn,
                directions=("forward", "backward"),
                urgent=False,
            )
            self._post(self.assignment.shadows[stage], audit, ())

    def _release(self, hit: ScreenHit) -> None:
        target = hit.source + (1 if hit.direction == "forward" else -1)
        release = Release(
            epoch=hit.epoch,
            step=hit.step,
            microbatch=hit.microbatch,
            direction=hit.direction,
            source=hit.source,
        )
        self._post(self.assignment.holders[target], release, ())

    def _judgement(
        self, offence: str, party: str, stage: int, reason: str, accuser: str, headers: dict[str, Signed]
    ) -> Judgement:
        verdict = Verdict.model_validate(
            {
                "step": self.ledger.step,
                "stage": stage,
                "party": party,
                "offence": offence,
                "reason": reason,
                "accuser": accuser,
            }
        )
        return Judgement(verdict, Exhibit(), headers)

    def _same_class(self, one: str, other: str) -> bool:
        return self.classes[one] == self.classes[other]

    def _same_class_as_owner(self, party: str) -> bool:
        return self._same_class(party, OWNER)
