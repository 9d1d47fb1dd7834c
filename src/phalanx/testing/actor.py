"""Actors: how one party of a simulation differs from an honest one."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from phalanx.pipeline import StageCopy, StageRunner, WrapCopy
from phalanx.pipeline.protocol.greetings import ChallengeReply, Hello
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Assign


@dataclass(frozen=True)
class OutgoingMessage:
    """One message that a simulated party is about to send.

    Attributes:
        receiver: The party that gets it; the sender itself for a message between its own stages.
        payload: Raw bytes of a tensor or of a part of a transfer; empty for most messages.
    """

    receiver: str
    message: Message
    payload: bytes = b""

    def with_fields(self, changes: Mapping[str, object]) -> "OutgoingMessage":
        """Return the same message to the same receiver with other values in some fields."""
        return replace(self, message=self.message.model_copy(update=dict(changes)))


Rewrite = Callable[[OutgoingMessage], Sequence[OutgoingMessage]]
"""Returns what leaves instead of one message: nothing, another one, or several; each is signed by the sender."""

Hear = Callable[[Assign], None]
"""Receives each assignment that the party is given, before the party acts on it."""

Tamper = Callable[[str, int, int, Tensor], Tensor]
"""Returns the tensor that is sent instead: gets direction, step, microbatch and the honest one, [batch, seq, dim]."""

Twist = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Returns the weight gradients that a stage reports instead of its own."""

_Body = TypeVar("_Body", bound=Message)


class WorkerCrash(Exception):  # noqa: N818 - an event, and no error of Phalanx: nothing may handle it
    """The end of a simulated worker at once, as SIGKILL ends a process."""


@dataclass(frozen=True)
class Actor:
    """The ways in which one worker differs from an honest one.

    Attributes:
        wrap_copy: Puts another object in the place of each copy that it holds or shadows.
        rewrite: Alters, drops, doubles or delays outgoing messages, before they are signed.
        kernels: Replaces the module of each copy, also for the kernel fingerprint, by another attention kernel, say.
        description: Description of its device when it joins; the real one when left out.
        numeric_class: Answers the kernel fingerprint as if its kernels were others, shared by all parties of this name,
            and describes itself so; the real one when left out.
    """

    wrap_copy: WrapCopy = lambda copy, held: copy
    rewrite: Rewrite = lambda outgoing: (outgoing,)
    hear: Hear = lambda assign: None
    description: str | None = None
    numeric_class: str | None = None
    kernels: WrapCopy = lambda copy, held: copy


def rewrite_only(kind: type[_Body], change: Callable[[OutgoingMessage, _Body], Sequence[OutgoingMessage]]) -> Rewrite:
    """Rewrite messages of one kind and let all others pass."""

    def rewrite(outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        return change(outgoing, outgoing.message) if isinstance(outgoing.message, kind) else (outgoing,)

    return rewrite


def rewrite_of(actor: Actor) -> Rewrite:
    """Return the `rewrite` of an actor that also replaces its description and its numeric class when it joins."""
    called = actor.numeric_class if actor.description is None else actor.description

    def rewrite(outgoing: OutgoingMessage) -> Sequence[OutgoingMessage]:
        message = outgoing.message
        if isinstance(message, Hello) and called is not None:
            other = message.numeric_class.model_copy(update={"device": called})
            outgoing = outgoing.with_fields({"numeric_class": other})
        if isinstance(message, ChallengeReply) and actor.numeric_class is not None:
            other_bits = hashlib.sha256(f"{actor.numeric_class} {message.nonce}".encode()).hexdigest()
            verdict_message = message.found.model_copy(
                update=dict.fromkeys(("forward", "backward", "gradient"), other_bits)
            )
            outgoing = outgoing.with_fields({"found": verdict_message})
        return actor.rewrite(outgoing)

    return rewrite


class TamperedRunner(StageRunner):
    """An honest stage with messages that pass through `tamper`, and weight gradients that pass through `twist`."""

    def __init__(self, honest: StageRunner, tamper: Tamper, twist: Twist) -> None:
        self._honest = honest
        self.module, self.spec = honest.module, honest.spec
        self._tamper, self._twist = tamper, twist

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        return self._tamper("forward", step, microbatch, self._honest.forward(step, microbatch, x))

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        honest = self._honest.backward(step, microbatch, gradient)
        return None if honest is None else self._tamper("backward", step, microbatch, honest)

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._honest.recompute_microbatch(step, microbatch, x, gradient)

    def take_gradients(self) -> dict[str, Tensor]:
        return self._twist(self._honest.take_gradients())

    def abandon_step(self) -> None:
        self._honest.abandon_step()


def tampering(
    tamper: Tamper = lambda direction, step, microbatch, tensor: tensor,
    twist: Twist = lambda gradients: gradients,
) -> WrapCopy:
    """Return a wrapper that puts a `TamperedRunner` in each copy that a worker holds; its audits stay honest."""

    def wrap(copy: StageCopy, held: bool) -> StageCopy:
        if not held:
            return copy
        # of a shared stage, the same module and optimizer also audit
        mine = shallow(copy)
        mine.runner = TamperedRunner(copy.runner, tamper, twist)
        return mine

    return wrap


def crash_at(step: int, microbatch: int = 0, direction: str = "forward") -> WrapCopy:
    """Let a worker die before it has sent this message of its stage."""

    def die(at_direction: str, at_step: int, at_microbatch: int, tensor: Tensor) -> Tensor:
        if (at_direction, at_step, at_microbatch) == (direction, step, microbatch):
            raise WorkerCrash(f"step {step}, microbatch {microbatch}, {direction}")
        return tensor

    return tampering(die)
