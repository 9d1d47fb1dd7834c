"""Continuous batching: one thread runs one model over the next tokens of every text that is being read or written."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.errors import ModelError, PhalanxError
from phalanx.serve.engine.attention import Segment, run_states, run_step
from phalanx.serve.engine.chooser import TokenChooser, check_finite, choose_tokens, score_token
from phalanx.serve.engine.hosted_model import HostedModel
from phalanx.serve.engine.packed import PackedLinear
from phalanx.serve.engine.request import (
    BadRequestError,
    ChoiceEnd,
    EngineBusyError,
    Event,
    FinishReason,
    GenerationRequest,
    PromptRead,
    TextPiece,
    TokenScore,
)
from phalanx.serve.engine.row_cache import CHUNK, PrefixStore, RowCache
from phalanx.serve.engine.text_assembler import TextAssembler
from phalanx.serve.marks import TokenMark

_FIXED_ROWS = 4
"""From so many rows on, the products of a row have the same bits whatever the number of rows (ADR 240)."""


class EngineSettings(StrictModel):
    """Bounds of the engine.

    Attributes:
        max_rows: Texts that are written at the same time.
        max_waiting: Requests in the queue; further ones are refused.
        max_cache_tokens: Tokens of all texts together for which keys and values are kept.
        max_owner_prefix_tokens: Tokens that one owner's reusable beginnings may have; 0 reuses nothing.
        max_step_tokens: Tokens of one step; prompts are read between the steps of other texts.
        default_max_tokens: Bound of a choice where the client names none.
        reproducible: Compute single rows as if they were four, and reuse prompts alone: a text then has the same bits
            whatever else is in the batch.
    """

    max_rows: int = Field(default=32, ge=1, le=1024)
    max_waiting: int = Field(default=128, ge=1, le=1 << 16)
    max_cache_tokens: int = Field(default=1 << 16, ge=64, le=1 << 26)
    max_owner_prefix_tokens: int = Field(default=1 << 13, ge=0, le=1 << 26)
    max_step_tokens: int = Field(default=4 * CHUNK, ge=CHUNK, le=1 << 16)
    default_max_tokens: int = Field(default=1024, ge=1, le=1 << 20)
    reproducible: bool = False


class EventStream:
    """The events of one request, from the decode loop to a client's task.

    Attributes:
        is_closed: Nobody reads on, or the last event was sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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


@dataclass(eq=False)
class _Row:
    """One choice while it is written.

    Attributes:
        cached: Tokens whose keys and values are in the cache; all but the last one while it is written.
    """

    job: "_Job"
    choice: int
    ids: list[int]
    cache: RowCache
    chooser: TokenChooser
    writer: TextAssembler
    cached: int = 0

    @property
    def num_written(self) -> int:
        return len(self.ids) - len(self.job.prompt)


