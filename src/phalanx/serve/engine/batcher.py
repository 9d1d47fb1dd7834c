"""Continuous batching: one thread runs one model over the next tokens of every text that is being read or written."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.errors import PhalanxError
from phalanx.serve.engine.attention import Segment, run_step
from phalanx.serve.engine.chooser import TokenChooser, check_finite, choose_tokens, score_token
from phalanx.serve.engine.hosted_model import HostedModel
from phalanx.serve.engine.jobs import EventStream, TextJob, WrittenChoice
from phalanx.serve.engine.packed import check_fixed_rows
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
from phalanx.serve.engine.text_states import StatesQueue, as_model_fault
from phalanx.serve.marks import TokenMark

_FIXED_ROWS = 4
"""From so many rows on, the products of a row have the same bits whatever the number of rows (ADR 240)."""


class EngineSettings(StrictModel):
    """Bounds of the engine.

    Attributes:
        max_rows: Texts that are written at the same time.
        max_waiting: Requests in the queue; further ones are refused.
        max_cache_tokens: Tokens of all texts together for which keys and values are kept; reusable beginnings of all
            owners together have twice as many again.
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


class BatchingEngine:
    """Writes texts by one model for many clients at once.

    Raises:
        ModelError: `reproducible` is asked for on a machine whose products depend on the number of rows.
    """

    def __init__(self, served: HostedModel, settings: EngineSettings, mark: TokenMark) -> None:
        self.served, self.settings = served, settings
        self._mark = mark
        if settings.reproducible:
            check_fixed_rows(served.module)
        of_owner = settings.max_owner_prefix_tokens
        self._prefixes = PrefixStore(of_owner, max(1, 2 * settings.max_cache_tokens // max(1, of_owner)))
        self._waiting: deque[TextJob] = deque()
        self._states = StatesQueue(served, settings.max_waiting, settings.max_step_tokens)
        self._rows: list[WrittenChoice] = []
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

    async def open_events(self, request: GenerationRequest, prompt: tuple[int, ...], adapter: str) -> EventStream:
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
    ) -> TextJob:
        served, choosers = self.served, []
        keeps_special = bool(request.tools)
        beginning = None if request.grammar is None else served.grammars.compile_grammar(request.grammar)
        for choice in range(request.n):
            grammar = None if beginning is None else beginning.copy()
            rule = request.sampling
            draw = self._mark.begin_text(
                rule, rule.seed, choice, wants_mark=request.wants_mark, may_skip=request.may_skip_mark
            )
            choosers.append(TokenChooser(rule, prompt, request.logprobs, grammar, draw))
        writers = [TextAssembler(served.backend, request.stop, skips_special=not keeps_special) for _ in choosers]
        return TextJob(request, prompt, adapter, max_tokens, stream, choosers, writers)

    def _enqueue(self, job: TextJob) -> None:
        with self._change:
            if self._is_closing:
                raise EngineBusyError("the server is about to end; ask another one")
            # those who have left behind a request that is too large to begin take no room
            self._waiting = deque(waiting for waiting in self._waiting if not waiting.is_left)
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
        with self._change:
            if self._is_closing:
                raise EngineBusyError("the server is about to end; ask another one")
            future = self._states.append_texts(texts, adapter)
            self._change.notify_all()
        return await future

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                self._drop_jobs()
                with self._change:
                    while not (self._rows or self._waiting or self._states or self._is_closing):
                        self._change.wait()
                    if self._is_closing:
                        break
                    self._admit_jobs()
                try:
                    self._states.embed_next()
                    self._run_rows()
                except Exception as exc:  # noqa: BLE001 - of a library; all tenants wait for this thread
                    self._fail_jobs([row.job for row in self._rows], as_model_fault(exc))
        self._fail_jobs([*(row.job for row in self._rows), *self._waiting], EngineBusyError("the server ended"))
        self._states.fail_all(EngineBusyError("the server ended"))

    def _fail_jobs(self, jobs: Sequence[TextJob], fault: PhalanxError) -> None:
        for job in dict.fromkeys(jobs):
            self._end_job(job, fault)

    def _end_job(self, job: TextJob, fault: PhalanxError | None) -> None:
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

    def _begin_job(self, job: TextJob) -> None:
        request = job.request
        cache = None
        if not request.echo and request.reuses_prompt:
            cache = self._prefixes.find_prefix(request.owner, (job.adapter, request.cache_salt), job.prompt)
        cache = cache or RowCache(self.served.num_layers)
        job.reused_tokens = cache.length
        job.scores = [None] if request.echo else []
        job.num_open = request.n
        row = WrittenChoice(job, 0, list(job.prompt), cache, job.choosers[0], job.writers[0], cache.length)
        job.rows = [row]
        job.stream.prompt_tokens = len(job.prompt)
        self._rows.append(row)
        self._reserved += job.num_reserved

    def _run_rows(self) -> None:
        """Run one step: each adapter's rows together."""
        for adapter in dict.fromkeys(row.job.adapter for row in self._rows):
            with self.served.choose_adapter(adapter):
                self._run_group([row for row in self._rows if row.job.adapter == adapter])

    def _run_group(self, rows: Sequence[WrittenChoice]) -> None:
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
        ready: list[tuple[WrittenChoice, Tensor]] = []
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
        self, rows: Sequence[WrittenChoice]
    ) -> tuple[Tensor, Tensor, list[Segment], list[tuple[WrittenChoice, Segment, bool]]]:
        """Lay out the next tokens of rows: one of each that writes, and chunks of prompts as far as a step goes."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[tuple[WrittenChoice, Segment, bool]] = []
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

    def _score_prompt(self, row: WrittenChoice, logits: Tensor) -> None:
        job = row.job
        num_top = job.request.logprobs or 0
        for offset, token in enumerate(job.prompt[row.cached + 1 : row.cached + 1 + len(logits)]):
            job.scores.append(score_token(logits[offset], token, num_top))

    def _choose_tokens(self, ready: Sequence[tuple[WrittenChoice, Tensor]]) -> None:
        """Write the next token of rows whose logits are there; a prompt that is read becomes a row for each choice."""
        rows: list[tuple[WrittenChoice, Tensor]] = []
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

    def _begin_choices(self, row: WrittenChoice) -> list[WrittenChoice]:
        """Return every choice of a prompt that is read, each with a cache of its own."""
        job = row.job
        number = self.served.find_text_number(row.cache)
        self._emit(job, PromptRead(len(job.prompt), job.reused_tokens, tuple(job.scores), number))
        if self.settings.reproducible:
            self._store_prefix(row, job.prompt)
        copies = [row.cache.copy_prefix(row.cache.length) for _ in range(job.request.n - 1)]
        for choice, cache in enumerate(copies, start=1):
            other = WrittenChoice(
                job, choice, list(job.prompt), cache, job.choosers[choice], job.writers[choice], row.cached
            )
            job.rows.append(other)
            self._rows.append(other)
        if job.max_tokens > 0:
            return list(job.rows)
        for beginning in list(job.rows):
            self._end_row(beginning, "length")
        return []

    def _write_token(self, row: WrittenChoice, score: TokenScore) -> None:
        row.ids.append(score.token)
        row.job.stream.completion_tokens += 1
        # a grammar is compiled with all ends of a turn, and is over with each of them
        is_turn = row.job.request.messages is not None or row.chooser.grammar is not None
        if score.token in (self.served.turn_ends if is_turn else self.served.text_ends):
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

    def _end_row(self, row: WrittenChoice, finish: FinishReason, last_scores: tuple[TokenScore, ...] = ()) -> None:
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

    def _store_prefix(self, row: WrittenChoice, ids: Sequence[int]) -> None:
        request = row.job.request
        if request.reuses_prompt:
            self._prefixes.put_prefix(request.owner, (row.job.adapter, request.cache_salt), ids, row.cache)

    def _emit(self, job: TextJob, event: Event) -> None:
        job.stream.send(event)
