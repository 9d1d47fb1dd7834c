"""Withhold expected messages: tensors, answers, or everything."""

from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.lab.attacks.attack import Attack
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.protocol.messages import Activation, FetchReply, StepMessage
from phalanx.testing import OutgoingMessage


class WithheldMessages(Attack):
    """Does not send some tensors to the next stage; `strength` is their share, drawn for each microbatch."""

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        message = outgoing.message
        if not isinstance(message, Activation) or outgoing.receiver == self.party or not self.lies_in(message.step):
            return (outgoing,)
        coin = float(torch.rand((), generator=self.make_generator(message.step, message.microbatch)))
        if not self.lies_towards(message.direction) or coin >= self.strength:
            return (outgoing,)
        self.log_lie(
            message.source, message.step, microbatch=message.microbatch, direction=message.direction, what="withholding"
        )
        return ()


class WithheldAnswer(Attack):
    """Sends every tensor on, and shows none to an auditor or an owner that asks for it."""

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        message = outgoing.message
        if not isinstance(message, FetchReply) or not self.lies_in(message.step):
            return (outgoing,)
        self.log_lie(
            message.source,
            message.step,
            microbatch=message.microbatch,
            direction=message.direction,
            what="withheld answer",
        )
        return ()


class StalledParty(Attack):
    """An attack that sends nothing any more from its first step on, as a process that was stopped."""

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._stalled = False

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        message = outgoing.message
        if not self._stalled and isinstance(message, StepMessage) and self.lies_in(message.step):
            self._stalled = True
            # a stalled party fails in everything that it does, so that no one stage is the place of it
            self.log_lie(self.config.stages[0], message.step, what="stall")
        return () if self._stalled else (outgoing,)
