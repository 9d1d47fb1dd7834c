"""Attacks on tensors between stages: the work is done honestly, and something else is sent."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import Attack, same_bits
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner, honest_part
from phalanx.pipeline import StageCopy, StageRunner


@dataclass(frozen=True)
class HonestMessage:
    """One message as an honest stage would send it.

    Attributes:
        direction: "forward" for an activation, "backward" for its gradient.
        given: Input of the stage, ``[batch, seq, dim]``.
        result: The honest message, ``[batch, seq, dim]``; never to be changed in place.
    """

    stage: int
    step: int
    microbatch: int
    direction: str
    given: Tensor
    result: Tensor


class MessageAttack(Attack, ABC):
    """An attack that changes the messages of a party's stages; audits of other stages stay honest.

    Attributes:
        what: Names the lie in the log where it is another one than a wrong tensor.
    """

    what: str | None = None

    @abstractmethod
    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """What is sent instead of `work.result`; the result itself where nothing is changed."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        return self.make_lying_copy(copy) if held else copy

    def make_lying_copy(self, copy: StageCopy) -> StageCopy:
        """A copy that says, whatever it is asked, what `say` makes of the truth."""
        honest = honest_part(copy)
        return AttackedCopy(honest, LyingRunner(honest.runner, self))

    def falsify_message(self, work: HonestMessage) -> Tensor:
        """What is sent; a lie is written down if it differs from the truth in any bit."""
        if not self.lies_in(work.step) or not self.lies_towards(work.direction):
            return work.result
        sent = self.lie(work, self.make_generator(work.step, work.microbatch))
        if not same_bits(sent, work.result):
            self.log_lie(work.stage, work.step, microbatch=work.microbatch, direction=work.direction, what=self.what)
        return sent


class LyingRunner(AttackedRunner):
    """A runner that computes honestly and lets a `MessageAttack` replace the messages."""

    def __init__(self, honest: StageRunner, attack: MessageAttack) -> None:
        super().__init__(honest)
        self._attack = attack

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        return self._falsify_result("forward", step, microbatch, x, self._honest.forward(step, microbatch, x))

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As the honest stage, then lie; where nothing is sent there is nothing to lie about."""
        honest = self._honest.backward(step, microbatch, gradient)
        if honest is None or gradient is None:
            return honest
        return self._falsify_result("backward", step, microbatch, gradient, honest)

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As the honest stage, then lie: what an auditor claims."""
        y, x_gradient = self._honest.recompute_microbatch(step, microbatch, x, gradient)
        y = self._falsify_result("forward", step, microbatch, x, y)
        if x_gradient is not None and gradient is not None:
            x_gradient = self._falsify_result("backward", step, microbatch, gradient, x_gradient)
        return y, x_gradient

    def _falsify_result(self, direction: str, step: int, microbatch: int, given: Tensor, result: Tensor) -> Tensor:
        return self._attack.falsify_message(HonestMessage(self.spec.index, step, microbatch, direction, given, result))
