"""Commit to an input that the neighbour never signed, so that it looks as if the neighbour had lied."""

import json
from collections.abc import Sequence

import torch

from phalanx.lab.attacks.attack import Attack
from phalanx.pipeline.protocol.messages import Commit, PassedOnHeader
from phalanx.security.crypto import digest_hex
from phalanx.testing import OutgoingMessage


class ForgedReceipt(Attack):
    """One received header of each commitment says another digest, under the neighbour's old signature."""

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Forge one header, drawn for each commitment, or pass the message on."""
        message = outgoing.message
        if not isinstance(message, Commit) or not message.received or not self.lies_in(message.step):
            return (outgoing,)
        index = int(torch.randint(len(message.received), (), generator=self.make_generator(message.step, 0)))
        headers = list(message.received)
        headers[index] = _forge_header(headers[index])
        self.log_lie(message.stage, message.step, what="forged receipt")
        return (outgoing.with_fields({"received": tuple(headers)}),)


def _forge_header(signed: PassedOnHeader) -> PassedOnHeader:
    fields = json.loads(signed.header)
    fields["payload_digest"] = digest_hex(f"not {fields['payload_digest']}".encode())
    return PassedOnHeader(header=json.dumps(fields, sort_keys=True, separators=(",", ":")), signature=signed.signature)
