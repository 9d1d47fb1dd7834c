"""Attacks that compute with another stage than the one they hold: same parameters, other arithmetic."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.lab.attacks.attack import Attack, same_bits
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner, honest_part
from phalanx.models import CAUSAL, AttentionPattern, StageModule
from phalanx.pipeline import StageCopy, StageRunner


class AlteredModule(StageModule):
    """Another module's parameters and names; subclasses compute something else with them."""

    def __init__(self, whole: StageModule) -> None:
        nn.Module.__init__(self)
        # the very same parts: what the twin's backward adds to a gradient, it adds to the stage's own
        vars(self).update(vars(whole))


class AlteredWeights(AlteredModule):
    """Computes with altered weights; gradients reach the true weights as if they were the altered ones."""

    _whole: StageModule

    def __init__(self, whole: StageModule, alter: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__(whole)
        self._alter = alter
        # not registered as a part: the parts are shared with it
        vars(self)["_whole"] = whole

    def forward(self, x: Tensor, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """As the whole stage, with other weights."""
        altered = {
            name: weight + (self._alter(name, weight.detach()) - weight).detach()
            for name, weight in self._whole.named_parameters()
        }
        result: Tensor = torch.func.functional_call(self._whole, altered, (x, pattern))
        return result


class AlteredModuleAttack(Attack, ABC):
    """Runs a twin instead of the stage: activations, gradients and weight gradients are all the twin's."""

    @abstractmethod
    def make_module(self, copy: StageCopy) -> StageModule:
        """What computes instead of the copy's module."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        honest = honest_part(copy)
        return AttackedCopy(honest, AlteredModuleRunner(honest, self)) if held else copy


class AlteredModuleRunner(AttackedRunner):
    """Runs the twin in the steps of the attack; the truth is computed beside it, for the attacker's log."""

    def __init__(self, honest: StageCopy, attack: AlteredModuleAttack) -> None:
        super().__init__(honest.runner)
        plan = honest.plan
        self._attack = attack
        self._twin = StageRunner(
            attack.make_module(honest), honest.spec, seed=plan.seed, precision=plan.precision, device=plan.device
        )
        self._inputs: dict[int, Tensor] = {}

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """As the twin, in a step of the attack."""
        if not self._attack.lies_in(step):
            return self._honest.forward(step, microbatch, x)
        self._inputs[microbatch] = x
        sent = self._twin.forward(step, microbatch, x)
        truth, _ = self._honest.recompute_microbatch(step, microbatch, x, None)
        return self._choose_result("forward", step, microbatch, sent, truth)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As the twin, in a step of the attack."""
        x = self._inputs.pop(microbatch, None)
        if x is None:
            return self._honest.backward(step, microbatch, gradient)
        sent = self._twin.backward(step, microbatch, gradient)
        _, truth = self._honest.recompute_microbatch(step, microbatch, x, gradient)
        if sent is None or truth is None:
            return sent
        return self._choose_result("backward", step, microbatch, sent, truth)

    def abandon_step(self) -> None:
        self._honest.abandon_step()
        self._twin.abandon_step()
        self._inputs.clear()

    def _choose_result(self, direction: str, step: int, microbatch: int, sent: Tensor, truth: Tensor) -> Tensor:
        if not self._attack.lies_towards(direction):
            return truth
        if not same_bits(sent, truth):
            self._attack.log_lie(self.spec.index, step, microbatch=microbatch, direction=direction)
        return sent
