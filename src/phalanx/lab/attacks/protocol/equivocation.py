"""Tell the receiver one thing, and the owner and every auditor another, each under a valid signature."""

from collections.abc import Sequence

import torch

from phalanx.lab.attacks.attack import Attack
from phalanx.pipeline.protocol.messages import Activation
from phalanx.testing import OutgoingMessage


class Equivocation(Attack):
    """The receiver gets the negated tensor; commitments and answers to auditors speak of the true one."""

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Send a lie, and sign the truth for one's own commitment."""
        message = outgoing.message
        if not isinstance(message, Activation) or not self.lies_in(message.step) or outgoing.receiver == self.party:
            return (outgoing,)
        if not self.lies_towards(message.direction):
            return (outgoing,)
        self.log_lie(
            message.source,
            message.step,
            microbatch=message.microbatch,
            direction=message.direction,
            what="equivocation",
        )
        lie = OutgoingMessage(outgoing.receiver, message, _negate_payload(outgoing.payload))
        return (lie, OutgoingMessage(self.party, message, outgoing.payload))


def _negate_payload(payload: bytes) -> bytes:
    """The bytes of the negated fp32 tensor."""
    return (-torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()
