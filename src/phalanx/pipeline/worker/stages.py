"""The two ways in which a party has a stage: it serves the stage, or shadows it, fresh and able to take over."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

from phalanx.data import without_attention
from phalanx.engine import StepInputs
from phalanx.errors import StaleReplicaError
from phalanx.models import with_marks
from phalanx.objectives import Objective, objective_of
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.screen import Doubt, doubt_about, draw_tensors
from phalanx.planner.schedules import Action, Direction, stage_actions
from phalanx.transport import SignedHeader

Slot = tuple[int, Direction, int]
"""(step, direction, microbatch) of a message into this stage."""


@dataclass
class SentTensor:
    """A tensor that was sent; kept until the step is decided, so that it can be fetched."""

    tensor: Tensor
    header: SignedHeader | None


@dataclass
class HostedStage:
    """A copy of a stage that takes part in the step; it runs an action as soon as its input is there."""

    plan: StepPlan
    copy: StageCopy
    inputs: dict[Slot, Tensor] = field(default_factory=dict)
    headers: dict[Slot, SignedHeader] = field(default_factory=dict)
    withheld: set[Slot] = field(default_factory=set)
    """Received, but not to be used before an audit has cleared it."""
    sent: dict[tuple[Direction, int], SentTensor] = field(default_factory=dict)
    past_sent: dict[int, dict[tuple[Direction, int], SentTensor]] = field(default_factory=dict)
    """What was sent in earlier steps, as long as they can be audited."""
    losses: list[float] = field(default_factory=list)
    step: int = -1
    batch: StepInputs | None = None
    pending_apply: float | None = None
    gradients: dict[str, Tensor] | None = None
    _todo: list[Action] = field(default_factory=list)

    @property
    def stage_runner(self) -> StageRunner:
        """Runs the copy's microbatches."""
        return self.copy.runner

    @property
    def stage_index(self) -> int:
        """The stage's number."""
        return self.copy.spec.index

    def begin_step(self, step: int, batch: StepInputs | None = None) -> None:
        """Start a step, or start it again; inputs of later steps that came early, and of one that lags, are kept."""
        self.stage_runner.abandon_step()
        if self.plan.guard.commit_lag:
            self._keep_sent(step)
        self.step, self.batch, self.gradients = step, batch, None
        self.sent.clear()
        self.losses.clear()
        for table in (self.inputs, self.headers):
            for slot in [slot for slot in table if slot[0] < step - self.plan.guard.commit_lag]:
                del table[slot]
        self._todo = list(reversed(self._action_order))

    @cached_property
    def _action_order(self) -> tuple[Action, ...]:
        return stage_actions(self.plan.schedule, self.stage_index, len(self.plan.stages), self.plan.microbatches)

    @cached_property
    def _stage_objective(self) -> Objective:
        """What the last stage minimises; code of the user's own is looked for where that stage is, and once."""
        return objective_of(self.plan.objective)

    def _keep_sent(self, step: int) -> None:
        if self.step >= 0 and step > self.step:
            self.past_sent[self.step] = dict(self.sent)
        steps = range(step - self.plan.guard.commit_lag, step)
        self.past_sent = {number: sent for number, sent in self.past_sent.items() if number in steps}

    def sent_in(self, step: int) -> dict[tuple[Direction, int], SentTensor]:
        """Return the tensors sent in a step, as far as they are kept."""
        return self.sent if step == self.step else self.past_sent.get(step, {})

    def discard_inputs(self) -> None:
        """Forget every message and the rest of the step: the epoch has changed, nothing runs before `begin`."""
        self.stage_runner.abandon_step()
        if self.plan.guard.commit_lag and 0 <= self.step < self.copy.step_count:
            self._keep_sent(self.step + 1)
        self.step, self.batch = -1, None
        self._todo.clear()
        self.sent.clear()
        self.inputs.clear()
        self.headers.clear()
        self.withheld.clear()

    @property
    def is_finished(self) -> bool:
        """Whether every microbatch of the step has gone both ways."""
        return self.step >= 0 and not self._todo

    def is_ready(self) -> bool:
        """Whether the next action has its input and the optimizer is up to date."""
        if not self._todo or self.pending_apply is not None or self.copy.step_count != self.step:
            return False
        direction, microbatch = self._todo[-1]
        if (direction == "forward" and self.copy.spec.is_first) or (direction == "backward" and self.copy.spec.is_last):
            return self.batch is not None
        slot = (self.step, direction, microbatch)
        return slot in self.inputs and slot not in self.withheld

    def run_next(self) -> tuple[Action, Tensor | None]:
        """Run the next action.

        Returns:
            The action and the tensor to send on, None where the pipeline ends.
        """
        action = self._todo.pop()
        if action.direction == "forward":
            return action, self._run_forward(action.microbatch)
        gradient = None if self.copy.spec.is_last else self.inputs[(self.step, "backward", action.microbatch)]
        result = self.stage_runner.backward(self.step, action.microbatch, gradient)
        return action, result

    def _run_forward(self, microbatch: int) -> Tensor | None:
        spec = self.copy.spec
        if spec.is_first and self.batch is not None:
            x = with_marks(self.batch.ids[microbatch], self.batch.extras_of(microbatch))
        else:
            x = self.inputs[(self.step, "forward", microbatch)]
        y = self.stage_runner.forward(self.step, microbatch, x)
        if not spec.is_last:
            return y
        if self.batch is not None:
            batch = self.batch
            loss = self.stage_runner.compute_loss(
                microbatch,
                batch.labels[microbatch],
                batch.num_targets,
                without_attention(batch.extras_of(microbatch)),
                self._stage_objective,
            )
            self.losses.append(loss)
        return None


