"""Embeddings: averaged last hidden states of texts, computed in pieces between the steps of generated texts."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.errors import ModelError, PhalanxError, describe_fault
from phalanx.serve.engine.attention import Segment, run_states
from phalanx.serve.engine.hosted_model import HostedModel
from phalanx.serve.engine.request import EngineBusyError
from phalanx.serve.engine.row_cache import RowCache


@dataclass(eq=False)
class _StatesJob:
    """Texts whose last hidden states are averaged.

    Attributes:
        cache: Of the text that is being read; None between texts.
        total: Sum of its states so far, float32 ``[dim]``.
    """

    texts: Sequence[tuple[int, ...]]
    adapter: str
    future: "asyncio.Future[list[list[float]]]"
    loop: asyncio.AbstractEventLoop
    vectors: list[list[float]] = field(default_factory=list)
    cache: RowCache | None = None
    total: Tensor | None = None


class StatesQueue:
    """Requests for embeddings in the order of their turns; clients append, and the decode thread takes.

    Args:
        max_waiting: Requests in the queue; further ones are refused.
        max_step_tokens: Tokens that are read at a time.
    """

    def __init__(self, served: HostedModel, max_waiting: int, max_step_tokens: int) -> None:
        self._served, self._max_waiting, self._max_step_tokens = served, max_waiting, max_step_tokens
        self._jobs: deque[_StatesJob] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def append_texts(self, texts: Sequence[tuple[int, ...]], adapter: str) -> "asyncio.Future[list[list[float]]]":
        """Queue texts of a client's task, and return what will hold a vector of length 1 for each.

        Raises:
            EngineBusyError: The queue is full.
        """
        if len(self._jobs) >= self._max_waiting:
            raise EngineBusyError("too many requests wait already; ask again later")
        loop = asyncio.get_running_loop()
        job = _StatesJob(texts, adapter, loop.create_future(), loop)
        self._jobs.append(job)
        return job.future

    def fail_all(self, fault: PhalanxError) -> None:
        """End every request that waits."""
        while self._jobs:
            _answer(self._jobs.popleft(), fault)

    def embed_next(self) -> None:
        """Read a piece of a text for embeddings: no longer than a step, so that those who write wait for no more."""
        if not self._jobs:
            return
        job = self._jobs.popleft()
        answer: list[list[float]] | PhalanxError | None = None
        try:
            with self._served.choose_adapter(job.adapter):
                if not job.future.done():
                    self._embed_piece(job)
                elif job.cache is not None:
                    # the client has left in the middle of a text
                    self._served.end_text(job.cache)
            answer = job.vectors if len(job.vectors) == len(job.texts) else None
        except Exception as exc:  # noqa: BLE001 - as in `BatchingEngine`
            answer = as_model_fault(exc)
        if answer is not None:
            _answer(job, answer)
        elif not job.future.done():
            # requests take turns by texts: one text at a time has keys and values
            (self._jobs.append if job.cache is None else self._jobs.appendleft)(job)

    def _embed_piece(self, job: _StatesJob) -> None:
        text = job.texts[len(job.vectors)]
        if job.cache is None:
            job.cache, job.total = RowCache(self._served.num_layers), None
            job.cache.reserve_room(len(text))
        cache, start = job.cache, job.cache.length
        stop = min(len(text), start + self._max_step_tokens)
        is_over = True
        try:
            ids, positions = torch.tensor([text[start:stop]]), torch.arange(start, stop)[None]
            segments = [Segment(cache, 0, start, stop - start)]
            states = run_states(self._served.module, ids, positions, segments).float().sum(dim=0)
            job.total = total = states if job.total is None else job.total + states
            cache.length = stop
            fault = self._served.find_text_fault(cache)
            if fault is not None:
                raise fault
            is_over = stop == len(text)
        finally:
            if is_over:
                job.cache = None
                self._served.end_text(cache)
        if is_over:
            mean = total / len(text)
            job.vectors.append((mean / mean.norm().clamp(min=1e-12)).tolist())


def as_model_fault(exc: Exception) -> PhalanxError:
    """Return what clients are told of an error in a step of the model: of errors that are not ours kind and place."""
    return exc if isinstance(exc, PhalanxError) else ModelError(f"the model cannot go on: {describe_fault(exc)}")


def _answer(job: _StatesJob, answer: list[list[float]] | PhalanxError) -> None:
    def set_answer() -> None:
        if job.future.done():
            return
        if isinstance(answer, PhalanxError):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)

    try:
        job.loop.call_soon_threadsafe(set_answer)
    except RuntimeError:
        # the server's loop is closed; nobody is left to read
        return
