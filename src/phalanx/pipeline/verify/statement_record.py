"""The append-only record of signed statements: each that counts is stored once, under its full identity."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import PassedOnHeader, StateDigest
from phalanx.pipeline.protocol.signed import STATE, StatementKey, statements_in, to_signed
from phalanx.transport import SignedHeader

_MIN_STEPS_KEPT = 2


@dataclass(frozen=True)
class StoredStatement:
    """One stored statement."""

    content: object
    header: PassedOnHeader


@dataclass
class StatementRecord:
    """The statements that verdicts and step proofs rest on.

    A message that the run ignores is not stored. What the owner says to itself has no signature and is not stored
    either: the owner is trusted, and evidence says where it rests on its word.

    Guarantees:
        The first statement of an identity stays. Its size is bounded by the statements that open steps ask of parties.
    """

    _statements: dict[StatementKey, StoredStatement] = field(default_factory=dict)

    def add_statement(self, key: StatementKey, content: object, header: SignedHeader | None) -> PassedOnHeader | None:
        """Store a statement that counts.

        Returns:
            The header of the first statement of this identity where that says something else; its author signed both.
        """
        if header is None:
            return None
        first = self._statements.get(key)
        if first is None:
            self._statements[key] = StoredStatement(content, to_signed(header))
            return None
        return None if first.content == content else first.header

    def add_message(self, author: str, message: Message, header: SignedHeader | None) -> PassedOnHeader | None:
        """Store everything that a message states; see `add`."""
        contradicted = [self.add_statement(key, content, header) for key, content in statements_in(author, message)]
        return next((first for first in contradicted if first is not None), None)

    def get_statement(self, key: StatementKey) -> StoredStatement | None:
        """Return the first statement of this identity, None where there is none."""
        return self._statements.get(key)

    def header_of(self, author: str, message: Message) -> PassedOnHeader | None:
        """Return the header under which a party has signed this very message, None where it has not."""
        for key, content in statements_in(author, message):
            stored = self._statements.get(key)
            if stored is not None and stored.content == content:
                return stored.header
        return None

    def signed_state(self, author: str, stage: int, state: StateDigest) -> PassedOnHeader | None:
        """Return the last header in which a party signed this state of a stage, None where there is none."""
        headers = [
            stored.header for _, stored in self._signed_states(author, stage, state.step) if stored.content == state
        ]
        return headers[-1] if headers else None

    def _signed_states(self, author: str, stage: int, step: int) -> Iterator[tuple[int, StoredStatement]]:
        """Yield signed states by epoch, in order."""
        identity = (STATE, author, stage, step)
        stored = [
            (key.epoch, statement)
            for key, statement in self._statements.items()
            if (key.kind, key.author, key.stage, key.step) == identity
        ]
        yield from sorted(stored, key=lambda item: item[0])

    def forget_before(self, step: int) -> None:
        """Drop what no open step rests on any more."""
        oldest = step - _MIN_STEPS_KEPT
        self._statements = {key: stored for key, stored in self._statements.items() if key.step >= oldest}

    def __len__(self) -> int:
        return len(self._statements)
