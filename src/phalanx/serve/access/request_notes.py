"""Notes about the request that is being answered, for metrics, traces and alerts; never a word of its text.

Whoever watches a server opens the notes before its door; parts behind the door add facts. Without a watcher
a note goes nowhere.
"""

import heapq
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.serve.access.key_store import Caller

if TYPE_CHECKING:
    from phalanx.serve.access.request_log import RequestFacts

_RUN, _SKETCH = 4, 16
_SALT = secrets.randbits(60)
"""Unknown to clients: none can choose runs that always win the places of a sketch."""


@dataclass(frozen=True)
class PromptSketch:
    """The memory of one prompt.

    Attributes:
        runs: The 16 smallest hashes of its runs of four tokens or words.
    """

    whole: int
    runs: frozenset[int]


@dataclass
class RequestNotes:
    """The notes of one request.

    Attributes:
        facts: What the log says of it; None where it has no line of its own.
        first_token: Monotonic second at which its first token was written.
        filter_name: The filter that refuses it; empty for none.
        budget: The budget that refuses it; empty for none.
    """

    caller: Caller | None = None
    facts: "RequestFacts | None" = None
    first_token: float | None = None
    filter_name: str = ""
    budget: str = ""
    sketches: list[PromptSketch] = field(default_factory=list)
    has_logprobs: bool = False


_notes: ContextVar[RequestNotes | None] = ContextVar("request_notes", default=None)


@contextmanager
def collect_notes() -> Iterator[RequestNotes]:
    """Collect the notes of everything that runs within, tasks that it starts included."""
    notes = RequestNotes()
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note_facts(caller: Caller, facts: "RequestFacts") -> None:
    """Note the log's facts about the request."""
    if (notes := _notes.get()) is not None:
        notes.caller, notes.facts = caller, facts


def note_filter(name: str) -> None:
    """Note the filter that refuses the request."""
    if (notes := _notes.get()) is not None:
        notes.filter_name = name


def note_budget(name: str) -> None:
    """Note the budget that refuses the request."""
    if (notes := _notes.get()) is not None:
        notes.budget = name


def note_token() -> None:
    """Note that a token was written; the first one counts."""
    if (notes := _notes.get()) is not None and notes.first_token is None:
        notes.first_token = time.monotonic()


def note_prompts(prompts: Sequence[Sequence[int] | Sequence[str]], *, has_logprobs: bool) -> None:
    """Note prompts by their sketches.

    Args:
        prompts: Each as tokens, or as words.
    """
    if (notes := _notes.get()) is not None:
        notes.sketches.extend(map(sketch_prompt, prompts[:_SKETCH]))
        notes.has_logprobs = notes.has_logprobs or has_logprobs


def sketch_prompt(pieces: Sequence[int] | Sequence[str]) -> PromptSketch:
    """Return the sketch of a prompt: enough to compare prompts of this process, and no text.

    The sketch of a prompt that goes on with another one has no run of the other's that the other's own sketch lacks.
    """
    whole = tuple(pieces)
    runs = {hash((_SALT, whole[start : start + _RUN])) for start in range(max(1, len(whole) - _RUN + 1))}
    return PromptSketch(hash((_SALT, whole)), frozenset(heapq.nsmallest(_SKETCH, runs)))
