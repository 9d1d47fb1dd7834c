"""What the owner keeps of a text while it is written: the signed pieces of every stage, so that they can be redone."""

import hmac
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import PhalanxError
from phalanx.serve.engine import EngineBusyError
from phalanx.serve.stages.messages import StageOffer, first_link
from phalanx.transport import CheckedFrame, SignedHeader

DepartureCause = Literal["refused", "silent", "lost", "frames", "revoked", "convicted"]
"""Why a party is taken out; it is guilty of something only where it is convicted.

- refused: it says that it does not answer
- silent: no answer in time
- lost: its link or its process ended
- frames: malformed frames, or far more frames than steps
- revoked: the owner has taken its certificate back
- convicted: the judge found it guilty
"""

_DRAWS = b"phalanx served texts/1"
_KEPT_ANSWERS = 64


class StageLostError(EngineBusyError):
    """A stage has no party left, or a text was computed by a party that lied; clients get 503."""


class DepartedError(PhalanxError):
    """One party does not go on; its shadow takes over. Not seen outside of the relay."""

    def __init__(self, party: str, cause: DepartureCause, reason: str) -> None:
        super().__init__(f"{party}: {reason}")
        self.party, self.cause, self.reason = party, cause, reason


class KeptPiece(NamedTuple):
    """A piece as its party signed it.

    Attributes:
        inputs: Hidden states ``[tokens, dim]``.
        outputs: Hidden states ``[tokens, dim]``.
        link: Signed link, see `next_link`.
        header: Header of the answer that it was in.
    """

    start: int
    inputs: Tensor
    outputs: Tensor
    digest: str
    link: str
    header: SignedHeader


@dataclass
class StageParty:
    """A party that holds a stage, with the session's records of it.

    Attributes:
        offer_header: With which the owner signed the offer to this party.
        order: Number of its next step.
        num_texts: Number of its next text.
        closed: Texts that it has not yet been told the end of.
        answers: Headers of its latest answers by the step that each answers.
        awaited: Digest of the step that it has to answer; empty where there is none.
        arrived: The answer to that step, until it is looked at.
        num_frames: Frames that it has sent.
    """

    name: str
    stage: int
    offer: StageOffer
    offer_header: SignedHeader
    is_ready: bool = False
    order: int = 0
    num_texts: int = 0
    closed: list[int] = field(default_factory=list)
    answers: dict[str, SignedHeader] = field(default_factory=dict)
    awaited: str = ""
    arrived: CheckedFrame | None = None
    num_frames: int = 0

    def keep_answer(self, step: str, header: SignedHeader) -> None:
        """Keep an answer for comparison with a second one; the oldest is forgotten."""
        self.answers[step] = header
        while len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def open_transcript(self) -> "StageTranscript":
        """Return the record of a text that begins at this party."""
        self.num_texts += 1
        return StageTranscript(self, self.num_texts - 1)


class StageTranscript:
    """The pieces of one text at one party."""

    def __init__(self, party: StageParty, number: int) -> None:
        self.party, self.number = party, number
        self.pieces: list[KeptPiece] = []

    @property
    def link(self) -> str:
        """The link before the next piece."""
        return self.pieces[-1].link if self.pieces else first_link(self.party.offer.digest, self.number)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.pieces[-1].start + len(self.pieces[-1].inputs) if self.pieces else 0


@dataclass
class ServedText:
    """One text that is being written.

    Attributes:
        transcripts: Of each stage, in the order in which parties have served it; the last one goes on.
        is_refuted: A part of it was computed by a party that lied.
    """

    number: int
    transcripts: list[deque[StageTranscript]]
    is_refuted: bool = False

    @property
    def all_transcripts(self) -> list[StageTranscript]:
        """Every record with a piece in it."""
        return [record for stage in self.transcripts for record in stage if record.pieces]


class ServedTextDraw:
    """Draws the texts that are redone from a keyed pseudo-random function, after every piece is signed.

    Args:
        key: Secret of the session, 32 bytes.

    Guarantees:
        The digests of the last signed answers enter the draw, so that a party that has seen all earlier draws knows
        nothing of this one before it has signed.
    """

    def __init__(self, key: bytes, rate: float) -> None:
        self._key = hmac.digest(key, _DRAWS, "sha256")
        self._rate = rate

    def is_drawn(self, text: int, transcripts: Sequence[StageTranscript]) -> bool:
        """Draw for one text."""
        signed = [text, *(record.pieces[-1].header.header_digest for record in transcripts)]
        number = int.from_bytes(hmac.digest(self._key, canonical_json(signed), "sha256")[:8], "big")
        return number < self._rate * 2**64


class PartyCounts:
    """Numbers of texts with a part of each party: all, and redone ones."""

    def __init__(self) -> None:
        self._texts: Counter[str] = Counter()
        self._checked: Counter[str] = Counter()

    def add_text(self, transcripts: Sequence[StageTranscript], *, is_checked: bool) -> None:
        """Count a text that is over."""
        for name in {record.party.name for record in transcripts}:
            self._texts[name] += 1
            self._checked[name] += int(is_checked)

    def num_unchecked(self, party: str) -> int:
        """Texts with a part of this party that nobody has redone."""
        return self._texts[party] - self._checked[party]
