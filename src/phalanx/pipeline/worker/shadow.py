"""The copy of a stage at the party that covers it: fresh, able to audit, able to take over."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from phalanx.errors import StaleReplicaError
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.screen import Doubt, doubt_about
from phalanx.transport import SignedHeader


@dataclass
class ShadowStage:
    """A shadow is as fresh as the last committed step; as long as it has audits of that step to do, it stays before it.

    `gradient` upkeep: the stage's weight gradient is received and put through the shadow's own
    optimizer. `lockstep`: the gradient is recomputed here, microbatch by microbatch. `update`: the
    weights after the step are received, only once the step is verified; until all are here nothing is audited.
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
    def index(self) -> int:
        """The stage's number."""
        return self.copy.spec.index

    def begin(self) -> None:
        """Forget what belongs to the last step or attempt."""
        self.copy.runner.abandon()
        self.gradients, self.incoming, self.recomputed, self.source = None, None, 0, ""
        self.doubt, self.order = None, "none"
        kept = range(self.copy.step - self.copy.plan.guard.commit_lag, self.copy.step)
        self.claims = {place: claim for place, claim in self.claims.items() if place[0] in kept}
        self.parts.clear()

    def restart(self, source: str) -> None:
        """Forget what has come of a transfer so far: `source` begins it."""
        self.incoming, self.source = None, source
        self.parts.clear()

    def expect_gradient(self) -> BulkReceiver:
        """Make room for the stage's gradient."""
        if self.incoming is None:
            self.incoming = BulkReceiver(self.copy.module.trainable())
        return self.incoming

    def expect_weights(self) -> BulkReceiver:
        """Make room for the stage's new weights: where the old ones are."""
        if self.incoming is None:
            self.incoming = BulkReceiver(self.copy.trained(), in_place=True)
        return self.incoming

    def audit(self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None) -> None:
        """Recompute one microbatch from committed inputs and keep the result as this auditor's claim.

        Raises:
            StaleReplicaError: The copy is not at that step.
        """
        self._expect_step(step)
        self._claim(step, microbatch, *self.copy.runner.recompute(step, microbatch, x, gradient))

    def audit_and_screen(self, step: int, microbatch: int, x: Tensor, gradient: Tensor) -> None:
        """As `audit`, and look at the stage's weight gradient with that of the microbatch in hand.

        Raises:
            StaleReplicaError: The copy is not at that step.
        """
        self._expect_step(step)
        y, x_gradient, own = self.copy.runner.redo(step, microbatch, x, gradient)
        self._claim(step, microbatch, y, x_gradient)
        if self.doubt is None and self.gradients is not None:
            self.doubt = doubt_about(self.gradients, own, self.copy.plan.microbatches)

    def _expect_step(self, step: int) -> None:
        if self.copy.step != step:
            raise StaleReplicaError(
                f"stage {self.index}: the shadow is at step {self.copy.step}, the claim from step {step}; "
                "no verdict is possible before it is resynchronised"
            )

    def _claim(self, step: int, microbatch: int, y: Tensor, x_gradient: Tensor | None) -> None:
        self.claims[(step, "forward", microbatch)] = y
        if x_gradient is not None:
            self.claims[(step, "backward", microbatch)] = x_gradient

    def follow(self, step: int, microbatch: int, x: Tensor, gradient: Tensor) -> None:
        """Lockstep: do all of the stage's work on one microbatch, weight gradients included."""
        runner = self.copy.runner
        self.claims[(step, "forward", microbatch)] = runner.forward(step, microbatch, x)
        x_gradient = runner.backward(step, microbatch, gradient)
        if x_gradient is not None:
            self.claims[(step, "backward", microbatch)] = x_gradient
        self.recomputed += 1
