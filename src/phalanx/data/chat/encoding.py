"""Conversations to token ids by a chat template, and the weight of each token as something to learn.

A turn of which the template leaves out a part would be learned as another one, so it is refused.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from phalanx.closing import Closeable
from phalanx.data.batch import IGNORE
from phalanx.data.borders import bare_encoder, border_of
from phalanx.data.chat.conversation import ChatMessage, Conversation, ToolCall
from phalanx.data.chat.renderer import ANY_DAY, ChatRenderer, RenderedChat, TurnSpan
from phalanx.data.chat.settings import OF_MODEL
from phalanx.data.chat.template import (
    DEFAULT_TEMPLATES,
    ChatTemplate,
    default_template,
    model_template,
    template_from_file,
)
from phalanx.data.normal_form import check_text
from phalanx.errors import DataError

_SHOWN = 40


def check_rendered(
    rendered: RenderedChat, messages: Sequence[ChatMessage], template: str, learned_from: int = 0
) -> None:
    """Look for the text and the calls of every message in a template's output, and for learned reasoning.

    A template may write a text as JSON, and without white space around it. Reasoning of a turn that is not learned may
    be missing: models are trained to get the earlier turns without it.

    Args:
        rendered: The text; without turns where it is a prompt.
        learned_from: The first message that may be learned.
    """
    places = {turn.message: rendered.text[turn.start : turn.stop] for turn in rendered.turns}
    for number, message in enumerate(messages):
        text = places.get(number, rendered.text)
        parts = [("text", message.text_content), *_parts_of_calls(message.tool_calls)]
        if rendered.turns and number >= learned_from and message.role == "assistant" and message.weight > 0:
            parts.append((message.reasoning_field, message.reasoning or ""))
        for what, part in parts:
            if not _is_in(part, text):
                raise DataError(
                    f"turn {number + 1}: its {what} ({part.strip()[:_SHOWN]!r}) is not written by chat template "
                    f"{template}; use a template that writes it, name its field in `ignore`, or remove the line"
                )


def _parts_of_calls(calls: Sequence[ToolCall]) -> Iterator[tuple[str, str]]:
    for call in calls:
        yield "tool call", call.name
        yield from (("tool call's argument", leaf) for leaf in _argument_leaves(call.arguments))


def _argument_leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _argument_leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _argument_leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value if isinstance(value, str) else json.dumps(value)


def _is_in(part: str, text: str) -> bool:
    plain = part.strip()
    as_json = (json.dumps(plain, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return plain in text or any(form in text for form in as_json)


_MARK = re.compile(r"<\|[^|<>\s]{1,60}\|>")
_PROBE = Conversation(messages=(ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b")))


@dataclass(frozen=True)
class EncodedConversation:
    """A conversation in tokens.

    Attributes:
        ids: int64 ``[tokens]``.
        weights: float32 ``[tokens]``: how much each token counts as one that the model should write; 0 outside the
            assistant's turns.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]

    @property
    def target_labels(self) -> NDArray[np.int64]:
        """Already shifted, int64 ``[tokens]``: the token behind each one; IGNORE where that is none to learn."""
        labels = np.full_like(self.ids, IGNORE)
        labels[:-1] = np.where(self.weights[1:] > 0, self.ids[1:], IGNORE)
        return labels


