"""Leave out the second half of the stage's layers: half the work for full pay."""

from torch import nn

from phalanx.lab.attacks.states.twin import AlteredModule, AlteredModuleAttack
from phalanx.models import StageModule
from phalanx.pipeline import StageCopy


class HalfLayers(AlteredModuleAttack):
    """A stage of one layer is skipped as a whole."""

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with the first half of its blocks."""
        return FirstHalf(copy.module)


class FirstHalf(AlteredModule):
    """The first half of the blocks, rounded down."""

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks that are run."""
        blocks = super().own_blocks
        return blocks[: len(blocks) // 2]
