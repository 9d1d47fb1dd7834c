"""From an internal request to the events of its reply, for every protocol: rights, filters, budgets, tools and log."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Literal

import anyio

from phalanx.data.chat import ChatMessage
from phalanx.data.chat.conversation import ToolCall
from phalanx.errors import DiskError, ModelError, PhalanxError
from phalanx.serve.access import (
    Access,
    BudgetExceeded,
    Caller,
    ModelOrder,
    RequestFacts,
    RequestRefused,
    RequestTexts,
    Reservation,
)
from phalanx.serve.access.key_guard import model_quarantined
from phalanx.serve.access.request_notes import note_budget, note_filter, note_prompts, note_token
from phalanx.serve.api.fields import refuse_bad_request
from phalanx.serve.engine import (
    BadRequestError,
    ChoiceEnd,
    EngineBusyError,
    EnginePool,
    EventStream,
    GenerationRequest,
    ModelCard,
    PromptRead,
    TextPiece,
    TokenScore,
    ToolReader,
    UnknownModelError,
)
from phalanx.serve.filters import FilterNote, StreamFilter, TextFilters, TextRefused, map_texts
from phalanx.serve.marks import MarkRefused

LEFT = 499
_PROMPT_FIELDS = {"messages", "tools", "text", "ids"}
ReplyFinish = Literal["stop", "length", "stop_sequence", "tool_calls", "content_filter"]


@dataclass(frozen=True)
class CallPiece:
    """A call of a tool is complete."""

    choice: int
    call: ToolCall


@dataclass(frozen=True)
class ReplyEnd:
    """One choice is over.

    Attributes:
        stop: The stop sequence that ended it.
        mark: ``gumbel``, ``bias`` or ``no (reason)``.
    """

    choice: int
    finish: ReplyFinish
    num_tokens: int
    stop: str | None
    mark: str


ReplyEvent = TextPiece | CallPiece | ReplyEnd


@dataclass
class _ChoiceState:
    """One choice on its way through the filters of output and the reader of tool calls."""

    stream_filter: StreamFilter
    tools: ToolReader | None
    num_tokens: int = 0
    num_fed: int = 0
    num_released: int = 0
    has_calls: bool = False
    is_over: bool = False
    scores: list[tuple[int, TokenScore]] = field(default_factory=list)

    def release_scores(self) -> tuple[TokenScore, ...]:
        """Return the scores of tokens whose text has gone out: they would show a text that a filter holds back."""
        ready = tuple(score for end, score in self.scores if end <= self.num_released)
        self.scores = [(end, score) for end, score in self.scores if end > self.num_released]
        return ready


@dataclass
class Usage:
    """Tokens of a reply."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0


