"""Attacks on a stage's state: its weights and its optimizer take another step than the verified one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.copies import AttackedCopy, honest_part
from phalanx.pipeline import StageCopy


class StateAttack(Attack, ABC):
    """Spoils the state of the stages that a party holds; its computation with that state is honest.

    A state belongs to the step that begins with it: with ``from_step = 3`` the update after step 2 is the
    first that is spoilt, and step 3 the first that is attacked.
    """

    @abstractmethod
    def spoil_state(self, copy: StageCopy, update: "UpdateInputs") -> None:
        """Change the copy, which has just taken an honest step; its snapshot is the state before that."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        return SpoiltCopy(honest_part(copy), self) if held else copy


class UpdateInputs:
    """The inputs of an optimizer step.

    Attributes:
        step: Its number, from 0.
    """

    def __init__(self, copy: StageCopy, step: int, gradients: Mapping[str, Tensor], clip_coefficient: float) -> None:
        config = copy.plan.optimizer
        self.step = step
        self.gradients = gradients
        self.clip_coefficient = clip_coefficient
        self.lr = copy.plan.learning_rate(step)
        self.weight_decay = config.weight_decay


class SpoiltCopy(AttackedCopy):
    """A copy with an optimizer that breaks the rules in the steps of the attack."""

    def __init__(self, honest: StageCopy, attack: StateAttack) -> None:
        super().__init__(honest)
        self._attack = attack

    def apply_update(self, step: int, gradients: Mapping[str, Tensor], clip_coefficient: float) -> None:
        """Take the honest step, then spoil it.

        Raises:
            StaleReplicaError: The copy is not at that step.
        """
        if not self._attack.lies_in(step + 1):
            super().apply_update(step, gradients, clip_coefficient)
            return
        self.optimizer.keep_snapshot()
        super().apply_update(step, gradients, clip_coefficient)
        truth = self.compute_digest()
        self._attack.spoil_state(self, UpdateInputs(self, step, gradients, clip_coefficient))
        if self.compute_digest() != truth:
            self._attack.log_lie(self.spec.index, self.step_count, what="state")