class ChatEncoder(Closeable):
    """A tokenizer with a chat template: what conversations are in tokens."""

    def __init__(self, template: ChatTemplate, backend: tokenizers.Tokenizer, today: date = ANY_DAY) -> None:
        # a copy: others may have told theirs to take special tokens for text
        self._backend = bare_encoder(backend, special_is_text=False)
        added = self._backend.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        # marks of turns that a model's maker added as plain tokens are no less marks
        marks = (token.content for token in added.values() if token.content in template.source)
        self._forging = sorted({*self._special.values(), *filter(_MARK.fullmatch, marks)})
        self._renderer = ChatRenderer(template, today)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that renders."""
        return self._renderer.template

    @property
    def renderer(self) -> ChatRenderer:
        """The process of the template: text without tokens."""
        return self._renderer

    @cached_property
    def end_of_turn(self) -> int | None:
        """Return the special token that ends an assistant's turn; None where the template writes none."""
        rendered = self._renderer.render_conversation(_PROBE)
        ids, inside = self._tokenize_turns(rendered.text, rendered.turns)
        end_tokens = [
            token for token, turn in zip(ids, inside, strict=True) if turn is not None and token in self._special
        ]
        return end_tokens[-1] if end_tokens else None

    def encode_conversation(self, conversation: Conversation, learned_from: int = 0) -> EncodedConversation:
        """Encode a whole conversation; the same one gives the same tokens on every machine.

        Args:
            learned_from: Messages before this one are not learned, whatever their weight, so that thoughts in them may
                be missing.

        Raises:
            DataError: The template does not render it, a message holds a special token, or the tokenizer lacks one.
            ModelError: The template is broken, or does or takes what no template may.
        """
        return self._encode_rendered(conversation, self._render_checked(conversation, learned_from))

    def encode_answer(
        self, before: Sequence[ChatMessage], answer: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()
    ) -> EncodedConversation:
        """Encode messages with an answer behind them, of which alone something is learned.

        All are encoded as one text; a token that reaches over the border of prompt and answer is the answer's.

        Args:
            before: The last of which is not the assistant's.
            answer: The assistant's messages, with results of tools between them.

        Raises:
            DataError: As `encode`; or the template writes the prompt otherwise where an answer follows.
        """
        conversation = Conversation(messages=(*before, *answer), tools=tuple(tools))
        rendered = self._render_checked(conversation, len(before))
        prompt = self._renderer.render_prompt(before, tools)
        check_rendered(RenderedChat(prompt, ()), before, self.chat_template.name)
        if not rendered.text.startswith(prompt):
            raise DataError(
                "the chat template renders the prompt differently when an answer follows; use another template"
            )
        # what a template marks as the assistant's may begin before the answer
        cut = (replace(turn, start=max(turn.start, len(prompt))) for turn in rendered.turns if turn.stop > len(prompt))
        return self._encode_rendered(conversation, RenderedChat(rendered.text, tuple(cut)))

    def _render_checked(self, conversation: Conversation, learned_from: int) -> RenderedChat:
        self._check_texts(conversation.messages, conversation.tools)
        rendered = self._renderer.render_conversation(conversation, learned_from)
        self._check_marks(rendered.text, conversation.messages)
        check_rendered(rendered, conversation.messages, self.chat_template.name, learned_from)
        return rendered

    def _encode_rendered(self, conversation: Conversation, rendered: RenderedChat) -> EncodedConversation:
        weights = _turn_weights(conversation, rendered)
        ids, inside = self._tokenize_turns(rendered.text, rendered.turns)
        of_tokens = [0.0 if turn is None else weights[turn] for turn in inside]
        return EncodedConversation(np.array(ids, dtype=np.int64), np.array(of_tokens, dtype=np.float32))

    def encode_prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = (), *, is_whole: bool = True
    ) -> list[int]:
        """Encode messages up to where the assistant begins.

        Args:
            messages: The last of which is not the assistant's.
            is_whole: Whether all of the messages must appear, as where an answer behind them is learned. In talks many
                templates leave out earlier thoughts.
        """
        self._check_texts(messages, tools)
        text = self._renderer.render_prompt(messages, tools)
        self._check_marks(text, messages)
        if is_whole:
            check_rendered(RenderedChat(text, ()), messages, self.chat_template.name)
        # a batch of one: `encode` keeps the interpreter's lock, and a long prompt would stop all threads of a server
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_ending(self, messages: Sequence[ChatMessage], ending: str) -> tuple[list[int], list[int]]:
        """Encode messages and the assistant's beginning as one text; return the ids before and of the ending."""
        self._check_texts(messages)
        text = self._renderer.render_prompt(messages)
        encoding = self._backend.encode(text + ending, add_special_tokens=False)
        border = border_of(encoding, text + ending, len(text))
        return list(encoding.ids[:border]), list(encoding.ids[border:])

    def close(self) -> None:
        self._renderer.close()

    def _tokenize_turns(self, text: str, turns: Sequence[TurnSpan]) -> tuple[list[int], list[int | None]]:
        """Return the ids, and of each the number of the assistant's turn that it is in.

        A token that reaches over the border of a turn is in it. What is only white space behind the special token that
        ends a turn is not: a model stops before it.
        """
        encoded = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        inside: list[int | None] = [None] * len(ids)
        starts = np.array([start for start, _ in encoded.offsets], dtype=np.int64)
        stops = np.array([stop for _, stop in encoded.offsets], dtype=np.int64)
        for number, turn in enumerate(turns):
            turn_tokens = np.flatnonzero((stops > turn.start) & (starts < turn.stop)).tolist()
            last = max((index for index in turn_tokens if ids[index] in self._special), default=None)
            if last is not None and not text[stops[last] : turn.stop].strip():
                turn_tokens = [index for index in turn_tokens if index <= last]
            for index in turn_tokens:
                inside[index] = number
        return ids, inside

    def _check_texts(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> None:
        places = [(f"turn {number}", _message_texts(message)) for number, message in enumerate(messages, start=1)]
        for place, texts in [*places, ("tools", [json.dumps(tools, ensure_ascii=False)])]:
            check_text("".join(texts), place)
            forged = next((token for token in self._forging if any(token in text for text in texts)), None)
            if forged is not None:
                raise DataError(
                    f"{place}: holds {forged!r}, a special token of the model, with which a text could forge a turn; "
                    "remove it"
                )

    def _check_marks(self, text: str, messages: Sequence[ChatMessage]) -> None:
        special_tokens = set(self._special.values())
        absent = sorted({mark for mark in _MARK.findall(text) if mark not in special_tokens})
        absent = [mark for mark in absent if self._backend.token_to_id(mark) is None]
        absent = [mark for mark in absent if mark not in self.chat_template.text_marks]
        written = [
            mark for mark in absent if not any(mark in text for message in messages for text in _message_texts(message))
        ]
        if written:
            raise DataError(
                f"chat template {self.chat_template.name}: writes {written[0]!r}, which is not a token of the "
                "tokenizer; "
                'use the matching tokenizer, or a template without special tokens such as "plain"'
            )


def _message_texts(message: ChatMessage) -> list[str]:
    calls = [json.dumps([call.name, call.arguments, call.id], ensure_ascii=False) for call in message.tool_calls]
    return [message.text_content, message.reasoning or "", message.name or "", message.tool_call_id or "", *calls]


def _turn_weights(conversation: Conversation, rendered: RenderedChat) -> list[float]:
    messages, conversation_weight = conversation.messages, conversation.weight
    of_assistant = {message.weight for message in messages if message.role == "assistant"}
    if len(of_assistant) == 1:
        return [conversation_weight * next(iter(of_assistant))] * len(rendered.turns)
    weights = []
    for turn in rendered.turns:
        if turn.message is None:
            raise DataError("messages differ in weight, and the chat template does not mark each by itself")
        weights.append(conversation_weight * messages[turn.message].weight)
    return weights


def open_chat(template: str, backend: tokenizers.Tokenizer, end_of_text: str, directory: Path) -> ChatEncoder:
    """Return an encoder of conversations by a chat template.

    Args:
        template: Name in a run file: the model's, one of those that come with Phalanx, or a file.
    """
    if template in DEFAULT_TEMPLATES:
        return ChatEncoder(default_template(template, end_of_text), backend)
    if template != OF_MODEL:
        return ChatEncoder(template_from_file(Path(template), directory, end_of_text), backend)
    return ChatEncoder(model_template(directory) or default_template("chatml", end_of_text), backend)
