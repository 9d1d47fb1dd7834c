"""Acts of an insider as values: a point of the run, and what is done there; a schedule can be read, printed and pasted.

An act names its point by what its party sends or gets. It says nothing of a message's fields but the name of a
neighbour (`neighbours.py`): the value itself follows from what is sent at that point.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

Path = tuple[str | int, ...]

STEPS_TO_LEAVE = 3
"""Steps after which an honest party that asks to leave is gone: its word comes in the first, and it hands over then."""


@dataclass(frozen=True)
class At:
    """A point of the run, as one party sees it.

    Attributes:
        kind: Of the message that the party sends or gets.
        step: That the message is about; None for any.
        nth: Of those that fit, from 0.
        event: Whether the party is about to send the message, or about to read it.
        lasting: Whether all later ones are meant as well.
        stage: That the message is about (`stage`, or `source` of a tensor); None for any.
        peer: To which it is sent, or from which it comes; None for any.
    """

    kind: str
    step: int | None = None
    nth: int = 0
    event: Literal["sends", "gets"] = "sends"
    lasting: bool = False
    stage: int | None = None
    peer: str | None = None


@dataclass(frozen=True)
class Alter:
    """One field of a message has a neighbouring value.

    Attributes:
        path: The field; a number stands for an entry of a list or, in order of keys, of an object.
        value: Name of a neighbour in `NEIGHBOURS`, or with "=" before it a JSON value.
    """

    path: Path
    value: str


@dataclass(frozen=True)
class Send:
    """The party sends this message altered.

    Attributes:
        alters: What is changed; nothing for the message itself.
        when: In the place of the message, before it, or behind it; "late" behind the next messages of the party.
        payload: Name in `PAYLOADS` of what becomes of its bytes; "" for nothing.
        to: Another receiver; "" for its own.
    """

    alters: tuple[Alter, ...] = ()
    when: Literal["instead", "before", "behind", "late"] = "instead"
    payload: str = ""
    to: str = ""


@dataclass(frozen=True)
class Say:
    """The party sends a message of a kind that was not asked for.

    Attributes:
        kind: Of the message; its fields are those that belong to this point of the run.
        alters: What is changed then.
        to: The receiver.
        num: How many times.
        payload: Name in `PAYLOADS`.
    """

    kind: str
    alters: tuple[Alter, ...] = ()
    to: str = "owner"
    num: int = 1
    payload: str = ""


@dataclass(frozen=True)
class Withhold:
    """The party does not send the message; it has signed it, and can show it."""


@dataclass(frozen=True)
class Crash:
    """The process of the party ends. The only act of an honest party."""


@dataclass(frozen=True)
class Lie:
    """From this point on the party computes something else; what it signs fits to it.

    Attributes:
        what: "weights" (negated once, after the next update), or, while it lasts, "forward", "backward", "gradient",
            "claims" (what it recomputes as an auditor).
        steps: How many steps it lasts.
    """

    what: str
    steps: int = 1


Deed = Send | Say | Withhold | Crash | Lie


@dataclass(frozen=True)
class Act:
    """One thing that a party does at one point."""

    at: At
    deed: Deed


@dataclass(frozen=True)
class Schedule:
    """Everything that decides what happens in a run.

    Attributes:
        company: Name in `COMPANIES`.
        acts: Of each party, by the number of its worker, from 1. A party with crashes alone is honest.
        moves: What happens between two steps: (before which step, "leave" or "return", worker's number).
        order: Seed of the order in which workers run; 0: one after another.
        steps: Left out, two.
    """

    company: str
    acts: dict[int, tuple[Act, ...]] = field(default_factory=dict)
    moves: tuple[tuple[int, str, int], ...] = ()
    order: int = 0
    steps: int = 2

    def and_also(self, number: int, act: Act) -> "Schedule":
        """The same with one act more, of one party."""
        return replace(self, acts={**self.acts, number: (*self.acts.get(number, ()), act)})

    def moved(self, *moves: tuple[int, str, int]) -> "Schedule":
        """The same with parties that leave or come back between two steps."""
        return replace(self, moves=(*self.moves, *moves))

    @property
    def looks_back(self) -> bool:
        """Whether an act shows something of an earlier session."""
        return any(
            alter.value == "other session"
            for acts in self.acts.values()
            for act in acts
            for alter in getattr(act.deed, "alters", ())
        )

    @property
    def num_acts(self) -> int:
        """Acts and moves of all parties."""
        return sum(len(acts) for acts in self.acts.values()) + bool(self.moves)

    @property
    def liars(self) -> set[str]:
        """Names of the parties that do more than crash."""
        return {
            f"worker-{number}"
            for number, acts in self.acts.items()
            if any(not isinstance(act.deed, Crash) for act in acts)
        }

    @property
    def leavers(self) -> set[str]:
        """Names of the parties that ask to leave in time, and do not come back."""
        back = {number for _, what, number in self.moves if what == "return"}
        early = [move for move in self.moves if move[0] + STEPS_TO_LEAVE <= self.steps]
        return {f"worker-{number}" for _, what, number in early if what == "leave" and number not in back}

    @property
    def victims(self) -> set[str]:
        """Names of honest parties that crash or leave."""
        crashing = {f"worker-{number}" for number, acts in self.acts.items() if acts}
        return {*crashing, *(f"worker-{number}" for _, _, number in self.moves)} - self.liars
