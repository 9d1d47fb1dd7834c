"""Tell the receiver one thing, and the owner and every auditor another, each under a valid signature."""

from collections.abc import Sequence

import torch

from phalanx.lab.attacks.attack import Attack
from phalanx.pipeline.protocol.messages import Activation
from phalanx.testing import Letter


class Equivocation(Attack):
    """The receiver gets the negated tensor; commitments and answers to auditors speak of the true one."""

    def rewrite(self, letter: Letter) -> Sequence[Letter]:
        """Send a lie, and sign the truth for one's own books."""
        message = letter.message
        if not isinstance(message, Activation) or not self.lies_in(message.step) or letter.receiver == self.party:
            return (letter,)
        if not self.lies_towards(message.direction):
            return (letter,)
        self.admit(
            message.source,
            message.step,
            microbatch=message.microbatch,
            direction=message.direction,
            what="equivocation",
        )
        lie = Letter(letter.receiver, message, _negated(letter.payload))
        return (lie, Letter(self.party, message, letter.payload))


def _negated(payload: bytes) -> bytes:
    """The bytes of the negated fp32 tensor."""
    return (-torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()