class ModelReply:
    """The reply to one or several prompts of one call, while it is written.

    Attributes:
        reads: Sizes and scores of the prompts that are read so far.
        notes: Notes of the filters of input and output.
        marks: Kind of mark of each choice that is over.
        answers: Pieces of the text of each choice that have gone out; None where nobody wants them.
        status: Status in the log: 200 once all of it has been read, 499 before.
    """

    def __init__(
        self,
        card: ModelCard,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[tuple[int, ...]],
        filters: TextFilters,
        notes: Sequence[FilterNote],
        *,
        keeps_answers: bool = False,
    ) -> None:
        self.card, self.requests, self.prompts = card, requests, prompts
        self.reads: list[PromptRead] = []
        self.notes: list[FilterNote] = list(notes)
        self.marks: list[str] = []
        self.usage = Usage(prompt_tokens=sum(map(len, prompts)))
        self.verdicts: list[str] = []
        self.answers: dict[int, list[str]] | None = {} if keeps_answers else None
        self.status = LEFT
        self._filters = filters
        self._streams: list[EventStream] = []
        self._stack = AsyncExitStack()
        self.on_close: list[Callable[[], None]] = []

    async def start(self, pool: EnginePool, tool_readers: Sequence[Callable[[], ToolReader] | None]) -> None:
        """Queue every prompt, and wait until the first is read, so that refusals come before the answer begins."""
        self._tool_readers = tool_readers
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            stream = await pool.open_events(request, prompt)
            self._streams.append(await self._stack.enter_async_context(aclosing(stream)))
        self.reads.append(await self._read_prompt(self._streams[0]))

    async def _read_prompt(self, stream: EventStream) -> PromptRead:
        event = await anext(stream)
        if not isinstance(event, PromptRead):
            raise ModelError("the engine wrote before it had read")
        self.usage.reused_tokens += event.reused_tokens
        if event.text is not None:
            self.verdicts.append(f"stages:text-{event.text}")
        return event

    async def read_events(self) -> AsyncGenerator[ReplyEvent, None]:
        """Yield the events of all prompts, one prompt behind the other; choices are numbered through."""
        first = 0
        for number, (request, stream) in enumerate(zip(self.requests, self._streams, strict=True)):
            if number:
                self.reads.append(await self._read_prompt(stream))
            make_reader = self._tool_readers[number]
            states = [
                _ChoiceState(self._filters.open_stream(), None if make_reader is None else make_reader())
                for _ in range(request.n)
            ]
            async for event in stream:
                if isinstance(event, PromptRead) or states[event.choice].is_over:
                    continue
                for reply_event in self._judge_event(event, first + event.choice, states[event.choice]):
                    yield reply_event
                if all(state.is_over for state in states):
                    break
            first += request.n
        self.status = 200

    def fail(self, refusal: RequestRefused) -> None:
        """Note that the reply ends with a fault in the place of its rest."""
        self.status = refusal.status
        self.verdicts.append(refusal.code)

    def _judge_event(self, event: TextPiece | ChoiceEnd, choice: int, state: _ChoiceState) -> list[ReplyEvent]:
        note_token()
        self.usage.completion_tokens += event.num_tokens - state.num_tokens
        state.num_tokens = event.num_tokens
        try:
            if isinstance(event, TextPiece):
                state.num_fed += len(event.text)
                state.scores.extend((state.num_fed, score) for score in event.scores)
                return self._release_text(state.stream_filter.feed(event.text), choice, state)
            events = self._release_text(state.stream_filter.close(), choice, state, is_end=True)
        except TextRefused as refusal:
            state.is_over = True
            self.verdicts.append(refusal.filter_name)
            self.marks.append("no (refused by a filter)")
            return [ReplyEnd(choice, "content_filter", state.num_tokens, None, self.marks[-1])]
        state.is_over = True
        self.notes.extend(state.stream_filter.notes)
        self.marks.append(event.mark)
        finish: ReplyFinish = "tool_calls" if state.has_calls and event.finish == "stop" else event.finish
        return [*events, ReplyEnd(choice, finish, event.num_tokens, event.stop, event.mark)]

    def _release_text(
        self, released: str, choice: int, state: _ChoiceState, *, is_end: bool = False
    ) -> list[ReplyEvent]:
        state.num_released += len(released)
        plain, calls = (released, []) if state.tools is None else state.tools.feed_text(released)
        if is_end and state.tools is not None:
            rest, last_calls = state.tools.close()
            plain, calls = plain + rest, calls + last_calls
        for call in calls:
            # escapes in its JSON have hidden its texts
            self._filters.check_json(json.dumps(call.arguments, ensure_ascii=False))
        if self.answers is not None:
            self.answers.setdefault(choice, []).append(released)
        state.has_calls = state.has_calls or bool(calls)
        scores = state.release_scores()
        events: list[ReplyEvent] = []
        if plain or scores:
            events.append(TextPiece(choice, plain, state.num_tokens, scores))
        events.extend(CallPiece(choice, call) for call in calls)
        return events

    async def close(self) -> None:
        """Cancel open texts, settle the budget and write the log; closing twice is harmless."""
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
        # what the engine has done is paid, not what somebody has read of it
        self.usage.prompt_tokens = sum(stream.prompt_tokens for stream in self._streams)
        self.usage.completion_tokens = sum(stream.completion_tokens for stream in self._streams)
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback()


