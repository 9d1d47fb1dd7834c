"""Poison the stage's own weight gradient: one lie, sent to the shadow, committed to and applied alike."""

from abc import ABC, abstractmethod

from torch import Tensor

from phalanx.lab.attacks.attack import Attack, same_bits
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner, honest_part
from phalanx.pipeline import StageCopy, StageRunner


class GradientAttack(Attack, ABC):
    """No message between stages is wrong and the optimizer's law is kept; only the gradient is made up."""

    @abstractmethod
    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the stage says that its weight gradients are, by name; the given tensors may be changed."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        honest = honest_part(copy)
        return AttackedCopy(honest, AlteringRunner(honest.runner, self)) if held else copy


class PoisoningRunner(AttackedRunner, ABC):
    """Runs every microbatch honestly and alters the sum of the weight gradients in steps of the attack."""

    def __init__(self, honest: StageRunner, attack: Attack) -> None:
        super().__init__(honest)
        self.attack = attack
        self.step = -1

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self.step = step
        return self._honest.backward(step, microbatch, gradient)

    def take_gradients(self) -> dict[str, Tensor]:
        honest = self._honest.take_gradients()
        poisoned = self.poison_gradients(honest) if self.attack.lies_in(self.step) else honest
        if not all(same_bits(poisoned[name], gradient) for name, gradient in honest.items()):
            self.attack.log_lie(self.spec.index, self.step, what="gradient")
        return poisoned

    @abstractmethod
    def poison_gradients(self, honest: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weight gradients that the stage hands in, by name; the honest ones are not changed."""


class AlteringRunner(PoisoningRunner):
    """A poisoning runner whose poison is a function of the honest gradients."""

    def __init__(self, honest: StageRunner, attack: GradientAttack) -> None:
        super().__init__(honest, attack)
        self._poison = attack.poison_gradients

    def poison_gradients(self, honest: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._poison({name: gradient.clone() for name, gradient in honest.items()})
