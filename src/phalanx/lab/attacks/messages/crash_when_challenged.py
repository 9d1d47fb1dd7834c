"""Lie, and die rather than show the sent message."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from phalanx.lab.attacks.messages.message_attack import HonestMessage
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.protocol.messages import Bulk, FetchReply
from phalanx.testing import OutgoingMessage, WorkerCrash

_CHALLENGES = ("weights", "undo")


class CrashWhenChallenged(SignFlip):
    """Flips signs; once it has lied, the first request for its tensors or weights ends the process."""

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._has_lied = False

    def falsify_message(self, work: HonestMessage) -> Tensor:
        """Lie, and remember that there was a lie."""
        sent = super().falsify_message(work)
        self._has_lied |= sent is not work.result
        return sent

    def rewrite_message(self, outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        """Crash instead of answering a challenge.

        Raises:
            WorkerCrash: It is challenged.
        """
        message = outgoing.message
        challenged = isinstance(message, FetchReply) or (isinstance(message, Bulk) and message.purpose in _CHALLENGES)
        if challenged and self._has_lied:
            raise WorkerCrash(f"{self.party} was asked for what it sent")
        return (outgoing,)
