"""A client of another owner, at work: it sends what the owner asks for, from texts that it alone has."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.security.crypto import Peer
from phalanx.split.channel import turn_messages as ask
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.client import Feedback
from phalanx.split.roles.client_end import ClientEnd

Rows = tuple[Tensor, Tensor]
"""Ids and labels of some rows."""


class OwnTexts(Protocol):
    """The texts of one client."""

    @property
    def microbatches(self) -> Sequence[int]:
        """This client's microbatches of a step."""
        ...

    def drawn(self, draw: int) -> Sequence[Rows]:
        """The rows of a draw, an entry for each microbatch of this client."""
        ...

    def held_out(self) -> Iterator[Rows]:
        """All held-out rows, some at a time."""
        ...


class TurnTaker:
    """The loop of a client: it takes the turns that the owner asks for, until the owner concludes.

    Args:
        split: The section of the run file.
        steps: Of the run; a turn of a later one is refused.
        party: Its end of the line.
        end: Sends microbatches.
        texts: Its own.
        tell: Takes a step and what this client's microbatches came to.

    Guarantees:
        What it is asked for is which of its texts to train on and when, nothing else: there is no message that asks
        for a text, and what leaves is sealed for the enclave that this client has appraised.
    """

    def __init__(
        self,
        split: SplitConfig,
        steps: int,
        party: EnclavePeer,
        end: ClientEnd,
        texts: OwnTexts,
        tell: Callable[[int, Feedback], None] = lambda step, told: None,
    ) -> None:
        self._split, self._steps = split, steps
        self._party, self._end, self._texts, self._tell = party, end, texts, tell

    def work(self) -> None:
        """Take turns until the owner concludes.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; nothing of the turn was sent.
            PhalanxError: As `Connection.hear`.
        """
        while True:
            message, _ = self._party.line.hear_one_of((ask.ClientTurn, ask.Conclude))
            if not isinstance(message, ask.ClientTurn):
                return
            self._take(message)

    def conclude(self, enclave: Peer) -> tuple[bytes, bytes] | None:
        """Compare what has crossed with the enclave's word, and say so; return both statements.

        Raises:
            TranscriptError: Both ends did not see the same frames.
        """
        statements = self._party.compare_transcripts(enclave)
        self._party.line.say(ask.ConcludeReply())
        self._party.line.flush()
        return statements

    def _take(self, turn: ask.ClientTurn) -> None:
        if turn.step > self._steps:
            raise FrameError(f"a turn of step {turn.step} is asked for, the run has {self._steps}")
        every = self._split.reattest_every
        now = bool(turn.what == "train" and every and turn.step and turn.step % every == 0)
        self._party.check_trust(every_s=self._split.reattest_s, now=now)
        if turn.what == "train":
            self._train(turn)
        else:
            self._measure(turn.step)

    def _train(self, turn: ask.ClientTurn) -> None:
        mine = self._texts.microbatches
        for number, (ids, labels) in zip(mine, self._texts.drawn(turn.draw), strict=True):
            self._end.send("train", turn.step, number, ids, labels)
        self._tell(turn.step, self._end.losses(turn.step, mine))

    def _measure(self, step: int) -> None:
        for number, (ids, labels) in enumerate(self._texts.held_out()):
            self._end.send("held_out", step, number, ids, labels)
            self._end.scores(step, number, ids.shape[0])
        self._party.line.say(ask.TurnDone(step=step))
