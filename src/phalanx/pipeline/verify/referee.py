"""The referee (L4) redoes one microbatch, or one update, from what both sides signed, and names exactly one party."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.engine import Offence, Verdict
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.files import (
    CLAIM_PREFIX,
    MICROBATCH_INPUTS,
    NOISE_PREFIX,
    TRUTH_PREFIX,
    ComparedTensors,
)
from phalanx.pipeline.evidence.weighing import (
    GradientClaim,
    Limit,
    MessageClaim,
    MessageFinding,
    same_norm,
    weigh_gradient,
    weigh_message,
    weigh_update,
)
from phalanx.pipeline.plan import BOUNDARY_DTYPE, Numerics, StepPlan
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Fetch,
    FetchBulk,
    MessageKey,
    PassedOnHeader,
    Purpose,
    StateDigest,
    target_of,
)
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed, owner_task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.rounding import MARGIN, PROBES, rounding_noise
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.facts import CommittedMessage, RefereeWork, Signed, StepFacts, StepLedger
from phalanx.planner.schedules import Direction
from phalanx.security.crypto import digest_hex
from phalanx.security.privacy import noise_seed
from phalanx.transport.tensors import tensor_from

NoiseKeyOf = Callable[[int, int], bytes | None]
"""Tells the key of the noise of an epoch and a stage; None where there is none."""

NO_TENSORS: Mapping[str, Tensor] = {}
_OTHER_WEIGHTS = "sent weights that differ from the signed ones"


@dataclass(frozen=True)
class Dispute:
    """A recomputed message that is not the committed one.

    Attributes:
        report: Names stage, step, epoch and microbatch.
        state: What both copies of the stage were agreed to be, each under its own party's signature.
    """

    report: AuditReport
    direction: Direction
    accuser: str
    assignment: Assignment
    inputs: Mapping[Direction, CommittedMessage]
    output: CommittedMessage
    state: StateDigest

    @property
    def key(self) -> MessageKey:
        """The message."""
        return self.report.stage, self.direction, self.report.microbatch

    @property
    def holder(self) -> str:
        """The party that served the stage."""
        return self.assignment.holders[self.report.stage]

    def sender_of_input(self, direction: Direction) -> str:
        """The party that sent the stage its input of one direction."""
        return self.assignment.holders[self.report.stage + (-1 if direction == "forward" else 1)]

    def signed_headers(self) -> dict[str, PassedOnHeader]:
        """Return the signed headers about it: the disputed message and its inputs."""
        return {"output": self.output.header} | {
            f"input_{name}": message.header for name, message in self.inputs.items()
        }

    def signed_states(self, facts: StepFacts) -> Mapping[str, Signed]:
        """Return the headers in which both parties with a copy signed its state."""
        stage = self.report.stage
        return facts.state_headers(stage, self.state, self.holder, facts.assignment.shadows.get(stage))


@dataclass(frozen=True)
class Ruling:
    """What a recomputation of a gradient or an update came to.

    Attributes:
        party: The party whose claim is off, or that has withheld signed bytes; None where neither is.
        offence: "transfer" convicts nobody: what decides was not brought.
        state: That an update leads to, where one was redone.
    """

    party: str | None
    offence: Offence
    compared: ComparedTensors = field(default_factory=ComparedTensors)
    state: StateDigest | None = None


@dataclass
class RedoneStep:
    """A stage's step as the judge did it.

    Attributes:
        inputs: Inputs of each microbatch, by name in evidence.
        outputs: The messages that come out, by direction and microbatch.
        noise_seeds: Of the noise on each tensor, in this step alone; nothing where rows are not hidden.
    """

    numerics: Numerics
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[tuple[Direction, int], Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    noise_seeds: dict[str, bytes] = field(default_factory=dict)

    def add_microbatch(self, microbatch: int, inputs: Sequence[Tensor], y: Tensor, x_gradient: Tensor | None) -> None:
        """Take one microbatch."""
        for name, tensor in zip(MICROBATCH_INPUTS, inputs, strict=True):
            self.inputs[f"{name}-{microbatch:05d}"] = tensor
        self.outputs[("forward", microbatch)] = y
        if x_gradient is not None:
            self.outputs[("backward", microbatch)] = x_gradient

    @property
    def signed_gradient(self) -> tuple[str, float | None]:
        """Digest and squared norm of the weight gradient, as an honest party signs them."""
        return transfer_digest(self.gradients), finite_norm_squared(self.gradients, self.numerics)

    @property
    def input_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Input and gradient of the output of each microbatch."""
        shown = [sorted(name for name in self.inputs if name.startswith(f"{kind}-")) for kind in MICROBATCH_INPUTS]
        return [(self.inputs[x], self.inputs[gradient]) for x, gradient in zip(*shown, strict=True)]

    def compared_tensors(self, copy: StageCopy, claimed: Mapping[str, Tensor] = NO_TENSORS) -> ComparedTensors:
        """Return the tensors that prove the gradient to others: weights, inputs, seeds of the noise, and results.

        Args:
            claimed: The gradient that the guilty party signed, where bits do not decide.
        """
        truth = {f"{TRUTH_PREFIX}{name}": tensor for name, tensor in self.gradients.items()}
        seeds = {
            f"{NOISE_PREFIX}{name}": torch.frombuffer(bytearray(seed), dtype=torch.uint8)
            for name, seed in self.noise_seeds.items()
        }
        tensors = {**self.inputs, **truth, **seeds, **claim_tensors(claimed)}
        return ComparedTensors(tensors, copy.weights_digest(), copy.weight_tensors())


