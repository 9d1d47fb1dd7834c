"""Attacks by signed statements that are untrue."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.errors import ConfigError
from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.copies import honest_part
from phalanx.lab.attacks.messages.altered_tensors import GaussianAdded
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.pipeline import AttackConfig, StageCopy
from phalanx.pipeline.protocol.messages import Activation, Commit, PassedOnHeader
from phalanx.security.crypto import digest_hex
from phalanx.testing import OutgoingMessage


class Colluders(SignFlip):
    """All parties of `attack.stages`, next to each other or not, lie in the same steps."""

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        _need_two(config)

    @property
    def seed_name(self) -> str:
        return "colluders"


class League(GaussianAdded):
    """The first of `attack.stages` is served with lies; a party of the league that audits it repeats each lie.

    The lie is a function of the honest tensor and of seed, step and microbatch, so auditor and culprit come
    to the same bits on machines of one numeric class. `strength` is that of `gaussian_added`.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        _need_two(config)

    @property
    def seed_name(self) -> str:
        return "league"

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        return self.make_lying_copy(copy) if copy.spec.index == self.config.stages[0] else honest_part(copy)


def _need_two(config: AttackConfig) -> None:
    if len(set(config.stages)) < 2:
        raise ConfigError(f"attack.stages: {config.kind!r} needs two parties or more, found {list(config.stages)}")


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


class FramingAuditor(SignFlip):
    """Serves its own stages honestly; as an auditor it claims, and shows when asked, the negated tensor."""

    what = "framing"

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        return honest_part(copy) if held else self.make_lying_copy(copy)
