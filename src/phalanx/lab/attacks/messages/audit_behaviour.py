"""Attacks that depend on when the party is audited."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.pipeline import AttackConfig, StageCopy
from phalanx.pipeline.protocol.messages import AuditReport, Bulk, FetchReply
from phalanx.testing import OutgoingMessage, WorkerCrash


class AuditAware(SignFlip):
    """Flips signs, but is honest in the microbatches that were audited most often so far.

    It counts its own observations: audits that it does for others, and its tensors that auditors fetch. `strength` is
    the share of microbatches in which it stays honest.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._audited: Counter[int] = Counter()
        self._num_microbatches = 0

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        self._num_microbatches = copy.plan.microbatches
        return super().wrap_copy(copy, held)

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Observe requests; nothing is changed."""
        message = outgoing.message
        if isinstance(message, AuditReport) or (isinstance(message, FetchReply) and not message.claim):
            self._audited[message.microbatch] += 1
        return (outgoing,)

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Flip the sign where no audit is expected."""
        return work.result if work.microbatch in self._expected_audits() else super().lie(work, generator)

    def _expected_audits(self) -> set[int]:
        count = round(self.strength * self._num_microbatches)
        by_count = sorted(range(self._num_microbatches), key=lambda m: (-self._audited[m], m))
        return set(by_count[:count])


_CHALLENGES = ("weights", "undo")


class CrashWhenChallenged(SignFlip):
    """Flips signs; once it has lied, the first request for its tensors or weights ends the process."""

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._has_lied = False

    def falsify_message(self, work: HonestMessage) -> Tensor:
        sent = super().falsify_message(work)
        self._has_lied |= sent is not work.result
        return sent

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Crash instead of answering a challenge."""
        message = outgoing.message
        challenged = isinstance(message, FetchReply) or (isinstance(message, Bulk) and message.purpose in _CHALLENGES)
        if challenged and self._has_lied:
            raise WorkerCrash(f"{self.party} was asked for what it sent")
        return (outgoing,)
