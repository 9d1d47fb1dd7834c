"""Requests inside the engine: each with its choices, and the stream of its events to a client."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Self

from phalanx.errors import PhalanxError
from phalanx.serve.engine.chooser import TokenChooser
from phalanx.serve.engine.request import Event, GenerationRequest, TokenScore
from phalanx.serve.engine.row_cache import RowCache
from phalanx.serve.engine.text_assembler import TextAssembler


class EventStream:
    """The events of one request, from the decode loop to a client's task.

    Attributes:
        is_closed: Nobody reads on, or the last event was sent.
        prompt_tokens: Tokens of the prompt, once the engine has begun to read it.
        completion_tokens: Tokens that the engine has written, of all choices, whether or not anybody reads them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.prompt_tokens = self.completion_tokens = 0
        self._events: asyncio.Queue[Event | PhalanxError | None] = asyncio.Queue()
        self.is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            PhalanxError: A fault ended the request.
        """
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, PhalanxError):
            raise event
        return event

    async def aclose(self) -> None:
        """Cancel the request, unless it is over."""
        self.is_closed = True

    def send(self, event: Event | PhalanxError | None) -> None:
        """Hand an event on; for the decode loop."""
        if self.is_closed:
            return
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # the server's loop is closed; nobody is left to read
            self.is_closed = True

    def end(self, fault: PhalanxError | None) -> None:
        """End the events; for the decode loop."""
        self.send(fault)
        self.is_closed = True


async def collect_events(events: EventStream) -> list[Event]:
    """Return all events of an answer."""
    async with aclosing(events) as stream:
        return [event async for event in stream]


@dataclass(eq=False)
class WrittenChoice:
    """One choice while it is written.

    Attributes:
        cached: Tokens whose keys and values are in the cache; all but the last one while it is written.
    """

    job: "TextJob"
    choice: int
    ids: list[int]
    cache: RowCache
    chooser: TokenChooser
    writer: TextAssembler
    cached: int = 0

    @property
    def num_written(self) -> int:
        """Tokens that the text has beside its prompt."""
        return len(self.ids) - len(self.job.prompt)


@dataclass(eq=False)
class TextJob:
    """A request in the engine."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    adapter: str
    max_tokens: int
    stream: EventStream
    choosers: Sequence[TokenChooser]
    writers: Sequence[TextAssembler]
    rows: list[WrittenChoice] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    reused_tokens: int = 0
    num_open: int = 0

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.stream.is_closed

    @property
    def num_reserved(self) -> int:
        """Tokens for which keys and values may be needed."""
        return (len(self.prompt) + self.max_tokens) * self.request.n
