"""The paper's detector over a whole pipeline: a duplicate of every middle stage, on the node behind it."""

from collections.abc import Collection, Mapping

from torch import Tensor

from phalanx.lab.reproduce.arms.duplicated_block import DuplicatedBlock
from phalanx.lab.reproduce.simulator import AlarmRaised, StageTensor
from phalanx.models import ModelSource
from phalanx.pipeline import StepPlan
from phalanx.train.setup.stage_source import StageLibrary


class DuplicateCheck:
    """A message check that repeats the work of every middle stage and raises the alarm at the first difference.

    Attributes:
        blocks: Blocks by the stage that each duplicates.
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