@dataclass(eq=False)
class _Job:
    """A request in the engine."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    adapter: str
    max_tokens: int
    stream: "EventStream"
    choosers: Sequence[TokenChooser]
    writers: Sequence[TextAssembler]
    rows: list[_Row] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    reused_tokens: int = 0
    num_open: int = 0

    @property
    def is_left(self) -> bool:
        return self.stream.is_closed

    @property
    def num_reserved(self) -> int:
        return (len(self.prompt) + self.max_tokens) * self.request.n


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


class BatchingEngine:
    """Writes texts by one model for many clients at once.

    Raises:
        ModelError: `reproducible` is asked for on a machine whose products depend on the number of rows.
    """

    def __init__(self, served: HostedModel, settings: EngineSettings, mark: TokenMark) -> None:
        self.served, self.settings = served, settings
        self._mark = mark
        if settings.reproducible:
            _check_fixed_rows(served)
        self._prefixes = PrefixStore(settings.max_owner_prefix_tokens)
        self._waiting: deque[_Job] = deque()
        self._embeddings: deque[_StatesJob] = deque()
        self._rows: list[_Row] = []
        self._reserved = 0
        self._change = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"decode-{served.name}", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Texts that are being written."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def close(self) -> None:
        """End the thread; texts that are being written end with an error."""
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        self._thread.join()

    def check_request(self, request: GenerationRequest, prompt: Sequence[int]) -> int:
        """Return how many tokens each choice may have at most.

        Raises:
            BadRequestError: The prompt leaves no room, or the request needs more than the engine has.
        """
        window = self.served.text_model.context_length
        room = window - len(prompt)
        if room < 1:
            raise BadRequestError(f"the prompt has {len(prompt)} tokens, the model's window is {window}", "messages")
        asked = self.settings.default_max_tokens if request.max_tokens is None else request.max_tokens
        if request.max_tokens is not None and request.max_tokens > room:
            raise BadRequestError(
                f"{len(prompt)} prompt tokens and {request.max_tokens} new ones are more than the window of {window}",
                "max_tokens",
            )
        if request.n > 1 and not self.served.forks_texts:
            raise BadRequestError("more than one choice is not served by a model in stages; send several requests", "n")
        max_tokens = min(asked, room)
        needed = (len(prompt) + max_tokens) * request.n
        if needed > self.settings.max_cache_tokens or request.n > self.settings.max_rows:
            raise BadRequestError(
                f"the request needs room for {needed} tokens, the server has {self.settings.max_cache_tokens}; lower "
                "max_tokens or n",
                "max_tokens",
            )
        return max_tokens

    async def open_events(self, request: GenerationRequest, prompt: tuple[int, ...], adapter: str) -> "EventStream":
        """Queue a request; closing the stream of its events cancels it.

        Raises:
            EngineBusyError: The queue is full, or the engine ends.
            BadRequestError: It does not fit, or its grammar is refused.
            MarkRefused: The text may not be without a mark, or cannot be marked.
        """
        max_tokens = self.check_request(request, prompt)
        stream = EventStream(asyncio.get_running_loop())
        job = await asyncio.to_thread(self._make_job, request, prompt, adapter, max_tokens, stream)
        self._enqueue(job)
        return stream

    def _make_job(
        self,
        request: GenerationRequest,
        prompt: tuple[int, ...],
        adapter: str,
        max_tokens: int,
        stream: EventStream,
    ) -> _Job:
        served, choosers = self.served, []
        keeps_special = bool(request.tools)
        for choice in range(request.n):
            grammar = None if request.grammar is None else served.grammars.compile_grammar(request.grammar)
            rule = request.sampling
            draw = self._mark.begin_text(
                rule, rule.seed, choice, wants_mark=request.wants_mark, may_skip=request.may_skip_mark
            )
            choosers.append(TokenChooser(rule, prompt, request.logprobs, grammar, draw))
        writers = [TextAssembler(served.backend, request.stop, skips_special=not keeps_special) for _ in choosers]
        return _Job(request, prompt, adapter, max_tokens, stream, choosers, writers)

    def _enqueue(self, job: _Job) -> None:
        with self._change:
            if self._is_closing:
                raise EngineBusyError("the server is about to end; ask another one")
            if len(self._waiting) >= self.settings.max_waiting:
                raise EngineBusyError(f"{len(self._waiting)} requests wait already; ask again later")
            self._waiting.append(job)
            self._change.notify_all()

    async def embed_texts(self, texts: Sequence[tuple[int, ...]], adapter: str) -> list[list[float]]:
        """Return the mean of the last hidden states of each text, with length 1.

        Raises:
            EngineBusyError: The queue is full, or the engine ends.
            ModelError: The model cannot go on.
        """
        loop = asyncio.get_running_loop()
        job = _StatesJob(texts, adapter, loop.create_future(), loop)
        with self._change:
            if self._is_closing or len(self._embeddings) >= self.settings.max_waiting:
                raise EngineBusyError("too many requests wait already; ask again later")
            self._embeddings.append(job)
            self._change.notify_all()
        return await job.future

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                self._drop_jobs()
                with self._change:
                    while not (self._rows or self._waiting or self._embeddings or self._is_closing):
                        self._change.wait()
                    if self._is_closing:
                        break
                    self._admit_jobs()
                try:
                    self._embed_next()
                    self._run_rows()
                except (PhalanxError, RuntimeError, ValueError, IndexError) as exc:
                    fault = exc if isinstance(exc, PhalanxError) else ModelError(f"the model cannot go on: {exc}")
                    self._fail_jobs([row.job for row in self._rows], fault)
        self._fail_jobs([*(row.job for row in self._rows), *self._waiting], EngineBusyError("the server ended"))
        for job in self._embeddings:
            _answer(job, EngineBusyError("the server ended"))

    def _fail_jobs(self, jobs: Sequence[_Job], fault: PhalanxError) -> None:
        for job in dict.fromkeys(jobs):
            self._end_job(job, fault)

    def _end_job(self, job: _Job, fault: PhalanxError | None) -> None:
        for row in job.rows:
            self.served.end_text(row.cache)
        job.stream.end(fault)
        self._rows = [row for row in self._rows if row.job is not job]
        if job.rows:
            self._reserved -= job.num_reserved
            job.rows = []

    def _drop_jobs(self) -> None:
        """End jobs that nobody waits for; outside of the lock, for the end of a text may wait for checks of others."""
        for job in {row.job for row in self._rows if row.job.is_left}:
            self._end_job(job, None)

    def _admit_jobs(self) -> None:
        """Begin jobs for which there is room, in the order of their coming."""
        while self._waiting:
            job = self._waiting[0]
            has_rows = len(self._rows) + job.request.n <= self.settings.max_rows
            if not job.is_left and not (
                has_rows and self._reserved + job.num_reserved <= self.settings.max_cache_tokens
            ):
                return
            self._waiting.popleft()
            if not job.is_left:
                self._begin_job(job)

    def _begin_job(self, job: _Job) -> None:
        request = job.request
        cache = None
        if not request.echo and request.reuses_prompt:
            cache = self._prefixes.find_prefix(request.owner, (job.adapter, request.cache_salt), job.prompt)
        cache = cache or RowCache(self.served.num_layers)
        job.reused_tokens = cache.length
        job.num_open = request.n
        row = _Row(job, 0, list(job.prompt), cache, job.choosers[0], job.writers[0], cache.length)
        job.rows = [row]
        self._rows.append(row)
        self._reserved += job.num_reserved

    def _embed_next(self) -> None:
        """Read a piece of a text for embeddings: no longer than a step, so that those who write wait for no more."""
        with self._change:
            job = self._embeddings.popleft() if self._embeddings else None
        if job is None:
            return
        answer: list[list[float]] | PhalanxError | None = None
        try:
            with self.served.choose_adapter(job.adapter):
                if not job.future.done():
                    self._embed_piece(job)
                elif job.cache is not None:
                    # the client has left in the middle of a text
                    self.served.end_text(job.cache)
            answer = job.vectors if len(job.vectors) == len(job.texts) else None
        except (PhalanxError, RuntimeError, ValueError, IndexError) as exc:
            answer = exc if isinstance(exc, PhalanxError) else ModelError(f"the model cannot go on: {exc}")
        if answer is not None:
            _answer(job, answer)
        elif not job.future.done():
            with self._change:
                # requests take turns by texts: one text at a time has keys and values
                (self._embeddings.append if job.cache is None else self._embeddings.appendleft)(job)

    def _embed_piece(self, job: _StatesJob) -> None:
        text = job.texts[len(job.vectors)]
        if job.cache is None:
            job.cache, job.total = RowCache(self.served.num_layers), None
            job.cache.reserve_room(len(text))
        cache, start = job.cache, job.cache.length
        stop = min(len(text), start + self.settings.max_step_tokens)
        is_over = True
        try:
            ids, positions = torch.tensor([text[start:stop]]), torch.arange(start, stop)[None]
            segments = [Segment(cache, 0, start, stop - start)]
            states = run_states(self.served.module, ids, positions, segments).float().sum(dim=0)
            job.total = total = states if job.total is None else job.total + states
            cache.length = stop
            fault = self.served.find_text_fault(cache)
            if fault is not None:
                raise fault
            is_over = stop == len(text)
        finally:
            if is_over:
                job.cache = None
                self.served.end_text(cache)
        if is_over:
            mean = total / len(text)
            job.vectors.append((mean / mean.norm().clamp(min=1e-12)).tolist())

    def _run_rows(self) -> None:
        """Run one step: each adapter's rows together."""
        for adapter in dict.fromkeys(row.job.adapter for row in self._rows):
            with self.served.choose_adapter(adapter):
                self._run_group([row for row in self._rows if row.job.adapter == adapter])

    def _run_group(self, rows: Sequence[_Row]) -> None:
        ids, positions, segments, parts = self._plan_step(rows)
        wanted: list[int] = []
        for row, segment, is_last in parts:
            if row.job.request.echo and row.cached < len(row.job.prompt) - 1:
                wanted.extend(range(segment.row, segment.row + segment.length))
            elif is_last:
                wanted.append(segment.row + segment.length - 1)
        rows_of_head = torch.tensor(wanted + [0] * self._num_padding(len(wanted)), dtype=torch.int64)
        logits = run_step(self.served.module, ids, positions, segments, rows_of_head)[: len(wanted)].float()
        check_finite(logits)
        ready: list[tuple[_Row, Tensor]] = []
        taken = 0
        for row, segment, is_last in parts:
            count = int(is_last)
            if row.job.request.echo and row.cached < len(row.job.prompt) - 1:
                count = segment.length
                self._score_prompt(row, logits[taken : taken + count])
            taken += count
            row.cached = row.cache.length = segment.start + segment.length
            fault = self.served.find_text_fault(row.cache)
            if fault is not None:
                self._end_job(row.job, fault)
            elif is_last:
                ready.append((row, logits[taken - 1]))
        self._choose_tokens(ready)

    def _plan_step(
        self, rows: Sequence[_Row]
    ) -> tuple[Tensor, Tensor, list[Segment], list[tuple[_Row, Segment, bool]]]:
        """Lay out the next tokens of rows: one of each that writes, and chunks of prompts as far as a step goes."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[tuple[_Row, Segment, bool]] = []
        writing = [row for row in rows if row.cached == len(row.ids) - 1]
        reading = [row for row in rows if row.cached < len(row.ids) - 1]
        room = max(self.settings.max_step_tokens - len(writing), CHUNK)
        for row in (*writing, *reading):
            # pieces end at fixed places, so that their bits do not depend on what else is in the step
            stop = min(len(row.ids), (row.cached // CHUNK + 1) * CHUNK)
            length = stop - row.cached
            if row in reading and length > room:
                continue
            room -= length if row in reading else 0
            row.cache.reserve_room(stop)
            segment = Segment(row.cache, len(ids), row.cached, length)
            parts.append((row, segment, stop == len(row.ids)))
            ids.extend(row.ids[row.cached : stop])
            positions.extend(range(row.cached, stop))
        padding = [0] * self._num_padding(len(ids))
        tensors = torch.tensor([ids + padding]), torch.tensor([positions + padding])
        return *tensors, [segment for _, segment, _ in parts], parts

    def _num_padding(self, rows: int) -> int:
        """Return how many rows are computed beside some that are needed; two and three cost more than four."""
        is_padded = rows < _FIXED_ROWS and (rows > 1 or self.settings.reproducible)
        if self.served.weights == "int8":
            # sums of integers are exact
            return 0
        return _FIXED_ROWS - rows if is_padded else 0

    def _score_prompt(self, row: _Row, logits: Tensor) -> None:
        job = row.job
        if not job.scores:
            job.scores.append(None)
        num_top = job.request.logprobs or 0
        for offset, token in enumerate(job.prompt[row.cached + 1 : row.cached + 1 + len(logits)]):
            job.scores.append(score_token(logits[offset], token, num_top))

    def _choose_tokens(self, ready: Sequence[tuple[_Row, Tensor]]) -> None:
        """Write the next token of rows whose logits are there; a prompt that is read becomes a row for each choice."""
        rows: list[tuple[_Row, Tensor]] = []
        for row, logits in ready:
            beginnings = [row] if row.num_written else self._begin_choices(row)
            rows.extend((beginning, logits) for beginning in beginnings)
        if not rows:
            return
        scores = choose_tokens([row.chooser for row, _ in rows], torch.stack([logits for _, logits in rows]))
        for (row, _), score in zip(rows, scores, strict=True):
            if row.job.is_left:
                continue
            if isinstance(score, PhalanxError):
                # what its own grammar does wrong ends that request alone
                self._end_job(row.job, score)
            else:
                self._write_token(row, score)

    def _begin_choices(self, row: _Row) -> list[_Row]:
        """Return every choice of a prompt that is read, each with a cache of its own."""
        job = row.job
        number = self.served.find_text_number(row.cache)
        self._emit(job, PromptRead(len(job.prompt), job.reused_tokens, tuple(job.scores), number))
        if self.settings.reproducible:
            self._store_prefix(row, job.prompt)
        copies = [row.cache.copy_prefix(row.cache.length) for _ in range(job.request.n - 1)]
        for choice, cache in enumerate(copies, start=1):
            other = _Row(job, choice, list(job.prompt), cache, job.choosers[choice], job.writers[choice], row.cached)
            job.rows.append(other)
            self._rows.append(other)
        if job.max_tokens > 0:
            return list(job.rows)
        for beginning in list(job.rows):
            self._end_row(beginning, "length")
        return []

    def _write_token(self, row: _Row, score: TokenScore) -> None:
        row.ids.append(score.token)
        if score.token in self.served.ends:
            # who scores a prompt drops the last score, which is the written token's: it has to be there
            self._end_row(row, "stop", (score,) if row.job.request.echo else ())
            return
        text, scores = row.writer.feed_token(score)
        has_scores = row.job.request.logprobs is not None
        if text or (scores and has_scores):
            self._emit(row.job, TextPiece(row.choice, text, row.num_written, scores if has_scores else ()))
        if row.writer.stop is not None:
            self._end_row(row, "stop_sequence")
        elif row.chooser.is_complete:
            self._end_row(row, "stop")
        elif row.num_written >= row.job.max_tokens:
            self._end_row(row, "length")

    def _end_row(self, row: _Row, finish: FinishReason, last_scores: tuple[TokenScore, ...] = ()) -> None:
        job = row.job
        text, scores = row.writer.close()
        scores += last_scores
        if text or (scores and job.request.logprobs is not None):
            has_scores = job.request.logprobs is not None
            self._emit(job, TextPiece(row.choice, text, row.num_written, scores if has_scores else ()))
        finish = "stop_sequence" if row.writer.stop is not None else finish
        self._emit(job, ChoiceEnd(row.choice, finish, row.num_written, row.writer.stop, row.chooser.mark_name))
        self._rows.remove(row)
        if not self.settings.reproducible:
            self._store_prefix(row, row.ids)
        job.num_open -= 1
        if job.num_open == 0:
            self._end_job(job, None)

    def _store_prefix(self, row: _Row, ids: Sequence[int]) -> None:
        request = row.job.request
        if request.reuses_prompt:
            self._prefixes.put_prefix(request.owner, (row.job.adapter, request.cache_salt), ids, row.cache)

    def _emit(self, job: _Job, event: Event) -> None:
        job.stream.send(event)


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


def _check_fixed_rows(served: HostedModel) -> None:
    """Compare the products of rows in batches of several sizes, by every shape of weights in the model.

    Raises:
        ModelError: They differ in a bit.
    """
    products: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {
        tuple(weight.shape): partial(torch.nn.functional.linear, weight=weight)
        for weight in served.module.parameters()
        if weight.dim() == 2
    }
    packed = [layer for layer in served.module.modules() if isinstance(layer, PackedLinear)]
    products |= {(layer.out_features, layer.in_features): layer for layer in packed}
    generator = torch.Generator().manual_seed(0)
    dtype = served.module.dtype
    for shape, multiply in islice(products.items(), 16):
        inputs = torch.randn(64, shape[1], generator=generator).to(dtype)
        whole = multiply(inputs)
        for rows in (4, 5, 7, 8, 13, 32):
            if not torch.equal(multiply(inputs[64 - rows :]), whole[64 - rows :]):
                raise ModelError(f"reproducible: here the products of {rows} and of 64 rows differ in their bits")


async def collect_events(events: EventStream) -> list[Event]:
    """Return all events of an answer."""
    async with aclosing(events) as stream:
        return [event async for event in stream]