def claim_tensors(claimed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the tensors of a signed gradient as evidence does."""
    return {f"{CLAIM_PREFIX}{name}": tensor for name, tensor in claimed.items()}


class Referee:
    """The owner's referee; it trusts digests that were signed, never the party that brings the bytes.

    Each party answers for its own signatures, and for nothing else: its message is redone with the weights of the
    digest that it signed. A party that does not bring the bytes of its own digest is replaced and not convicted.

    Guarantees:
        With the alarm at 2 tau and the referee at tau, an accusation within honest rounding convicts no party of a
        lie, and of two parties that differ by more at least one is off.

    Source: referee with a committed accuser, `verified pipeline` design section 4; after the refereed
    delegation of computation of Canetti, Riva and Rothblum 2011.
    """

    def __init__(
        self, plan: StepPlan, bits_decide: Callable[[str], bool], noise_key: NoiseKeyOf = lambda epoch, stage: None
    ) -> None:
        """`bits_decide` tells whether a party's bits must equal the owner's own; `noise_key` is `StepFacts`'s."""
        self._plan = plan
        self._bits_decide = bits_decide
        self._noise_key = noise_key
        self._work = RefereeWork()

    def take_work(self) -> RefereeWork:
        """Return the work since the last call: that of one dispute, if it is asked after each."""
        spent, self._work = self._work, RefereeWork()
        return spent

    @owner_task
    async def judge_message(
        self, dispute: Dispute, copy: StageCopy | None = None
    ) -> tuple[Verdict | None, ComparedTensors]:
        """Redo the disputed microbatch.

        Args:
            copy: The stage, if the referee has it already; else the accuser is asked for its weights.

        Returns:
            The verdict, and its tensors; None within tolerance.
        """
        report = dispute.report
        copy = copy or await self.fetch_weights(report.epoch, report.step, report.stage, dispute.accuser, dispute.state)
        if copy is None:
            return self._guilty_verdict(dispute, dispute.accuser, "transfer", _OTHER_WEIGHTS), ComparedTensors()
        directions: tuple[Direction, ...] = ("forward", "backward") if dispute.direction == "backward" else ("forward",)
        inputs = list[Tensor]()
        for direction in directions:
            tensor = await self._fetch_input(dispute, direction)
            if tensor is None:
                # a stage answers for the inputs that it shows, else their sender does: its signature is on them
                sender = dispute.sender_of_input(direction)
                is_shown = dispute.inputs[direction].shown_by == dispute.holder
                party = dispute.holder if is_shown or sender == OWNER else sender
                reason = f"sent no {direction} input of the signed digest"
                return self._guilty_verdict(dispute, party, "transfer", reason), ComparedTensors()
            inputs.append(tensor)
        reported, claim = report.digests[dispute.direction], None
        if dispute.accuser != OWNER:
            claim = await self._fetch_tensor(dispute, dispute.key, (dispute.accuser,), reported, claim=True)
        receiver = dispute.assignment.holders[target_of(dispute.key)]
        sent_output = await self._fetch_tensor(dispute, dispute.key, (receiver, dispute.holder), dispute.output.digest)
        shown = {name: tensor for name, tensor in (("accuser", claim), ("claimed", sent_output)) if tensor is not None}
        compared = self._redo_message(dispute, copy, inputs, shown)
        limit = Limit(self._plan.guard.tolerance, lambda: self._allowed_distance(dispute, copy, inputs))
        output = MessageClaim(dispute.holder, dispute.output.digest, sent_output, self._limit_of(dispute.holder, limit))
        accusation = MessageClaim(dispute.accuser, reported, claim, self._limit_of(dispute.accuser, limit))
        finding = weigh_message(compared.tensors["recomputed"], output, accusation)
        return None if finding is None else self._verdict_of_finding(dispute, finding), compared

    def _limit_of(self, party: str, limit: Limit) -> Limit | None:
        return None if self._bits_decide(party) else limit

    def _redo_message(
        self, dispute: Dispute, copy: StageCopy, inputs: Sequence[Tensor], shown: Mapping[str, Tensor]
    ) -> ComparedTensors:
        """The disputed message as it comes out of these weights, with everything that it is compared with."""
        self._count_work(microbatches=1)
        gradient = inputs[1] if len(inputs) > 1 else None
        report = dispute.report
        y, x_gradient = copy.runner.recompute_microbatch(report.step, report.microbatch, inputs[0], gradient)
        truth = y if dispute.direction == "forward" or x_gradient is None else x_gradient
        tensors = {"input": inputs[0], "recomputed": truth, **shown}
        if gradient is not None:
            tensors["gradient"] = gradient
        return ComparedTensors(tensors, copy.weights_digest(), copy.weight_tensors())

    @owner_task
    async def stage_at(self, stage: int, parties: Sequence[str], state: StateDigest) -> StageCopy | None:
        """Return a stage with weights and moments, from the first party that brings the agreed ones."""
        for party in parties:
            copy = StageCopy.build_empty(self._plan, stage)
            request = FetchBulk(epoch=self.epoch, step=state.step, stage=stage, purpose="state")
            state_and_step = await TensorsNeed(party, request, copy.state_tensors())
            if state_and_step is not None:
                copy.load_tensors(*state_and_step)
                if copy.compute_digest() == state:
                    return copy
        return None

    @owner_task
    async def fetch_inputs(
        self, ledger: StepLedger, stage: int, microbatch: int, assignment: Assignment
    ) -> list[Tensor] | None:
        """Activation and gradient that a stage committed to have used; None when no party brings one of them."""
        keys: tuple[MessageKey, ...] = ((stage - 1, "forward", microbatch), (stage + 1, "backward", microbatch))
        tensors_found = [await self.fetch_committed(ledger, key, assignment, stage) for key in keys]
        tensors = [tensor for tensor in tensors_found if tensor is not None]
        return tensors if len(tensors) == len(tensors_found) else None

    @owner_task
    async def judge_update(
        self,
        stage: int,
        parties: Sequence[str],
        before: StateDigest,
        gradient: tuple[str, float],
        after: Mapping[str, StateDigest],
    ) -> Ruling:
        """Redo one optimizer step from an undo copy of the agreed state and the gradient that the holder signed.

        Args:
            stage: The stage with copies that differ.
            parties: Those that have an undo copy or the gradient; one that brings each is enough.
            before: The state that all had signed before the step.
            gradient: The digest that the stage committed to, and the clip coefficient of the step.
            after: Reported state of each party with a copy.
        """
        copy = await self._fetch_undone(stage, parties, before)
        gradients = None if copy is None else await self.fetch_gradient(parties, (stage, before.step), gradient[0])
        if copy is None or gradients is None:
            return Ruling(parties[0], "transfer")
        self._count_work(steps=1)
        return self.redo_update(copy, gradients, gradient[1], after)

    def redo_update(
        self, copy: StageCopy, gradients: dict[str, Tensor], clip_coefficient: float, after: Mapping[str, StateDigest]
    ) -> Ruling:
        """Let a copy of the agreed state take the step, and compare; the copy is one update further then."""
        state = {name: tensor.clone() for name, tensor in copy.state_tensors().items()}
        shown = {f"{TRUTH_PREFIX}{name}": tensor for name, tensor in gradients.items()}
        compared = ComparedTensors(shown, copy.weights_digest(), state)
        copy.apply_update(copy.step_count, gradients, clip_coefficient)
        truth = copy.compute_digest()
        guilty = weigh_update(truth, after)
        return Ruling(guilty[0] if guilty else None, "state", compared, truth)

    async def _fetch_undone(self, stage: int, parties: Sequence[str], before: StateDigest) -> StageCopy | None:
        """A stage as it was before its last update, from the first party that brings the agreed state of it."""
        for party in parties:
            copy = StageCopy.build_empty(self._plan, stage)
            request = FetchBulk(epoch=self.epoch, step=before.step, stage=stage, purpose="undo")
            undo = await TensorsNeed(party, request, copy.optimizer.state_tensors())
            wanted = request.model_copy(update={"purpose": "weights"})
            weights = await TensorsNeed(party, wanted, copy.weight_tensors())
            if undo is None or weights is None:
                continue
            frozen = {name: tensor for name, tensor in weights[0].items() if name.startswith("frozen/")}
            copy.load_tensors({**frozen, **undo[0]}, before.step)
            if copy.compute_digest() == before:
                return copy
        return None

    @owner_task
    async def judge_norm(self, ledger: StepLedger, stage: int, holder: str, shadow: str) -> Ruling:
        """Compute the norm of a gradient that both agree on; a party with a wrong norm is guilty.

        Two norms that differ by more than rounding allows may both be within that of the true one.
        """
        commit = ledger.commits[stage]
        gradients = await self.fetch_gradient((shadow,), (stage, ledger.step), commit.gradient)
        if gradients is None:
            return Ruling(shadow, "transfer")
        truth, held = finite_norm_squared(gradients, self._plan.numerics), ledger.held.get((stage, shadow))
        signed = {holder: commit.norm_squared, shadow: None if held is None else held.norm_squared}
        for party, norm in signed.items():
            alike = self._bits_decide(party)
            if not same_norm(truth, norm, alike=alike):
                prefix = TRUTH_PREFIX if alike else CLAIM_PREFIX
                compared = ComparedTensors({f"{prefix}{name}": tensor for name, tensor in gradients.items()})
                return Ruling(party, "gradient", compared)
        return Ruling(None, "gradient")

    @owner_task
    async def fetch_gradient(
        self, parties: Sequence[str], place: tuple[int, int], digest: str, purpose: Purpose = "gradient"
    ) -> dict[str, Tensor] | None:
        """Return the weight gradient of a stage in a step from the first party that brings the one of this digest."""
        request = FetchBulk(epoch=self.epoch, stage=place[0], step=place[1], purpose=purpose)
        expected = StageCopy.build_empty(self._plan, place[0]).module.trainable_parameters()
        for party in parties:
            answer = await TensorsNeed(party, request, expected)
            if answer is not None and transfer_digest(answer[0]) == digest:
                return answer[0]
        return None

    @owner_task
    async def judge_step(
        self, ledger: StepLedger, stage: int, assignment: Assignment, auditor: str, other: GradientClaim
    ) -> Ruling:
        """Redo a stage's step from committed inputs; the party with the wrong gradient is guilty.

        Args:
            auditor: The party that contradicts the stage; brings the weights.
        """
        holder, commit = assignment.holders[stage], ledger.commits[stage]
        copy = await self.fetch_weights(ledger.epoch, ledger.step, stage, auditor, ledger.agreed[stage])
        if copy is None:
            return Ruling(auditor, "transfer")
        self._count_work(steps=1)
        redone = await self.redo_step(copy, ledger, stage, assignment)
        if redone is None:
            return Ruling(holder, "transfer")
        claim = GradientClaim(holder, commit.gradient, commit.norm_squared)
        return Ruling(weigh_gradient(redone.signed_gradient, claim, other), "gradient", redone.compared_tensors(copy))

    @owner_task
    async def redo_step(
        self, copy: StageCopy, ledger: StepLedger, stage: int, assignment: Assignment
    ) -> RedoneStep | None:
        """Run all microbatches of a stage again; None when no party brings an input that the stage committed to."""
        redone = RedoneStep(self._plan.numerics)
        for m in range(self._plan.microbatches):
            tensors = await self.fetch_inputs(ledger, stage, m, assignment)
            if tensors is None:
                return None
            y = copy.runner.forward(ledger.step, m, tensors[0])
            redone.add_microbatch(m, tensors, y, copy.runner.backward(ledger.step, m, tensors[1]))
        key = self._noise_key(ledger.epoch, stage)
        redone.gradients = copy.weight_gradient(ledger.step, key)
        if key is not None:
            redone.noise_seeds = {name: noise_seed(key, ledger.step, name) for name in redone.gradients}
        return redone

    epoch = 0
    """Epoch of requests; the engine keeps it at the present one."""

    def _count_work(self, *, microbatches: int = 0, steps: int = 0) -> None:
        work = self._work
        self._work = RefereeWork(microbatches=work.microbatches + microbatches, steps=work.steps + steps)

    @owner_task
    async def fetch_weights(
        self, epoch: int, step: int, stage: int, party: str, state: StateDigest
    ) -> StageCopy | None:
        """A stage with the weights of a signed state, from `party`; None when it does not bring them."""
        copy = StageCopy.build_empty(self._plan, stage)
        request = FetchBulk(epoch=epoch, step=step, stage=stage, purpose="weights")
        answer = await TensorsNeed(party, request, copy.weight_tensors())
        if answer is None:
            return None
        copy.load_weights(answer[0])
        return copy if copy.weights_digest() == state.weights else None

    async def _fetch_input(self, dispute: Dispute, direction: Direction) -> Tensor | None:
        source = dispute.report.stage + (-1 if direction == "forward" else 1)
        parties = (dispute.sender_of_input(direction), dispute.holder)
        key: MessageKey = (source, direction, dispute.report.microbatch)
        return await self._fetch_tensor(dispute, key, parties, dispute.inputs[direction].digest)

    async def _fetch_tensor(
        self, dispute: Dispute, key: MessageKey, parties: Sequence[str], digest: str, *, claim: bool = False
    ) -> Tensor | None:
        request = Fetch.from_key(dispute.report.epoch, dispute.report.step, key, claim=claim)
        return await self.signed_tensor(request, parties, digest)

    @owner_task
    async def fetch_committed(
        self, ledger: StepLedger, key: MessageKey, assignment: Assignment, stage: int
    ) -> Tensor | None:
        """An input that a stage committed to, from its sender or from the stage itself; None when neither brings it."""
        request = Fetch.from_key(ledger.epoch, ledger.step, key)
        parties = (assignment.holders[key[0]], assignment.holders[stage])
        return await self.signed_tensor(request, parties, ledger.messages[key].digest)

    @owner_task
    async def signed_tensor(self, request: Fetch, parties: Sequence[str], digest: str) -> Tensor | None:
        """Return the tensor from the first party that brings bytes with this digest: no other way hands bytes out."""
        for party in parties:
            answer = await MessageNeed(party, request)
            is_whole = answer is not None and answer.payload.nbytes == self._plan.hidden_bytes
            if answer is not None and is_whole and digest_hex(answer.payload) == digest:
                return tensor_from(answer.payload, BOUNDARY_DTYPE, self._plan.hidden_shape)
        return None

    def _allowed_distance(self, dispute: Dispute, copy: StageCopy, inputs: Sequence[Tensor]) -> float:
        """How far an honest party of another numeric class may be off in this very message; tau at least."""
        self._count_work(microbatches=PROBES + 1)
        x, gradient, report = inputs[0], inputs[1] if len(inputs) > 1 else None, dispute.report
        noise = rounding_noise(copy.runner, report.step, report.microbatch, dispute.direction, x, gradient)
        return max(self._plan.guard.tolerance, MARGIN * noise)

    def _verdict_of_finding(self, dispute: Dispute, finding: MessageFinding) -> Verdict:
        what = {"message": "sent a wrong tensor", "accusation": "accused an honest stage"}.get(
            finding.offence, "did not send the signed tensor"
        )
        return self._guilty_verdict(dispute, finding.party, finding.offence, what, finding.distance, finding.allowed)

    def _guilty_verdict(
        self,
        dispute: Dispute,
        party: str,
        offence: Offence,
        what: str,
        distance: float | None = None,
        allowed: float = 0.0,
    ) -> Verdict:
        shown = "not finite" if distance is not None and not distance < float("inf") else None
        if distance is not None and shown is None:
            shown = f"distance {distance:.1e}"
        report = dispute.report
        return Verdict(
            step=report.step,
            stage=report.stage,
            party=party,
            offence=offence,
            reason=f"stage {report.stage}, microbatch {report.microbatch}, {dispute.direction}: {party} {what}"
            f" ({shown or 'another digest'}, allowed {allowed:.1e})",
            direction=dispute.direction,
            microbatch=report.microbatch,
            distance=None if shown == "not finite" else distance,
            allowed=allowed,
            accuser=dispute.accuser,
        )
