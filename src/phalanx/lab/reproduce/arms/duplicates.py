"""The paper's detector over a whole pipeline: a duplicate of every middle stage, on the node behind it."""

from collections.abc import Collection, Mapping

from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.lab.attacks.attack import same_bits
from phalanx.lab.reproduce.arms.arm import ArmInputs
from phalanx.lab.reproduce.arms.undefended import SimulatedArm
from phalanx.lab.reproduce.simulator import AlarmRaised, StageTensor
from phalanx.models import ModelSource
from phalanx.pipeline import StageCopy, StepPlan
from phalanx.train.setup.stage_source import StageLibrary


class DuplicatedBlock:
    """A stage's duplicate on the node of the stage behind it, kept in lock-step by its own optimizer.

    The jumping connection brings the stage's own input; the duplicate does the same work and compares. It needs the
    stage's own work again: forward, backward, optimizer, memory.

    Guarantees:
        Finds every changed bit of a message of the stage, also NaN for NaN and the sign of a zero. Accuses
        no honest stage of the same numeric class; between two kinds of hardware it accuses honest ones,
        for it knows no tolerance. Does not find a lie about the input when the node before is in league,
        and believes the node that holds the duplicate.

    Source: Lu et al. 2023, section 6.2. Their release compares values in the forward direction only; the
    backward comparison follows the text, which says that it mirrors the forward one.
    """

    def __init__(self, copy: StageCopy) -> None:
        self._copy = copy

    @property
    def stage_index(self) -> int:
        """The stage that this is a duplicate of."""
        return self._copy.spec.index

    def repeats_forward(self, step: int, microbatch: int, x: Tensor, claimed: Tensor) -> bool:
        """Whether the duplicate turns `x` ``[batch, seq, dim]`` into exactly the claimed activation."""
        return same_bits(self._copy.runner.forward(step, microbatch, x), claimed)

    def repeats_backward(self, step: int, microbatch: int, gradient: Tensor, claimed: Tensor) -> bool:
        """Whether the duplicate turns a gradient of its output into exactly the claimed one of its input."""
        gradients = self._copy.runner.backward(step, microbatch, gradient)
        return gradients is not None and same_bits(gradients, claimed)

    def take_gradients(self) -> Mapping[str, Tensor]:
        """Weight gradients of the step; afterwards there are none."""
        return self._copy.runner.take_gradients()

    def take_step(self, gradients: Mapping[str, Tensor], lr: float, clip_coefficient: float) -> None:
        """Take the optimizer step that the stage takes."""
        self._copy.optimizer.step(gradients, lr, clip_coefficient)

    def drop_graphs(self) -> None:
        """Forget graphs and gradients of a step that is not finished."""
        self._copy.runner.abandon_step()

    def has_state_of(self, copy: StageCopy) -> bool:
        """Whether weights and moments equal `copy`'s bit for bit."""
        return self._copy.compute_digest() == copy.compute_digest()


class DuplicateCheck:
    """A message check that repeats the work of every middle stage and raises the alarm at the first difference.

    Attributes:
        idle: Stages with a duplicate that rests in this attempt, because they are frozen.
    """

    def __init__(self, source: ModelSource, plan: StepPlan) -> None:
        library = StageLibrary(source, plan, None)
        self.blocks = {stage: DuplicatedBlock(library(stage)) for stage in range(1, len(plan.stages) - 1)}
        self.idle: Collection[int] = ()

    def accepts_message(self, message: StageTensor, /) -> bool:
        """Repeat the work that the message's sender claims.

        Raises:
            AlarmRaised: The result differs in a bit.
        """
        block = self.blocks.get(message.source)
        if block is None or message.source in self.idle:
            return True
        check = block.repeats_forward if message.direction == "forward" else block.repeats_backward
        if not check(message.step, message.microbatch, message.cause, message.tensor):
            raise AlarmRaised(message.source)
        return True

    def update_duplicates(self, gradients: Mapping[int, Mapping[str, Tensor]], lr: float, clip: float) -> None:
        """Let the duplicates of these stages take the same optimizer step, each on its own gradients."""
        for stage, block in self.blocks.items():
            block_gradients = block.take_gradients()
            if stage in gradients:
                block.take_step(block_gradients, lr, clip)

    def drop_all_graphs(self) -> None:
        """Forget graphs and gradients of all duplicates."""
        for block in self.blocks.values():
            block.drop_graphs()


class DuplicatingArm(SimulatedArm):
    """The base of the arms with the paper's detector, which count its alarms."""

    def __init__(self, setting: ArmInputs) -> None:
        super().__init__(setting)
        self.duplicates = DuplicateCheck(setting.source, setting.plan)
        self.event_counts.alarms = self.event_counts.honest_accused = self.event_counts.lies_missed = 0

    def find_suspect(self, step: int, inputs: StepInputs) -> int | None:
        """Run one attempt at a step; return the stage that the detector names, None where it finds nothing."""
        liar, counts = self.attacker.lying_stage_at(step), self.event_counts
        try:
            self.simulator.run_attempt(step, inputs, self.duplicates)
        except AlarmRaised as alarm:
            counts.alarms = (counts.alarms or 0) + 1
            counts.honest_accused = (counts.honest_accused or 0) + (alarm.suspect != liar)
            return alarm.suspect
        if liar is not None:
            counts.lies_missed = (counts.lies_missed or 0) + len(inputs.ids)
        return None

    def abandon_attempt(self) -> None:
        """Forget graphs and gradients of an attempt, which will be made again."""
        self.simulator.abandon_attempt()
        self.duplicates.drop_all_graphs()
        self.event_counts.redone_steps += 1

    def apply_gradients(self, step: int, frozen: Collection[int] = ()) -> None:
        """Let all stages but the frozen ones take the step, and their duplicates with them."""
        taken = self.simulator.take_gradients()
        gradients = {stage: of_stage for stage, of_stage in taken.items() if stage not in frozen}
        clip = self.simulator.combined_clip(gradients)
        self.simulator.update_copies(step, gradients, clip)
        self.duplicates.update_duplicates(gradients, self.simulator.learning_rate(step), clip)
