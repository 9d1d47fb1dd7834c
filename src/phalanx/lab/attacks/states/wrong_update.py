"""Break the optimizer's law: another learning rate, no decay, no step at all."""

import torch

from phalanx.lab.attacks.states.state_attack import StateAttack, UpdateInputs
from phalanx.pipeline import StageCopy


class WrongLearningRate(StateAttack):
    """`strength` multiplies the learning rate."""

    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Take the step again, with another rate."""
        copy.optimizer.restore_snapshot()
        copy.optimizer.step(dict(update.gradients), update.lr * self.strength, update.clip_coefficient)


class NoWeightDecay(StateAttack):
    """Matrices do not decay."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Undo the weight decay, which AdamW applies apart from the gradient's step."""
        before, after = copy.optimizer.undo_state(), copy.optimizer.state_tensors()
        for name, weight in after.items():
            if name.startswith("weight/") and weight.ndim >= 2:
                weight.add_(before[name], alpha=update.lr * update.weight_decay)


class SkippedUpdate(StateAttack):
    """The state does not change; only its step number advances."""

    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Go back, and count the step as taken."""
        copy.optimizer.load_state(copy.optimizer.undo_state(), update.step + 1)
