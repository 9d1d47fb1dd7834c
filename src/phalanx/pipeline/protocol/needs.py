"""Needs: what the owner's decisions wait for. The owner's one loop serves them and hands back the answers.

A judge takes facts and returns a verdict. Where it needs something first it awaits a `Need`, and does not know how that
comes: the loop in `owner/event_loop.py` asks, handles messages until the answer is there or patience is over, and goes
on with the judge. A test answers by hand.
"""

import functools
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from phalanx.pipeline.protocol.message import Message, ReceivedMessage
from phalanx.pipeline.protocol.messages import Ask, Fetch, FetchBulk, ProgressReport

P = ParamSpec("P")
T = TypeVar("T")


class Need(Generic[T]):
    """One thing that is waited for; awaiting it is worth the answer."""

    def __await__(self) -> Generator["Need[Any]", Any, T]:
        """Hand the need to the loop, and take the answer from it."""
        answer: T = yield self
        return answer


@dataclass(frozen=True, eq=False)
class LoopTurn(Need[None]):
    """One turn of the loop: received messages are handled, and a piece of work done."""


@dataclass(frozen=True, eq=False)
class OwnMail(Need[None]):
    """A need that the messages between the owner's own parts are handled, and nothing else."""


@dataclass(frozen=True, eq=False)
class MessageNeed(Need[ReceivedMessage | None]):
    """One message, or one claim of an auditor; None when no answer comes in time."""

    party: str
    request: Fetch


@dataclass(frozen=True, eq=False)
class TensorsNeed(Need[tuple[dict[str, Tensor], int] | None]):
    """A stage's state, weights, undo copy or gradient.

    The answer is the tensors and the optimizer steps they have taken; None when none comes in time.

    Attributes:
        party: The party that is asked.
        expected: Names, shapes and types; values are not read.
    """

    party: str
    request: FetchBulk
    expected: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ProgressNeed(Need[dict[str, ProgressReport]]):
    """The progress of parties; those that do not answer in time are left out."""

    parties: Collection[str]
    request: Ask


@dataclass(frozen=True, eq=False)
class Delivery(Need[None]):
    """A message to a party; it is on its way when the loop goes on."""

    party: str
    message: Message
    payload: Sequence[memoryview]


@dataclass(frozen=True, eq=False)
class TensorsDelivery(Need[None]):
    """Many tensors to a party, part by part, as the answer to a request that it has not made."""

    party: str
    request: FetchBulk
    tensors: Mapping[str, Tensor]
    step: int


@dataclass(frozen=True, eq=False)
class OwnerTask(Need[T]):
    """A piece of the owner's work that may wait; the loop runs it and hands its result to the task that awaits it.

    The loop keeps the list of tasks that wait for another one. So the stack holds the loop and one task, however many
    judges ask each other.
    """

    work: Coroutine[Need[Any], Any, T]


def owner_task(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, OwnerTask[T]]:
    """Let calls of a coroutine function be tasks."""

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> OwnerTask[T]:
        return OwnerTask(function(*args, **kwargs))

    return begin