class Service:
    """Everything between a route and the engine."""

    def __init__(self, pool: EnginePool, access: Access, filters: TextFilters) -> None:
        self.pool, self.access, self.filters = pool, access, filters

    def cards_for(self, caller: Caller) -> list[ModelCard]:
        """Return the models that a key may use."""
        return [card for card in self.pool.cards if caller.allows_model(card.id)]

    def has_digest(self, order: ModelOrder) -> bool:
        """Whether an order names the files of a model that is served."""
        return any(card.id == order.model and card.digest in order.digests for card in self.pool.cards)

    def find_card(self, model_id: str, caller: Caller) -> ModelCard:
        """Return a model that a key may use.

        Raises:
            UnknownModelError: There is none, or the key may not use it: the answers do not differ.
        """
        if not caller.allows_model(model_id):
            raise UnknownModelError("no such model; GET /v1/models lists those that the key may use")
        card = self.pool.find_card(model_id)
        if not self.access.key_store.allows_models(self.pool.digests_of(card)):
            raise model_quarantined()
        return card

    def begin_request(self, caller: Caller) -> Reservation:
        """Count a request before its body is parsed, so that one which is refused later has been counted.

        Raises:
            RequestRefused: A budget of the key is used up.
        """
        try:
            return self.access.budgets.begin(caller)
        except PhalanxError as exc:
            raise refusal_of(exc) from exc
        except BudgetExceeded as exc:
            raise _refuse_budget(exc) from exc

    async def open_reply(
        self, requests: Sequence[GenerationRequest], caller: Caller, route: str, reservation: Reservation
    ) -> ModelReply:
        """Begin to answer the prompts of one call.

        Args:
            reservation: Of the request; the reply settles it.

        Raises:
            RequestRefused: Rights, filters, bounds, the queue or the budget refuse.
        """
        try:
            card = self.find_card(requests[0].model, caller)
            notes: list[FilterNote] = []
            admitted, prompts = await asyncio.to_thread(self._read_prompts, requests, notes)
            engine = self.pool.find_engine(card.id)
            num_new = sum(
                engine.check_request(request, prompt) * request.n
                for request, prompt in zip(admitted, prompts, strict=True)
            )
            note_prompts(prompts, has_logprobs=requests[0].logprobs is not None)
            forced = [self._force_tool(request) for request in admitted]
            keeps = self.access.request_log.seals_texts
            reply = ModelReply(card, forced, prompts, self.filters, notes, keeps_answers=keeps)
            reservation.reserve_tokens(sum(map(len, prompts)), num_new)

            def record() -> None:
                self._record_reply(reply, caller, route)

            reply.on_close = [
                lambda: reservation.settle(reply.usage.prompt_tokens, reply.usage.completion_tokens),
                record,
            ]
            try:
                await reply.start(self.pool, [self._reader_of(request) for request in admitted])
            except BaseException as exc:
                if isinstance(exc, PhalanxError):
                    # the refusal has a line of its own
                    reply.on_close.remove(record)
                await reply.close()
                raise
        except PhalanxError as exc:
            raise refusal_of(exc) from exc
        except BudgetExceeded as exc:
            raise _refuse_budget(exc) from exc
        return reply

    async def embed_texts(
        self,
        model_id: str,
        texts: Sequence[str | tuple[int, ...]],
        caller: Caller,
        route: str,
        reservation: Reservation,
        is_open: Callable[[], bool],
    ) -> tuple[list[list[float]], int]:
        """Return one vector a text, and how many tokens they have together.

        Args:
            is_open: Whether the caller may still be answered; a client that leaves cancels the call.
        """

        def record(status: int) -> None:
            logged = _texts_of(admitted, []) if self.access.request_log.seals_texts else None
            facts = RequestFacts(route, card.digest, status, {"prompt_tokens": num_tokens}, texts=logged)
            self.access.request_log.record_request(caller, facts)

        requests = [
            GenerationRequest(model=model_id, owner=caller.owner, text=text)
            if isinstance(text, str)
            else GenerationRequest(model=model_id, owner=caller.owner, ids=text)
            for text in texts
        ]
        try:
            card = self.find_card(model_id, caller)
            admitted, prompts = await asyncio.to_thread(self._read_prompts, requests, [])
            num_tokens = sum(map(len, prompts))
            if max(map(len, prompts)) > card.window:
                raise BadRequestError(f"a text has more tokens than the model's window of {card.window}", "input")
            reservation.reserve_tokens(num_tokens, 0)
            try:
                vectors = await self.pool.embed_texts(model_id, prompts)
            except asyncio.CancelledError:
                record(LEFT)
                raise
        except PhalanxError as exc:
            if isinstance(exc, EngineBusyError):
                reservation.settle(0, 0)
            raise refusal_of(exc) from exc
        except BudgetExceeded as exc:
            raise _refuse_budget(exc) from exc
        record(200 if is_open() else LEFT)
        return vectors, num_tokens

    async def count_tokens(self, request: GenerationRequest, caller: Caller, route: str) -> int:
        """Return the number of tokens of a prompt; it costs one request and no tokens."""
        try:
            card = self.find_card(request.model, caller)
            num_tokens = len(await self.pool.encode_prompt(request))
        except PhalanxError as exc:
            raise refusal_of(exc) from exc
        self.access.request_log.record_request(caller, RequestFacts(route, card.digest, 200))
        return num_tokens

    def _read_prompts(
        self, requests: Sequence[GenerationRequest], notes: list[FilterNote]
    ) -> tuple[list[GenerationRequest], list[tuple[int, ...]]]:
        """Return requests as filters admit them, and their prompts in tokens; for a thread: 2 MiB take seconds."""
        admitted = [self._admit_request(request, notes) for request in requests]
        return admitted, [self.pool.find_engine(request.model).served.encode_prompt(request) for request in admitted]

    def _admit_request(self, request: GenerationRequest, notes: list[FilterNote]) -> GenerationRequest:
        """Return a request with the texts that filters admit."""

        def admit(text: str) -> str:
            admitted = self.filters.admit_input(text)
            notes.extend(admitted.notes)
            return admitted.text

        if request.text is not None:
            return request.model_copy(update={"text": admit(request.text)})
        if request.messages is None:
            return request
        # calls, names and offered tools are texts that the model reads as well
        messages = tuple(
            message.model_copy(
                update={
                    "content": map_texts(message.content, admit),
                    "name": map_texts(message.name, admit),
                    "tool_call_id": map_texts(message.tool_call_id, admit),
                    "tool_calls": tuple(
                        call.model_copy(update={"arguments": map_texts(call.arguments, admit)})
                        for call in message.tool_calls
                    ),
                }
            )
            for message in request.messages
        )
        tools = tuple(
            tool.model_copy(
                update={"description": admit(tool.description), "parameters": map_texts(tool.parameters, admit)}
            )
            for tool in request.tools
        )
        _check_turns(messages)
        return request.model_copy(update={"messages": messages, "tools": tools})

    def _force_tool(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request whose text must be a call where the client wants one."""
        if request.tool_choice in ("auto", "none") or request.grammar is not None:
            return request
        names = {tool.name for tool in request.tools}
        if request.tool_choice != "required" and request.tool_choice not in names:
            raise BadRequestError("names no tool of the request", "tool_choice")
        tools = [tool for tool in request.tools if request.tool_choice in ("required", tool.name)]
        tool_format = self.pool.find_engine(request.model).served.tool_format if tools else None
        if tool_format is None:
            raise BadRequestError("a call is required, and there are no tools", "tool_choice")
        return request.model_copy(update={"grammar": tool_format.grammar_of(tools)})

    def _reader_of(self, request: GenerationRequest) -> Callable[[], ToolReader] | None:
        if not request.tools or request.tool_choice == "none":
            return None
        tool_format = self.pool.find_engine(request.model).served.tool_format
        if tool_format is None:
            return None
        names = frozenset(tool.name for tool in request.tools)
        return lambda: ToolReader(tool_format, names)

    def _record_reply(self, reply: ModelReply, caller: Caller, route: str) -> None:
        usage = reply.usage
        facts = RequestFacts(
            route=route,
            model_digest=reply.card.digest,
            status=reply.status,
            sizes={"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
            verdicts=[*reply.verdicts, *(f"{note.filter}:{note.kind}" for note in reply.notes)],
            mark=", ".join(sorted(set(reply.marks))),
            texts=None
            if reply.answers is None
            else _texts_of(reply.requests, list(map("".join, reply.answers.values()))),
        )
        self.access.request_log.record_request(caller, facts)


def _texts_of(requests: Sequence[GenerationRequest], answers: Sequence[str]) -> RequestTexts:
    prompts = [request.model_dump(mode="json", include=_PROMPT_FIELDS, exclude_none=True) for request in requests]
    return RequestTexts(prompts, answers)


def _refuse_budget(exc: BudgetExceeded) -> RequestRefused:
    note_budget(exc.limit)
    message = f"The budget {exc.limit} of this key is used up."
    return RequestRefused(429, exc.limit, message, retry_after_s=exc.retry_after_s)


def refusal_of(exc: PhalanxError) -> RequestRefused:
    """Return the answer to a fault; its message reaches the client only where the request is at fault."""
    match exc:
        case BadRequestError():
            refusal = refuse_bad_request(exc)
        case TextRefused():
            note_filter(exc.filter_name)
            message = f"A filter refuses the text: {exc.filter_name}, {exc.reason}"
            refusal = RequestRefused(400, "content_filter", message[:200])
        case UnknownModelError():
            refusal = RequestRefused(404, "model_not_found", str(exc), param="model")
        case MarkRefused():
            refusal = RequestRefused(403, "mark_required", str(exc), param="mark")
        case EngineBusyError():
            refusal = RequestRefused(503, "overloaded", str(exc), retry_after_s=1)
        case DiskError():
            refusal = RequestRefused(503, "unavailable", "The server cannot record the request.", retry_after_s=30)
        case _:
            refusal = RequestRefused(500, "server_error", "The model cannot go on; the server's log has the reason.")
    return refusal


def _check_turns(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise BadRequestError("there is no message", "messages")
    if messages[-1].role == "assistant":
        raise BadRequestError(
            "the last message is the assistant's; a chat ends with the user's or a tool's", "messages"
        )
    if any(message.has_no_content and message.role == "user" for message in messages):
        raise BadRequestError("a message of the user says nothing", "messages")
