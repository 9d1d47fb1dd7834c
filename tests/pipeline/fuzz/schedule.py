"""A schedule: which parties of which company lie, and what each liar does to which of its messages."""

from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class On:
    """Which messages are meant.

    Attributes:
        kind: Of the message; "" for any.
        step: Of the optimizer; None for any.
        nth: Of those that fit, from 0.
        lasting: Whether all later ones are meant as well.
    """

    kind: str
    step: int | None = None
    nth: int = 0
    lasting: bool = False


@dataclass(frozen=True)
class Alter:
    """Another value in one place."""

    path: Path
    change: Any


@dataclass(frozen=True)
class Drop:
    """It is never sent."""


@dataclass(frozen=True)
class Repeat:
    """It is sent so many times more."""

    times: int


@dataclass(frozen=True)
class Hold:
    """It is sent behind so many later ones."""

    messages: int


@dataclass(frozen=True)
class Redirect:
    """It goes to another party, or to all parties that it does not concern."""

    to: str


@dataclass(frozen=True)
class Payload:
    """Its tensor's bytes are other ones."""

    how: str


@dataclass(frozen=True)
class Again:
    """An earlier message of a kind is sent along, signed anew; of this session or an earlier one."""

    kind: str
    nth: int = 0
    earlier: bool = False


@dataclass(frozen=True)
class Say:
    """A message that was not asked for is sent along."""

    kind: str
    to: str = "owner"
    changes: tuple[Alter, ...] = ()
    payload: int = 0


@dataclass(frozen=True)
class Crash:
    """The insider's process ends."""


Deed = Alter | Drop | Repeat | Hold | Redirect | Payload | Again | Say | Crash


@dataclass(frozen=True)
class Act:
    """One thing that an insider does."""

    on: On
    deed: Deed


@dataclass(frozen=True)
class Liar:
    """One insider.

    Attributes:
        acts: On its messages.
        attack: Name in the table of attacks of what it does to its computations; "none" for nothing.
        from_step: First step in which it does so.
    """

    acts: tuple[Act, ...] = ()
    attack: str = "none"
    from_step: int = 0


@dataclass(frozen=True)
class Schedule:
    """Everything that decides what happens.

    Attributes:
        company: Name in `COMPANIES`.
        liars: By worker's number, from 1.
        events: What happens to honest parties: (before which step, "join" or "leave" or "kill", worker's number).
        order: Seed of the order in which workers run; 0: one after another.
    """

    company: str
    liars: dict[int, Liar]
    events: tuple[tuple[int, str, int], ...] = ()
    order: int = 0