@dataclass
class ShadowStage:
    """A shadow is as fresh as the last committed step; as long as it has audits of that step to do, it stays before it.

    `gradient` upkeep: the stage's weight gradient is received and put through the shadow's own
    optimizer. `lockstep`: the gradient is recomputed here, microbatch by microbatch.
    """

    copy: StageCopy
    gradients: dict[str, Tensor] | None = None
    incoming: BulkReceiver | None = None
    pending_apply: float | None = None
    claims: dict[tuple[int, Direction, int], Tensor] = field(default_factory=dict)
    """What this auditor recomputed, by step, direction and microbatch, until no request for it can come any more."""
    parts: list[SignedHeader] = field(default_factory=list)
    source: str = ""
    """The party that began the transfer under way."""
    last_gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the last applied step: evidence until the next one."""
    recomputed: int = 0
    doubt: Doubt | None = None
    """Why the gradient of this step looks odd beside a microbatch of it that was recomputed."""
    order: Literal["none", "awaited", "given"] = "none"
    """To recompute the whole step, after the owner was told of the doubt; while awaited, the copy stays where it is."""
    audited: dict[str, Tensor] = field(default_factory=dict)
    """The weight gradient that was recomputed last, where others are to compare its distance."""

    @property
    def stage_index(self) -> int:
        """The stage's number."""
        return self.copy.spec.index

    def reset_step(self) -> None:
        """Forget what belongs to the last step or attempt."""
        self.copy.runner.abandon_step()
        self.gradients, self.incoming, self.recomputed, self.source = None, None, 0, ""
        self.doubt, self.order = None, "none"
        copy = self.copy
        steps = range(copy.step_count - copy.plan.guard.commit_lag, copy.step_count)
        self.claims = {place: claim for place, claim in self.claims.items() if place[0] in steps}
        self.parts.clear()

    def restart_transfer(self, source: str) -> None:
        """Forget the received parts of a transfer: `source` begins it."""
        self.incoming, self.source = None, source
        self.parts.clear()

    def expect_gradient(self) -> BulkReceiver:
        """Make room for the stage's gradient."""
        if self.incoming is None:
            self.incoming = BulkReceiver(self.copy.module.trainable_parameters())
        return self.incoming

    def audit_microbatch(self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None) -> None:
        """Recompute one microbatch from committed inputs and keep the result as this auditor's claim."""
        self._expect_step(step)
        self._store_claims(step, microbatch, *self.copy.runner.recompute_microbatch(step, microbatch, x, gradient))

    def audit_and_screen(self, step: int, microbatch: int, x: Tensor, gradient: Tensor) -> None:
        """As `audit_microbatch`, and look at drawn tensors of the claimed weight gradient with the own ones in hand."""
        self._expect_step(step)
        sizes = {name: parameter.numel() for name, parameter in self.copy.module.trainable_parameters().items()}
        names = draw_tensors(sizes) if self.copy.plan.row_clip is None else None
        y, x_gradient, own_gradients = self.copy.runner.redo_microbatch(step, microbatch, x, gradient, names)
        self._store_claims(step, microbatch, y, x_gradient)
        if self.doubt is None and self.gradients is not None:
            self.doubt = doubt_about(self.gradients, own_gradients, self.copy.plan.microbatches)

    def _expect_step(self, step: int) -> None:
        if self.copy.step_count != step:
            raise StaleReplicaError(
                f"stage {self.stage_index}: the shadow is at step {self.copy.step_count}, but the claim is from step "
                f"{step}; no verdict is possible before it is resynchronised"
            )

    def _store_claims(self, step: int, microbatch: int, y: Tensor, x_gradient: Tensor | None) -> None:
        self.claims[(step, "forward", microbatch)] = y
        if x_gradient is not None:
            self.claims[(step, "backward", microbatch)] = x_gradient

    def follow_microbatch(self, step: int, microbatch: int, x: Tensor, gradient: Tensor) -> None:
        """Lockstep: do all of the stage's work on one microbatch, weight gradients included."""
        runner = self.copy.runner
        self._store_claims(
            step, microbatch, runner.forward(step, microbatch, x), runner.backward(step, microbatch, gradient)
        )
        self.recomputed += 1
